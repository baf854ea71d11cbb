"""Tests of the counts by client and adapter, and of their bound."""

from typing import Any

from caraserve.core.request import Finish, GenerateRequest, Phases, SamplingParams
from caraserve.core.tenant import Tenant
from caraserve.telemetry.usage import OTHERS, Usage, UsageCounters


def request(client: str = "c", adapter: str | None = "a", **fields: Any) -> GenerateRequest:
    return GenerateRequest("id", (1, 2, 3), adapter, SamplingParams(), 0.0, Tenant(client, "user"), **fields)


def finish(reason: Any = "stop", output: int = 5, cached: int = 2, prefill_ms: float = 1.0) -> Finish:
    return Finish(reason, 3, output, cached, Phases(1.0, 0.0, prefill_ms, 1.0))


def test_requests_and_tokens_add_up_by_client_and_adapter() -> None:
    counters = UsageCounters()
    for client, adapter in (("c", "a"), ("c", "a"), ("c", None), ("d", "a")):
        counters.observe(request(client, adapter), finish())
    once = Usage(1, 3, 2, 5, 0)
    assert list(counters.rows()) == [("c", "a", Usage(2, 6, 4, 10, 0)), ("c", None, once), ("d", "a", once)]


def test_the_prompt_of_several_answers_counts_once() -> None:
    counters = UsageCounters()
    for index in range(3):
        counters.observe(request(counts_prompt=index == 0), finish())
    assert list(counters.rows()) == [("c", "a", Usage(3, 3, 2, 15, 0))]


def test_a_failure_counts_what_was_computed_before_it() -> None:
    counters = UsageCounters()
    counters.observe(request(), finish("error", output=4))
    counters.observe(request(), finish("error", output=0, cached=0, prefill_ms=0.0))  # while it waited
    counters.observe(request(), finish("cancelled", output=1))
    assert list(counters.rows()) == [("c", "a", Usage(3, 6, 4, 5, 2))]


def test_beyond_the_bound_a_clients_new_adapters_share_a_row() -> None:
    counters = UsageCounters(most_rows=2)
    for adapter in ("a", "b", "e", "f", "a"):
        counters.observe(request("c", adapter), finish())
    for client in ("d", "e", "f"):
        counters.observe(request(client), finish())
    found = {(client, adapter): row.requests for client, adapter, row in counters.rows()}
    assert found == {("c", "a"): 2, ("c", "b"): 1, ("c", OTHERS): 2, ("d", OTHERS): 1, (OTHERS, OTHERS): 2}


def test_a_clients_combinations_beyond_their_bound_share_a_row() -> None:
    counters = UsageCounters(most_combinations=2)
    for weight in (0.5, 0.25, 0.125, 2.0, 0.5):
        counters.observe(request("c", f"a*{weight}"), finish())
    for client, adapter in (("c", "a"), ("d", "a*2.0")):
        counters.observe(request(client, adapter), finish())
    found = {(client, adapter): row.requests for client, adapter, row in counters.rows()}
    assert found == {("c", "a*0.5"): 2, ("c", "a*0.25"): 1, ("c", OTHERS): 2, ("c", "a"): 1, ("d", "a*2.0"): 1}
