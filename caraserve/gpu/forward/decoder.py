"""The forward pass over torch, Triton and the raw kernels: issues what lane.py puts in order.

Nothing here allocates device memory or waits for the device, so a pass may be captured. The residual stream is summed
where it is normed: what o and down leave in `delta` is added by the norm that follows.
"""

from collections.abc import Callable

from torch import Tensor

from caraserve.gpu.driver.api import Driver, Stream
from caraserve.gpu.forward.batch import DeviceBatch, PassShape
from caraserve.gpu.forward.lanes import HandOff, Pass
from caraserve.gpu.forward.lora_pass import ChunkHandOffs, LoraLane, LoraPass
from caraserve.gpu.kernels.attention import NO_WINDOW, attend_decode, attend_prefill
from caraserve.gpu.kernels.cuda_launch import Kernels
from caraserve.gpu.kernels.layers import embed, rms_norm, rotate_and_append, silu_mul
from caraserve.gpu.kernels.sampling import Outputs, SamplerState, sample, score
from caraserve.gpu.memory.adapter_tables import AdapterTables
from caraserve.gpu.memory.request_state import DeviceState
from caraserve.gpu.memory.workspace import Workspace
from caraserve.gpu.weights import Weights
from caraserve.model.spec import ModelSpec


class Decoder:
    """One lane's forward passes. Lanes share weights, state and tables; batch and workspace are a lane's own."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        state: DeviceState,
        batch: DeviceBatch,
        tables: AdapterTables,
        workspace: Workspace,
        kernels: Kernels,
        driver: Driver,
    ) -> None:
        self.spec, self.weights, self.state, self.batch = spec, weights, state, batch
        self.workspace, self.driver = workspace, driver
        self.lora = LoraLane(spec, batch, tables, workspace, kernels, driver)
        self.sampler = SamplerState(state.sampling, state.history, workspace.weights, workspace.counts)
        self.windows = tuple(window or NO_WINDOW for window in spec.windows)

    def work(self, shape: PassShape, *, weights: Weights | None = None, assist: ChunkHandOffs | None = None) -> Pass:
        """The kernels of a pass over the batch's first places; results are left in the batch.

        `weights`: the base's with an adapter merged, over which there is no LoRA. `assist`: of the chunk's hand-offs.
        """
        return _DecoderPass(self, shape, weights, assist)


class _DecoderPass:
    """Views of the lane's memory for one shape, and what is issued on them."""

    def __init__(
        self, decoder: Decoder, shape: PassShape, merged: Weights | None, assist: ChunkHandOffs | None
    ) -> None:
        self._of, self._shape = decoder, shape
        self._weights = decoder.weights if merged is None else merged
        self._lora: LoraPass | None = None
        if merged is None and shape.has_lora:
            self._lora = decoder.lora.pass_over(shape, assist)
        batch, self._rows = decoder.batch, decoder.workspace.activations.first(shape.tokens)
        self._inputs, self._outputs = self._rows.inputs, self._rows.outputs
        self._queries = self._rows.qkv[:, : self._rows.attended.shape[1]]
        self._decoding = [(batch.row_token[rows], scratch) for rows, scratch in decoder.workspace.decode_pieces(shape)]
        self._tiles = batch.tile_first[: shape.tiles], batch.tile_tokens[: shape.tiles]
        self._before = (self._attention_norm, self._attend, self._mlp_norm, self._activate)

    def begin(self, stream: Stream) -> None:
        self._run(
            stream,
            lambda: embed(self._of.state.history, self._weights.embedding, self._of.batch.tokens, self._rows.hidden),
        )

    def before(self, layer: int, group: int, stream: Stream) -> None:
        self._run(stream, lambda: self._before[group](layer))

    def project(self, layer: int, group: int, stream: Stream) -> None:
        linear = self._weights.layers[layer].linears[group]
        self._run(stream, lambda: linear.apply(self._inputs[group], self._outputs[group]))

    def lora(self, layer: int, group: int, stream: Stream) -> None:
        if self._lora is not None:
            self._lora.add(layer, group, stream)

    def publish(self, layer: int, group: int, hand_off: HandOff, stream: Stream) -> None:
        self._handing_over().publish(group, hand_off.index, stream)

    def add(self, layer: int, group: int, hand_off: HandOff, stream: Stream) -> None:
        self._handing_over().add_handed_off(layer, group, hand_off.index, stream)

    def end(self, stream: Stream) -> None:
        self._run(stream, self._choose)

    def _run(self, stream: Stream, issue: Callable[[], None]) -> None:
        self._of.driver.run(stream, issue)

    def _handing_over(self) -> LoraPass:
        if self._lora is None:
            raise AssertionError("a pass without adapters hands nothing off")
        return self._lora

    def _attention_norm(self, layer: int) -> None:
        weight, delta = self._weights.layers[layer].attention_norm, self._rows.delta if layer else None
        rms_norm(self._rows.hidden, weight, self._rows.normed, self._of.spec.rms_eps, delta)

    def _attend(self, layer: int) -> None:
        """Rotates, keeps keys and values, and attends to them."""
        rows, tokens, cache = self._rows, self._of.batch.tokens, self._of.state.caches[layer]
        weights, window = self._weights, self._of.windows[layer]
        norms = weights.layers[layer].head_norms
        rotate_and_append(rows.qkv, weights.cos, weights.sin, tokens, cache, norms, self._of.spec.rms_eps)
        for row_token, scratch in self._decoding:
            attend_decode(self._queries, cache, tokens, row_token, rows.attended, scratch, window)
        if self._shape.tiles:
            attend_prefill(self._queries, cache, tokens, *self._tiles, rows.attended, window)

    def _mlp_norm(self, layer: int) -> None:
        weight, rows = self._weights.layers[layer].mlp_norm, self._rows
        rms_norm(rows.hidden, weight, rows.normed, self._of.spec.rms_eps, rows.delta)

    def _activate(self, layer: int) -> None:
        silu_mul(self._rows.gate_up, self._rows.activated)

    def _choose(self) -> None:
        """Logits, samples and scores of the wanted tokens, as many at once as there is room for."""
        most = self._of.workspace.logits.shape[0]
        for start in range(0, self._shape.outputs, most):
            end = min(start + most, self._shape.outputs)
            self._choose_of(outputs_between(self._of.batch.outputs, start, end), end - start)

    def _choose_of(self, outputs: Outputs, count: int) -> None:
        workspace, weights, tokens = self._of.workspace, self._weights, self._of.batch.tokens
        wanted, logits, rows = workspace.wanted[:count], workspace.logits[:count], self._rows
        # A token is wanted once at most, as it must be where the last layer's part is added here.
        rms_norm(rows.hidden, weights.final_norm, wanted, self._of.spec.rms_eps, rows.delta, outputs.token)
        weights.head.apply(wanted, logits)
        sample(logits, outputs, tokens, self._of.sampler)
        score(logits, outputs)


def outputs_between(outputs: Outputs, start: int, end: int) -> Outputs:
    """Places [start, end) of the wanted tokens."""

    def cut(part: Tensor) -> Tensor:
        return part[start:end]

    return Outputs(
        cut(outputs.token),
        cut(outputs.kind),
        cut(outputs.wanted),
        cut(outputs.chosen),
        cut(outputs.logprob),
        cut(outputs.top_ids),
        cut(outputs.top_logprobs),
    )
