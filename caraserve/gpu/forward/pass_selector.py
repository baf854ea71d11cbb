"""Which weights a pass runs over: the base's, or the base's with one adapter merged."""

from caraserve.core.batch import Batch
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.forward.batch import Shape
from caraserve.gpu.forward.channels import Channels
from caraserve.gpu.forward.decoder import Decoder
from caraserve.gpu.forward.graphs import Bucket
from caraserve.gpu.forward.lanes import Pass
from caraserve.gpu.memory.adapters import DeviceImages
from caraserve.gpu.merged_weights import MergedWeights


class Works:
    """The launching thread's alone."""

    def __init__(
        self, decoder: Decoder, images: DeviceImages, channels: Channels, merged: MergedWeights | None
    ) -> None:
        """`merged`: where adapters are merged; it takes as much memory as the base."""
        self._decoder, self._images, self._channels, self._merged = decoder, images, channels, merged

    @property
    def merges(self) -> int:
        """How often an adapter was merged into the base weights."""
        return 0 if self._merged is None else self._merged.merges

    def prepare(self, plan: Batch) -> None:
        """Merges what a plan wants merged, in the compute lane's order."""
        if plan.merged is not None:
            bound = self._images.bound[plan.merged]
            if bound.is_loading:
                raise AssertionError(f"adapter slot {plan.merged} cannot be merged: its weights have not arrived")
            stream = self._channels.timelines.streams[Lane.COMPUTE]
            image = self._images.bytes_of(plan.merged)
            self._merging.merge(bound.stored, image, self._channels.driver, stream)

    def of_plan(self, plan: Batch, shape: Shape) -> Pass:
        """The pass of a plan that no graph serves."""
        return self._decoder.work(shape, weights=None if plan.merged is None else self._merging.weights)

    def to_capture(self, bucket: Bucket, shape: Shape) -> Pass:
        """The pass of a graph."""
        return self._decoder.work(shape, weights=self._merging.weights if bucket.merged else None)

    @property
    def _merging(self) -> MergedWeights:
        if self._merged is None:
            raise AssertionError("a plan wants an adapter merged, and there is no memory for that")
        return self._merged
