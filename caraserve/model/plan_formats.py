"""The formats of a plan's modules, from the configuration of a checkpoint and from the names of its tensors."""

from collections.abc import Callable, Container
from dataclasses import replace

from caraserve.model.formats import WeightFormat
from caraserve.model.formats.plain import PLAIN
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import DecoderPlan, ExpertTensor
from caraserve.model.quantization import Quantization


def with_formats(plan: DecoderPlan, quantization: Quantization | None) -> DecoderPlan:
    """Returns a plan with the formats that the checkpoint's configuration states for its modules."""
    if quantization is None:
        return plan

    def stated(kind: WeightFormat, tensor: str) -> WeightFormat:
        names = [name.removesuffix(".weight") for name in plan.stored_names(tensor)]
        return quantization.format_of(*names, is_linear=tensor != plan.embed) or PLAIN

    return replace(_changed(plan, stated), embed_format=stated(PLAIN, plan.embed))


def with_stored(plan: DecoderPlan, stored: Container[str]) -> DecoderPlan:
    """Returns a plan with numbers for modules that a checkpoint stores as numbers, though its configuration does not
    except them. `stored`: the names of its tensors."""

    def is_stored(tensor: str) -> bool:
        return any(name in stored for name in plan.stored_names(tensor))

    def kept(kind: WeightFormat, tensor: str) -> WeightFormat:
        if not tensor.endswith(".weight"):  # of all experts, whose numbers may be stored as [inputs, outputs]
            return kind
        main = kind.main_tensors(tensor.removesuffix(".weight"))
        is_plain = tensor not in main and not any(map(is_stored, main)) and is_stored(tensor)
        return PLAIN if is_plain else kind

    return _changed(plan, kept)


def _changed(plan: DecoderPlan, change: Callable[[WeightFormat, str], WeightFormat]) -> DecoderPlan:
    """Returns a plan with changed formats of linears, experts and head: (format, tensor of the weights) → format."""

    def with_format(linear: LinearPlan) -> LinearPlan:
        return replace(linear, format=change(linear.format, f"{linear.module}.weight"))

    def with_expert_format(one: ExpertTensor) -> ExpertTensor:  # all experts have that of the first
        kind = change(one.format, one.tensor.format(expert=0))
        return replace(one, format=kind, is_transposed=one.is_transposed and kind is PLAIN)

    layers = tuple(layer.with_linears(with_format).with_expert_tensors(with_expert_format) for layer in plan.layers)
    head = plan.head_format if plan.head is None else change(plan.head_format, plan.head)
    return replace(plan, layers=layers, head_format=head)
