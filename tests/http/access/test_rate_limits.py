"""Tests of the limits of keys: which requests are refused, for how long, and what headers and errors say."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from caraserve.core.request import TokenDelta
from caraserve.errors import BackendFailed, Overloaded
from caraserve.http.access.rate_limits import RateLimiter, _duration
from tests.http.fake_engine import FakeEngine, finish, spell
from tests.http.fleet import FULL, Fleet
from tests.http.serving import Answer, Client, serving

KEY = "sk-limited"
HEADERS = {"Authorization": f"Bearer {KEY}"}
Limited = Callable[..., Path]
MESSAGE = "ab"  # three tokens with the one that begins a text; the answer has three too


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which buckets are refilled."""
    found = Clock()
    inner: Callable[..., None] = RateLimiter.__init__
    monkeypatch.setattr(RateLimiter, "__init__", lambda self, answer_s: inner(self, answer_s, now=found))
    return found


@pytest.fixture
def limited(tmp_path: Path) -> Limited:
    """Writes a file with one key that has these limits."""

    def write(**limits: float) -> Path:
        path = tmp_path / "keys.json"
        entry = {"name": "team", "sha256": hashlib.sha256(KEY.encode()).hexdigest()} | limits
        path.write_text(json.dumps({"keys": [entry]}))
        return path

    return write


async def ask(client: Client, **fields: Any) -> Answer:
    return await client.complete(prompt=MESSAGE, headers=HEADERS, **fields)


async def test_requests_over_the_rate_wait_exactly_as_long_as_the_answer_says(clock: Clock, limited: Limited) -> None:
    async with serving(FakeEngine(), api_key_file=limited(requests_per_minute=2)) as client:
        assert [(await ask(client)).status for _ in range(2)] == [200, 200]
        clock.now_s += 12.5
        refused = await ask(client)
        assert refused.status == 429
        assert refused.error["code"] == "rate_limit_exceeded"
        assert refused.error["type"] == "rate_limit_error"
        assert "2 requests per minute" in refused.error["message"]
        assert (refused.headers["Retry-After"], refused.headers["retry-after-ms"]) == ("18", "17500")
        clock.now_s += 17.499
        assert (await ask(client)).status == 429
        clock.now_s += 0.0011
        assert (await ask(client)).status == 200


async def test_tokens_of_prompts_and_answers_count(clock: Clock, limited: Limited) -> None:
    async with serving(FakeEngine(), api_key_file=limited(tokens_per_minute=10)) as client:
        assert (await ask(client)).status == 200  # leaves 10 - 3 - 3
        answer = await ask(client)  # leaves 4 - 3 - 3
        assert answer.status == 200
        assert answer.headers["x-ratelimit-remaining-tokens"] == "1"  # when it was admitted
        refused = await ask(client)
        assert (refused.status, refused.headers["retry-after-ms"]) == (429, "30000")  # from -2 to 3, at 10 a minute
        assert "10 tokens per minute" in refused.error["message"]
        clock.now_s += 30
        assert (await ask(client)).status == 200


async def test_a_prompt_over_a_whole_minutes_tokens_waits_for_a_full_bucket(clock: Clock, limited: Limited) -> None:
    async with serving(FakeEngine(), api_key_file=limited(tokens_per_minute=2)) as client:
        assert (await ask(client)).status == 200  # leaves 2 - 3 - 3
        refused = await ask(client)
        assert (refused.status, refused.headers["retry-after-ms"]) == (429, "180000")
        clock.now_s += 180
        assert (await ask(client)).status == 200


async def test_several_answers_to_one_prompt_are_one_request_with_one_prompt(limited: Limited) -> None:
    async with serving(FakeEngine(), api_key_file=limited(requests_per_minute=10, tokens_per_minute=100)) as client:
        answer = await client.complete(prompt=[MESSAGE, MESSAGE], n=5, headers=HEADERS)
        assert answer.headers["x-ratelimit-remaining-requests"] == "9"
        assert answer.headers["x-ratelimit-remaining-tokens"] == "94"
        after = await ask(client)
        assert after.headers["x-ratelimit-remaining-tokens"] == str(94 - 30 - 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_has_openais_headers(limited: Limited, stream: bool) -> None:
    path = limited(requests_per_minute=600, tokens_per_minute=60_000)
    async with serving(FakeEngine(), api_key_file=path) as client:
        answer = await ask(client, stream=stream)
        models = await client.get("/v1/models", headers=HEADERS)
    assert {name: value for name, value in answer.headers.items() if name.startswith("x-ratelimit")} == {
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "599",
        "x-ratelimit-reset-requests": "100ms",
        "x-ratelimit-limit-tokens": "60000",
        "x-ratelimit-remaining-tokens": "59997",
        "x-ratelimit-reset-tokens": "3ms",
    }
    assert not [name for name in models.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0ms"), (0.0201, "21ms"), (1.5, "1.5s"), (360, "6m0s")])
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


async def test_requests_under_way_are_limited(limited: Limited) -> None:
    fake = FakeEngine(script=None)
    async with serving(fake, api_key_file=limited(concurrency=2)) as client:
        running = [asyncio.create_task(ask(client)) for _ in range(2)]
        streams = await fake.submitted(2)
        refused = await ask(client)
        assert (refused.status, refused.error["code"]) == (429, "concurrency_limit_exceeded")
        assert refused.headers["retry-after-ms"] == "4000"  # an answer is predicted to take 8 s, and two are under way
        streams[0].end()
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        fake.script = spell
        assert (await ask(client)).status == 200
        streams[1].end()
        assert [(await task).status for task in running] == [200, 200]


async def test_a_client_that_leaves_makes_room_and_has_used_the_tokens_so_far(limited: Limited) -> None:
    fake = FakeEngine(script=lambda request: spell(request)[:-1])  # three tokens, and no end
    async with serving(fake, api_key_file=limited(concurrency=1, tokens_per_minute=100)) as client:
        asking = client.session.post(
            client.url + "/v1/completions", json={"prompt": MESSAGE, "stream": True}, headers=HEADERS
        )
        async with asking as response:
            text = b""
            while b"!" not in text:
                text += await response.content.readany()
            response.close()
        await fake.streams[0].cancelled.wait()
        fake.script = spell
        answer = await ask(client)
        assert (answer.status, answer.headers["x-ratelimit-remaining-tokens"]) == (200, "91")


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=1.0), BackendFailed("the device failed")])
async def test_a_request_that_the_server_fails_to_answer_costs_no_tokens(limited: Limited, error: Exception) -> None:
    async with serving(FakeEngine(refusals={0: error}), api_key_file=limited(tokens_per_minute=100)) as client:
        assert (await ask(client)).status >= 429
        assert (await ask(client)).headers["x-ratelimit-remaining-tokens"] == "97"


async def test_a_changed_limit_holds_at_once(clock: Clock, limited: Limited, monkeypatch: pytest.MonkeyPatch) -> None:
    from caraserve.http import app

    keys = app.ApiKeys
    made = []
    monkeypatch.setattr(app, "ApiKeys", lambda config: made.append(keys(config)) or made[0])
    path = limited(requests_per_minute=1)
    async with serving(FakeEngine(), api_key_file=path) as client:
        assert [(await ask(client)).status for _ in range(2)] == [200, 429]
        limited(requests_per_minute=60)
        made[0]._clients = made[0]._read()
        clock.now_s += 1
        assert [(await ask(client)).status for _ in range(2)] == [200, 429]


async def test_a_forwarded_request_counts_once_where_it_was_received(limited: Limited, running: Fleet) -> None:
    path = limited(requests_per_minute=2, tokens_per_minute=100)
    a = await running.start("a", api_key_file=path)
    b = await running.start("b", api_key_file=path)
    running.world.loads["a"] = FULL
    answers = [await ask(a.client) for _ in range(2)]
    assert (len(a.engine.requests), len(b.engine.requests)) == (0, 2)
    assert [answer.headers["x-ratelimit-remaining-tokens"] for answer in answers] == ["97", "91"]
    assert (await ask(a.client)).status == 429
    assert len(a.forwards) == 2
    running.world.loads["a"], running.world.loads["b"] = running.world.loads["b"], FULL
    assert (await ask(b.client)).headers["x-ratelimit-remaining-requests"] == "1"


async def test_a_forwarded_stream_counts_all_its_tokens_however_many_an_event_has(
    limited: Limited, running: Fleet
) -> None:
    path = limited(tokens_per_minute=100)
    answers = FakeEngine(script=lambda asked: [TokenDelta("abcde", (1, 2, 3, 4, 5), finish=finish(asked, 5))])
    a = await running.start("a", api_key_file=path)
    await running.start("b", answers, api_key_file=path)
    running.world.loads["a"] = FULL
    left = [(await ask(a.client, stream=True)).headers["x-ratelimit-remaining-tokens"] for _ in range(2)]
    assert (left, len(a.forwards)) == (["97", str(97 - 5 - 3)], 2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": MESSAGE}),
        ("/detokenize", {"tokens": [97]}),
        ("/v1/messages/count_tokens", {"model": "a", "messages": [{"role": "user", "content": MESSAGE}]}),
    ],
    ids=["tokenize", "detokenize", "count_tokens"],
)
async def test_requests_for_tokens_count_as_requests_alone(
    clock: Clock, limited: Limited, path: str, body: dict[str, Any]
) -> None:
    limits = {"requests_per_minute": 2, "tokens_per_minute": 4, "concurrency": 1}
    async with serving(FakeEngine(), api_key_file=limited(**limits)) as client:
        assert (await ask(client)).status == 200  # uses up the tokens
        answer, refused = [await client.post(path, body, headers=HEADERS) for _ in range(2)]
        assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (200, "0")
        assert (refused.status, refused.headers["retry-after-ms"]) == (429, "30000")
        assert refused.json["error"]["type"] == "rate_limit_error"
        clock.now_s += 30
        assert (await client.post(path, body, headers=HEADERS)).status == 200


async def test_keys_without_limits_have_no_headers(limited: Limited) -> None:
    async with serving(FakeEngine(), api_key_file=limited()) as client:
        answer = await ask(client)
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
