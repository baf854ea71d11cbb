"""Tests of fields that are not supported: refused with advice, refused as misspelt, or ignored and listed."""

import time
from typing import Any

import pytest

from caraserve.errors import InvalidRequest
from caraserve.http.body.field_types import Fields
from caraserve.http.body.known_fields import MAX_UNKNOWN, KnownFields, check_fields
from caraserve.http.body.request_schema import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    LOAD_ADAPTER,
    RERANK,
    SCORE,
    STREAM_OPTIONS,
    TOKENIZE,
    UNLOAD_ADAPTER,
)
from caraserve.http.body.translated_schema import MESSAGES, RESPONSES
from caraserve.model.sentence_format import SentenceFormat
from tests.http.fake_engine import FakeEngine
from tests.http.serving import Client, OneOff, serving

TABLES = [COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE, LOAD_ADAPTER, UNLOAD_ADAPTER, STREAM_OPTIONS]
TABLES += [EMBEDDINGS, SCORE, RERANK, RESPONSES, MESSAGES]
IGNORED = "x-caraserve-ignored"
EVERY_SERVED_VALUE: dict[str, Any] = {
    "model": "a",
    "lora_path": "a",
    "lora": [{"id": "a", "scale": 1}],
    "adapter_id": "a",
    "user": "u",
    "cache_salt": "s",
    "priority": 3,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "return_token_ids": True,
    "n": 2,
    "max_tokens": 4,
    "max_completion_tokens": 4,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["x"],
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"3": 1.0},
    "allowed_token_ids": [65, 66],
    "bad_words": ["x"],
    "return_tokens_as_token_ids": True,
    "truncate_prompt_tokens": 1,
    "truncation_side": "right",
}
NOT_STREAMED: dict[str, Any] = {"prompt_logprobs": 1, "stream": False, "stream_options": None}
OF_COMPLETIONS: dict[str, Any] = {
    "prompt_embeds": [],
    "prompt": "x",
    "suffix": "",
    "echo": True,
    "best_of": 2,
    "add_special_tokens": True,
    "logprobs": 1,
}
OF_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template_kwargs": {"anything": 1},
    "logprobs": True,
    "top_logprobs": 1,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": True,
    "tool_choice": "none",
    "functions": [{}],
    "function_call": "none",
    "thinking_token_budget": -1,
    "prediction": {"type": "content", "content": "x"},
}
OF_REASONING = {"reasoning_effort": "low", "include_reasoning": False}  # ignored, and listed, where nothing reasons

CONSTRAINTS = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {}}},
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
    "regex": "a",
    "ebnf": 'root ::= "a"',
    "grammar": 'root ::= "a"',
    "json_schema": {"type": "object"},
    "structural_tag": {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<a"]},
}


@pytest.mark.parametrize(
    ("path", "table", "own"),
    [("/v1/completions", COMPLETIONS, OF_COMPLETIONS), ("/v1/chat/completions", CHAT, OF_CHAT)],
)
async def test_every_field_of_a_table_is_read(path: str, table: KnownFields, own: dict[str, Any]) -> None:
    body = EVERY_SERVED_VALUE | own
    read = body.keys() | CONSTRAINTS.keys() | NOT_STREAMED.keys()
    assert read | (OF_REASONING.keys() if table is CHAT else set()) == table.served
    async with serving(FakeEngine()) as client:
        answer = await client.post(path, body)
        whole = await client.post(path, body | NOT_STREAMED)
        constrained = [  # one at a time, and without what contradicts them
            await client.post(path, body | {"ignore_eos": False, "min_tokens": 0, name: value})
            for name, value in CONSTRAINTS.items()
        ]
    for each in (answer, whole, *constrained):
        assert each.status == 200, each.body
        assert IGNORED not in each.headers


@pytest.mark.parametrize(
    ("path", "table", "own"),
    [
        (
            "/v1/embeddings",
            EMBEDDINGS,
            {"input": "x", "encoding_format": "base64", "dimensions": 2, "normalize": False},
        ),
        ("/v1/score", SCORE, {"text_1": "x", "text_2": "y"}),
        ("/v1/score", SCORE, {"queries": "x", "documents": "y"}),
        ("/v1/rerank", RERANK, {"query": "x", "documents": ["y"], "top_n": 1, "return_documents": False}),
    ],
    ids=["embeddings", "texts", "queries", "rerank"],
)
async def test_every_field_of_a_route_for_embeddings_is_read(
    path: str, table: KnownFields, own: dict[str, Any]
) -> None:
    body = {"add_special_tokens": False, "prompt_name": "query", **own}
    body |= {name: value for name, value in EVERY_SERVED_VALUE.items() if name in table.served}
    others = {"text_1", "text_2", "queries", "documents"} if table is SCORE else set()
    assert body.keys() | others == table.served
    engine = FakeEngine()
    engine.tokenizer.sentences = SentenceFormat(prompts={"query": "Find: "})
    answer = await OneOff(engine).post(path, body)
    assert answer.status == 200, answer.body
    assert IGNORED not in answer.headers


@pytest.mark.parametrize("table", TABLES)
def test_no_field_is_in_two_groups(table: KnownFields) -> None:
    assert not table.served & table.refused.keys()
    assert not table.ignored & (table.served | table.refused.keys())


@pytest.mark.parametrize("table", TABLES)
def test_no_known_name_counts_as_misspelt(table: KnownFields) -> None:
    for name in table.served | table.ignored:
        check_fields(Fields({name: "x"}), table)
    for name in table.refused:
        with pytest.raises(InvalidRequest, match=f"^{name} is not supported by this server; "):
            check_fields(Fields({name: object()}), table)


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("max_new_tokens", 5, "max_tokens"),
        ("n_predict", 5, "max_tokens"),
        ("repeat_penalty", 1.1, "repetition_penalty"),
        ("random_seed", 1, "seed"),
        ("do_sample", False, "temperature 0"),
        ("stop_sequences", ["x"], "stop"),
        ("n_probs", 3, "logprobs"),
        ("format", "json", "response_format"),
        ("banned_strings", ["x"], "bad_words"),
        ("mirostat", 2, "not implemented"),
        ("typical_p", 0.9, "not implemented"),
        ("dry_multiplier", 0.8, "not implemented"),
        ("enable_thinking", False, "chat_template_kwargs"),
        ("logprob_token_ids", [1], "leave it out"),
        ("truncate", 10, "shorten the prompt"),
        ("vllm_xargs", {"a": 1}, "not implemented"),
        ("kv_transfer_params", {"a": 1}, "leave it out"),
        ("options", {"temperature": 0}, "top level"),
        ("parameters", {"adapter_id": "a"}, "top level"),
        ("system", "Be brief.", "role system"),
        ("image_data", ["x"], "only text"),
    ],
)
@pytest.mark.parametrize("kind", ["complete", "chat"])
async def test_fields_that_would_change_the_answer_are_refused(
    kind: str, field: str, value: object, instead: str, client: Client, fake: FakeEngine
) -> None:
    answer = await getattr(client, kind)(**{field: value})
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "invalid_request_error", field)
    assert instead in answer.error["message"]
    assert not fake.streams


@pytest.mark.parametrize(
    "neutral",
    [
        {"typical_p": 1.0, "mirostat": 0, "repeat_penalty": 1, "grammar": "", "json_schema": {}, "n_probs": 0},
        {"do_sample": True, "n_predict": -1, "thinking_token_budget": -1, "watermark": False, "options": {}},
        {"regex": None, "lora_request": None, "guided_json": None, "adapters": None},
    ],
)
async def test_values_that_ask_for_nothing_are_read(neutral: dict[str, Any]) -> None:
    answer = await OneOff().complete(**neutral)
    assert answer.status == 200
    assert IGNORED not in answer.headers


@pytest.mark.parametrize(
    ("path", "field", "meant"),
    [
        ("/v1/completions", "max_token", "max_tokens"),
        ("/v1/completions", "maxTokens", "max_tokens"),
        ("/v1/completions", "temprature", "temperature"),
        ("/v1/completions", "temperatrue", "temperature"),
        ("/v1/completions", "top-p", "top_p"),
        ("/v1/completions", "Stop", "stop"),
        ("/v1/completions", "stops", "stop"),
        ("/v1/completions", "repitition_penalty", "repetition_penalty"),
        ("/v1/completions", "Lora_Path", "lora_path"),
        ("/v1/completions", "lorapath", "lora_path"),
        ("/v1/completions", "adapter-id", "adapter_id"),
        ("/v1/completions", "prompts", "prompt"),
        ("/v1/completions", "N", "n"),
        ("/v1/chat/completions", "message", "messages"),
        ("/v1/chat/completions", "respons_format", "response_format"),
        ("/v1/chat/completions", "maxCompletionTokens", "max_completion_tokens"),
        ("/v1/chat/completions", "logprob", "logprobs"),
        ("/tokenize", "promt", "prompt"),
        ("/detokenize", "token", "tokens"),
        ("/v1/load_lora_adapter", "load_in_place", "load_inplace"),
        ("/v1/unload_lora_adapter", "loraName", "lora_name"),
    ],
)
async def test_a_misspelt_field_is_refused_with_the_right_name(path: str, field: str, meant: str) -> None:
    answer = await OneOff().post(path, {field: "x"})
    assert (answer.status, answer.error["param"]) == (400, field)
    assert f"did you mean {meant!r}" in answer.error["message"]


@pytest.mark.parametrize(
    "sent",
    [
        {"metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"reasoning_effort": "low", "verbosity": "low", "web_search_options": {}},
        {"prompt_cache_key": "k", "safety_identifier": "s", "spaces_between_special_tokens": True, "length_penalty": 1},
        {"chat_id": "1", "session_id": "2", "id": "3", "background_tasks": {}, "features": {}, "files": []},
        {"tags": ["x"], "type": "x", "mode": "x", "title": "x", "top_n": 1, "model_name": "x", "chat_template_id": 1},
        {"request_id": "1", "cache_prompt": False, "repeat_last_n": 64, "keep_alive": "5m", "user_id": 7},
    ],
)
async def test_other_fields_of_clients_are_ignored_and_listed(sent: dict[str, Any], client: Client) -> None:
    answers = [await client.complete(**sent), await client.chat(**sent), await client.chat(**sent, stream=True)]
    assert [answer.status for answer in answers] == [200] * 3
    for answer in answers:
        assert answer.headers[IGNORED].split(", ") == sorted(sent)


async def test_all_routes_that_take_a_body_list_what_they_ignore(client: Client) -> None:
    answers = [
        await client.post("/tokenize", {"prompt": "x", "extra": 1}),
        await client.post("/detokenize", {"tokens": [65], "extra": 1}),
        await client.post("/v1/load_lora_adapter", {"lora_name": "c", "lora_path": "/c", "extra": 1}),
        await client.post("/v1/unload_lora_adapter", {"lora_name": "c", "extra": 1}),
    ]
    assert [(answer.status, answer.headers[IGNORED]) for answer in answers] == [(200, "extra")] * 4


async def test_options_inside_stream_options_are_checked_too(client: Client) -> None:
    wrong = await client.complete(stream=True, stream_options={"include_usages": True})
    listed = await client.complete(stream=True, stream_options={"include_obfuscation": False, "include_usage": True})
    assert (wrong.status, wrong.error["param"]) == (400, "include_usages")
    assert listed.headers[IGNORED] == "stream_options.include_obfuscation"


async def test_ignored_names_cannot_break_the_header() -> None:
    names = ["a\r\nSet-Cookie: x=1", "naïve", "comma, comma", "\0", "", "x" * 500]
    answer = await OneOff().complete(**dict.fromkeys(names, 1))
    assert answer.status == 200
    assert "Set-Cookie" not in answer.headers
    listed = answer.headers[IGNORED].split(", ")
    assert sorted(listed) == sorted(["a??Set-Cookie:?x?1", "na?ve", "comma??comma", "?", "", "x" * 64])


async def test_a_long_list_of_ignored_names_is_cut_between_two() -> None:
    names = [f"{number}{'y' * 70}" for number in range(MAX_UNKNOWN)]
    answer = await OneOff().complete(**dict.fromkeys(names, 1))
    *listed, end = answer.headers[IGNORED].split(", ")
    assert (end, {len(name) for name in listed}) == ("...", {64})
    assert len(answer.headers[IGNORED]) <= 2100


async def test_more_unknown_fields_than_any_client_sends_are_refused(client: Client, fake: FakeEngine) -> None:
    answer = await client.complete(**{f"q{number}": 1 for number in range(MAX_UNKNOWN + 1)})
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert str(MAX_UNKNOWN) in answer.error["message"]
    assert not fake.streams


def test_ten_thousand_unknown_fields_cost_less_than_a_millisecond() -> None:
    body = {f"an_unknown_field_{number}": 1 for number in range(10_000)}

    def refused_after_ms() -> float:
        began_s = time.thread_time()
        with pytest.raises(InvalidRequest, match="more than 64"):
            check_fields(Fields(body), CHAT)
        return 1000 * (time.thread_time() - began_s)

    refused_after_ms()  # makes the table's index
    assert min(refused_after_ms() for _ in range(10)) < 1
