"""A request's phases: only the table's changes exist, and the time spent adds up."""

import itertools

import pytest

from caraserve.core.request import TRANSITIONS, GenerateRequest, Phase, Request, SamplingParams


def made() -> Request:
    return Request(GenerateRequest("id", (1, 2), None, SamplingParams(), 0.0), seed=0)


def test_only_the_listed_transitions_are_allowed() -> None:
    for start, end in itertools.product(Phase, Phase):
        request = made()
        request.phase = start
        if end in TRANSITIONS[start]:
            request.move_to(end, 1.0)
            assert request.phase is end
        else:
            with pytest.raises(AssertionError, match=end.name):
                request.move_to(end, 1.0)


def test_the_phases_of_an_unfinished_request_last_until_now_and_those_of_a_finished_one_until_its_end() -> None:
    request = made()
    request.move_to(Phase.LOADING, 1.0)
    phases = request.phases(now_s=4.0)
    assert [(one.name, one.ended_s) for one in phases.history] == [("queued", 1.0), ("load", 4.0)]
    assert (phases.queued_ms, phases.load_ms, phases.e2e_ms) == (1000, 3000, 4000)
    request.move_to(Phase.FINISHED, 5.0)
    assert request.phases(now_s=9.0).e2e_ms == 5000


def test_phases_add_up_to_the_whole_time_through_a_preemption() -> None:
    request = made()
    walk = [
        (1.0, Phase.LOADING),
        (3.0, Phase.PREFILL),
        (6.0, Phase.DECODE),
        (10.0, Phase.PREEMPTED),
        (15.0, Phase.PREFILL),
        (21.0, Phase.DECODE),
        (28.0, Phase.FINISHED),
    ]
    for now_s, phase in walk:
        request.move_to(phase, now_s)
    phases = request.phases(now_s=40.0)
    assert (phases.queued_ms, phases.load_ms, phases.prefill_ms, phases.decode_ms) == (6000, 2000, 9000, 11000)
    assert phases.e2e_ms == 28000
