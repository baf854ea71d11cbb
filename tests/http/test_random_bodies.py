"""Tests with random bodies to any route: no 5xx, and every field is read, refused, or listed as ignored."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caraserve.http.body import field_types, request_schema
from caraserve.http.body.known_fields import KnownFields
from caraserve.http.body.translated_schema import MESSAGES, RESPONSES
from tests.http.fake_engine import FakeEngine
from tests.http.serving import Answer, Client, serving

ROUTES: dict[str, tuple[KnownFields, dict[str, Any]]] = {
    "/v1/completions": (request_schema.COMPLETIONS, {"prompt": "x"}),
    "/v1/chat/completions": (request_schema.CHAT, {"messages": [{"role": "user", "content": "x"}]}),
    "/v1/embeddings": (request_schema.EMBEDDINGS, {"input": "x"}),
    "/v1/score": (request_schema.SCORE, {"text_1": "x", "text_2": "y"}),
    "/v1/rerank": (request_schema.RERANK, {"query": "x", "documents": ["x", "y"]}),
    "/v1/responses": (RESPONSES, {"input": "x"}),
    "/v1/messages": (MESSAGES, {"max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}),
    "/v1/messages/count_tokens": (MESSAGES, {"messages": [{"role": "user", "content": "x"}]}),
    "/tokenize": (request_schema.TOKENIZE, {"prompt": "x"}),
    "/detokenize": (request_schema.DETOKENIZE, {"tokens": [65]}),
    "/v1/load_lora_adapter": (request_schema.LOAD_ADAPTER, {"lora_name": "c", "lora_path": "/c"}),
    "/v1/unload_lora_adapter": (request_schema.UNLOAD_ADAPTER, {"lora_name": "b"}),
}
PLAUSIBLE: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 0.5, 1.0, [], {}, ["x"], [1, 2]),
    *("", "a", "b", "org/base", "none", "auto", "text"),
    *([{"id": "a", "scale": 1.0}], {"type": "text"}, {"include_usage": True}, {"a": None}, {"3": 1}, 2**63, 10**400),
    [{"role": "tool", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [{"function": 3}]}],
]
VALUES = st.sampled_from(PLAUSIBLE) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def misspelt(name: str) -> st.SearchStrategy[str]:
    place = st.integers(0, len(name) - 1)
    return st.one_of(
        place.map(lambda at: name[:at] + name[at + 1 :]),
        place.map(lambda at: name[:at] + "x" + name[at:]),
        st.just(name.upper()),
        st.just(name.replace("_", "-")),
    )


def names(known: KnownFields) -> st.SearchStrategy[str]:
    served = st.sampled_from(sorted(known.served))
    every = st.sampled_from(sorted(known.served | known.refused.keys() | known.ignored))
    return st.one_of(served, every, every.flatmap(misspelt), st.text(max_size=12))


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(ROUTES)))
    known, least = ROUTES[path]
    more = draw(st.dictionaries(names(known), VALUES, max_size=3))
    return path, more if draw(st.integers(0, 7)) == 7 else least | more


class Asking:
    """A server with a fake engine, for requests from outside its event loop; records the fields that parsers read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = 0
        self.read: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._client: Client = self._run(self._stack.enter_async_context(serving(FakeEngine())))
        raw = field_types.Fields.raw

        def noting(read: field_types.Fields, name: str) -> Any:
            self.read.add(name)
            return raw(read, name)

        monkeypatch.setattr(field_types.Fields, "raw", noting)

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def ask(self, path: str, body: dict[str, Any]) -> Answer:
        self.read.clear()
        answer: Answer = self._run(self._client.post(path, json.dumps(body).encode()))
        return answer

    def close(self) -> None:
        self._run(self._stack.aclose())
        self._loop.close()


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asking]:
    made = Asking(monkeypatch)
    yield made
    made.close()
    assert made.answers > 20  # or the bodies are so strange that nothing is learnt from them


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=requests())
def test_no_answer_leaves_a_field_unread_and_unlisted(asking: Asking, request: tuple[str, dict[str, Any]]) -> None:
    path, body = request
    answer = asking.ask(path, body)
    assert answer.status in (200, 400, 404), answer.body
    if answer.status != 200:
        assert set(answer.json["error"]) >= {"message", "type"}
        assert path.startswith("/v1/messages") or set(answer.error) == {"message", "type", "param", "code"}
        assert len(answer.body) < 2000
        return
    asking.answers += 1
    listed = answer.headers.get("x-caraserve-ignored", "").split(", ")
    for name, value in body.items():
        assert value is None or name in asking.read or re.sub(r"[^A-Za-z0-9_.:-]", "?", name) in listed
