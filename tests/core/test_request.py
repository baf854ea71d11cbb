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
    phases = request.phases()
    assert (phases.queued_ms, phases.load_ms, phases.prefill_ms, phases.decode_ms) == (6000, 2000, 9000, 11000)
    assert phases.e2e_ms == 28000
