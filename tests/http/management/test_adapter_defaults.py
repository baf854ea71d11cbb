"""What an adapter's requests take where they leave a field out: chat template, stop strings and sampling."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from caraserve.core.request import GenerateRequest
from caraserve.core.tenant import Tenant
from caraserve.lora.served_base import ServedBase
from caraserve.tokenizer.adapter_templates import AdapterTemplates
from caraserve.tokenizer.process_pool import JobOwner
from tests.http.fake_engine import FakeTokenizer, spell
from tests.http.managed import CatalogEngine, serving
from tests.http.serving import Client
from tests.lora.folders import write_adapter
from tests.lora.uploads import tar_of

SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.1,
    "max_tokens": 7,
}
STOP = ["END", "###"]
USER = {"role": "user", "content": "hello"}
# By the path: the least body, and the names of the limit and of the stop strings.
DIALECTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "/v1/completions": ({"prompt": "ab"}, "max_tokens", "stop"),
    "/v1/chat/completions": ({"messages": [USER]}, "max_tokens", "stop"),
    "/v1/responses": ({"input": "hello"}, "max_output_tokens", "stop"),
    "/v1/messages": ({"messages": [USER], "max_tokens": 7}, "max_tokens", "stop_sequences"),
}
CHATS = [path for path in DIALECTS if path != "/v1/completions"]
TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
WITH_TOOLS = TEMPLATE + "{% if tools %}<tool_call>{{ tools[0].function.name }}{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "time"}}]


@asynccontextmanager
async def serving_two(tmp_path: Path, text: str = "Hi!") -> AsyncIterator[tuple[Client, CatalogEngine]]:
    """A server of the adapters a and b, whose answers are `text`."""
    engine = CatalogEngine(script=lambda request: spell(request, text))
    async with serving(tmp_path, engine=engine) as (client, receiver):
        for name in "ab":
            write_adapter(receiver.root / name, {"lora_alpha": ord(name)})
            await receiver.catalog.load(name, name, inplace=True)
        yield client, engine


async def patch(client: Client, **fields: Any) -> None:
    answer = await client.request("PATCH", "/v1/adapters/a", json=fields)
    assert answer.status == 200, answer.body


async def asked(client: Client, engine: CatalogEngine, path: str, **fields: Any) -> GenerateRequest:
    """What the engine gets of a request, without what differs between any two."""
    answer = await client.post(path, DIALECTS[path][0] | {"model": "a"} | fields)
    assert answer.status == 200, answer.body
    return replace(engine.requests[-1], request_id="", arrival_s=0.0, adapter="")


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_request_of_an_adapter_with_defaults_equals_one_that_spells_them_out(tmp_path: Path, path: str) -> None:
    _, limit, stop = DIALECTS[path]
    async with serving_two(tmp_path) as (client, engine):
        plain = await asked(client, engine, path)
        spelled = SAMPLING | {limit: SAMPLING["max_tokens"], stop: STOP}
        if limit != "max_tokens":
            del spelled["max_tokens"]
        wanted = await asked(client, engine, path, **spelled)
        await patch(client, sampling=SAMPLING, stop=STOP)
        assert await asked(client, engine, path) == wanted != plain
        assert await asked(client, engine, path, model="b") == plain
        await patch(client, sampling=None, stop=None)
        assert await asked(client, engine, path) == plain


@pytest.mark.parametrize("path", DIALECTS)
async def test_what_a_request_gives_wins_and_a_null_is_the_default(tmp_path: Path, path: str) -> None:
    _, limit, stop = DIALECTS[path]
    given = {"temperature": 1.5, "top_k": 0, limit: 3, stop: ["x"]}
    async with serving_two(tmp_path) as (client, engine):
        wanted = await asked(client, engine, path, **given)
        await patch(client, sampling={"temperature": 0.5, "top_k": 5, "max_tokens": 2}, stop=STOP)
        assert await asked(client, engine, path, **given) == wanted
        nulls = await asked(client, engine, path, temperature=None, **{stop: None})
        assert (nulls.params.temperature, nulls.params.stop) == (0.5, tuple(STOP))
        assert (await asked(client, engine, path, **{stop: []})).params.stop == ()


async def test_the_newer_limit_of_a_request_wins_too_and_a_default_one_fits_the_context(tmp_path: Path) -> None:
    async with serving_two(tmp_path) as (client, engine):
        await patch(client, sampling={"max_tokens": 995})
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert (await asked(client, engine, path, max_completion_tokens=4)).params.max_tokens == 4
        long = await asked(client, engine, "/v1/completions", prompt="x" * 20)
        assert long.params.max_tokens == engine.max_model_len - len(long.prompt_ids)
        scored = await asked(client, engine, "/v1/chat/completions", logprobs=True)
        assert scored.params.max_tokens == engine.max_model_len - len(scored.prompt_ids)


async def test_an_alias_has_the_defaults_of_its_adapter(tmp_path: Path) -> None:
    async with serving_two(tmp_path) as (client, engine):
        await patch(client, sampling={"temperature": 0.5}, chat_template=TEMPLATE)
        await client.request("PUT", "/v1/aliases/prod", json={"adapter": "a"})
        one = await asked(client, engine, "/v1/chat/completions", model="prod")
        assert one == await asked(client, engine, "/v1/chat/completions", model="a")
        await client.request("PUT", "/v1/aliases/prod", json={"adapter": "b"})
        assert (await asked(client, engine, "/v1/chat/completions", model="prod")).params.temperature == 1.0


async def test_chats_of_all_kinds_and_counts_of_tokens_have_the_adapters_template(tmp_path: Path) -> None:
    async with serving_two(tmp_path) as (client, engine):
        before = [await asked(client, engine, path) for path in CHATS]
        await patch(client, chat_template=TEMPLATE)
        for path in CHATS:
            assert bytes((await asked(client, engine, path)).prompt_ids) == b"[hello]>"
        body = {"model": "a", "messages": [USER]}
        assert bytes((await client.post("/tokenize", body)).json["tokens"]) == b"[hello]>"
        assert (await client.post("/v1/messages/count_tokens", body)).json == {"input_tokens": 8}
        assert (await client.post("/tokenize", body | {"model": "b"})).json["tokens"] == list(before[0].prompt_ids)
        assert [await asked(client, engine, path, model="b") for path in CHATS] == before
        embedded = [(await client.embed(model=name)).json["data"] for name in "ab"]
        assert embedded[0] == embedded[1]


async def test_a_prompt_waits_in_the_queue_of_its_client_user_and_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[JobOwner] = []
    ask = AdapterTemplates.ask

    async def asked_for(self: AdapterTemplates, message: bytes, field: str, owner: JobOwner) -> memoryview:
        owners.append(owner)
        return await ask(self, message, field, owner)

    monkeypatch.setattr(AdapterTemplates, "ask", asked_for)
    async with serving_two(tmp_path) as (client, engine):
        await patch(client, chat_template=TEMPLATE)
        for path in CHATS:
            named = {"metadata": {"user_id": "u"}} if path == "/v1/messages" else {"user": "u"}
            owners.clear()
            await asked(client, engine, path, **named)
            assert set(owners) == {JobOwner(Tenant("127.0.0.1", "u"), "a")}
        for path in ("/tokenize", "/v1/messages/count_tokens"):
            owners.clear()
            await client.post(path, {"model": "a", "messages": [USER]})
            assert owners == [JobOwner(Tenant("127.0.0.1"), "a")]


async def test_an_adapters_template_decides_on_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "tool_format", None)
    async with serving_two(tmp_path, '<tool_call>{"name": "time", "arguments": {}}</tool_call>') as (client, engine):
        await patch(client, chat_template=WITH_TOOLS)
        answer = await client.chat(model="a", tools=TOOLS)
        assert answer.json["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "time"
        assert bytes(engine.requests[-1].prompt_ids) == b"[hello]><tool_call>time"
        counted = {"model": "a", "messages": [USER], "tools": [{"name": "time", "input_schema": {"type": "object"}}]}
        assert (await client.post("/v1/messages/count_tokens", counted)).json == {"input_tokens": 23}
        refused = [await client.chat(model="b", tools=TOOLS)]
        await patch(client, chat_template=TEMPLATE)
        refused.append(await client.chat(model="a", tools=TOOLS))
        assert [(one.status, one.error["param"]) for one in refused] == [(400, "tools")] * 2


async def test_an_adapters_template_decides_on_reasoning(tmp_path: Path) -> None:
    async with serving_two(tmp_path, "<think>Hm.</think>Hi!") as (client, _):
        await patch(client, chat_template=TEMPLATE + "{% if enable_thinking is false %}<think></think>{% endif %}")
        messages = [(await client.chat(model=name)).json["choices"][0]["message"] for name in "ab"]
        assert (messages[0]["reasoning_content"], messages[0]["content"]) == ("Hm.", "Hi!")
        assert messages[1]["content"] == "<think>Hm.</think>Hi!"
        body = {"model": "a", "messages": [USER], "max_tokens": 99, "thinking": {"type": "enabled"}}
        blocks = (await client.post("/v1/messages", body)).json["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text"]


async def test_a_template_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    unfit = {
        "{% for a in %}": "does not compile",
        "{{ raise_exception('no users') }}": "no users",
        "{% if false %}x{% endif %}": "empty prompt",
        "{{ messages[7].content.role }}": "no element 7",
        "{% for a in 'x' * 1000 %}" * 3 + "{% endfor %}" * 3: "takes more than",
    }
    async with serving_two(tmp_path) as (client, _):
        await patch(client, chat_template=TEMPLATE)
        for source, words in unfit.items():
            answer = await client.request(
                "PATCH", "/v1/adapters/a", json={"chat_template": source, "labels": {"x": ""}}
            )
            assert (answer.status, answer.error["param"]) == (400, "chat_template")
            assert words in answer.error["message"]
        card = (await client.get("/v1/adapters/a")).json
        assert (card["chat_template"], card["labels"]) == (TEMPLATE, {})


async def test_messages_that_the_template_refuses_are_the_clients_mistake(tmp_path: Path) -> None:
    async with serving_two(tmp_path) as (client, _):
        await patch(client, chat_template="{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}x")
        answer = await client.chat(model="a", messages=[USER, USER])
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "one only" in answer.error["message"]


@pytest.mark.parametrize("path", CHATS)
async def test_chats_take_the_template_in_the_adapters_folder_until_one_is_set(tmp_path: Path, path: str) -> None:
    """With --adapter-chat-templates. The engine's prompts are the characters of the text."""
    engine = CatalogEngine(script=lambda request: spell(request, "Hi!"))
    base = ServedBase(takes_templates=True)
    async with serving(tmp_path, engine=engine, base=base) as (client, receiver):
        folder = write_adapter(receiver.root / "a")
        prompts = []
        for text in (None, TEMPLATE, TEMPLATE.replace(">", "!")):
            if text is not None:
                (folder / "chat_template.jinja").write_text(text)
            await receiver.catalog.load("a", "a", inplace=True)
            card = (await client.get("/v1/adapters/a")).json
            assert (card["folder_chat_template"], card["own_chat_template"]) == (text, text is not None)
            prompts.append((await asked(client, engine, path)).prompt_ids)
        await patch(client, chat_template=TEMPLATE)
        assert (await asked(client, engine, path)).prompt_ids == prompts[1]
        await patch(client, chat_template=None)
        assert (await asked(client, engine, path)).prompt_ids == prompts[2]
        assert len(set(prompts)) == 3
        (folder / "chat_template.jinja").unlink()
        await receiver.catalog.load("a", "a", inplace=True)
        assert (await asked(client, engine, path)).prompt_ids == prompts[0]


async def test_an_upload_of_the_same_matrices_with_another_template_changes_the_template(tmp_path: Path) -> None:
    engine = CatalogEngine(script=lambda request: spell(request, "Hi!"))
    async with serving(tmp_path / "root", engine=engine, base=ServedBase(takes_templates=True)) as (client, receiver):
        folder = write_adapter(tmp_path / "made")
        for text in (TEMPLATE, TEMPLATE.replace(">", "!")):
            (folder / "chat_template.jinja").write_text(text)
            made = await client.request("PUT", "/v1/adapters/a", data=tar_of(folder))
            assert made.json["folder_chat_template"] == text
            assert (receiver.root / "a" / "chat_template.jinja").read_text() == text
