"""Tests of the loads of `bench modes`: the requests of its repeats, and the adapters that are requested first."""

from collections.abc import Sequence

from caraserve.bench.cli import bench_parser
from caraserve.bench.mode_loads import ModeLoads, mode_loads
from caraserve.bench.options import LoadOptions

ADAPTERS, RESIDENT = 40, 10


def loads_of(popularity: str, requests: int, repeats: int = 3) -> ModeLoads:
    words = ["modes", "--lora-assignment", popularity, "--adapters", str(ADAPTERS), "--num-prompts", str(requests)]
    return mode_loads(LoadOptions.from_args(bench_parser().parse_args(words)).spec(), repeats)


def dealt(loads: ModeLoads) -> list[int | None]:
    return [request.adapter for load in loads.repeats for request in load.requests]


def hits(warm_up: Sequence[int], requested: Sequence[int | None]) -> int:
    """Returns how many requests find their adapter on a device that drops the least recently used of RESIDENT."""
    held = list(warm_up)[-RESIDENT:]
    found = 0
    for adapter in requested:
        assert adapter is not None
        found += adapter in held
        held = [*(other for other in held if other != adapter), adapter][-RESIDENT:]
    return found


def test_no_request_finds_its_adapter_where_adapters_leave_the_device_after_use() -> None:
    for requests in (5, 9, 12, 20, 50):  # of each of three repeats: 40 adapters are enough for some of them only
        loads = loads_of("distinct", requests)
        assert hits(loads.warm_up_order(RESIDENT), dealt(loads)) == 0, requests


def test_repeats_have_the_arrivals_and_lengths_of_their_seeds() -> None:
    first, second, _ = loads_of("distinct", 20).repeats
    assert [request.at_s for request in first.requests] != [request.at_s for request in second.requests]
    assert [request.at_s for request in loads_of("uniform", 20).repeats[1].requests] == [
        request.at_s for request in second.requests
    ]


def test_the_server_reads_all_files_that_runs_use_and_then_holds_the_last_adapters() -> None:
    for popularity in ("uniform", "zipf:2", "identical"):
        loads = loads_of(popularity, 20)
        order = loads.warm_up_order(RESIDENT)
        assert set(dealt(loads)) <= set(order)
        assert order[-RESIDENT:] == [*range(ADAPTERS - RESIDENT, ADAPTERS)]
        assert len(order) == len(set(order))


def test_a_server_that_holds_all_adapters_gets_requests_for_those_that_runs_use() -> None:
    assert loads_of("identical", 20).warm_up_order(0) == [0]
    loads = loads_of("distinct", 5)
    assert loads.warm_up_order(0) == dealt(loads)
