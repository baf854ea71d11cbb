"""One simulated instance, driven step by step, and the check that it is empty at the end."""

from collections.abc import Sequence

import numpy as np

from caraserve.bench.records import PlannedRequest, Workload
from caraserve.bench.simulator import batching
from caraserve.bench.simulator.compiled import BACKLOG, FOREVER, Batches, entry
from caraserve.bench.simulator.setting import SimulatedMachine
from caraserve.bench.simulator.simulation import make_batches, make_requests
from caraserve.cluster.routing.cost import Backlog


@entry
def _advance(batches, now):  # type: ignore[no-untyped-def]
    batching.advance(batches, 0, now)
    return batching.num_stuck(batches.instances[0])


@entry
def _deliver(batches, index, now, ready):  # type: ignore[no-untyped-def]
    batching.deliver(batches, 0, index, now, ready)


@entry
def _take_back(batches, index):  # type: ignore[no-untyped-def]
    batching.take_back(batches, 0, index)


@entry
def _write_backlog(batches, shown):  # type: ignore[no-untyped-def]
    batching.write_backlog(batches.machines[0], batches.instances[0], shown[0])


class OneInstance:
    """An instance that serves requests given as (rank, prompt tokens, output tokens)."""

    def __init__(self, machine: SimulatedMachine, requests: Sequence[tuple[int, int, int]]) -> None:
        planned = [PlannedRequest(index, 0.0, index, *row[1:]) for index, row in enumerate(requests)]
        rows, ranks = make_requests(Workload(tuple(planned), tuple(row[0] for row in requests)))
        self._batches = make_batches([machine], rows, ranks)
        # The runs of iterations: (start, duration of each, times, decoding requests, prompt tokens).
        self.runs: list[tuple[int, int, int, int, int]] = []

    def advance(self, now: int) -> int:
        """Returns the number of requests that wait for memory or a slot at that time."""
        one = self._batches.instances[0]
        while True:
            loaded = one["loading_ready"][0] if one["num_loading"] else FOREVER  # which may cut the run short
            at = min(one["stop"], loaded)
            if at > now:
                return int(_advance(self._batches, now))
            if one["stop"] == at:
                tokens = one["chunk_tokens"][: one["num_chunks"]].sum()
                start, each, times, decoding = (int(one[name]) for name in ("start", "each", "count", "num_decoding"))
                self.runs.append((start, each, times, decoding, int(tokens)))
            _advance(self._batches, at)

    def deliver(self, index: int, now: int, ready: int) -> None:
        _deliver(self._batches, index, now, ready)

    def take_back(self, index: int) -> None:
        _take_back(self._batches, index)

    def backlog(self) -> Backlog:
        shown = np.zeros(1, BACKLOG)
        _write_backlog(self._batches, shown)
        return Backlog(*shown[0].tolist())

    def finish(self) -> None:
        """Serves what is left, and checks that nothing is."""
        self.advance(FOREVER - 1)
        check_empty(self._batches)

    def times(self) -> list[tuple[int, int]]:
        """Returns the times of the first token and the end of every request."""
        return [(int(one["first"]), int(one["done"])) for one in self._batches.requests]

    def iterations(self) -> list[tuple[int, int, int, int]]:
        """Returns every iteration as (start, duration, decoding requests, prompt tokens)."""
        return [
            (start + index * each, each, decoding, tokens)
            for start, each, times, decoding, tokens in self.runs
            for index in range(times)
        ]


def check_empty(batches: Batches) -> None:
    """Raises AssertionError unless all requests have ended and all counters are back at their start values."""
    for machine, one in zip(batches.machines, batches.instances, strict=True):
        for name in ("num_loading", "num_waiting", "num_prefilling", "num_decoding", "num_chunks", "count"):
            assert one[name] == 0, f"{name} is {one[name]}"
        for name in ("rank_sum", "rank_max", "decoding_rank_sum", "decoding_rank_max", "queued_tokens"):
            assert one[name] == 0, f"{name} is {one[name]}"
        assert (one["kv_free"], one["kv_promised"], one["queued_token_ranks"]) == (machine["kv_tokens"], 0, 0)
        assert not one["ranks"].any()
        assert not one["decoding_ranks"].any()
