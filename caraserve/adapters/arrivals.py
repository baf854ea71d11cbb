"""When adapters on their way to the device are expected there, and when a prefill may start on one. Level 2; for
`residency.py`."""

from collections.abc import Callable

from caraserve.adapters.loading import LAYERWISE_MODES, Group, Loading, Start
from caraserve.adapters.version import Tier, Version
from caraserve.model.layout import AdapterSpec


class Arrivals:
    """One link, one copy after another. The event loop's alone."""

    def __init__(self, loading: Loading, now: Callable[[], float]) -> None:
        self._loading, self._now = loading, now
        self._link_free_s = 0.0  # when the link is expected to have done all that it was asked

    def expect(self, spec: AdapterSpec) -> tuple[Group, ...]:
        """An adapter is being copied from now on: in which groups of layers, and when each is expected, behind all
        loads before."""
        starts_s = max(self._now(), self._link_free_s)
        speed = self._loading.link_bytes_per_s
        self._link_free_s = starts_s + spec.num_bytes / speed
        return tuple(Group(end, starts_s + spec.layer_ends[end - 1] / speed) for end in self._loading.group_ends(spec))

    def all_there(self) -> None:
        """Nothing is being copied, whatever was expected."""
        self._link_free_s = self._now()

    def start_of(self, version: Version, tokens: int, begins_s: float, *, may_assist: bool) -> Start | None:
        """When a request whose first chunk has so many tokens may run on a version, `begins_s` at the earliest; None:
        not yet known."""
        if version.tier is Tier.DEVICE:
            return self._loading.start_loaded(begins_s, version.spec, tokens)
        if version.tier is Tier.COPYING and self._loading.mode in LAYERWISE_MODES:
            assert version.spec is not None
            return self._loading.start(begins_s, version.groups, version.spec, tokens, may_assist=may_assist)
        return None
