"""The decoder on the device: `decoder_layer` is the order of one layer, `DecoderPass` has its steps.

No step allocates device memory or waits for the device, so a pass may be captured as a graph. The residual stream is
summed where it is normed: the o and down projections leave their result in `delta`, and the next norm adds it.
"""

from collections.abc import Callable, Collection
from dataclasses import fields

import numpy as np
from torch import Tensor

from caraserve.core.lora_layout import DOWN, GATE_UP, OUT, QKV
from caraserve.gpu.attention.base import Attention, layer_attention
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.forward.batch import DeviceBatch
from caraserve.gpu.forward.lora_pass import HandOffMemory, LoraLane, LoraPass
from caraserve.gpu.kernels.elementwise import activate, embed
from caraserve.gpu.kernels.heads import Heads, RopeTables, rotate_and_append
from caraserve.gpu.kernels.norms import NormWeights, add_and_norm
from caraserve.gpu.kernels.sampling import Outputs, SamplerState, sample, score
from caraserve.gpu.memory.adapter_tables import AdapterTables
from caraserve.gpu.memory.masks import MaskedOutputs
from caraserve.gpu.memory.pass_shape import PassShape
from caraserve.gpu.memory.request_state import DeviceState
from caraserve.gpu.memory.workspace import Workspace
from caraserve.gpu.weights import Weights
from caraserve.model.spec import ModelSpec


def decoder_layer(steps: "DecoderPass", layer: int, stream: Stream) -> None:
    """Issues one decoder layer on `stream`, in the order of `decoder_layer` in cpu/forward.py."""

    def linear(group: int) -> None:
        """Computes the base product of the modules that read one input, and their LoRA."""
        if group not in steps.handed_off:
            steps.project(layer, group, stream)
            steps.add_lora(layer, group, stream)
        else:
            steps.publish(layer, group, stream)
            steps.project(layer, group, stream)  # the workers compute meanwhile
            steps.add_handed_off(layer, group, stream)

    steps.attention_norm(layer, stream)
    linear(QKV)
    steps.rotate_and_append(layer, stream)
    steps.attend(layer, stream)
    linear(OUT)
    steps.mlp_norm(layer, stream)
    linear(GATE_UP)
    steps.silu_mul(layer, stream)
    linear(DOWN)


def issue_pass(
    steps: "DecoderPass", stream: Stream, layers: int, before_layer: Callable[[int], None] = lambda layer: None
) -> None:
    """Issues a whole pass, for running or capturing. `before_layer(layer)` issues what must precede a layer."""
    steps.embed(stream)
    for layer in range(layers):
        before_layer(layer)
        decoder_layer(steps, layer, stream)
    steps.sample(stream)


class Decoder:
    """Makes the passes of one lane. Lanes share weights, state and tables; each has its own batch and workspace."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        state: DeviceState,
        batch: DeviceBatch,
        tables: AdapterTables,
        workspace: Workspace,
        device: GpuDevice,
        attention: Attention,
    ) -> None:
        self.spec, self.weights, self.state, self.batch = spec, weights, state, batch
        self.workspace, self.kernels, self.driver, self.attention = workspace, device.kernels, device.driver, attention
        self.lora = LoraLane(spec, batch, tables, workspace, device)
        self.sampler = SamplerState(state.sampling, state.history, workspace.weights, workspace.counts)
        self.layer_attention = layer_attention(spec)

    @property
    def hidden(self) -> Tensor:
        """The residual stream of the lane's passes, [tokens, hidden]."""
        return self.workspace.activations.hidden

    def make_pass(
        self,
        shape: PassShape,
        *,
        weights: Weights | None = None,
        hand_offs: HandOffMemory | None = None,
        masked: MaskedOutputs | None = None,
    ) -> "DecoderPass":
        """Returns the pass over the batch's first places; it leaves results in the batch.

        `weights`: the base's with an adapter merged, over which there is no LoRA. `hand_offs`: of an assisted chunk,
        in which CPU workers may compute the LoRA of any layer. `masked`: outputs whose tokens grammars limit; a graph
        leaves them to `sample_masked`.
        """
        return DecoderPass(self, shape, weights, hand_offs, masked)

    def sample_masked(self, masked: MaskedOutputs, start: int, end: int, stream: Stream) -> None:
        """Samples and scores the masked ones of the outputs [start, end), whose logits are in the workspace, as soon
        as their masks are written."""
        first, last = np.searchsorted(masked.indices, (start, end)).tolist()
        if first == last:
            return
        outputs, rows = outputs_between(self.batch.outputs, start, end), self.batch.masked.between(first, last)
        logits = self.workspace.logits[: end - start]
        masked.await_masks(stream)
        self.kernels.launch(sample(logits, outputs, self.batch.tokens, self.sampler, rows), stream)
        if masked.has_scores:
            self.kernels.launch(score(logits, outputs, rows), stream)

    def embed_prompts(self, count: int, stream: Stream) -> Tensor:
        """Norms the last tokens of the batch's `count` prompts that are embedded, [count, hidden]; to be issued between
        their pass and the next one, whose graph has no such step. The pass has normed none of these tokens."""
        rows, norm = self.workspace.activations, NormWeights(self.weights.final_norm, None, self.spec.rms_eps)
        named, out = self.batch.embedded[:count], self.workspace.embeddings[:count]
        self.driver.run(stream, lambda: add_and_norm(rows.hidden, rows.delta, out, norm, rows=named))
        return out


class DecoderPass:
    """The steps of a pass of one shape. Each issues kernels on a stream and returns at once. A module group is an index
    of GROUPS: modules that read the same input."""

    def __init__(
        self,
        decoder: Decoder,
        shape: PassShape,
        merged: Weights | None,
        hand_offs: HandOffMemory | None,
        masked: MaskedOutputs | None,
    ) -> None:
        self._decoder, self._shape, self._masked = decoder, shape, masked
        self._weights = decoder.weights if merged is None else merged
        self._lora: LoraPass | None = None
        if merged is None and shape.has_lora:
            self._lora = decoder.lora.pass_over(shape, hand_offs)
        self.handed_off: Collection[int] = () if hand_offs is None else shape.groups
        batch, self._rows = decoder.batch, decoder.workspace.activations.first(shape.tokens)
        self._inputs, self._outputs = self._rows.inputs, self._rows.outputs
        self._queries = self._rows.qkv[:, : self._rows.attended.shape[1]]
        self._decoding = [(batch.row_token[rows], scratch) for rows, scratch in decoder.workspace.decode_parts(shape)]
        self._tiles = batch.tile_first[: shape.tiles], batch.tile_tokens[: shape.tiles]

    def embed(self, stream: Stream) -> None:
        """Writes the tokens' embeddings to the residual stream, where vectors of prompts already stand."""
        decoder, hidden = self._decoder, self._rows.hidden
        self._run(stream, lambda: embed(decoder.state.history, self._weights.embedding, decoder.batch.tokens, hidden))

    def attention_norm(self, layer: int, stream: Stream) -> None:
        weight, delta = self._weights.layers[layer].attention_norm, self._rows.delta if layer else None
        self._run(stream, lambda: self._norm(weight, delta))

    def project(self, layer: int, group: int, stream: Stream) -> None:
        """Multiplies a module group's input by the base weights."""
        linear, rounded = self._weights.layers[layer].linears[group], self._decoder.workspace.rounded
        self._run(stream, lambda: linear.apply(self._inputs[group], self._outputs[group], rounded))

    def add_lora(self, layer: int, group: int, stream: Stream) -> None:
        """Adds the LoRA of weights on the device to a module group's output."""
        if self._lora is not None:
            self._lora.add(layer, group, stream)

    def publish(self, layer: int, group: int, stream: Stream) -> None:
        """Decides, once for all blocks, who computes a module group's LoRA, by the layer's ready word.

        If the weights have not arrived, copies x to the workers that the work order names and then sets x_flag. If they
        have, or if a worker is missing, sets y_flag.
        """
        self._assisted_lora().publish(layer, group, stream)

    def add_handed_off(self, layer: int, group: int, stream: Stream) -> None:
        """Waits for the workers or the weights, whichever come first, and adds the workers' result to a module group's
        output, or the LoRA of weights on the device. Adds nothing if the chunk was aborted, and sets the pass's error
        word."""
        self._assisted_lora().add_handed_off(layer, group, stream)

    def rotate_and_append(self, layer: int, stream: Stream) -> None:
        """Rotates queries and keys, and appends keys and values to the KV blocks."""
        decoder, spec, weights = self._decoder, self._decoder.spec, self._weights
        tokens, cache, norms = decoder.batch.tokens, decoder.state.caches[layer], weights.layers[layer].head_norms
        q, k = (NormWeights(each, None, spec.rms_eps, scope="head") for each in norms) if norms else (None, None)
        first = spec.heads * spec.head_dim
        columns = 0, first, first + spec.kv_heads * spec.head_dim
        rope = RopeTables(weights.cos, weights.sin)
        heads = Heads(spec.heads, spec.kv_heads, spec.head_dim, *columns, rope, q, k)
        self._run(stream, lambda: rotate_and_append(self._rows.qkv, tokens, cache, heads))

    def attend(self, layer: int, stream: Stream) -> None:
        """Attends with the tiles of prompt chunks, and with the rows that decode."""
        self._run(stream, lambda: self._attend(layer))

    def mlp_norm(self, layer: int, stream: Stream) -> None:
        self._run(stream, lambda: self._norm(self._weights.layers[layer].mlp_norm, self._rows.delta))

    def silu_mul(self, layer: int, stream: Stream) -> None:
        gate, up = self._rows.gate_up.chunk(2, 1)
        self._run(stream, lambda: activate(gate, up, self._rows.activated, "silu"))

    def sample(self, stream: Stream) -> None:
        """Computes logits of the wanted tokens, samples and scores, as many rows of logits at a time as the
        workspace holds; results are left in the batch."""
        most = self._decoder.workspace.logits.shape[0]
        for start in range(0, self._shape.outputs, most):
            end = min(start + most, self._shape.outputs)
            self._sample(start, end, stream)
            if self._masked is not None:
                self._decoder.sample_masked(self._masked, start, end, stream)

    def _run(self, stream: Stream, issue: Callable[[], None]) -> None:
        self._decoder.driver.run(stream, issue)

    def _assisted_lora(self) -> LoraPass:
        if self._lora is None:
            raise AssertionError("a pass without adapters has no hand-offs")
        return self._lora

    def _norm(self, weight: Tensor, delta: Tensor | None) -> None:
        norm = NormWeights(weight, None, self._decoder.spec.rms_eps)
        add_and_norm(self._rows.hidden, delta, self._rows.normed, norm)

    def _attend(self, layer: int) -> None:
        decoder, out = self._decoder, self._rows.attended
        attention, how = decoder.attention, decoder.layer_attention[layer]
        given = self._queries, decoder.state.caches[layer], decoder.batch.tokens
        if self._shape.tiles:
            attention.prefill.attend(*given, *self._tiles, out, how)
        for row_token, scratch in self._decoding:
            attention.decode.attend(*given, row_token, out, scratch, how)

    def _sample(self, start: int, end: int, stream: Stream) -> None:
        decoder, weights, rows = self._decoder, self._weights, self._rows
        outputs, count = outputs_between(decoder.batch.outputs, start, end), end - start
        wanted, logits = decoder.workspace.wanted[:count], decoder.workspace.logits[:count]

        def logits_of_wanted() -> None:
            # Each token is wanted at most once: the norm adds `delta`, the last layer's result, to the residual stream.
            norm = NormWeights(weights.final_norm, None, decoder.spec.rms_eps)
            add_and_norm(rows.hidden, rows.delta, wanted, norm, rows=outputs.token)
            weights.head.apply(wanted, logits)

        self._run(stream, logits_of_wanted)
        decoder.kernels.launch(sample(logits, outputs, decoder.batch.tokens, decoder.sampler), stream)
        decoder.kernels.launch(score(logits, outputs), stream)


def outputs_between(outputs: Outputs, start: int, end: int) -> Outputs:
    """Returns places [start, end) of the wanted tokens."""
    return Outputs(*(getattr(outputs, field.name)[start:end] for field in fields(Outputs)))
