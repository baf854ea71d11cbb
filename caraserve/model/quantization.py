"""Which linear modules of a checkpoint are quantised and how, read from `quantization_config` of config.json. Pure.

Three formats are known. In compressed-tensors, which llm-compressor writes, and `fp8`, which AutoFP8 and vLLM write, a
weight is a code of one byte, and its value is the code's value times a scale of its output or of the whole module.
`mxfp4` is that of the experts of GPT-OSS.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caraserve.errors import ModelLoadError
from caraserve.model.formats import WeightFormat
from caraserve.model.formats.fp8 import Fp8
from caraserve.model.formats.int8 import Int8
from caraserve.model.formats.mxfp4 import MXFP4
from caraserve.model.formats.scaled_codes import Inputs, ScaledCodes

_SUPPORTED = (
    "supported are fp8 (E4M3) and int8 weights, symmetric, with a scale per tensor or per output, in checkpoints of "
    "compressed-tensors (format float-quantized, int-quantized or naive-quantized) and of fp8 (AutoFP8, "
    "vLLM), and mxfp4 of experts"
)
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_SCHEMES: Mapping[str, type[ScaledCodes]] = {"float": Fp8, "int": Int8}
_EXPERTS = (r"re:.*\.experts\.",)  # what `mxfp4` converts
_LINEAR, _PATTERN = "Linear", "re:"  # a class of modules; the prefix of a regular expression over names


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantised modules of a checkpoint. `groups`: (targets, format); targets and `ignore` are module names,
    regular expressions after `re:` that match from a name's start, or `Linear` for all linear modules."""

    groups: tuple[tuple[tuple[str, ...], WeightFormat], ...]
    ignore: tuple[str, ...]

    def format_of(self, *names: str, is_linear: bool = True) -> WeightFormat | None:
        """Returns the format of a module by the whole names that it may have, as `model.layers.0.mlp.up_proj`; None if
        it is not quantised. Names come before regular expressions, and these before `Linear`."""
        if any(_rank(target, name, is_linear) is not None for target in self.ignore for name in names):
            return None
        found = [
            (rank, index)
            for index, (targets, _) in enumerate(self.groups)
            for target in targets
            for name in names
            if (rank := _rank(target, name, is_linear)) is not None
        ]
        return self.groups[min(found)[1]][1] if found else None


def _rank(target: str, module: str, is_linear: bool) -> int | None:
    """Returns how exactly a target names a module, 0 being the most exact, or None if it does not."""
    if target == module:
        return 0
    if target.startswith(_PATTERN):
        return 1 if re.match(target.removeprefix(_PATTERN), module) else None
    return 2 if target == _LINEAR and is_linear else None


def parse_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Returns the quantisation of a model by its config.json, None if it has none. Raises ModelLoadError, which names
    what is not supported and what is."""
    # Checkpoints of the year 2024 call it `compression_config`.
    section = config.get("quantization_config") or config.get("compression_config")
    if not section:
        return None
    if not isinstance(section, dict):
        raise _refused(f"it is {section!r}, not an object")
    method = section.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(section)
    if method == "fp8":
        return _fp8(section)
    if method == "mxfp4":  # modules that it does not convert have other tensors, of which reading says that
        return Quantization(((_EXPERTS, MXFP4),), ())
    raise _refused(f"quant_method {method!r}")


def _compressed_tensors(section: Mapping[str, Any]) -> Quantization:
    for key, harmless in (("sparsity_config", "dense"), ("transform_config", None)):
        found = section.get(key)
        if found and not (isinstance(found, dict) and harmless is not None and found.get("format") == harmless):
            raise _refused(f"{key} {found!r}")
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refused(f"config_groups {groups!r}")
    parsed = tuple(_group(name, group, section.get("format")) for name, group in groups.items())
    return Quantization(parsed, _names(section, "ignore"))


def _group(name: str, group: Any, format_of_all: Any) -> tuple[tuple[str, ...], WeightFormat]:
    if not isinstance(group, dict):
        raise _refused(f"{name} {group!r}")
    packing = group.get("format") or format_of_all
    if packing not in _FORMATS:
        raise _refused(f"format {packing!r}")
    if group.get("output_activations"):
        raise _refused(f"output_activations of {name}")
    weights: Any = group.get("weights")
    scheme = _scheme(weights, f"weights of {name}")
    if weights.get("dynamic") or weights.get("strategy") not in ("tensor", "channel"):
        raise _refused(
            f"weights of {name} with strategy {weights.get('strategy')!r}, dynamic {weights.get('dynamic')!r}"
        )
    return _names(group, "targets"), scheme(_inputs(group.get("input_activations"), scheme, name))


def _inputs(inputs: Any, scheme: type[ScaledCodes], group: str) -> Inputs:
    if not inputs:
        return Inputs.KEPT
    what = f"input_activations of {group}"
    if _scheme(inputs, what) is not scheme:
        raise _refused(f"{what} of type {inputs['type']!r} with weights of another type")
    strategy, dynamic = inputs.get("strategy"), inputs.get("dynamic")
    if dynamic is True and strategy in ("token", "tensor"):
        return Inputs.PER_TOKEN  # also for `tensor`: a scale for all tokens would let requests of a batch differ
    if not dynamic and strategy == "tensor":
        return Inputs.STATIC
    raise _refused(f"{what} with strategy {strategy!r}, dynamic {dynamic!r}")


def _scheme(fields: Any, what: str) -> type[ScaledCodes]:
    """Returns the format of 8-bit symmetric weights or inputs."""
    if not isinstance(fields, dict):
        raise _refused(f"{what} {fields!r}")
    kind: Any
    kind, bits, symmetric = (fields.get(key) for key in ("type", "num_bits", "symmetric"))
    if kind not in _SCHEMES or bits != 8 or symmetric is not True:
        raise _refused(f"{what} of type {kind!r} with {bits!r} bits, symmetric {symmetric!r}")
    return _SCHEMES[kind]


def _fp8(section: Mapping[str, Any]) -> Quantization:
    if section.get("weight_block_size"):
        raise _refused(f"weight_block_size {section['weight_block_size']!r}")
    if section.get("fmt", "e4m3") != "e4m3":
        raise _refused(f"fmt {section['fmt']!r}")
    schemes = {"dynamic": Inputs.PER_TOKEN, "static": Inputs.STATIC}
    scheme = section.get("activation_scheme")
    if scheme not in schemes:
        raise _refused(f"activation_scheme {scheme!r}")
    ignore = (*_names(section, "ignored_layers"), *_names(section, "modules_to_not_convert"))
    # In this format the head is never quantised, whether the list has it or not.
    return Quantization((((_LINEAR,), Fp8(schemes[scheme])),), (*ignore, "lm_head"))


def _names(fields: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = fields.get(key) or []
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise _refused(f"{key} {names!r}")
    for name in names:
        if name.startswith(_PATTERN):
            try:
                re.compile(name.removeprefix(_PATTERN))
            except re.error as error:
                raise _refused(f"{key} has {name!r}, which is no regular expression ({error})") from None
    return tuple(names)


def _refused(what: str) -> ModelLoadError:
    return ModelLoadError(f"config.json: quantization_config: {what} cannot be served; {_SUPPORTED}")
