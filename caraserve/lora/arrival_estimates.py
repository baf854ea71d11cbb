"""Estimates when an adapter's layers will be on the device, and when a prefill with it may start."""

from collections.abc import Callable
from dataclasses import replace

from caraserve.core.lora_layout import AdapterSpec
from caraserve.lora.adapter import Adapter, AdapterTier, PartialImage
from caraserve.lora.start_policy import LayerGroup, PrefillStart, StartPolicy


class ArrivalEstimates:
    """Expected times of the copies on one link, which run one after another. Not thread-safe: for the event loop."""

    def __init__(self, loading: StartPolicy, now: Callable[[], float]) -> None:
        self._loading, self._now = loading, now
        self._link_free_s = 0.0  # when the link is expected to have finished all copies

    @property
    def by_layers(self) -> bool:
        """Whether a prefill may start before all layers of its adapter are on the device."""
        return self._loading.mode.is_layerwise

    def expect(self, spec: AdapterSpec) -> tuple[LayerGroup, ...]:
        """Returns the groups of layers in which an adapter is copied from now on, each with the time when it is
        expected on the device: after all copies that were started before."""
        starts_s = max(self._now(), self._link_free_s)
        speed = self._loading.link_bytes_per_s
        self._link_free_s = starts_s + spec.num_bytes / speed
        return tuple(
            LayerGroup(end, starts_s + spec.layer_ends[end - 1] / speed) for end in self._loading.group_ends(spec)
        )

    def expect_streamed(self, partial: PartialImage) -> tuple[LayerGroup, ...]:
        """Returns the expected arrival of each layer of an adapter that is copied while it is downloaded. Assumes that
        the remaining layers are downloaded as fast as those so far."""
        now_s, ends = self._now(), partial.image.spec.layer_ends
        there = ends[partial.layers - 1]
        s_per_byte = (now_s - partial.began_s) / max(1, there)
        link_s_per_byte = 1 / self._loading.link_bytes_per_s
        groups, start = [], 0
        for layer, end in enumerate(ends):
            in_host_s = now_s + max(0, end - there) * s_per_byte
            groups.append(LayerGroup(layer + 1, in_host_s + (end - start) * link_s_per_byte, in_host_s))
            start = end
        return tuple(groups)

    def expect_rest(self, adapter: Adapter) -> tuple[LayerGroup, ...]:
        """Returns the layer groups of a streamed adapter whose download has just ended. Layers that had arrived before
        are on the device already; the link copies only the rest."""
        assert adapter.partial is not None
        now_s, ends, layers = self._now(), adapter.partial.image.spec.layer_ends, adapter.partial.layers
        rest_s = (ends[-1] - ends[layers - 1]) / self._loading.link_bytes_per_s
        self._link_free_s = max(now_s, self._link_free_s) + rest_s
        return tuple(
            LayerGroup(group.end, now_s if group.end <= layers else self._link_free_s) for group in adapter.groups
        )

    def all_there(self) -> None:
        """Corrects the estimate when nothing is being copied: the link is free from now on."""
        self._link_free_s = self._now()

    def start_of(self, adapter: Adapter, tokens: int, begins_s: float, *, may_assist: bool) -> PrefillStart | None:
        """Returns when a request whose first chunk has so many tokens may start with an adapter, `begins_s` at the
        earliest. None: the adapter is not being copied yet, or is about to leave the device."""
        if not adapter.takes_requests:
            return None
        if adapter.tier is AdapterTier.DEVICE:
            return self._loading.start_loaded(begins_s, adapter.spec, tokens)
        if adapter.tier in (AdapterTier.STREAMING, AdapterTier.COPYING) and self.by_layers:
            assert adapter.spec is not None
            start = self._loading.start(begins_s, adapter.groups, adapter.spec, tokens, may_assist=may_assist)
            # A streamed prefill is a side batch: its wait for the network delays no other request.
            return replace(start, at_s=begins_s) if adapter.tier is AdapterTier.STREAMING else start
        return None
