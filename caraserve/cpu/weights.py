"""Loads the base model: reads the tensors that a plan names, and fills the records of `structs.py`.

Modules are cut into their parts here, so that kernels see sites: outputs of one role, from a panel's start.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import PANEL
from caraserve.cpu import structs
from caraserve.cpu.expert_weights import expert_sites
from caraserve.cpu.layers import ACTIVATIONS
from caraserve.cpu.linear import kernels_of
from caraserve.cpu.linear.base import WeightKernels
from caraserve.cpu.linear.plain import TABLE, preparation
from caraserve.cpu.products import place_prepared
from caraserve.cpu.simd import LANES
from caraserve.cpu.weight_memory import Raw, WeightMemory, convert
from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Code, Dtype, decoded, to_float32
from caraserve.model.formats import Matrix, TensorReader, WeightFormat
from caraserve.model.formats.plain import PLAIN
from caraserve.model.linear_plan import LinearPlan, accumulated
from caraserve.model.plan import Attention, Block, DecoderPlan, DeltaNet, Group, LayerPlan, Mlp, Moe, Norm, Rope
from caraserve.model.rope import alibi_slopes, growth_of_q, rope_tables
from caraserve.util.units import align_up, ceil_div

Floats = NDArray[np.float32]

_DUMMY_STD, _DUMMY_CODE = 0.02, 32.0  # of numbers, and of the values of codes
_DUMMY_SCALE = 120  # of MXFP4: 2^-7, about the deviation over that of the codes' values
_READING_BYTES = 2 << 30  # for tensors on the way from files to panels
_BYTES_PER_WEIGHT = 4  # of them: as stored, as codes of one byte or as fp32, and of the next tensor as stored


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A MODEL record for `step`, and what is behind its addresses."""

    model: NDArray[np.void]
    sites: NDArray[np.void]  # SITE [layers, most sites], the table of the record's `site`
    dtype: Dtype  # of weights that are plain numbers
    prepared_bytes: int  # of the widest row that `prepare_rows` writes, and after it one of plain numbers
    widest_input: int
    memory: WeightMemory


def load_model(
    plan: DecoderPlan,
    dtype: Dtype,
    max_context: int,
    read: TensorReader,
    progress: Callable[[], None],
    *,
    rounds_rows: bool = False,
    threads: int = 1,
) -> LoadedModel:
    """Reads and packs each tensor once. Calls `progress` after each layer and after the embeddings. `rounds_rows`: rows
    are rounded to int8 for products with quantised weights. `threads`: how many layers are read at once, if memory for
    all their tensors is small.

    Raises ModelLoadError, also for layers that this backend cannot compute."""
    _check(plan)
    return _Loader(plan, dtype, max_context, read, rounds_rows).load(progress, min(threads, _most_at_once(plan)))


def progress_steps(plan: DecoderPlan) -> int:
    """Returns how often `load_model` calls `progress`."""
    return len(plan.layers) + 1


def compile_kernels(plan: DecoderPlan, *, rounds_rows: bool = False) -> None:
    """Compiles the kernels that only some models need, or loads them from the cache: of the formats of weights, of
    experts and of delta nets."""
    if plan.moes:
        import caraserve.cpu.experts
    if plan.delta_nets:
        import caraserve.cpu.delta_net  # noqa: F401
    for kind in plan.formats:
        kernels_of(kind, rounds_rows=rounds_rows)


def _check(plan: DecoderPlan) -> None:
    for index, layer in enumerate(plan.layers):
        for block in layer.blocks:
            if isinstance(block.body, DeltaNet) and [site.role for site in layer.sites][:3] != ["q", "k", "v"]:
                raise ModelLoadError(f"layer {index} has a delta net whose first outputs are not q, k and v")
        if sum(isinstance(block.body, Attention | DeltaNet) for block in layer.blocks) > 1:
            raise ModelLoadError(f"layer {index} has more than one attention or delta net; the CPU computes one")


def _most_at_once(plan: DecoderPlan) -> int:
    """Returns how many layers may be read at once for memory's sake."""
    sizes = [linear.inputs * linear.outputs for layer in plan.layers for linear in layer.linears]
    sizes += [
        moe.experts * one.inputs * (one.stored_outputs or one.outputs) for moe in plan.moes for one in moe.tensors
    ]
    return max(1, _READING_BYTES // (_BYTES_PER_WEIGHT * max(sizes)))


class _Loader:
    """Fills the records of one model."""

    def __init__(
        self, plan: DecoderPlan, dtype: Dtype, max_context: int, read: TensorReader, rounds_rows: bool
    ) -> None:
        self._rounds_rows = rounds_rows
        self._plan, self._dtype, self._max_context, self._read = plan, dtype, max_context, read
        self._memory = WeightMemory()
        self._state_bytes = self._prepared_bytes = 0  # of the layers so far
        self._kv_numbers = 0  # in a KV block
        self._ropes = {rope: self._rope(rope) for rope in plan.ropes}

    def load(self, progress: Callable[[], None], threads: int) -> LoadedModel:
        plan = self._plan
        layers = np.zeros(len(plan.layers), structs.LAYER)
        sites = np.zeros((len(plan.layers), plan.most_sites), structs.SITE)
        pool = ThreadPoolExecutor(threads, "caraserve-load")
        try:
            for index, experts in enumerate(pool.map(self._matrices, plan.layers, sites)):
                layers[index] = self._layer(index, plan.layers[index], sites[index], experts)
                progress()
        finally:
            pool.shutdown(cancel_futures=True)
        model = structs.filled(
            structs.MODEL,
            **self._embedding_and_head(),
            layers=len(plan.layers),
            hidden=plan.hidden,
            hidden_pad=align_up(plan.hidden, PANEL),
            vocab=plan.vocab_size,
            vocab_pad=align_up(plan.vocab_size, PANEL),
            most_sites=plan.most_sites,
            state_bytes=self._state_bytes,
            layer=self._memory.records(layers),
            site=int(sites.ctypes.data),
            final=self._norm(plan.final, plan.hidden),
            embed_scale=plan.embed_scale,
            logit_scale=plan.logit_scale,
            logit_cap=plan.logit_cap or 0.0,
        )
        progress()
        widest = plan.widest_input  # for merged weights, whose rows are those of plain numbers
        prepared = self._prepared_bytes + preparation(self._dtype, widest)["prepared_bytes"]
        return LoadedModel(model, sites, self._dtype, prepared, widest, self._memory)

    # --- linears ---

    def _matrices(self, layer: LayerPlan, sites: NDArray[np.void]) -> dict[int, NDArray[np.void]]:
        """Reads the matrices of a layer one after another. Fills the records of its linears' parts; returns those of
        experts by the number of their block. Other threads read other layers meanwhile."""
        columns = [4 * column for group in layer.groups for column in group.columns(PANEL)]  # by site
        for index, linear in enumerate(layer.linears):
            matrix = self._matrix(linear)
            bias = self._values(f"{linear.module}.bias", (linear.outputs,)) if linear.bias else None
            for site in layer.sites:
                if site.linear == index:
                    part = linear.parts[site.part]
                    part_bias = None if bias is None else bias[part.index]
                    record = self._site(linear.format, matrix.rows(part.rows), part_bias, site.inputs, site.outputs)
                    record["column"] = columns[site.index]
                    sites[site.index] = record[0]
        bodies = enumerate(block.body for block in layer.blocks)
        return {number: expert_sites(body, self._read, self._site) for number, body in bodies if isinstance(body, Moe)}

    def _place_prepared(self, sites: NDArray[np.void]) -> None:
        self._prepared_bytes = max(self._prepared_bytes, place_prepared(sites))

    def _matrix(self, linear: LinearPlan) -> Matrix:
        """Reads a linear's weights, [outputs, inputs]."""
        if not linear.transposed:
            return linear.format.read(self._read, linear.module, (linear.outputs, linear.inputs))
        matrix = linear.format.read(self._read, linear.module, (linear.inputs, linear.outputs))
        if matrix.dtype is None:
            raise ModelLoadError(f"{linear.module}: weights stored as [inputs, outputs] can only be read as numbers")
        return Matrix({"weight": matrix.arrays["weight"].T}, matrix.dtype)

    def _site(
        self, kind: WeightFormat, matrix: Matrix, bias: Floats | None, inputs: int, outputs: int
    ) -> NDArray[np.void]:
        """Packs weights; returns a SITE record without its column and the place of its prepared rows."""
        return self._packed(kernels_of(kind, rounds_rows=self._rounds_rows), matrix, bias, inputs, outputs)

    def _packed(
        self, kernels: WeightKernels, matrix: Matrix, bias: Floats | None, inputs: int, outputs: int
    ) -> NDArray[np.void]:
        panels, record = ceil_div(outputs, PANEL), np.zeros(1, structs.SITE)
        fields = {
            "product": kernels.product,
            "expand": kernels.expand,
            "row": kernels.row,
            "bias": 0 if bias is None else self._memory.vectors(bias, PANEL * panels),
            "inputs": inputs,
            "panels": panels,
            **kernels.pack(matrix, self._dtype, self._memory),
        }
        for name, value in fields.items():
            record[name] = value
        return record

    def _embedding_and_head(self) -> dict[str, int]:
        plan, shape = self._plan, (self._plan.vocab_size, self._plan.hidden)
        bias = None if plan.head_bias is None else self._values(plan.head_bias, shape[:1])
        kind, matrix = plan.embed_format, plan.embed_format.read(self._read, _module(plan.embed), shape)
        embedding = None
        if plan.head is not None or plan.has_unit_head_rows:
            kernels = TABLE if kind is PLAIN else kernels_of(kind)
            embedding = self._memory.records(self._packed(kernels, matrix, None, plan.hidden, plan.vocab_size))
        if plan.head is not None:
            del matrix  # so that memory is never taken by both as stored
            kind, matrix = plan.head_format, plan.head_format.read(self._read, _module(plan.head), shape)
        if plan.has_unit_head_rows:
            values = kind.values(matrix)
            kind, matrix = PLAIN, Matrix({"weight": values / np.linalg.norm(values, axis=1, keepdims=True)}, Dtype.F32)
        site = self._site(kind, matrix, bias, plan.hidden, plan.vocab_size)
        self._place_prepared(site)
        head = self._memory.records(site)
        embedding = head if embedding is None else embedding
        return {"embed": embedding, "positions": self._positions(), "head": head}

    def _positions(self) -> int:
        plan = self._plan
        if plan.positions is None:
            return 0
        table = self._values(plan.positions, (plan.max_position, plan.hidden))
        return self._memory.vectors(table[: self._max_context])

    # --- blocks ---

    def _layer(
        self, index: int, layer: LayerPlan, sites: NDArray[np.void], experts: Mapping[int, NDArray[np.void]]
    ) -> tuple[int, int]:
        """Returns the fields of a LAYER record. `sites`, `experts`: records of matrices, by block those of experts."""
        for group in layer.groups:
            self._place_prepared(sites[group.sites[0].index :][: len(group.sites)])
        scalars = [1.0] * len(layer.blocks)
        if self._plan.layer_scalars:
            scalars[-1] = float(self._values(self._plan.layer_scalars[index], (1,))[0])
        blocks = np.zeros(len(layer.blocks), structs.BLOCK)
        for number, block in enumerate(layer.blocks):
            groups = [group for group in layer.groups if group.block == number]
            blocks[number] = self._block(index, block, groups, scalars[number], experts.get(number))[0]
        return len(blocks), self._memory.records(blocks)

    def _block(
        self, layer: int, block: Block, groups: Sequence[Group], scalar: float, experts: NDArray[np.void] | None
    ) -> NDArray[np.void]:
        (group_in, *rest), hidden = groups, self._plan.hidden
        columns = zip((site.role for site in group_in.sites), group_in.columns(PANEL), strict=True)
        offsets = {role: 4 * column for role, column in columns}
        if isinstance(block.body, Attention):
            kind, body = structs.ATTENTION, self._attention(block.body, offsets)
        elif isinstance(block.body, Moe):
            assert experts is not None
            kind, body = structs.MOE, self._moe(block.body, offsets, experts)
        elif isinstance(block.body, DeltaNet):
            kind, body = structs.DELTA_NET, self._delta_net(block.body, offsets)
        else:
            assert isinstance(block.body, Mlp)
            kind, body = structs.MLP, self._mlp(block.body, offsets)
        return structs.filled(
            structs.BLOCK,
            kind=int(kind),
            body=self._memory.records(body),
            pre=self._norm(block.pre, hidden),
            post=self._norm(block.post, hidden),
            adds_directly=block.adds_directly and scalar == 1.0,
            keeps_rows=block.reads_first_rows,
            group_in=self._group(layer, group_in),
            group_out=self._group(layer, rest[0]) if rest else 0,
            multiplier=block.multiplier,
            scalar=scalar,
        )

    def _group(self, layer: int, group: Group) -> int:
        record = structs.filled(
            structs.GROUP,
            layer=layer,
            index=group.index,
            first_site=group.sites[0].index,
            sites=len(group.sites),
            inputs=group.inputs,
            panels=group.width(PANEL) // PANEL,
            row_bytes=4 * group.width(PANEL),
        )
        return self._memory.records(record)

    def _attention(self, body: Attention, offsets: Mapping[str, int]) -> NDArray[np.void]:
        kv_offset = self._kv_numbers
        self._kv_numbers += 2 * structs.BLOCK_TOKENS * body.kv_heads * body.head_dim
        none = {"rotated": 0, "cos": 0, "sin": 0, "growth": 0}
        return structs.filled(
            structs.ATTENTION_BODY,
            **(none if body.rope is None else self._ropes[body.rope]),
            heads=body.heads,
            kv_heads=body.kv_heads,
            head_dim=body.head_dim,
            window=body.window or structs.NO_WINDOW,
            kv_offset=kv_offset,
            q=offsets["q"],
            k=offsets["k"],
            v=offsets.get("v", offsets["k"]),
            gate=offsets["gate"] if body.gated else int(structs.NO_COLUMN),
            q_norm=self._norm(body.q_norm, body.head_dim, body.heads),
            k_norm=self._norm(body.k_norm, body.head_dim, body.kv_heads),
            v_norm=self._norm(body.v_norm, body.head_dim, body.kv_heads),
            norm_after_rope=body.norm_after_rope,
            sinks=0 if body.sinks is None else self._memory.vectors(self._values(body.sinks, (body.heads,))),
            slopes=self._memory.vectors(alibi_slopes(body.heads)) if body.alibi else 0,
            scale=body.scale,
            cap=body.cap or 0.0,
        )

    def _mlp(self, body: Mlp, offsets: Mapping[str, int]) -> NDArray[np.void]:
        up = next(part for linear in body.linears for part in linear.parts if part.role == "up")
        return structs.filled(
            structs.MLP_BODY,
            activation=ACTIVATIONS[body.activation],
            gate=offsets["gate"] if body.is_gated else int(structs.NO_COLUMN),
            up=offsets["up"],
            panels=ceil_div(up.outputs, PANEL),
        )

    def _moe(self, body: Moe, offsets: Mapping[str, int], sites: NDArray[np.void]) -> NDArray[np.void]:
        shared = 0
        if body.out is not None:
            mlp = Mlp(body.linears, body.out, body.activation)
            shared = self._memory.records(self._mlp(mlp, offsets))
        panels = ceil_div(body.gate.outputs, PANEL)
        activation = ACTIVATIONS[body.activation]
        own = structs.filled(structs.MLP_BODY, activation=activation, gate=0, up=4 * PANEL * panels, panels=panels)
        groups, kept, how = body.groups or (0, 0, "max")
        correction = None if body.correction is None else self._values(body.correction, (body.experts,))
        for expert in sites:
            self._place_prepared(expert[:2])
            self._place_prepared(expert[2:])
        return structs.filled(
            structs.MOE_BODY,
            experts=body.experts,
            top_k=body.top_k,
            router=offsets["router"],
            shared_gate=offsets.get("shared_gate", int(structs.NO_COLUMN)),
            shared=shared,
            own=self._memory.records(own),
            site=self._memory.records(sites),
            takes_sigmoids=body.scores == "sigmoid",
            correction=0 if correction is None else self._memory.vectors(correction),
            groups=groups,
            kept_groups=kept,
            adds_second=how == "top2",
            prepares_down=bool(sites["prepared_bytes"][:, 2].any()),
            normalises=body.normalise,
            scale=body.scale,
        )

    def _delta_net(self, body: DeltaNet, offsets: Mapping[str, int]) -> NDArray[np.void]:
        widths = dict.fromkeys("qk", body.key_heads * body.key_width) | {"v": body.value_heads * body.value_width}
        panels = sum(ceil_div(width, PANEL) for width in widths.values())
        stored = self._values(body.convolution, (body.channels, 1, body.kernel))
        taps = np.zeros((body.kernel, PANEL * panels), np.float32)
        for start, (role, width) in zip(accumulated(widths.values()), widths.items(), strict=False):
            column = offsets[role] // 4
            taps[:, column : column + width] = stored[start : start + width, 0].T
        log_decay, step_bias = (self._values(name, (body.value_heads,)) for name in (body.log_decay, body.step_bias))
        keys, values = align_up(body.key_width, LANES), align_up(body.value_width, LANES)
        inputs_offset = self._state_bytes
        matrices_offset = inputs_offset + 4 * PANEL * panels * (body.kernel - 1)
        self._state_bytes = matrices_offset + 4 * keys * values * body.value_heads
        return structs.filled(
            structs.DELTA_NET_BODY,
            key_heads=body.key_heads,
            value_heads=body.value_heads,
            key_width=body.key_width,
            key_padded=keys,
            value_width=body.value_width,
            **{role: offsets[role] for role in "qkvzab"},
            kernel=body.kernel,
            channel_panels=panels,
            convolution=self._memory.vectors(taps, PANEL * panels),
            negative_rate=self._memory.vectors(log_decay if body.stores_rates else -np.exp(log_decay)),
            step_bias=self._memory.vectors(step_bias),
            norm=self._norm(body.norm, body.value_width, body.value_heads),
            inputs_offset=inputs_offset,
            matrices_offset=matrices_offset,
            scale=body.key_width**-0.5,
        )

    # --- vectors ---

    def _values(self, name: str, shape: tuple[int, ...]) -> Floats:
        return to_float32(*self._read(name, shape))

    def _norm(self, norm: Norm | None, width: int, heads: int = 1) -> int:
        """Returns the address of a NORM record, of rows of `heads` · `width` elements."""
        if norm is None:
            return 0
        shape = {"row": (heads * width,), "head": (width,), "heads": (heads, width)}[norm.scope]
        order = slice(None) if norm.order is None else list(norm.order)

        def ordered(name: str) -> Floats:
            if "{head}" in name:
                values = np.stack([self._values(name.format(head=head), shape[1:]) for head in range(heads)])
            else:
                values = self._values(name, shape)
            return values.reshape(-1)[order].reshape(shape)

        weight = np.ones(shape, np.float32) if norm.weight is None else ordered(norm.weight)
        padded = align_up(shape[-1], LANES)
        record = structs.filled(
            structs.NORM,
            weight=self._memory.vectors(weight + np.float32(norm.offset), padded),
            bias=0 if norm.bias is None else self._memory.vectors(ordered(norm.bias), padded),
            subtracts_mean=norm.kind == "layer",
            width=shape[-1],
            padded=padded,
            head_bytes=4 * padded if norm.scope == "heads" else 0,
            eps=norm.eps,
        )
        return self._memory.records(record)

    def _rope(self, rope: Rope) -> dict[str, int]:
        """Returns the fields of an ATTENTION_BODY record about a rotation."""
        cos, sin = rope_tables(rope, self._max_context)
        factors = growth_of_q(rope, self._max_context)
        growth = 0 if factors is None else self._memory.vectors(factors)
        tables = {"cos": self._memory.vectors(cos), "sin": self._memory.vectors(sin)}
        return {"rotated": cos.shape[1], "growth": growth, **tables}


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def dummy_reader(seed: int, dtype: Dtype) -> TensorReader:
    """Returns a reader of random weights of plausible size; norms are one and biases zero. The same seed gives the same
    model."""
    return _DummyTensors(seed, dtype)


def _not_made(tensor: str) -> ModelLoadError:
    return ModelLoadError(
        f"{tensor}: random weights of its format are not made on a CPU, only numbers, fp8, int8 and the experts of "
        "GPT-OSS; serve the checkpoint's own, without --load-format dummy"
    )


class _DummyTensors:
    """The tensors of a model that has no files. The values of each follow from its name, whichever is read first."""

    def __init__(self, seed: int, dtype: Dtype) -> None:
        self._seed, self._dtype = seed, dtype

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng((self._seed, zlib.crc32(name.encode())))

    def __call__(self, name: str, shape: tuple[int, ...]) -> tuple[Raw, Dtype]:
        if len(shape) == 1 or "norm" in name or name.endswith("bias"):
            values = np.full(shape, not name.endswith("bias"), np.float32)
        else:
            values = self._rng(name).standard_normal(shape, np.float32) * np.float32(_DUMMY_STD)
        return convert(values, Dtype.F32, self._dtype), self._dtype

    def codes(self, name: str, shape: tuple[int, ...], code: Code) -> NDArray[np.uint8]:
        if code is Code.U8:
            is_scale = name.endswith("_scales")
            return (
                np.full(shape, _DUMMY_SCALE, np.uint8)
                if is_scale
                else self._rng(name).integers(0, 256, shape, np.uint8)
            )
        values = decoded(np.arange(256, dtype=np.uint8), code)
        return self._rng(name).choice(np.flatnonzero(np.abs(values) < 2 * _DUMMY_CODE).astype(np.uint8), shape)

    def blocks(self, name: str, shape: tuple[int, ...], kind: str) -> NDArray[np.uint8]:
        raise ModelLoadError(f"{name}: random weights are not made in the blocks of GGUF files")

    def words(self, name: str, shape: tuple[int, ...]) -> NDArray[np.uint32]:
        raise _not_made(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        raise _not_made(name)  # only formats that are packed, or described in a file, ask

    def scales(self, module: str, outputs: int) -> Floats:
        return np.full(outputs, _DUMMY_STD / _DUMMY_CODE, np.float32)
