"""Tests of the loads of `bench modes`: the requests of its repeats, and the adapters that servers hold before them."""

from collections.abc import Sequence

from caraserve.bench.cli import bench_parser
from caraserve.bench.mode_loads import ModeLoads, mode_loads
from caraserve.bench.options import LoadOptions

ADAPTERS, RESIDENT, REPEATS = 40, 10, 4


def loads_of(popularity: str, requests: int) -> ModeLoads:
    words = ["modes", "--lora-assignment", popularity, "--adapters", str(ADAPTERS), "--num-prompts", str(requests)]
    return mode_loads(LoadOptions.from_args(bench_parser().parse_args(words)).spec(), REPEATS)


def dealt(loads: ModeLoads, repeat: int) -> list[int]:
    return [request.adapter for request in loads.repeats[repeat].requests if request.adapter is not None]


def hits(requested: Sequence[int], before: Sequence[int]) -> int:
    """Returns how many requests find their adapter on a device that drops the least recently used of RESIDENT."""
    held, found = list(before), 0
    for adapter in requested:
        found += adapter in held[-RESIDENT:]
        held = [*(other for other in held if other != adapter), adapter]
    return found


def test_no_request_finds_its_adapter_where_adapters_leave_the_device_after_use() -> None:
    """On a new server in each repeat, on one that is kept, and when a run is repeated."""
    for requests in (5, 9, 12, 20, 50):  # of each repeat: some repeats begin near the end of the order
        loads, kept = loads_of("distinct", requests), list[int]()
        for repeat in range(REPEATS):
            before, now = loads.held_before(repeat, RESIDENT), dealt(loads, repeat)
            assert hits(now, before) == 0, (requests, repeat)
            kept += before
            assert hits(now, kept) == 0, (requests, repeat)
            kept += [*now, *before]
            assert hits(now, kept) == 0, (requests, repeat)
            kept += now


def test_repeats_have_the_arrivals_and_lengths_of_their_seeds() -> None:
    in_turn, drawn = loads_of("distinct", 20).repeats, loads_of("uniform", 20).repeats
    assert in_turn[0].requests[5].at_s != in_turn[1].requests[5].at_s
    for one, other in zip(in_turn, drawn, strict=True):
        assert [request.at_s for request in one.requests] == [request.at_s for request in other.requests]


def test_a_server_reads_the_files_that_runs_use() -> None:
    assert loads_of("identical", 20).used() == [0]
    for popularity in ("uniform", "zipf:2", "distinct"):
        loads = loads_of(popularity, 9)
        assert loads.used() == sorted({adapter for repeat in range(REPEATS) for adapter in dealt(loads, repeat)})


def test_each_repeat_of_a_drawn_load_begins_with_the_same_adapters_on_the_device() -> None:
    loads = loads_of("zipf:2", 20)
    for repeat in range(REPEATS):
        assert loads.held_before(repeat, RESIDENT) == [*range(ADAPTERS - RESIDENT, ADAPTERS)]
    assert loads.held_before(0, 0) == []
    assert loads.held_before(0, 2 * ADAPTERS) == [*range(ADAPTERS)]
