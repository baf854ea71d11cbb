"""Tests of POST /v1/completions: the engine requests that its fields give, and the shape of responses."""

import asyncio
import dataclasses
from typing import Any

import pytest

from caraserve.core.request import GenerateRequest, Phases, TokenDelta
from caraserve.core.tenant import Tenant
from caraserve.errors import BackendFailed, Draining, NonFiniteLogits, Overloaded
from tests.http.fake_engine import BOS, DIGEST, FakeEngine, failing, finish, scored
from tests.http.serving import Client, OneOff, serving


async def submitted(fields: dict[str, Any], **engine: Any) -> list[GenerateRequest]:
    """Returns the engine requests that a body gives."""
    answer = await OneOff(fake := FakeEngine(**engine)).complete(**fields)
    assert answer.status == 200, answer.body
    return fake.requests


async def test_answer_has_openai_shape() -> None:
    answer = (await OneOff().complete(model="a")).json
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "a",
        "choices": [{"index": 0, "text": "Hi!", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "system_fingerprint": f"a@{DIGEST}",
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_phases_are_in_a_header() -> None:
    answer = await OneOff().complete()
    phases = (
        "queued=1.000;load=2.000;prefill=3.000;decode=4.000;stalled=0.000;interrupted=0.000;cpu_lora=0.000;cpu_layers=0"
    )
    assert answer.headers["x-caraserve-phases"] == phases


async def test_phases_are_those_of_the_slowest_answer() -> None:
    def unequal(request: GenerateRequest) -> list[TokenDelta]:
        prefill_ms = 50.0 if request.request_id.endswith("-1") else 5.0
        ended = dataclasses.replace(finish(request, 1), phases=Phases(0, 0, prefill_ms, 0))
        return [TokenDelta("x", (1,), finish=ended)]

    answer = await OneOff(FakeEngine(script=unequal)).complete(n=3)
    assert "prefill=50.000;" in answer.headers["x-caraserve-phases"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(BOS, 97, 98)]),
        (["a", "b"], [(BOS, 97), (BOS, 98)]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        (["a", [5]], [(BOS, 97), (5,)]),
    ],
)
async def test_prompt_forms(prompt: object, expected: list[tuple[int, ...]]) -> None:
    assert [request.prompt_ids for request in await submitted({"prompt": prompt})] == expected


async def test_special_tokens_may_be_left_out() -> None:
    (request,) = await submitted({"prompt": "a", "add_special_tokens": False})
    assert request.prompt_ids == (97,)


async def test_long_text_is_encoded_too() -> None:
    (request,) = await submitted({"prompt": "x" * 5000}, max_model_len=10_000)
    assert len(request.prompt_ids) == 5001


async def test_defaults_are_openais() -> None:
    (request,) = await submitted({})
    params = request.params
    assert (request.adapter, request.tenant, request.cache_salt) == (None, Tenant("127.0.0.1"), "")
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (16, 1.0, 1.0, 0, None)


async def test_model_defaults_apply_to_absent_fields() -> None:
    model = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    (request,) = await submitted({"top_p": 0.5}, default_sampling=model)
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.5, 20, 1.1)


async def test_every_sampling_field_arrives() -> None:
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["x", "yy"],
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "presence_penalty": 1,
        "frequency_penalty": -2,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -100, "9": 1.5},
        "logprobs": 4,
    }
    (request,) = await submitted(fields | {"user": "u1", "cache_salt": "s"})
    params = request.params
    assert {name: getattr(params, name) for name in fields} == fields | {
        "stop": ("x", "yy"),
        "stop_token_ids": (5,),
        "logit_bias": ((7, -100.0), (9, 1.5)),
    }
    assert (request.tenant, request.cache_salt) == (Tenant("127.0.0.1", "u1"), "s")


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 0}, "top_k", 0),
        ({"max_completion_tokens": 5}, "max_tokens", 5),
        ({"max_completion_tokens": 5, "max_tokens": 9}, "max_tokens", 5),
        ({"prompt": [1] * 990}, "max_tokens", 10),
    ],
    ids=["no limit", "0 is no limit", "newer name", "both names", "rest of the context"],
)
async def test_what_a_limit_means(fields: dict[str, Any], name: str, expected: int) -> None:
    (request,) = await submitted(fields)
    assert getattr(request.params, name) == expected


async def test_each_prompt_and_answer_is_one_request_with_its_own_seed() -> None:
    answer = (await OneOff(fake := FakeEngine()).complete(prompt=["a", "b"], n=2, seed=10)).json
    assert [request.params.seed for request in fake.requests] == [10, 11, 10, 11]
    assert [request.request_id for request in fake.requests] == [f"{answer['id']}-{index}" for index in range(4)]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 4  # each prompt once
    assert answer["usage"]["completion_tokens"] == 12


async def test_logprobs() -> None:
    answer = (await OneOff().complete(logprobs=3)).json
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["H", "i", "!"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "text_offset": [0, 1, 2],
        "top_logprobs": [
            {"H": -0.5, "I": -1.5, "J": -9999.0},
            {"i": -0.5, "j": -1.5, "k": -9999.0},
            {"!": -0.5, '"': -1.5, "#": -9999.0},
        ],
    }


async def test_chosen_token_is_among_the_top_even_when_it_is_not_the_best() -> None:
    def unlikely(request: GenerateRequest) -> list[TokenDelta]:
        best = scored(ord("x"), 1)
        chosen = dataclasses.replace(best, token_id=ord("q"), logprob=-7.0)
        return [TokenDelta("q", (ord("q"),), (chosen,), finish=finish(request, 1))]

    answer = (await OneOff(FakeEngine(script=unlikely)).complete(logprobs=1)).json
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"q": -7.0, "x": -0.5}]


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_scoring_a_prompt_as_evaluations_do(max_tokens: int, client: Client, fake: FakeEngine) -> None:
    fields: dict[str, Any] = {"prompt": [97, 98, 99], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    answer = (await client.complete(**fields)).json
    assert fake.requests[0].params.prompt_logprobs == 1
    choice = answer["choices"][0]
    generated = "H" * max_tokens
    assert choice["text"] == "abc" + generated
    assert choice["logprobs"]["tokens"] == list("abc" + generated)
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (2 + max_tokens)
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"b": -0.5}]
    assert choice["logprobs"]["text_offset"] == list(range(3 + max_tokens))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_scored_in_chunks_has_all_its_logprobs(stream: bool) -> None:
    def pieces(request: GenerateRequest) -> list[TokenDelta]:
        a, b, c = (scored(token_id, 0) for token_id in b"bcd")
        return [
            TokenDelta("", (), prompt_logprobs=(None, a, b)),
            TokenDelta("", (), prompt_logprobs=(c,)),
            TokenDelta("e", (101,), (scored(101, 0),), finish=finish(request, 1)),
        ]

    answer = await OneOff(FakeEngine(script=pieces)).complete(
        prompt=list(b"abcd"), echo=True, logprobs=0, max_tokens=1, stream=stream
    )
    choices = [event["choices"][0] for event in (answer.events if stream else [answer.json])]
    assert "".join(choice["text"] for choice in choices) == "abcde"
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == list("abcde")
    assert [score for choice in choices for score in choice["logprobs"]["token_logprobs"]] == [None, *[-0.5] * 4]


async def test_a_prompt_of_one_token_has_no_score() -> None:
    answer = (
        await OneOff(FakeEngine(script=lambda request: [TokenDelta("", (), finish=finish(request, 0))])).complete(
            prompt=[97], echo=True, logprobs=1, max_tokens=0
        )
    ).json
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }


async def test_echo_without_logprobs_repeats_the_prompt_as_it_was_written() -> None:
    answer = (await OneOff().complete(prompt="äb", echo=True)).json
    assert answer["choices"][0]["text"] == "äbHi!"


async def test_token_ids_on_request() -> None:
    choice = (await OneOff().complete(return_token_ids=True)).json["choices"][0]
    assert choice["prompt_token_ids"] == [BOS, 97, 98]
    assert choice["token_ids"] == list(b"Hi!")


async def test_stop_reason_and_cached_tokens_are_reported() -> None:
    def stopped(request: GenerateRequest) -> list[TokenDelta]:
        ended = dataclasses.replace(finish(request, 1, stop_reason="END"), cached_tokens=2)
        return [TokenDelta("x", (120,), finish=ended)]

    answer = (await OneOff(FakeEngine(script=stopped)).complete()).json
    assert answer["choices"][0]["stop_reason"] == "END"
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (11, "However, you requested 1001 tokens (990 in the {source}, 11 in the completion)."),
        (None, "However, the {source} alone"),
    ],
)
async def test_the_error_for_a_too_long_prompt_has_openais_wording(asked: int | None, words: str) -> None:
    """litellm, LangChain and others recognize this error by its first sentence."""
    tokens = 990 if asked else 1000
    async with serving(FakeEngine()) as client:
        text = await client.complete(prompt=[1] * tokens, max_tokens=asked)
        content = "x" * (tokens - len("<user:;assistant:"))  # the first token begins the text
        chat = await client.chat(messages=[{"role": "user", "content": content}], max_completion_tokens=asked)
    for answer, source in ((text, "prompt"), (chat, "messages")):
        assert answer.error["message"].startswith("This model's maximum context length is 1000 tokens. ")
        assert words.format(source=source) in answer.error["message"]
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "expected"), [({}, 0), ({"priority": -3}, -3), ({"priority": 2**63 - 1}, 2**63 - 1)]
)
async def test_priority_reaches_the_engine(fields: dict[str, int], expected: int) -> None:
    assert {request.priority for request in await submitted({"n": 2} | fields)} == {expected}


async def test_overload_has_retry_after_and_no_effects() -> None:
    fake = FakeEngine(script=None, refusals={2: Overloaded("The queue is full.", retry_after_s=1.2)})
    answer = await OneOff(fake).complete(n=3)
    assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
    assert (answer.headers["Retry-After"], answer.headers["retry-after-ms"]) == ("2", "1200")
    assert [stream.cancelled.is_set() for stream in fake.streams] == [True, True]


@pytest.mark.parametrize("stream", [False, True])
async def test_draining_is_503(stream: bool) -> None:
    answer = await OneOff(FakeEngine(refusals={0: Draining("Stopping.", retry_after_s=3)})).complete(stream=stream)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "3")


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_the_first_token_has_a_status(stream: bool) -> None:
    answer = await OneOff(FakeEngine(script=failing(BackendFailed("device lost")))).complete(stream=stream)
    assert answer.status == 500
    assert answer.error == {"message": "device lost", "type": "server_error", "param": None, "code": "backend_failed"}


@pytest.mark.parametrize("stream", [False, True])
async def test_logits_that_are_not_finite_are_an_error_that_names_the_adapter(stream: bool) -> None:
    answer = await OneOff(FakeEngine(script=failing(NonFiniteLogits("a")))).complete(model="a", stream=stream)
    assert answer.status == 422
    assert "'a' computes numbers that are not finite" in answer.error["message"]
    assert (answer.error["param"], answer.error["code"]) == ("model", "non_finite_logits")


async def test_a_stream_that_has_begun_ends_with_the_error_of_its_adapter() -> None:
    answer = await OneOff(FakeEngine(script=failing(NonFiniteLogits("a"), "half"))).complete(model="a", stream=True)
    assert answer.status == 200
    assert b'"code":"non_finite_logits"' in answer.body.replace(b" ", b"")


async def test_one_failed_answer_cancels_its_siblings() -> None:
    fake = FakeEngine(script=None)
    async with serving(fake) as client:
        pending = asyncio.create_task(client.complete(n=3))
        streams = await fake.submitted(3)
        streams[1].end(0, "error", BackendFailed("device lost"))
        assert (await pending).status == 500
    assert [stream.cancelled.is_set() for stream in streams] == [True, False, True]


async def test_server_side_cancel_is_no_answer() -> None:
    def cancelled(request: GenerateRequest) -> list[TokenDelta]:
        return [TokenDelta("half", (1,)), TokenDelta("", (), finish=finish(request, 1, "cancelled"))]

    assert (await OneOff(FakeEngine(script=cancelled)).complete()).status == 503


async def test_defect_is_500_and_names_the_request_but_not_the_defect(caplog: pytest.LogCaptureFixture) -> None:
    answer = await OneOff(FakeEngine(refusals={0: ZeroDivisionError("secret")})).complete()
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert answer.headers["X-Request-Id"] in answer.error["message"]
    assert "secret" not in answer.error["message"]
    assert "secret" in caplog.text


async def test_unknown_fields_change_nothing() -> None:
    (plain,) = await submitted({})
    (request,) = await submitted({"store": True, "metadata": {}, "whatever": [1]})
    assert request.params == plain.params


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"n": 128, "max_tokens": 997, "logprobs": 20}, ("128 answers", "127616 tokens", "2679936 logprobs")),
        ({"prompt": [[1] * 900] * 128, "echo": True, "max_tokens": 0, "logprobs": 20}, ("20 alternatives", "2097152")),
    ],
    ids=["generated", "echoed"],
)
async def test_more_logprobs_than_a_response_may_have_are_refused(
    fields: dict[str, Any], numbers: tuple[str, ...]
) -> None:
    engine = FakeEngine(script=None)
    answer = await OneOff(engine).complete(**fields)
    assert (answer.status, answer.error["param"]) == (400, "logprobs")
    assert all(number in answer.error["message"] for number in numbers)
    assert not engine.streams


async def test_a_large_response_does_not_depend_on_the_parts_it_is_written_in(client: Client) -> None:
    prompt = list(range(256)) * 2
    fields = {"max_tokens": 3, "echo": True, "logprobs": 5}
    answer = await client.complete(prompt=[prompt] * 40, **fields)
    single = (await client.complete(prompt=prompt, **fields)).json["choices"][0]
    streamed = await client.complete(prompt=prompt, stream=True, **fields)
    assert int(answer.headers["Content-Length"]) == len(answer.body) > 1 << 20
    assert [choice | {"index": 0} for choice in answer.json["choices"]] == [single] * 40
    assert len(single["logprobs"]["tokens"]) == 515
    for name, values in single["logprobs"].items():
        assert values == [value for event in streamed.events for value in event["choices"][0]["logprobs"][name]]
