"""The decoder on the device: `decoder_layer` is the order of one layer of a plan, `DecoderPass` has its steps.

No step allocates device memory or waits for the device, so a pass may be captured as a graph. A block leaves its result
in `added`; the next block's first step adds it to the residual stream, after its post norm, and norms the sum.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from torch import Tensor

from caraserve.gpu.attention.base import Attention as AttentionKernels
from caraserve.gpu.attention.base import Scratch
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.driver.streams import SideStream
from caraserve.gpu.forward.batch import DeviceBatch
from caraserve.gpu.forward.lora_pass import HandOffMemory, LoraLane, LoraPass
from caraserve.gpu.kernels.delta_net import apply_delta_net
from caraserve.gpu.kernels.elementwise import activate, cap_logits, embed, multiply_by_gate
from caraserve.gpu.kernels.experts import apply_experts
from caraserve.gpu.kernels.grouped import embed_grouped
from caraserve.gpu.kernels.heads import rotate_and_append
from caraserve.gpu.kernels.lora_sums import LoraSums
from caraserve.gpu.kernels.norms import NormWeights, add_and_norm
from caraserve.gpu.kernels.sampling import Outputs, SamplerState, sample, score
from caraserve.gpu.kernels.vocabulary import change_embeddings, change_logits
from caraserve.gpu.memory.adapter_tables import AdapterTables
from caraserve.gpu.memory.masks import MaskedOutputs
from caraserve.gpu.memory.pass_shape import PassShape
from caraserve.gpu.memory.request_state import DeviceState
from caraserve.gpu.memory.workspace import Workspace
from caraserve.gpu.weights import BlockWeights, Weights, columns_of
from caraserve.model.plan import Attention, DecoderPlan, DeltaNet, Group, Mlp, Moe


def decoder_layer(steps: "DecoderPass", layer: int, stream: Stream) -> None:
    """Issues one decoder layer on `stream`: for each block its first step, projections, body, and output; the experts
    read what the first projections have read and written."""

    def linear(group: Group) -> None:
        """Computes the base product of the modules that read the same rows, and their LoRA."""
        if not steps.is_handed_off(layer, group.index):
            steps.begin_lora(layer, group.index, stream)
            steps.project(layer, group.index, stream)
            steps.add_lora(layer, group.index, stream)
        else:
            steps.publish(layer, group.index, stream)
            steps.project(layer, group.index, stream)  # the workers compute meanwhile
            steps.add_handed_off(layer, group.index, stream)

    for block in steps.blocks[layer]:
        steps.begin_block(block, stream)
        linear(block.first)
        steps.compute_body(block, stream)
        if block.last is not None:
            linear(block.last)
        steps.add_experts(block, stream)


def issue_pass(
    steps: "DecoderPass", stream: Stream, layers: int, before_layer: Callable[[int], None] = lambda layer: None
) -> None:
    """Issues a whole pass, for running or capturing. `before_layer(layer)` issues what must precede a layer."""
    steps.embed(stream)
    for layer in range(layers):
        before_layer(layer)
        decoder_layer(steps, layer, stream)
    steps.sample(stream)


@dataclass(frozen=True, slots=True)
class BlockSteps:
    """A block of a layer, its groups, and the block before it, whose result it adds; None: there is none."""

    layer: int
    body: Attention | Mlp | Moe | DeltaNet
    first: Group
    last: Group | None  # None: experts compute all that the block adds
    columns: Mapping[str, slice]  # of each role in what the first group writes
    before: "BlockSteps | None" = field(repr=False)
    weights: BlockWeights
    is_final: bool  # no block adds its result: the final norm does

    @property
    def adds_lora_of_first(self) -> bool:
        """Whether the kernel that reads the first group's product next can add LoRA to it, and reads all of it."""
        roles = self.columns.keys()
        if isinstance(self.body, Attention):
            heads = self.weights.heads
            return roles <= {"q", "k", "v"} and heads is not None and heads.is_one_launch
        return isinstance(self.body, Mlp) and roles <= {"gate", "up"}

    @property
    def adds_lora_of_last(self) -> bool:
        """Whether the next block's first step can add LoRA to the last group's product, of which it reads all."""
        return (
            self.last is not None and len(self.last.sites) == 1 and self.weights.experts is None and not self.is_final
        )


def block_steps(plan: DecoderPlan, weights: Weights) -> list[list[BlockSteps]]:
    """Returns the blocks by layer."""
    made, before = list[list[BlockSteps]](), None
    for index, layer in enumerate(plan.layers):
        blocks = []
        final = layer.blocks[-1] if index == len(plan.layers) - 1 else None
        for number, (block, own) in enumerate(zip(layer.blocks, weights.layers[index].blocks, strict=True)):
            first, *others = (group for group in layer.groups if group.block == number)
            last = others[0] if others else None
            parts = index, block.body, first, last, columns_of(first)
            before = BlockSteps(*parts, before, own, is_final=block is final)
            blocks.append(before)
        made.append(blocks)
    return made


class Decoder:
    """Makes the passes of one lane. Lanes share weights, state and tables; each has its own batch and workspace."""

    def __init__(
        self,
        plan: DecoderPlan,
        weights: Weights,
        state: DeviceState,
        batch: DeviceBatch,
        tables: AdapterTables,
        workspace: Workspace,
        device: GpuDevice,
        attention: AttentionKernels,
    ) -> None:
        self.plan, self.weights, self.state, self.batch = plan, weights, state, batch
        self.workspace, self.kernels, self.driver, self.attention = workspace, device.kernels, device.driver, attention
        self.vocabulary = tables.vocabulary
        self.lora = LoraLane(plan, batch, tables, workspace, device)
        self.sampler = SamplerState(state.sampling, state.history, workspace.weights, workspace.counts)
        self.blocks = block_steps(plan, weights)
        every = [block for blocks in self.blocks for block in blocks]
        # Layer and index of the groups whose product is next read by a kernel that can add LoRA to it.
        self.added_later = {(block.layer, block.first.index) for block in every if block.adds_lora_of_first}
        self.added_later |= {
            (block.layer, block.last.index) for block in every if block.last is not None and block.adds_lora_of_last
        }

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
        side: SideStream | None = None,
    ) -> "DecoderPass":
        """Returns the pass over the batch's first places; it leaves results in the batch.

        `weights`: the base's with an adapter merged, over which there is no LoRA. `hand_offs`: of an assisted chunk,
        in which CPU workers may compute the LoRA of any layer. `masked`: outputs whose tokens grammars limit; a graph
        leaves them to `sample_masked`. `side`: of a pass to be captured, for LoRA beside the base products.
        """
        return DecoderPass(self, shape, weights, hand_offs, masked, side)

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
        named, out = self.batch.embedded[:count], self.workspace.embeddings[:count]
        self.driver.run(stream, lambda: self.norm_last(out, named))
        return out

    def norm_last(self, out: Tensor, tokens: Tensor) -> None:
        """Adds the last block's result to the residual stream of some tokens, each named once, and norms them."""
        rows, last = self.workspace.activations, self.blocks[-1][-1].weights
        add_last_and_norm(rows.hidden, rows.added, out, self.weights.final_norm, last, tokens)


class DecoderPass:
    """The steps of a pass of one shape. Each issues kernels on a stream and returns at once. A group is an index in its
    layer: modules that read the same rows."""

    def __init__(
        self,
        decoder: Decoder,
        shape: PassShape,
        merged: Weights | None,
        hand_offs: HandOffMemory | None,
        masked: MaskedOutputs | None,
        side: SideStream | None,
    ) -> None:
        self._decoder, self._shape, self._masked = decoder, shape, masked
        self._weights = decoder.weights if merged is None else merged
        self._lora: LoraPass | None = None
        if merged is None and shape.has_lora:
            self._lora = decoder.lora.pass_over(shape, hand_offs, side, decoder.added_later)
        self._hands_off, self._shapes = hand_offs is not None, decoder.plan.shapes_of_groups
        self.blocks: Sequence[Sequence[BlockSteps]] = decoder.blocks
        self._rows = decoder.workspace.activations.first(shape.tokens)
        batch, workspace = decoder.batch, decoder.workspace
        self._decoding: dict[tuple[int, int], list[tuple[Tensor, Scratch]]] = {
            heads: [(batch.row_token[rows], scratch) for rows, scratch in workspace.decode_parts(shape, heads)]
            for heads in workspace.scratch
        }
        self._tiles = batch.tile_first[: shape.tiles], batch.tile_tokens[: shape.tiles]
        self._columns: dict[tuple[int, int, int], Tensor] = {}  # views, by group shape and columns

    def is_handed_off(self, layer: int, group: int) -> bool:
        """Returns whether CPU workers may compute a group's LoRA."""
        return self._hands_off and self._shapes[layer][group] in self._shape.groups

    def embed(self, stream: Stream) -> None:
        """Writes the tokens' embeddings to the residual stream, where vectors of prompts already stand."""
        decoder, weights, hidden = self._decoder, self._weights, self._rows.hidden
        history, tokens, scale = decoder.state.history, decoder.batch.tokens, decoder.plan.embed_scale
        embedding = weights.embedding

        def rows() -> None:
            if isinstance(embedding, Tensor):
                embed(history, embedding, tokens, hidden, scale, weights.positions)
                return
            embed_grouped(history, embedding, tokens, hidden)
            if scale != 1.0 or weights.positions is not None:
                embed(history, None, tokens, hidden, scale, weights.positions)

        self._run(stream, rows)
        if self._shape.changes_vocabulary:
            adapters, tables = decoder.batch.adapters, decoder.vocabulary
            given = hidden, history, tokens, adapters, tables, scale, weights.positions
            self._run(stream, lambda: change_embeddings(*given))

    def begin_block(self, block: BlockSteps, stream: Stream) -> None:
        """Adds the result of the block before to the residual stream, and norms the rows that this block reads."""
        rows, pre, before = self._rows, block.weights.pre, block.before
        if before is None and pre is None:
            return
        out = None if pre is None else rows.normed
        if before is None:
            self._run(stream, lambda: add_and_norm(rows.hidden, None, out, pre))
            return
        lora, of = self._sums(before.layer, before.last), before.weights
        self._run(stream, lambda: add_last_and_norm(rows.hidden, rows.added, out, pre, of, lora=lora))

    def project(self, layer: int, group: int, stream: Stream) -> None:
        """Multiplies a group's rows by the base weights."""
        linear, room = self._weights.layers[layer].linears[group], self._decoder.workspace.room
        shape = self._shapes[layer][group]
        self._run(stream, lambda: linear.apply(self._rows.inputs[shape], self._rows.outputs[shape], room))

    def begin_lora(self, layer: int, group: int, stream: Stream) -> None:
        """Starts what a group's LoRA computes of its rows beside the base product, if the pass has a side stream."""
        if self._lora is not None:
            self._lora.begin(layer, group, stream)

    def add_lora(self, layer: int, group: int, stream: Stream) -> None:
        """Adds the LoRA of weights on the device to a group's output."""
        if self._lora is not None:
            self._lora.add(layer, group, stream)

    def publish(self, layer: int, group: int, stream: Stream) -> None:
        """Decides, once for all blocks, who computes a group's LoRA, by the layer's ready word.

        If the weights have not arrived, copies x to the workers that the work order names and then sets x_flag. If they
        have, or if a worker is missing, sets y_flag.
        """
        self._assisted_lora().publish(layer, group, stream)

    def add_handed_off(self, layer: int, group: int, stream: Stream) -> None:
        """Waits for the workers or the weights, whichever come first, and adds the workers' result to a group's output,
        or the LoRA of weights on the device. Adds nothing if the chunk was aborted, and sets the pass's error word."""
        self._assisted_lora().add_handed_off(layer, group, stream)

    def compute_body(self, block: BlockSteps, stream: Stream) -> None:
        """Computes what lies between a block's projections: attention, a delta net, or the activation of an MLP or of a
        shared expert."""
        if block.last is None:
            return
        first, last = (self._shapes[block.layer][group.index] for group in (block.first, block.last))
        projected, out = self._rows.outputs[first], self._rows.inputs[last]
        if isinstance(block.body, Attention):
            self._attend(block, block.body, projected, out, stream)
        elif isinstance(block.body, DeltaNet):
            self._recur(block, projected, out, stream)
        else:
            gate, row_gate = (
                self._of_role(block, role) if role in block.columns else None for role in ("gate", "shared_gate")
            )
            up, kind, lora = self._of_role(block, "up"), block.body.activation, self._sums(block.layer, block.first)
            self._run(stream, lambda: activate(gate, up, out, kind, row_gate, lora))

    def add_experts(self, block: BlockSteps, stream: Stream) -> None:
        """Computes what a block's experts add to the output of its shared expert, or its output if there is none."""
        experts, room = block.weights.experts, self._decoder.workspace.experts
        if experts is None:
            return
        assert room is not None
        x, added = self._rows.inputs[self._shapes[block.layer][block.first.index]], self._rows.added
        logits, position = self._of_role(block, "router"), self._decoder.batch.tokens.position
        adds = block.last is not None
        self._run(stream, lambda: apply_experts(x, logits, position, experts, room, added, adds=adds))

    def sample(self, stream: Stream) -> None:
        """Computes logits of the wanted tokens, samples and scores, as many rows of logits at a time as the
        workspace holds; results are left in the batch."""
        most = self._decoder.workspace.logits.shape[0]
        for start in range(0, self._shape.outputs, most):
            end = min(start + most, self._shape.outputs)
            self._sample(start, end, stream)
            if self._masked is not None:
                self._decoder.sample_masked(self._masked, start, end, stream)

    def _of_role(self, block: BlockSteps, role: str) -> Tensor:
        """Returns the columns of a role in what the first group of a block writes."""
        columns, shape = block.columns[role], self._shapes[block.layer][block.first.index]
        key = shape, columns.start, columns.stop
        if key not in self._columns:
            self._columns[key] = self._rows.outputs[shape][:, columns]
        return self._columns[key]

    def _sums(self, layer: int, group: Group | None) -> LoraSums | None:
        """Returns the LoRA that the kernel which reads a group's product has to add, if there is any."""
        return None if self._lora is None or group is None else self._lora.sums(layer, group.index)

    def _run(self, stream: Stream, issue: Callable[[], None]) -> None:
        self._decoder.driver.run(stream, issue)

    def _assisted_lora(self) -> LoraPass:
        if self._lora is None:
            raise AssertionError("a pass without adapters has no hand-offs")
        return self._lora

    def _attend(self, block: BlockSteps, body: Attention, projected: Tensor, out: Tensor, stream: Stream) -> None:
        """Rotates queries and keys, appends keys and values to the KV blocks, and attends with the tiles of prompt
        chunks and with the rows that decode."""
        decoder, heads, how = self._decoder, block.weights.heads, block.weights.attention
        cache, tokens, kernels = decoder.state.caches[block.layer], decoder.batch.tokens, decoder.attention
        assert heads is not None
        assert how is not None
        assert cache is not None
        lora = self._sums(block.layer, block.first)
        self._run(stream, lambda: rotate_and_append(projected, tokens, cache, heads, lora))
        queries = self._of_role(block, "q")

        def attend() -> None:
            if self._shape.tiles:
                kernels.prefill.attend(queries, cache, tokens, *self._tiles, out, how)
            for row_token, scratch in self._decoding[body.heads, body.head_dim]:
                kernels.decode.attend(queries, cache, tokens, row_token, out, scratch, how)

        self._run(stream, attend)
        if body.gated:
            gate = self._of_role(block, "gate")
            self._run(stream, lambda: multiply_by_gate(out, gate))

    def _recur(self, block: BlockSteps, projected: Tensor, out: Tensor, stream: Stream) -> None:
        """Convolves and recurs from the states of the requests' slots."""
        decoder, net = self._decoder, block.weights.delta_net
        state, mixed = decoder.state.delta_nets[block.layer], decoder.workspace.mixed
        assert net is not None
        assert mixed is not None
        mixed = mixed[: self._shape.tokens, : net.channels]
        self._run(stream, lambda: apply_delta_net(projected, mixed, out, decoder.batch.tokens, state, net))

    def _sample(self, start: int, end: int, stream: Stream) -> None:
        decoder, weights, plan = self._decoder, self._weights, self._decoder.plan
        outputs, count = outputs_between(decoder.batch.outputs, start, end), end - start
        wanted, logits = decoder.workspace.wanted[:count], decoder.workspace.logits[:count]

        def logits_of_wanted() -> None:
            decoder.norm_last(wanted, outputs.token)  # each token is wanted at most once
            weights.head.apply(wanted, logits, decoder.workspace.room)
            if self._shape.changes_vocabulary:
                adapters, products = decoder.batch.adapters, decoder.workspace.products
                change_logits(logits, wanted, products, outputs.token, adapters, decoder.vocabulary, weights.head_bias)
            if plan.logit_scale != 1.0 or plan.logit_cap is not None:
                cap_logits(logits, plan.logit_scale, plan.logit_cap)

        self._run(stream, logits_of_wanted)
        decoder.kernels.launch(sample(logits, outputs, decoder.batch.tokens, decoder.sampler), stream)
        decoder.kernels.launch(score(logits, outputs), stream)


def add_last_and_norm(
    hidden: Tensor,
    added: Tensor,
    out: Tensor | None,
    norm: NormWeights | None,
    before: BlockWeights,
    rows: Tensor | None = None,
    lora: LoraSums | None = None,
) -> None:
    """Adds the result of the block `before` to the residual stream, and norms the sum; see `add_and_norm`."""
    add_and_norm(hidden, added, out, norm, before.post, before.multiplier, before.scalar, rows, lora)


def outputs_between(outputs: Outputs, start: int, end: int) -> Outputs:
    """Returns places [start, end) of the wanted tokens."""
    return Outputs(*(getattr(outputs, each.name)[start:end] for each in fields(Outputs)))
