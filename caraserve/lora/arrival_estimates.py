"""Estimates when an adapter's layers will be on the device, and when a prefill with it may start."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from caraserve.core.lora_layout import AdapterSpec
from caraserve.lora.adapter import Adapter, AdapterTier, PartialImage
from caraserve.lora.start_policy import AwaitedPrefill, CopyPlan, ExpectedLayers, PrefillStart, StartPolicy


class ArrivalEstimates:
    """Expected times of the copies on one link, which run one after another. Not thread-safe: for the event loop."""

    def __init__(self, loading: StartPolicy, now: Callable[[], float]) -> None:
        self._loading, self._now = loading, now
        self._link_free_s = 0.0  # when the link is expected to have finished all copies

    @property
    def by_layers(self) -> bool:
        """Whether a prefill may start before all layers of its adapter are on the device."""
        return self._loading.mode.is_layerwise

    @property
    def uses_workers(self) -> bool:
        """Whether CPU workers may compute layers that are not on the device yet."""
        return self._loading.uses_workers

    def expect(self, spec: AdapterSpec, prefill: AwaitedPrefill) -> CopyPlan:
        """Plans a copy that is started now for `prefill`, and begins after all that were started before."""
        now_s = self._now()
        starts_s = max(now_s, self._link_free_s)
        self._link_free_s = starts_s + spec.num_bytes / self._loading.link_bytes_per_s
        return self._loading.plan_copy(spec, starts_s, replace(prefill, begins_s=max(now_s, prefill.begins_s)))

    def expect_streamed(self, partial: PartialImage) -> tuple[ExpectedLayers, ...]:
        """Returns the expected arrival of each layer of an adapter that is copied while it is downloaded. Assumes that
        the remaining layers are downloaded as fast as those so far."""
        now_s, ends = self._now(), partial.image.spec.layer_ends
        there = ends[partial.layers - 1]
        s_per_byte = (now_s - partial.began_s) / max(1, there)
        link_s_per_byte = 1 / self._loading.link_bytes_per_s
        groups, start = [], 0
        for layer, end in enumerate(ends):
            in_host_s = now_s + max(0, end - there) * s_per_byte
            groups.append(ExpectedLayers(layer + 1, in_host_s + (end - start) * link_s_per_byte, in_host_s))
            start = end
        return tuple(groups)

    def expect_rest(self, adapter: Adapter) -> tuple[ExpectedLayers, ...]:
        """Returns the layer groups of a streamed adapter whose download has just ended. Layers that had arrived before
        are on the device already; the link copies only the rest."""
        assert adapter.partial is not None
        now_s, ends, layers = self._now(), adapter.partial.image.spec.layer_ends, adapter.partial.layers
        rest_s = (ends[-1] - ends[layers - 1]) / self._loading.link_bytes_per_s
        self._link_free_s = max(now_s, self._link_free_s) + rest_s
        return tuple(
            ExpectedLayers(group.end, now_s if group.end <= layers else self._link_free_s) for group in adapter.groups
        )

    def arrived(self, adapter: Adapter, others: Iterable[Adapter]) -> None:
        """Corrects the estimates of the other copies under way, which the link ends after that of `adapter`: they are
        as late, or as early. An error of a few percent would else grow with every copy while the link is busy."""
        if not (self.by_layers and adapter.groups):
            return
        late_s = self._now() - _last_s(adapter.groups)
        self._link_free_s += late_s
        for other in others:
            other.groups = _later(other.groups, late_s)

    def all_there(self) -> None:
        """Corrects the estimate when nothing is being copied: the link is free from now on."""
        self._link_free_s = self._now()

    def start_of(self, adapter: Adapter, prefill: AwaitedPrefill, *, may_assist: bool) -> PrefillStart | None:
        """Returns when a request may start with an adapter. None: the adapter is not being copied yet, or is about to
        leave the device."""
        if not adapter.takes_requests:
            return None
        if adapter.tier is AdapterTier.DEVICE:
            return self._loading.start_loaded(prefill, adapter.spec)
        if adapter.tier in (AdapterTier.STREAMING, AdapterTier.COPYING) and self.by_layers:
            assert adapter.spec is not None
            groups = adapter.groups
            if adapter.tier is AdapterTier.COPYING and groups and (late_s := self._now() - _last_s(groups)) > 0:
                groups = _later(groups, 2 * late_s)  # it may be late for as long again
            start = self._loading.start(prefill, groups, adapter.spec, may_assist=may_assist)
            # A streamed prefill is a side batch: its wait for the network delays no other request.
            return replace(start, at_s=prefill.begins_s) if adapter.tier is AdapterTier.STREAMING else start
        return None


def _last_s(groups: tuple[ExpectedLayers, ...]) -> float:
    """Returns when the last of these layers are expected."""
    return max(group.arrives_s for group in groups)


def _later(groups: tuple[ExpectedLayers, ...], seconds: float) -> tuple[ExpectedLayers, ...]:
    return tuple(replace(group, arrives_s=group.arrives_s + seconds) for group in groups)
