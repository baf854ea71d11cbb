"""Gives a plan what a GGUF file decides: the names, formats and biases of its tensors. Norms have the offset added that
some families add when they compute; experts of a layer are one tensor for gate, up and down each."""

import re
from dataclasses import replace

from caraserve.errors import ModelLoadError
from caraserve.model.formats import WeightFormat
from caraserve.model.gguf.config import EMBEDDING, HEAD
from caraserve.model.gguf.files import GgufModel
from caraserve.model.gguf.orders import tensor_format
from caraserve.model.gguf.reader import plain_dtype
from caraserve.model.linear_plan import LinearPlan, Part, accumulated
from caraserve.model.plan import Attention, Block, Body, DecoderPlan, DeltaNet, ExpertTensor, LayerPlan, Mlp, Moe, Norm

# Names of modules by the roles of their parts.
_ATTENTION = {"q": "attn_q", "qgate": "attn_q", "k": "attn_k", "v": "attn_v", "qkv": "attn_qkv", "out": "attn_output"}
_DELTA_NET = {"qkv": "attn_qkv", "z": "attn_gate", "a": "ssm_alpha", "b": "ssm_beta", "out": "ssm_out"}
_MLP = {"gate": "ffn_gate", "up": "ffn_up", "gateup": "ffn_up", "down": "ffn_down"}
_MOE = {
    "router": "ffn_gate_inp",
    "shared_gate": "ffn_gate_inp_shexp",
    "gate": "ffn_gate_shexp",
    "up": "ffn_up_shexp",
    "down": "ffn_down_shexp",
}
_UNUSED = re.compile(r"rope_freqs\.weight|rope_factors_(short|long)\.weight|blk\.(?P<layer>\d{1,5})\..*")
_HEAD_BIAS, _POSITIONS, _FINAL = "output.bias", "position_embd.weight", "output_norm"


def plan_for(model: GgufModel, plan: DecoderPlan) -> DecoderPlan:
    """Returns the plan of a model, from that of its configuration. Raises ModelLoadError for tensors that are missing,
    of a type that is not read, or not used."""
    names = _Names(model)
    layers = tuple(_layer(names, f"blk.{index}", layer) for index, layer in enumerate(plan.layers))
    embed_format = names.format_of(names.stored(plan.embed, EMBEDDING))
    head = None
    if HEAD in model.tensors:
        head = names.stored(plan.head or "lm_head.weight", HEAD)
    made = replace(
        plan,
        layers=layers,
        final=_norm(names, plan.final, _FINAL),
        head=None if head is None else plan.head or "lm_head.weight",
        head_format=embed_format if head is None else names.format_of(head),
        embed_format=embed_format,
        head_bias=plan.head_bias and names.if_there(plan.head_bias, _HEAD_BIAS),
        positions=plan.positions and names.found(plan.positions, _POSITIONS),
        names_in_file=names.by_plan,
    )
    names.check_all_used(len(plan.layers))
    return made


class _Names:
    """Finds the tensors of a file. `by_plan`: their names by those of the plan."""

    def __init__(self, model: GgufModel) -> None:
        self._model = model
        self.by_plan: dict[str, str] = {}

    def __contains__(self, stored: str) -> bool:
        return stored in self._model.tensors

    def stored(self, name: str, stored: str) -> str:
        """Notes the name of a tensor that must be there; returns it. Raises ModelLoadError."""
        if stored not in self:
            raise ModelLoadError(f"{self._model.name}: tensor {stored} is missing")
        self.by_plan[name] = stored
        return stored

    def found(self, name: str, stored: str) -> str:
        """Notes the name of a tensor of numbers that must be there; returns the plan's. Raises ModelLoadError."""
        plain_dtype(self._model, self.stored(name, stored))
        return name

    def if_there(self, name: str, stored: str) -> str | None:
        """Returns the plan's name of a tensor, None if the file has none."""
        return self.found(name, stored) if stored in self else None

    def format_of(self, stored: str) -> WeightFormat:
        """Returns the format of a tensor. Raises ModelLoadError for a type that is not read."""
        try:
            return tensor_format(self._model, stored)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self._model.name}: tensor {stored}: {error.message}") from None

    def check_all_used(self, layers: int) -> None:
        """Raises ModelLoadError for a tensor that is used by nothing, but of layers that predict several tokens: those
        from `layers` on, if the file says that it has such."""
        predicts = bool(self._model.metadata.get(f"{self._model.architecture}.nextn_predict_layers"))
        for name in sorted(self._model.tensors.keys() - set(self.by_plan.values())):
            match = _UNUSED.fullmatch(name)
            if match is None or (match["layer"] is not None and not (predicts and int(match["layer"]) >= layers)):
                raise ModelLoadError(
                    f"{self._model.name}: tensor {ascii(name)[:200]} is not known in models of architecture "
                    f"{self._model.architecture}"
                )


def _layer(names: _Names, prefix: str, layer: LayerPlan) -> LayerPlan:
    return LayerPlan(tuple(_block(names, prefix, block) for block in layer.blocks))


def _block(names: _Names, prefix: str, block: Block) -> Block:
    if isinstance(block.body, Attention | DeltaNet):
        pre, post = "attn_norm", "post_attention_norm"
    else:  # of some families the norm before the MLP has the name that others' have after attention
        pre, post = "ffn_norm", "post_ffw_norm"
        if f"{prefix}.{pre}.weight" not in names:
            pre = "post_attention_norm"
    return replace(
        block,
        body=_body(names, prefix, block.body),
        pre=block.pre and _norm(names, block.pre, f"{prefix}.{pre}"),
        post=block.post and _norm(names, block.post, f"{prefix}.{post}"),
    )


def _body(names: _Names, prefix: str, body: Body) -> Body:
    match body:
        case Attention():
            linears = body.linears
            if len(linears) > 1 and f"{prefix}.attn_qkv.weight" in names:
                linears = (_joined(linears),)
            return replace(
                body,
                linears=tuple(_linear(names, prefix, _ATTENTION, one) for one in linears),
                out=_linear(names, prefix, _ATTENTION, body.out),
                q_norm=body.q_norm and _norm(names, body.q_norm, f"{prefix}.attn_q_norm"),
                k_norm=body.k_norm and _norm(names, body.k_norm, f"{prefix}.attn_k_norm"),
                sinks=body.sinks and names.found(body.sinks, f"{prefix}.attn_sinks.weight"),
            )
        case DeltaNet():
            return replace(
                body,
                linears=tuple(_linear(names, prefix, _DELTA_NET, one) for one in body.linears),
                out=_linear(names, prefix, _DELTA_NET, body.out),
                convolution=names.found(body.convolution, f"{prefix}.ssm_conv1d.weight"),
                log_decay=names.found(body.log_decay, f"{prefix}.ssm_a"),
                stores_rates=True,
                step_bias=names.found(body.step_bias, f"{prefix}.ssm_dt.bias"),
                norm=_norm(names, body.norm, f"{prefix}.ssm_norm"),
            )
        case Mlp():
            return replace(
                body,
                linears=tuple(_linear(names, prefix, _MLP, one) for one in body.linears),
                out=_linear(names, prefix, _MLP, body.out),
            )
        case Moe():
            return replace(
                body,
                linears=tuple(_linear(names, prefix, _MOE, one) for one in body.linears),
                out=body.out and _linear(names, prefix, _MOE, body.out),
                gate=_experts(names, f"{prefix}.ffn_gate_exps", body.gate),
                up=_experts(names, f"{prefix}.ffn_up_exps", body.up),
                down=_experts(names, f"{prefix}.ffn_down_exps", body.down),
                correction=body.correction and names.found(body.correction, f"{prefix}.exp_probs_b.bias"),
            )


def _linear(names: _Names, prefix: str, by_roles: dict[str, str], linear: LinearPlan) -> LinearPlan:
    module = f"{prefix}.{by_roles[''.join(part.role for part in linear.parts)]}"
    stored = names.stored(f"{linear.module}.weight", f"{module}.weight")
    has_bias = names.if_there(f"{linear.module}.bias", f"{module}.bias") is not None
    return replace(linear, format=names.format_of(stored), bias=has_bias, transposed=False)


def _joined(linears: tuple[LinearPlan, ...]) -> LinearPlan:
    """Returns the module that has the outputs of several ones, one after another."""
    first, starts = linears[0], list(accumulated(one.outputs for one in linears))
    parts = tuple(
        Part(part.role, tuple(start + row for row in part.rows))
        for start, one in zip(starts, linears, strict=False)
        for part in one.parts
    )
    return LinearPlan(f"{first.module.rpartition('.')[0]}.qkv_proj", first.inputs, starts[-1], parts)


def _norm(names: _Names, norm: Norm, module: str) -> Norm:
    """Returns a norm with the offset 0: the file has it added."""
    assert norm.weight is not None, "norms without a weight have no tensor"
    weight = norm.weight.replace(".{head}", "")  # the weights of all heads are one tensor
    bias = weight.removesuffix("weight") + "bias"
    return replace(
        norm,
        weight=names.found(weight, f"{module}.weight"),
        bias=names.if_there(bias, f"{module}.bias"),
        offset=0.0,
    )


def _experts(names: _Names, module: str, one: ExpertTensor) -> ExpertTensor:
    stored = names.stored(f"{module}.weight", f"{module}.weight")
    bias = names.if_there(f"{module}.bias", f"{module}.bias")
    return ExpertTensor(stored, one.outputs, one.inputs, bias=bias, format=names.format_of(stored))
