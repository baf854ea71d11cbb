"""The formats of compressed-tensors, which llm-compressor writes, by the groups of its configuration. Pure."""

from collections.abc import Mapping
from typing import Any

from caraserve.model.dtype import Code, Dtype
from caraserve.model.formats import WeightFormat
from caraserve.model.formats.fp8 import Fp8
from caraserve.model.formats.grouped import Scale
from caraserve.model.formats.int8 import Int8
from caraserve.model.formats.packed import MXFP4_GROUP, NVFP4, NVFP4_GROUP, PACKED_MXFP4, PackedIntegers
from caraserve.model.formats.scaled_codes import BlockCodes, Inputs, ScaledCodes

_SCALES = {Dtype.F32: Scale.F32, Dtype.F16: Scale.F16, Dtype.BF16: Scale.BF16}
_SCHEMES: Mapping[str, type[Fp8] | type[Int8]] = {"float": Fp8, "int": Int8}
_FORMATS = (
    *("float-quantized", "int-quantized", "naive-quantized"),
    *("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
)
_SUFFIX = ".weight_scale"


class NotRead(Exception):
    """A field has a value that is not read."""

    def __init__(self, what: str, right: str) -> None:
        """`what`: the field and its value. `right`: values that are read."""
        super().__init__(f"{what} is not read; {right} {'are' if ', ' in right else 'is'}")


def is_group(size: object) -> bool:
    """Returns whether a field is a number of inputs with one scale that kernels compute with."""
    return type(size) is int and 16 <= size <= 1 << 20 and size % 16 == 0


def format_of_group(name: str, group: Any, format_of_all: Any, dtype: Dtype) -> WeightFormat:
    """Returns the format of the modules of a group. `dtype`: of the model, which scales have. Raises NotRead."""
    if not isinstance(group, dict):
        raise NotRead(f"{name} {group!r:.200}", "an object")
    packing = group.get("format") or format_of_all
    if packing not in _FORMATS:
        raise NotRead(f"format {packing!r:.200}", ", ".join(_FORMATS))
    if group.get("output_activations"):
        raise NotRead(f"output_activations of {name}", "none")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise NotRead(f"weights {weights!r:.200} of {name}", "an object")
    if weights.get("dynamic"):
        raise NotRead(f"dynamic {weights['dynamic']!r:.200} of the weights of {name}", "false")
    if packing == "pack-quantized":
        return _packed_integers(name, weights, dtype)
    if packing in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        is_mx = packing.startswith("mx")
        _check(name, "weights", weights, type="float", num_bits=4, symmetric=True)
        _check(name, "weights", weights, group_size=MXFP4_GROUP if is_mx else NVFP4_GROUP)
        return PACKED_MXFP4 if is_mx else NVFP4
    return _bytes(name, weights, group.get("input_activations"))


def _packed_integers(name: str, weights: Mapping[str, Any], dtype: Dtype) -> WeightFormat:
    _check(name, "weights", weights, type="int")
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if type(bits) is not int or bits not in (4, 8):
        raise NotRead(f"num_bits {bits!r:.200} of the weights of {name}", "4 or 8")
    if weights.get("actorder") not in (None, False, "group", "dynamic", "weight", "static"):
        raise NotRead(f"actorder {weights['actorder']!r:.200} of {name}", "group, dynamic, weight or static")
    size: Any = 0 if strategy == "channel" else weights.get("group_size")  # 0: all inputs
    symmetric = weights.get("symmetric", True)
    is_known = strategy == "channel" or (strategy == "group" and is_group(size))
    if not is_known or not isinstance(symmetric, bool):
        raise NotRead(
            f"strategy {strategy!r:.200}, group_size {size!r:.200}, symmetric {symmetric!r:.200} of {name}",
            "channel, or group with a multiple of 16,",
        )
    return PackedIntegers.of(bits, size, _SCALES[dtype], symmetric=symmetric)


def _bytes(name: str, weights: Mapping[str, Any], activations: Any) -> WeightFormat:
    """Returns the format of weights of one byte each."""
    scheme = _scheme(weights, f"weights of {name}")
    strategy, code = weights.get("strategy"), Code.F8_E4M3 if scheme is Fp8 else Code.I8
    if strategy in ("tensor", "channel"):
        return scheme(_inputs(activations, scheme, name))
    if isinstance(activations, dict) and activations.get("dynamic") is not True:
        raise NotRead(f"input_activations of {name} with dynamic {activations.get('dynamic')!r:.200}", "true")
    blocks = weights.get("block_structure") if strategy == "block" else [1, weights.get("group_size")]
    if strategy not in ("block", "group") or not isinstance(blocks, list) or len(blocks) != 2:
        raise NotRead(f"weights of {name} with strategy {strategy!r:.200}", "tensor, channel, group or block")
    rows, group = blocks
    if type(rows) is not int or rows < 1 or not is_group(group):
        raise NotRead(f"weights of {name} in blocks of {blocks!r:.200}", "a multiple of 16 inputs")
    return BlockCodes.of(code, rows, group, _SUFFIX)


def _inputs(inputs: Any, scheme: type[ScaledCodes], group: str) -> Inputs:
    if not inputs:
        return Inputs.KEPT
    what = f"input_activations of {group}"
    if _scheme(inputs, what) is not scheme:
        raise NotRead(f"{what} of type {inputs['type']!r:.200} with weights of another type", "the same type")
    strategy, dynamic = inputs.get("strategy"), inputs.get("dynamic")
    if dynamic is True and strategy in ("token", "tensor"):
        return Inputs.PER_TOKEN  # also for `tensor`: a scale for all tokens would let requests of a batch differ
    if not dynamic and strategy == "tensor":
        return Inputs.STATIC
    raise NotRead(f"{what} with strategy {strategy!r:.200}, dynamic {dynamic!r:.200}", "token, or static per tensor,")


def _scheme(fields: Any, what: str) -> type[Fp8] | type[Int8]:
    """Returns the format of 8-bit symmetric weights or inputs."""
    if not isinstance(fields, dict):
        raise NotRead(f"{what} {fields!r:.200}", "an object")
    kind: Any
    kind, bits, symmetric = (fields.get(key) for key in ("type", "num_bits", "symmetric"))
    if not isinstance(kind, str) or kind not in _SCHEMES or bits != 8 or symmetric is not True:
        raise NotRead(
            f"{what} of type {kind!r:.200} with {bits!r:.200} bits, symmetric {symmetric!r:.200}",
            "float or int with 8 bits, symmetric",
        )
    return _SCHEMES[kind]


def _check(name: str, what: str, fields: Mapping[str, Any], **wanted: Any) -> None:
    for key, right in wanted.items():
        if fields.get(key) != right:
            raise NotRead(f"{key} {fields.get(key)!r:.200} of the {what} of {name}", repr(right))
