"""Tests of the load client with an endpoint without a model, which records when it sent each token."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from urllib.request import urlopen

import pytest
import uvloop

from caraserve.bench.client.dialects import LoadSettings
from caraserve.bench.client.endpoint import Endpoint, find_endpoint
from caraserve.bench.client.player import Pacer, Player, report_progress
from caraserve.bench.records import PlannedRequest, Run, Workload
from caraserve.errors import ConfigError
from tests.bench.fake_endpoint import fake_process

TIMED = "ttft-100-tpot-10"


@dataclass(frozen=True)
class Served:
    url: str

    def log(self) -> list[dict[str, list[float]]]:
        """Returns the endpoint's records of complete answers."""
        with urlopen(f"{self.url}/log") as answer:
            noted: list[dict[str, list[float]]] = json.load(answer)
        return noted


@pytest.fixture(scope="module")
def fake() -> Iterator[Served]:
    with fake_process(TIMED, "refuse", "break", "hang-up") as (url, _):
        yield Served(url)


def load(moments_s: Sequence[float], adapter: int = 0, output_tokens: int = 4) -> Workload:
    requests = (PlannedRequest(index, at_s, adapter, 12, output_tokens) for index, at_s in enumerate(moments_s))
    return Workload(tuple(requests), (8,))


def play(fake: Served, workload: Workload, settings: LoadSettings | None = None, backend: str = "openai") -> Run:
    async def run() -> Run:
        endpoint = await find_endpoint(fake.url, backend, None, None)
        return await Player(endpoint, workload, endpoint.adapters, settings or LoadSettings(seed=0), "fake").play()

    return uvloop.run(run())


# --- what comes back ---


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_every_token_event_has_its_time_and_the_server_counts_the_tokens(fake: Served, backend: str) -> None:
    record = play(fake, load([0.0]), backend=backend).records[0]
    assert record.error is None
    assert (record.prompt_tokens, record.output_tokens) == (7, 4)
    assert len(record.token_s) == (4 if backend == "openai" else 3)  # a chat begins with a role and no token
    assert list(record.token_s) == sorted(record.token_s)
    assert dict(record.phases) == {"queued": 1.5, "load": 2.0}


@pytest.mark.parametrize(
    ("adapter", "error"),
    [(1, "HTTP 429: not today"), (2, "out of paper"), (3, "the server closed the connection")],
    ids=["refused", "broken off", "hung up"],
)
def test_a_request_that_fails_says_why(fake: Served, adapter: int, error: str) -> None:
    run = play(fake, load([0.0, 0.01], adapter))
    assert [str(record.error)[: len(error)] for record in run.records] == [error, error]


def test_a_failed_request_does_not_affect_the_others(fake: Served) -> None:
    mixed = Workload(tuple(PlannedRequest(index, 0.0, index % 4, 5, 4) for index in range(8)), (8,))
    errors = [record.error for record in play(fake, mixed).records]
    assert [error is None for error in errors] == [True, False, False, False] * 2


# --- when it is sent ---


def test_measured_latencies_are_those_of_the_endpoint(fake: Served) -> None:
    run = play(fake, load([0.004 * index for index in range(250)], output_tokens=8))
    log = fake.log()[-len(run.records) :]  # other tests' requests are before
    ttft_s = fmean(record.token_s[0] - record.sent_s for record in run.records)
    tpot_s = fmean((record.token_s[-1] - record.token_s[0]) / 7 for record in run.records)
    # The client's latencies include the way to the endpoint, and the machine may be busy with other tests.
    assert ttft_s == pytest.approx(fmean(each["sent_s"][0] - each["came_s"] for each in log), rel=0.1)  # type: ignore[operator]
    assert tpot_s == pytest.approx(fmean((each["sent_s"][-1] - each["sent_s"][0]) / 7 for each in log), rel=0.02)
    assert all(record.sent_s >= record.due_s for record in run.records)


def test_an_open_loop_does_not_wait_for_answers(fake: Served) -> None:
    run = play(fake, load([0.001 * index for index in range(30)]))
    assert max(record.sent_s for record in run.records) < min(record.done_s for record in run.records)


def test_a_closed_loop_keeps_as_many_requests_in_flight_as_requested(fake: Served) -> None:
    run = play(fake, load([0.0] * 6), LoadSettings(seed=0, max_concurrency=2))
    starts_ends = sorted(
        [(record.sent_s, 1) for record in run.records] + [(record.done_s, -1) for record in run.records]
    )
    under_way, most = 0, 0
    for _, change in starts_ends:
        under_way += change
        most = max(most, under_way)
    assert most == 2
    assert all(record.error is None for record in run.records)


def test_stopping_keeps_completed_requests_and_marks_the_others_interrupted(fake: Served) -> None:
    async def run() -> Run:
        endpoint = await find_endpoint(fake.url, "openai", None, None)
        player = Player(endpoint, load([0.0, 0.0, 60.0]), endpoint.adapters, LoadSettings(seed=0), "stopped")
        watching = asyncio.create_task(
            report_progress(player, lambda live: player.stop() if live.done else None, 0.001)
        )
        try:
            return await player.play()
        finally:
            watching.cancel()

    stopped = uvloop.run(run())
    assert stopped.interrupted
    assert {record.index for record in stopped.records} == {0, 1}
    assert None in [record.error for record in stopped.records]
    assert {record.error for record in stopped.records} <= {None, "interrupted"}


def test_the_same_seed_sends_the_same_prompts(fake: Served) -> None:
    async def requests(seed: int) -> list[bytes]:
        endpoint = await find_endpoint(fake.url, "openai", None, None)
        player = Player(endpoint, load([0.0, 0.0]), endpoint.adapters, LoadSettings(seed=seed), "")
        return player._requests

    first, again, other = (uvloop.run(requests(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first[0] != first[1]
    assert first[0] != other[0]


# --- the pacer ---


def paced(moments_s: list[float], stop_at: int | None = None) -> list[tuple[int, float]]:
    """Returns (index, seconds after the scheduled time) of every call."""

    async def run() -> list[tuple[int, float]]:
        started_s, ended = time.perf_counter(), asyncio.Event()
        calls: list[tuple[int, float]] = []
        pacer: Pacer

        def call(index: int) -> None:
            calls.append((index, time.perf_counter() - started_s - moments_s[index]))
            if index == stop_at:
                pacer.stop()
            if index in (stop_at, len(moments_s) - 1):
                ended.set()

        pacer = Pacer([started_s + moment_s for moment_s in moments_s], call)
        await ended.wait()
        for _ in range(5):  # lets the event loop run all pending callbacks
            await asyncio.sleep(0.001)
        return calls

    return uvloop.run(run())


def test_calls_are_in_order_and_none_is_early_but_at_once_if_its_time_has_passed() -> None:
    calls = paced([-1.0, -0.5, 0.0, 0.0, 0.003, 0.0031, 0.02])
    assert [index for index, _ in calls] == [*range(7)]
    assert all(late_s >= 0 for _, late_s in calls)


def test_a_stopped_pacer_makes_no_more_calls() -> None:
    assert [index for index, _ in paced([0.0, 0.001, 0.002, 0.003], stop_at=1)] == [0, 1]


# --- finding an endpoint ---


def find(url: str, adapters: tuple[str, ...] | None = None, backend: str = "openai") -> Endpoint:
    return uvloop.run(find_endpoint(url, backend, None, adapters))


def test_models_with_a_parent_are_the_adapters(fake: Served) -> None:
    endpoint = find(f"{fake.url}/v1")
    assert endpoint.base_model == "base"
    assert endpoint.adapters == (TIMED, "refuse", "break", "hang-up")


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("localhost:8000", "write it as http://host:port"),
        ("http://127.0.0.1:1", "127.0.0.1:1"),
    ],
)
def test_an_invalid_endpoint_is_refused(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        find(url)


def test_an_adapter_that_the_endpoint_does_not_list_can_be_requested(fake: Served) -> None:
    endpoint = find(fake.url, ("refuse", "nobody"))
    assert endpoint.adapters == ("refuse", "nobody")
    assert endpoint.unlisted == ("nobody",)
