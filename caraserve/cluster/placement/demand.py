"""Counts the tokens of each adapter's answers, by time steps of 60 s. Placement is planned from these counts."""

from collections.abc import Iterable, Mapping

from caraserve.cluster.placement.plan import extrapolated

STEP_S = 60.0

Rates = Mapping[str, tuple[float, float]]  # adapter → tokens/s in the last step but one, and in the last


class DemandCounter:
    """Counts the tokens that one instance has answered, for the current time step and the two before."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, int]] = {}

    def count(self, name: str, wall_s: float, tokens: int = 1) -> None:
        """Adds tokens to an adapter's count in the time step of `wall_s`."""
        step = int(wall_s / STEP_S)
        counts = self._steps.get(step)
        if counts is None:
            self._steps = {old: kept for old, kept in self._steps.items() if old >= step - 2}
            counts = self._steps[step] = {}
        counts[name] = counts.get(name, 0) + tokens

    def rates(self, epoch: int) -> dict[str, tuple[float, float]]:
        """Returns tokens/s in the two steps before an epoch, earlier one first, of adapters that had any."""
        before, latest = self._steps.get(epoch - 2, {}), self._steps.get(epoch - 1, {})
        names = before.keys() | latest.keys()
        return {name: (before.get(name, 0) / STEP_S, latest.get(name, 0) / STEP_S) for name in names}


def expected_demand(parts: Iterable[Rates]) -> dict[str, float]:
    """Predicts each adapter's tokens/s in the next step, over all instances, from the last two steps."""
    sums: dict[str, tuple[float, float]] = {}
    for rates in parts:
        for name, (before, latest) in rates.items():
            known = sums.get(name, (0.0, 0.0))
            sums[name] = known[0] + before, known[1] + latest
    return {name: extrapolated(before, latest) for name, (before, latest) in sums.items()}
