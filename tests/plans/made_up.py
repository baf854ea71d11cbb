"""Made-up decoders that together use every field of a plan, with random tensors, and changes of each field alone."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caraserve.model.dtype import Code, Dtype, decoded
from caraserve.model.formats.fp8 import Fp8
from caraserve.model.formats.int8 import Int8
from caraserve.model.formats.mxfp4 import MXFP4
from caraserve.model.formats.plain import PLAIN
from caraserve.model.formats.scaled_codes import Inputs
from caraserve.model.linear_plan import LinearPlan, Part, interleaved_rows, part_rows
from caraserve.model.plan import Attention, Block, DecoderPlan, DeltaNet, ExpertTensor, LayerPlan, Mlp, Moe, Norm, Rope

# No width is a whole number of panels; K and V of a layer are half a panel.
HIDDEN, HEADS, KV_HEADS, DIM, INTER, VOCAB, POSITIONS = 96, 4, 2, 16, 160, 80, 128
Q, KV = HEADS * DIM, KV_HEADS * DIM
Change = Callable[[DecoderPlan], DecoderPlan]


class Tensors:
    """The tensors of a made-up checkpoint: a name always has the same numbers."""

    def __call__(self, name: str, shape: tuple[int, ...]) -> tuple[NDArray[np.generic], Dtype]:
        noise = _rng(name).standard_normal(shape, np.float32)
        if name.endswith(".scale"):
            return np.float32(0.03) * np.abs(noise), Dtype.F32
        if "norm" in name:
            return 1 + np.float32(0.3) * noise, Dtype.F32
        return noise * np.float32(1.6 / shape[-1] ** 0.5 if len(shape) == 2 else 0.3), Dtype.F32

    def codes(self, name: str, shape: tuple[int, ...], code: Code) -> NDArray[np.uint8]:
        if name.endswith("_scales"):
            return _rng(name).integers(118, 124, shape, np.uint8)
        finite = np.flatnonzero(np.isfinite(decoded(np.arange(256, dtype=np.uint8), code))).astype(np.uint8)
        return _rng(name).choice(finite, shape)

    def scales(self, module: str, outputs: int) -> NDArray[np.float32]:
        return _rng(module).uniform(0.001, 0.002, outputs).astype(np.float32)


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def linear(layer: int, name: str, inputs: int, *parts: tuple[str, int], **fields: Any) -> LinearPlan:
    """Returns a linear whose parts lie one after another: (role, outputs) each."""
    outputs = sum(size for _, size in parts)
    return LinearPlan(f"model.layers.{layer}.{name}", inputs, outputs, part_rows(parts), **fields)


def rope(pairs: int, base: float, **fields: Any) -> Rope:
    return Rope(tuple(base ** (-index / pairs) for index in range(pairs)), **fields)


def norm(layer: int, name: str, **fields: Any) -> Norm:
    return Norm(f"model.layers.{layer}.{name}_norm.weight", 1e-5, **fields)


def decoder(blocks: Callable[[int], tuple[Block, ...]], layers: int = 3, **fields: Any) -> DecoderPlan:
    common = {"family": "made-up", "vocab_size": VOCAB, "hidden": HIDDEN, "max_position": POSITIONS, "dtype": "float32"}
    final = Norm("model.norm.weight", 1e-5)
    made = tuple(LayerPlan(blocks(layer)) for layer in range(layers))
    return DecoderPlan(**{**common, "layers": made, "final": final, **fields})


def sandwich() -> DecoderPlan:
    """Norms before and after each block, GeGLU, soft caps, norms of heads; windows and another rope on two layers."""

    def blocks(layer: int) -> tuple[Block, ...]:
        def of(name: str) -> Norm:
            return norm(layer, name, offset=1.0)

        attention = Attention(
            linears=(
                linear(layer, "q_proj", HIDDEN, ("q", Q)),
                linear(layer, "k_proj", HIDDEN, ("k", KV)),
                linear(layer, "v_proj", HIDDEN, ("v", KV)),
            ),
            out=linear(layer, "o_proj", Q, ("out", HIDDEN)),
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            scale=0.2,
            window=(None, 20, 7)[layer],
            cap=3.0,
            rope=rope(DIM // 2, 10000.0) if layer == 0 else rope(4, 100.0, factor=1.25),
            q_norm=replace(of("q"), scope="head"),
            k_norm=replace(of("k"), scope="head"),
        )
        mlp = Mlp(
            (linear(layer, "gate_proj", HIDDEN, ("gate", INTER)), linear(layer, "up_proj", HIDDEN, ("up", INTER))),
            linear(layer, "down_proj", INTER, ("down", HIDDEN)),
            "gelu_tanh",
        )
        return (
            Block(attention, of("before_attention"), of("after_attention")),
            Block(mlp, of("before_mlp"), of("after_mlp"), multiplier=0.7),
        )

    scalars = tuple(f"model.layers.{layer}.scalar" for layer in range(3))
    return decoder(blocks, embed_scale=3.5, logit_cap=4.0, logit_scale=0.8, head=None, layer_scalars=scalars)


def parallel() -> DecoderPlan:
    """One norm with a mean and a bias for both blocks, fused and transposed linears with biases, ALiBi, positions."""

    def blocks(layer: int) -> tuple[Block, ...]:
        attention = Attention(
            linears=(linear(layer, "c_attn", HIDDEN, ("q", Q), ("k", KV), ("v", KV), bias=True, transposed=True),),
            out=linear(layer, "c_proj", Q, ("out", HIDDEN), bias=True, transposed=True),
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            scale=DIM**-0.5,
            alibi=True,
            q_norm=norm(layer, "q", kind="layer", scope="heads"),
            k_norm=norm(layer, "k", kind="layer", scope="heads", bias=f"model.layers.{layer}.k_norm.bias"),
        )
        mlp = Mlp(
            (linear(layer, "c_fc", HIDDEN, ("up", INTER), bias=True, transposed=True),),
            linear(layer, "mlp.c_proj", INTER, ("down", HIDDEN), bias=True, transposed=True),
            "relu2",
        )
        first = norm(layer, "ln", kind="layer", bias=f"model.layers.{layer}.ln.bias")
        return Block(attention, first), Block(mlp, None, reads_first_rows=True)

    final = Norm("model.norm.weight", 1e-5, kind="layer", bias="model.norm.bias")
    return decoder(blocks, 2, final=final, positions="model.positions", head_bias="lm_head.bias")


def gated() -> DecoderPlan:
    """A gate of attention beside q, sinks, V that is K, norms of whole rows after an interleaved rope, no norms before
    blocks, clamped SwiGLU of one fused module, weights in codes."""
    order = interleaved_rows(HEADS, DIM, DIM // 2)
    k_order = interleaved_rows(KV_HEADS, DIM, DIM // 2)

    def blocks(layer: int) -> tuple[Block, ...]:
        halves = [range(2 * DIM * head, 2 * DIM * head + DIM) for head in range(HEADS)]
        q_rows = [row for half in halves for row in half]
        q_gate = LinearPlan(
            f"model.layers.{layer}.q_proj",
            HIDDEN,
            2 * Q,
            (
                Part("q", tuple(q_rows[row] for row in order)),
                Part("gate", tuple(row + DIM for row in q_rows)),
            ),
            format=Fp8(Inputs.KEPT),
        )
        attention = Attention(
            linears=(q_gate, replace(linear(layer, "k_proj", HIDDEN, ("k", KV)), parts=(Part("k", k_order),))),
            out=linear(layer, "o_proj", Q, ("out", HIDDEN), format=Int8(Inputs.KEPT), bias=True),
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            scale=0.3,
            rope=rope(DIM // 4, 50.0, q_growth=(0.4, 8)),
            q_norm=norm(layer, "q", scope="row", order=order),
            k_norm=norm(layer, "k", scope="row", order=k_order),
            v_norm=Norm(None, 1e-5, scope="head"),
            norm_after_rope=True,
            sinks=f"model.layers.{layer}.sinks",
            gated=True,
        )
        mlp = Mlp(
            (linear(layer, "gate_up_proj", HIDDEN, ("gate", INTER), ("up", INTER), format=Int8(Inputs.KEPT)),),
            linear(layer, "down_proj", INTER, ("down", HIDDEN)),
            "clamped_swiglu",
        )
        return Block(attention, None, norm(layer, "after_attention")), Block(mlp, None, norm(layer, "after_mlp"))

    return decoder(blocks, 2, has_unit_head_rows=True, embed_format=Int8(Inputs.KEPT), logit_scale=3.0)


def mixed() -> DecoderPlan:
    """Layers of different kinds, whose groups differ in number of sites and in widths, and one without attention."""
    _, alone = sandwich().layers[0].blocks
    layers = parallel().layers[0], LayerPlan((alone,)), sandwich().layers[2], gated().layers[1]
    return decoder(lambda layer: layers[layer].blocks, len(layers))


def experts() -> DecoderPlan:
    """Two kinds of experts, each after attention: chosen by sigmoids with a correction among the groups that score
    highest, with biases, fused tensors of all experts and a gated shared expert; chosen by softmax, a tensor each."""
    count, inner, shared = 8, 48, 80

    def sigmoid(layer: int) -> Moe:
        name = f"model.layers.{layer}.mlp"
        fused = ExpertTensor(f"{name}.experts.gate_up_proj", inner, HIDDEN, 2 * inner, is_transposed=True)
        fused = replace(fused, bias=f"{name}.experts.gate_up_proj_bias")
        return Moe(
            linears=(
                linear(layer, "mlp.router", HIDDEN, ("router", count), bias=True),
                linear(layer, "mlp.shared_gate", HIDDEN, ("shared_gate", 1)),
                linear(layer, "mlp.gate_proj", HIDDEN, ("gate", shared)),
                linear(layer, "mlp.up_proj", HIDDEN, ("up", shared)),
            ),
            out=linear(layer, "mlp.down_proj", shared, ("down", HIDDEN)),
            experts=count,
            top_k=3,
            gate=replace(fused, rows=range(0, 2 * inner, 2)),
            up=replace(fused, rows=range(1, 2 * inner, 2)),
            down=ExpertTensor(f"{name}.experts.down_proj", HIDDEN, inner, bias=f"{name}.experts.down_proj_bias"),
            activation="clamped_swiglu",
            scores="sigmoid",
            scale=1.7,
            correction=f"{name}.correction",
            groups=(4, 2, "top2"),
        )

    def softmax(layer: int) -> Moe:
        name = f"model.layers.{layer}.mlp.experts.{{expert}}"
        return Moe(
            linears=(linear(layer, "mlp.router", HIDDEN, ("router", count)),),
            out=None,
            experts=count,
            top_k=2,
            gate=ExpertTensor(f"{name}.gate_proj.weight", inner, HIDDEN),
            up=ExpertTensor(f"{name}.up_proj.weight", inner, HIDDEN),
            down=ExpertTensor(f"{name}.down_proj.weight", HIDDEN, inner),
            normalise=False,
        )

    def blocks(layer: int) -> tuple[Block, ...]:
        attention, _ = parallel().layers[0].with_linears(lambda one: _of_layer(one, layer)).blocks
        attention = replace(attention, pre=norm(layer, "before_attention"))
        body = softmax(layer) if layer % 2 else sigmoid(layer)
        after = norm(layer, "after_mlp") if layer == 2 else None
        return attention, Block(body, norm(layer, "before_mlp"), after, multiplier=0.8 if layer == 2 else 1.0)

    return decoder(blocks, 4)


def delta_nets() -> DecoderPlan:
    """Two delta nets and attention between them: one with a fused module and value heads that share key heads, one
    with a module for each role. Widths of keys and values differ."""

    def net(layer: int, names: tuple[str, ...], key: tuple[int, int], value: tuple[int, int], kernel: int) -> DeltaNet:
        keys, values = key[0] * key[1], value[0] * value[1]
        outputs = {"q": keys, "k": keys, "v": values, "z": values, "b": value[0], "a": value[0]}
        name = f"model.layers.{layer}.delta"
        return DeltaNet(
            linears=tuple(
                linear(
                    layer, f"delta.in_{roles}", HIDDEN, *((role, outputs[role]) for role in roles), bias=roles == "z"
                )
                for roles in names
            ),
            out=linear(layer, "delta.out", values, ("out", HIDDEN)),
            convolution=f"{name}.convolution",
            log_decay=f"{name}.log_decay",
            step_bias=f"{name}.step_bias",
            norm=norm(layer, "delta", scope="head"),
            key_heads=key[0],
            value_heads=value[0],
            key_width=key[1],
            value_width=value[1],
            kernel=kernel,
        )

    def blocks(layer: int) -> tuple[Block, ...]:
        attention, mlp = (
            replace(block, pre=norm(layer, f"before_{number}"), reads_first_rows=False)
            for number, block in enumerate(parallel().layers[0].with_linears(lambda one: _of_layer(one, layer)).blocks)
        )
        if layer == 0:
            return Block(net(0, ("qkv", "z", "b", "a"), (2, 16), (6, 24), 4), norm(0, "before_delta")), mlp
        if layer == 1:
            return attention, mlp
        body = net(2, ("q", "k", "v", "a", "b", "z"), (4, 20), (4, 12), 3)
        return Block(body, norm(2, "before_delta"), norm(2, "after_delta"), multiplier=0.8), mlp

    return decoder(blocks)


def _of_layer(one: LinearPlan, layer: int) -> LinearPlan:
    return replace(one, module=one.module.replace("layers.0.", f"layers.{layer}."))


PLANS: dict[str, Callable[[], DecoderPlan]] = {
    "sandwich": sandwich,
    "parallel": parallel,
    "gated": gated,
    "mixed": mixed,
    "experts": experts,
    "delta nets": delta_nets,
}


# --- one field changed alone ---


def _blocks(change: Callable[[Block], Block]) -> Change:
    """Returns the change of all blocks of the plan's last layer."""

    def changed(plan: DecoderPlan) -> DecoderPlan:
        *first, last = plan.layers
        return replace(plan, layers=(*first, LayerPlan(tuple(map(change, last.blocks)))))

    return changed


def body(kind: type[Attention | Mlp | Moe | DeltaNet], **fields: Any) -> Change:
    def change(block: Block) -> Block:
        return replace(block, body=replace(block.body, **fields)) if isinstance(block.body, kind) else block

    return _blocks(change)


def body_norm(which: str, **fields: Any) -> Change:
    def change(block: Block) -> Block:
        if not isinstance(block.body, Attention):
            return block
        return replace(block, body=replace(block.body, **{which: replace(getattr(block.body, which), **fields)}))

    return _blocks(change)


def block_norm(which: str, **fields: Any) -> Change:
    def change(block: Block) -> Block:
        found = getattr(block, which)
        return block if found is None else replace(block, **{which: replace(found, **fields)})

    return _blocks(change)


def linears(**fields: Any) -> Change:
    def changed(plan: DecoderPlan) -> DecoderPlan:
        return replace(
            plan, layers=tuple(layer.with_linears(lambda one: replace(one, **fields)) for layer in plan.layers)
        )

    return changed


def expert_tensors(which: Callable[[ExpertTensor], bool], **fields: Any) -> Change:
    def changed(plan: DecoderPlan) -> DecoderPlan:
        def change(one: ExpertTensor) -> ExpertTensor:
            return replace(one, **fields) if which(one) else one

        return replace(plan, layers=tuple(layer.with_expert_tensors(change) for layer in plan.layers))

    return changed


def _last_rope(**fields: Any) -> Change:
    def change(block: Block) -> Block:
        if not isinstance(block.body, Attention) or block.body.rope is None:
            return block
        return replace(block, body=replace(block.body, rope=replace(block.body.rope, **fields)))

    return _blocks(change)


def _top(**fields: Any) -> Change:
    return lambda plan: replace(plan, **fields)


def _each(**fields: Any) -> Change:
    return _blocks(lambda block: replace(block, **fields))


def _mlp_block(**fields: Any) -> Change:
    return _blocks(lambda block: replace(block, **fields) if isinstance(block.body, Mlp) else block)


_BIAS = "model.another.bias"
CHANGES: dict[str, dict[str, Change]] = {
    "sandwich": {
        "scale": body(Attention, scale=0.4),
        "window": body(Attention, window=6),
        "no window": body(Attention, window=None),
        "cap": body(Attention, cap=1.0),
        "no cap": body(Attention, cap=None),
        "no rope": body(Attention, rope=None),
        "frequencies": _last_rope(frequencies=(1.0, 0.1, 0.0, 0.01)),
        "rotated pairs": _last_rope(frequencies=(1.0, 0.1)),
        "rope factor": _last_rope(factor=0.8),
        "rope's growth of q": _last_rope(q_growth=(0.5, 4)),
        "no norm of q": body(Attention, q_norm=None),
        "no norm of k": body(Attention, k_norm=None),
        "norm of v": body(Attention, v_norm=Norm(None, 1e-5, scope="head")),
        "norms after rope": body(Attention, norm_after_rope=True),
        "norm of q with a mean": body_norm("q_norm", kind="layer"),
        "norm of q with a weight for each head": body_norm("q_norm", scope="heads", weight="model.heads_norm"),
        "norm of q over the row": body_norm("q_norm", scope="row", weight="model.row_norm"),
        "norm of k with a bias": body_norm("k_norm", bias=_BIAS),
        "sinks": body(Attention, sinks="model.sinks"),
        "alibi": body(Attention, alibi=True),
        "silu": body(Mlp, activation="silu"),
        "gelu": body(Mlp, activation="gelu"),
        "gated relu2": body(Mlp, activation="relu2"),
        "clamped swiglu": body(Mlp, activation="clamped_swiglu"),
        "multiplier": _each(multiplier=1.5),
        "no post norm": _each(post=None),
        "no post norm, no multiplier": _each(post=None, multiplier=1.0),
        "no pre norm": _each(pre=None),
        "rows of the first block": _mlp_block(reads_first_rows=True),
        "offset of pre norms": block_norm("pre", offset=0.0),
        "bias of pre norms": block_norm("pre", bias=_BIAS),
        "eps of pre norms": block_norm("pre", eps=0.5),
        "no weight of pre norms": block_norm("pre", weight=None, offset=0.0),
        "mean of post norms": block_norm("post", kind="layer"),
        "offset of post norms": block_norm("post", offset=0.0),
        "biases": linears(bias=True),
        "embedding scale": _top(embed_scale=1.0),
        "positions": _top(positions="model.positions"),
        "own head": _top(head="lm_head.weight"),
        "unit rows of a tied head": _top(has_unit_head_rows=True),
        "head bias": _top(head_bias="lm_head.bias"),
        "logit scale": _top(logit_scale=1.0),
        "logit cap": _top(logit_cap=2.0),
        "no logit cap": _top(logit_cap=None),
        "no layer scalars": _top(layer_scalars=()),
        "final norm": _top(final=Norm("model.norm.weight", 1e-5, kind="layer", bias="model.norm.bias", offset=1.0)),
    },
    "parallel": {
        "no biases": linears(bias=False),
        "one rotation": body(Attention, rope=rope(DIM // 2, 10000.0)),
        "no alibi": body(Attention, alibi=False),
        "own rows": _mlp_block(reads_first_rows=False),
        "multiplier": _each(multiplier=0.5),
        "gelu of up alone": body(Mlp, activation="gelu"),
        "silu of up alone": body(Mlp, activation="silu"),
        "no positions": _top(positions=None),
        "fp8 head": _top(head_format=Fp8(Inputs.KEPT)),
    },
    "experts": {
        "one expert fewer": body(Moe, top_k=1),
        "other scores": body(Moe, scores="sigmoid"),
        "weights that sum to 1": body(Moe, normalise=True),
        "scale of the weights": body(Moe, scale=2.5),
        "correction of scores": body(Moe, correction="model.correction"),
        "groups scored by their best two": body(Moe, groups=(4, 1, "top2")),
        "groups scored by their best": body(Moe, groups=(2, 1, "max")),
        "gelu": body(Moe, activation="gelu_tanh"),
        "clamped swiglu": body(Moe, activation="clamped_swiglu"),
        "fp8 experts": expert_tensors(lambda one: "{expert}" in one.tensor, format=Fp8(Inputs.KEPT)),
        "mxfp4 experts": expert_tensors(lambda one: one.is_transposed, format=MXFP4, is_transposed=False),
    },
    "delta nets": {
        "other decay": body(DeltaNet, log_decay="model.another_decay"),
        "other bias of steps": body(DeltaNet, step_bias="model.another_step_bias"),
        "other convolution": body(DeltaNet, convolution="model.another_convolution"),
        "longer convolution": body(DeltaNet, kernel=5),
        "norm of heads": body(DeltaNet, norm=norm(2, "another", offset=0.5, scope="head")),
        "wider keys": body(DeltaNet, key_heads=2, key_width=40),
    },
    "gated": {
        "no gate": body(Attention, gated=False),
        "no sinks": body(Attention, sinks=None),
        "norm of q in the stored order": body_norm("q_norm", order=None),
        "norms before rope": body(Attention, norm_after_rope=False),
        "no norm of v": body(Attention, v_norm=None),
        "no growth of q": _last_rope(q_growth=None),
        "plain weights": linears(format=PLAIN),
        "head rows as they are": _top(has_unit_head_rows=False),
        "plain embedding": _top(embed_format=PLAIN),
    },
}
