"""How many tokens each adapter's answers had, by time step: what a placement is made of. Pure."""

from collections.abc import Iterable, Mapping

from caraserve.cluster.placement.plan import extrapolated

STEP_S = 60.0

Rates = Mapping[str, tuple[float, float]]  # adapter → tokens/s in the last step but one, and in the last


class DemandCounter:
    """One instance's part of it."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, int]] = {}

    def count(self, name: str, wall_s: float, tokens: int = 1) -> None:
        """An adapter's answer has so many more tokens."""
        step = int(wall_s / STEP_S)
        counts = self._steps.get(step)
        if counts is None:
            self._steps = {old: kept for old, kept in self._steps.items() if old >= step - 2}
            counts = self._steps[step] = {}
        counts[name] = counts.get(name, 0) + tokens

    def rates(self, epoch: int) -> dict[str, tuple[float, float]]:
        """Of the two steps before an epoch; only adapters that were asked for."""
        before, latest = self._steps.get(epoch - 2, {}), self._steps.get(epoch - 1, {})
        names = before.keys() | latest.keys()
        return {name: (before.get(name, 0) / STEP_S, latest.get(name, 0) / STEP_S) for name in names}


def expected_demand(parts: Iterable[Rates]) -> dict[str, float]:
    """What the next step will ask of each adapter, from what each instance answered in the last two."""
    sums: dict[str, tuple[float, float]] = {}
    for rates in parts:
        for name, (before, latest) in rates.items():
            known = sums.get(name, (0.0, 0.0))
            sums[name] = known[0] + before, known[1] + latest
    return {name: extrapolated(before, latest) for name, (before, latest) in sums.items()}
