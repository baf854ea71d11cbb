"""Which plans the CUDA backend computes. Needs no torch, so that a configuration can be checked before the start."""

from collections.abc import Iterator

from caraserve.core.lora_layout import A_COLUMNS
from caraserve.cpu.handoff import MOST_SITES
from caraserve.errors import ModelLoadError
from caraserve.model.plan import Attention, Block, DecoderPlan, DeltaNet, Mlp, Moe

_WIDEST_HEAD = 256  # with wider ones the attention of prompts needs more shared memory than there is


def check_plan(plan: DecoderPlan) -> None:
    """Raises ModelLoadError with the first thing of a plan that the CUDA backend cannot compute."""
    for index, layer in enumerate(plan.layers):
        problems = [problem for block in layer.blocks for problem in _problems(block)]
        if sum(isinstance(block.body, Attention | DeltaNet) for block in layer.blocks) > 1:
            problems.append("more than one attention or delta net")
        if any(block.reads_first_rows for block in layer.blocks) and layer.blocks[0].pre is None:
            problems.append("blocks that read the same rows, and no norm before them")
        if any(len(group.sites) > MOST_SITES for group in layer.groups):
            problems.append(f"more than {MOST_SITES} outputs of the same rows")
        if problems:
            raise ModelLoadError(f"layer {index} has {problems[0]}, which a GPU cannot compute")
        for linear in layer.linears:
            if linear.inputs % A_COLUMNS:
                raise ModelLoadError(
                    f"{linear.module} has {linear.inputs} inputs, not a multiple of {A_COLUMNS}, which CUDA needs"
                )


def _problems(block: Block) -> Iterator[str]:
    body = block.body
    if isinstance(body, Attention):
        if body.head_dim > _WIDEST_HEAD:
            yield f"heads of {body.head_dim} numbers, more than {_WIDEST_HEAD}"
        has_values = any(part.role == "v" for linear in body.linears for part in linear.parts)
        if not has_values and body.v_norm is not None and body.v_norm.scope == "row":
            yield "values that are keys, and a norm of their rows"
    elif isinstance(body, Mlp):
        if body.activation == "clamped_swiglu" and not body.is_gated:
            yield "clamped_swiglu without a gate"
    elif isinstance(body, Moe):
        yield from _problems_of_experts(body)
    elif [part.role for linear in body.linears for part in linear.parts][:3] != ["q", "k", "v"]:
        yield "a delta net whose first outputs are not q, k and v"
    elif max(body.key_width, body.value_width) > _WIDEST_HEAD:
        yield f"a delta net with heads of {body.key_width} and {body.value_width} numbers, more than {_WIDEST_HEAD}"


def _problems_of_experts(body: Moe) -> Iterator[str]:
    groups, kept, _ = body.groups or (1, 1, "max")
    if groups < 1 or body.experts % groups:
        yield f"{body.experts} experts in {groups} groups"
    elif not 0 < kept <= groups or not 0 < body.top_k <= kept * (body.experts // groups):
        yield f"{body.top_k} experts of a token, from {kept} of {groups} groups that have {body.experts}"
    if body.gate.outputs != body.up.outputs or body.up.outputs != body.down.inputs:
        yield f"experts of {body.gate.outputs}, {body.up.outputs} and {body.down.inputs} numbers"
