"""When the next iteration is planned, on a device that is a clock and a host whose planning and launching take a given
time: late enough for requests to join it, and early enough for the device."""

import random
from collections.abc import Callable
from statistics import fmean

import pytest

from caraserve.core.batch import RowResult, StepResult
from caraserve.engine.iteration_times import IterationTimes, IterationWork
from caraserve.engine.launch_times import size_class

ITERATION_S = 0.007
ROWS = 8
DECODE = IterationWork(ROWS, 0, 0, 0, 0, 0)
RNG = random.Random(3)


class Host:
    """Plans and launches one iteration after another, each when `plan_at_s` says so, at first as soon as possible."""

    def __init__(self, times: IterationTimes) -> None:
        self.times = times
        self.now_s = self.free_s = 0.0
        self.waits_s: list[float] = []  # of the device
        self.leads_s: list[float | None] = []  # before the real end of the iteration under way; None: not waited
        self._launch(0.0)

    def run(
        self,
        iterations: int,
        launch_s: Callable[[], float],
        took_s: Callable[[], float] = lambda: ITERATION_S,
        late_s: Callable[[], float] = lambda: 0.0,
        work: IterationWork = DECODE,
    ) -> "Host":
        """`launch_s`: from planning until the device has the launch; `took_s`: an iteration; `late_s`: the timer."""
        self.waits_s, self.leads_s = [], []
        for _ in range(iterations):
            began_s = max(self.free_s, self._launched_s)
            done_s = began_s + took_s()
            at_s = self.times.plan_at_s(ROWS, has_prompts=work.tokens > 0)
            planned_s = self.now_s
            if at_s is not None and at_s > self.now_s:
                planned_s = min(at_s, done_s) + late_s()  # nothing wakes a host that cannot run
                if planned_s >= at_s:
                    self.times.woke(planned_s - at_s)
            self.leads_s.append(None if at_s is None else done_s - planned_s)
            outcome = StepResult((RowResult((7,)),), began_s, done_s, self._launched_s)
            launched_s = planned_s + launch_s()
            self.times.launch(work, ROWS, planned_s, launched_s)
            self.now_s = max(launched_s, done_s) + 0.0002  # results have been processed
            self.waits_s.append(self.times.end(outcome).late_s)
            self.free_s, self._launched_s = done_s, launched_s
        return self

    def _launch(self, at_s: float) -> None:
        self._launched_s = at_s
        self.times.launch(DECODE, ROWS, at_s, at_s)

    @property
    def waited_share(self) -> float:
        """The share of its time for which the device waited for launches."""
        return sum(self.waits_s) / (sum(self.waits_s) + len(self.waits_s) * ITERATION_S)


def model_ms(*work: int) -> float:
    return 1000 * ITERATION_S


@pytest.fixture
def host() -> Host:
    return Host(IterationTimes(model_ms))


def uniform(least_s: float, most_s: float) -> Callable[[], float]:
    return lambda: RNG.uniform(least_s, most_s)


def test_planning_begins_shortly_before_the_end_and_the_device_hardly_waits(host: Host) -> None:
    host.run(50, uniform(0.0008, 0.0012))
    host.run(1000, uniform(0.0008, 0.0012), late_s=uniform(0.0, 0.0002))
    leads_s = [lead_s for lead_s in host.leads_s if lead_s is not None]
    assert len(leads_s) == 1000
    assert fmean(leads_s) < 0.0018
    assert host.waited_share < 0.001


def test_nothing_is_waited_for_before_the_time_is_known(host: Host) -> None:
    host.run(3, uniform(0.001, 0.001))
    assert host.leads_s == [None] * 3


def test_nothing_is_waited_for_if_launching_takes_most_of_an_iteration(host: Host) -> None:
    host.run(200, uniform(0.003, 0.006))
    assert set(host.leads_s) == {None}


def test_the_lead_grows_with_the_errors_of_predictions(host: Host) -> None:
    host.run(200, uniform(0.001, 0.001))
    exact = fmean(lead_s for lead_s in host.leads_s if lead_s is not None)
    host.run(400, uniform(0.001, 0.001), took_s=uniform(ITERATION_S - 0.0005, ITERATION_S + 0.0005))
    inexact = fmean(lead_s for lead_s in host.leads_s[40:] if lead_s is not None)
    assert inexact > exact + 0.0002
    assert host.waited_share < 0.002


def test_one_slow_launch_changes_nothing_but_many_make_the_lead_longer(host: Host) -> None:
    host.run(200, uniform(0.001, 0.001))
    before = host.leads_s[-1]
    host.run(1, uniform(0.0015, 0.0015))
    host.run(10, uniform(0.001, 0.001))
    assert host.leads_s[-1] == pytest.approx(before)
    host.run(30, uniform(0.0015, 0.0015))
    assert host.leads_s[-1] is not None
    assert before is not None
    assert host.leads_s[-1] > before + 0.0004


def test_launches_that_are_far_too_late_now_and_then_cost_the_device_a_bounded_share_of_its_time(host: Host) -> None:
    """As on a machine whose cores other processes use: no lead would be enough. Unbounded, it would be 6 %."""
    host.run(200, uniform(0.001, 0.001))
    host.run(5000, lambda: 0.001, late_s=lambda: 0.02 if RNG.random() < 0.03 else 0.0)
    assert any(lead_s is not None for lead_s in host.leads_s)
    assert host.waited_share < 0.015
    host.run(1000, uniform(0.001, 0.001))
    assert all(lead_s is not None for lead_s in host.leads_s[-100:])


def test_prompts_that_take_long_to_launch_do_not_make_other_iterations_be_planned_early(host: Host) -> None:
    prompts = IterationWork(ROWS - 1, 0, 0, 65, 0, 0)
    host.run(100, uniform(0.001, 0.001))
    for _ in range(8):
        host.run(1, uniform(0.003, 0.003), work=prompts)
        host.run(5, uniform(0.001, 0.001))
    assert host.leads_s[-1] is not None
    assert host.leads_s[-1] < 0.002


def test_classes_of_sizes_grow_with_them_and_halve_none() -> None:
    assert [size_class(size, 2) for size in (1, 2, 3, 4, 6, 8)] == [1, 3, 4, 5, 6, 7]
    for per_doubling in (2, 4):
        classes = [size_class(size, per_doubling) for size in range(1, 3000)]
        assert classes == sorted(classes)
        assert classes[2047] - classes[1023] == per_doubling
