"""The fields that constrain an answer, by the names of OpenAI, vLLM, SGLang and llama.cpp."""

import json
from typing import Any

import numpy as np
import pytest

from caraserve.core.grammar import mask_words
from caraserve.core.tenant import Tenant
from caraserve.tokenizer.grammar import GrammarKind, GrammarSource
from tests.http.fake_engine import EOS, WRONG_GRAMMAR, FakeEngine, FakeGrammar, FakeTokenizer
from tests.http.serving import Client, OneOff, serving, wrong

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANY_OBJECT = {"type": "object"}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<"]}
TAGS = [{"trigger": "<", "begin": "<f>", "schema": SCHEMA, "end": "</f>"}]
CHOICES = ["yes", "no"]


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", ANY_OBJECT),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA},
                }
            },
            "json_schema",
            SCHEMA,
        ),
        ({"response_format": {"type": "structural_tag", **TAG}}, "structural_tag", TAGS),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_schema", ANY_OBJECT),
        ({"structured_outputs": {"regex": "a*"}}, "regex", "a*"),
        ({"structured_outputs": {"choice": CHOICES}}, "choice", CHOICES),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "grammar", "root ::= x"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structural_tag", TAGS),
        ({"guided_json": {}}, "json_schema", {}),
        ({"guided_regex": "a*"}, "regex", "a*"),
        ({"guided_choice": CHOICES}, "choice", CHOICES),
        ({"guided_grammar": "root ::= x"}, "grammar", "root ::= x"),
        ({"regex": "a*"}, "regex", "a*"),
        ({"ebnf": "root ::= x"}, "grammar", "root ::= x"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"grammar": "root ::= x"}, "grammar", "root ::= x"),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("kind_of_request", ["chat", "complete"])
async def test_each_field_is_one_grammar(
    fields: dict[str, Any], kind: GrammarKind, value: Any, kind_of_request: str, client: Client, fake: FakeEngine
) -> None:
    answer = await getattr(client, kind_of_request)(**fields)
    assert answer.status == 200
    assert "x-caraserve-ignored" not in answer.headers
    source = fake.requests[0].params.grammar
    assert isinstance(source, GrammarSource)
    is_json = kind in ("json_schema", "choice", "structural_tag")
    assert (source.kind, json.loads(source.text) if is_json else source.text) == (kind, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("guided_json", {"x": "y" * 300_000}), ("guided_choice", ["x"] * 2000)],
    ids=["schema", "choices"],
)
async def test_sources_that_are_too_large_are_refused(field: str, value: Any) -> None:
    refused = await OneOff().complete(**{field: value})
    assert (refused.status, refused.error["param"]) == (400, field)


async def test_numbers_beyond_64_bits_are_kept() -> None:
    fake = FakeEngine()
    assert (await OneOff(fake).complete(guided_json={"maximum": 2**70})).status == 200
    assert json.loads(fake.requests[0].params.grammar.text) == {"maximum": 2**70}


@pytest.mark.parametrize(
    ("fields", "is_one"),
    [
        ({"guided_grammar": "root ::= x", "structured_outputs": {"grammar": "root ::= x"}}, True),  # guidance's client
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object", "schema": SCHEMA}}, True),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": True}}, True),
        ({"guided_grammar": "root ::= x", "structured_outputs": {"grammar": "root ::= y"}}, False),
        ({"guided_regex": "a*", "guided_grammar": "a*"}, False),
        ({"regex": "a*", "guided_regex": "a*", "structured_outputs": {"regex": "b*"}}, False),
    ],
    ids=str,
)
async def test_equal_grammars_in_several_fields_are_one(fields: dict[str, Any], is_one: bool) -> None:
    answer = await OneOff().complete(**fields)
    assert answer.status == (200 if is_one else 400)
    assert is_one or "both constrain the answer" in answer.error["message"]


FORMAT = {"type": "json_schema", "schema": {"pattern": WRONG_GRAMMAR}}
OF_CLIENTS = {  # of each API: a body whose grammar is wrong, and the field that has it
    "/v1/responses": ({"input": "x", "text": {"format": FORMAT}}, "text.format"),
    "/v1/messages": ({"output_config": {"format": FORMAT}}, "output_config.format"),
    "/v1/messages ": ({"output_format": FORMAT}, "output_format"),
    "/v1/chat/completions": (
        {"response_format": {"type": "json_schema", "json_schema": FORMAT}},
        "response_format",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", OF_CLIENTS)
async def test_a_schema_that_cannot_be_compiled_is_refused_by_the_clients_own_field(path: str, stream: bool) -> None:
    fields, own = OF_CLIENTS[path]
    body = {"model": "a", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5} | fields
    if "input" in fields:
        del body["messages"], body["max_tokens"]
    refused = await OneOff(fake := FakeEngine()).post(path.strip(), body | {"stream": stream})
    assert refused.status == 400
    assert refused.json["error"]["message"].startswith(f"{own} cannot be compiled")
    assert refused.json["error"].get("param", own) == own
    assert not fake.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_cannot_be_compiled_is_refused_by_its_field(stream: bool) -> None:
    refused = await OneOff(fake := FakeEngine()).complete(guided_regex=WRONG_GRAMMAR, stream=stream)
    assert (refused.status, refused.error["param"]) == (400, "guided_regex")
    assert not fake.requests


async def test_a_grammar_is_compiled_at_the_turn_of_the_client_and_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants: list[Tenant] = []

    async def prepare(self: FakeGrammar, tenant: Tenant) -> None:
        tenants.append(tenant)

    monkeypatch.setattr(FakeGrammar, "prepare", prepare)
    async with serving(FakeEngine()) as client:
        for fields in ({}, {"bad_words": ["x"]}):  # which is a grammar around the other one
            assert (await client.complete(guided_regex="a*", user="u", **fields)).status == 200
    assert tenants == [Tenant("127.0.0.1", "u")] * 2


# --- allowed_token_ids and bad_words ---


EVERY = set(range(FakeTokenizer.vocab_size))


async def allowed_after(output: bytes, **fields: Any) -> set[int]:
    """Returns the tokens that may follow after an answer began with `output`."""
    fake = FakeEngine()
    async with serving(fake) as client:
        for answer in (await client.complete(**fields), await client.chat(**fields)):
            assert answer.status == 200, answer.body
    masks = []
    for request in fake.requests:
        assert request.params.grammar is not None
        mask = np.zeros(mask_words(FakeTokenizer.vocab_size), np.uint32)
        request.params.grammar.matcher(list(output)).write_mask(mask)
        masks.append({one for one in range(32 * len(mask)) if mask[one // 32] >> np.uint32(one % 32) & 1})
    assert masks[0] == masks[1]
    return masks[0]


async def test_only_allowed_token_ids_may_follow() -> None:
    assert await allowed_after(b"a", allowed_token_ids=[3, EOS, 3]) == {3, EOS}


@pytest.mark.parametrize(
    ("output", "missing"), [(b"", b"z"), (b"se", b"az"), (b"the se", b"az"), (b" se", b"az"), (b"see", b"z")]
)
async def test_a_bad_word_may_not_be_completed(output: bytes, missing: bytes) -> None:
    assert await allowed_after(output, bad_words=["sea", " z"]) == EVERY - set(missing)


async def test_a_word_within_a_text_counts_where_a_space_makes_other_tokens_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def encode(tokenizer: FakeTokenizer, text: str, **settings: Any) -> list[int]:
        """As byte-pair encodings do, writes a space and a letter as one token."""
        return [text[1].encode()[0] + 128, *text[2:].encode()] if text.startswith(" ") else list(text.encode())

    monkeypatch.setattr(FakeTokenizer, "encode", encode)
    fields: dict[str, Any] = {"prompt": [1], "bad_words": ["ab", "c"]}
    fake = FakeEngine()
    assert (await OneOff(fake).complete(**fields)).status == 200
    grammar = fake.requests[0].params.grammar
    assert grammar is not None
    for output, missing in (([], {99, 227}), ([97], {98, 99, 227}), ([225], {98, 99, 227})):
        mask = np.zeros(mask_words(FakeTokenizer.vocab_size), np.uint32)
        grammar.matcher(output).write_mask(mask)
        assert {one for one in EVERY if not mask[one // 32] >> np.uint32(one % 32) & 1} == missing


async def test_the_end_may_not_come_before_min_tokens() -> None:
    fields = {"allowed_token_ids": [65, EOS, 66], "min_tokens": 2, "stop_token_ids": [66]}
    assert await allowed_after(b"A", **fields) == {65}
    assert await allowed_after(b"AA", **fields) == {65, 66, EOS}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *wrong("allowed_token_ids", [], [258], ["a"]),
        *wrong("bad_words", "sea", [""], [" "], [3], ["x" * 257], ["x"] * 1025, ["x" * 200] * 41),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["complete", "chat"])
async def test_wrong_values_are_refused(kind: str, fields: dict[str, Any], param: str, client: Client) -> None:
    answer = await getattr(client, kind)(**fields)
    assert (answer.status, answer.error["param"]) == (400, param)
