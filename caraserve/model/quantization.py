"""Which linear modules of a checkpoint are quantised and how, read from `quantization_config` of config.json. Pure.

Each method has a function here that turns its fields into formats of `formats/`, or refuses them by name. Only weights
count, and for fp8 and int8 how inputs are quantised; fields about how weights were found or are computed are not read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caraserve.errors import ModelLoadError
from caraserve.model.compressed_groups import NotRead, format_of_group, is_group
from caraserve.model.dtype import DTYPES, Code, Dtype
from caraserve.model.formats import WeightFormat
from caraserve.model.formats.awq import Awq
from caraserve.model.formats.bitsandbytes import EIGHT_BITS, TABLES, FourBits
from caraserve.model.formats.fp8 import Fp8
from caraserve.model.formats.gptq import Gptq
from caraserve.model.formats.mxfp4 import MXFP4
from caraserve.model.formats.scaled_codes import BlockCodes, Inputs
from caraserve.model.name_patterns import PatternError, name_pattern

_EXPERTS = (r"re:.*\.experts\.",)  # what `mxfp4` converts
_LINEAR, _PATTERN = "Linear", "re:"  # a class of modules; the prefix of a regular expression over names
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantised modules of a checkpoint. `groups`: (targets, format), None for modules that stay numbers; targets
    and `ignore` are module names, regular expressions after `re:` that match from a name's start, or `Linear` for all
    linear modules. `ignored_parts`: words of names, with the dots between them, of which one is enough."""

    groups: tuple[tuple[tuple[str, ...], WeightFormat | None], ...]
    ignore: tuple[str, ...]
    ignored_parts: tuple[str, ...] = ()

    def format_of(self, *names: str, is_linear: bool = True) -> WeightFormat | None:
        """Returns the format of a module by the whole names that it may have, as `model.layers.0.mlp.up_proj`; None if
        it is not quantised. Names come before regular expressions, and these before `Linear`."""
        if any(_rank(target, name, is_linear) is not None for target in self.ignore for name in names):
            return None
        if any(f".{part.strip('.')}." in f".{name}." for part in self.ignored_parts for name in names):
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
        try:
            return 1 if name_pattern(target.removeprefix(_PATTERN)).matches(module) else None
        except PatternError as error:
            raise ModelLoadError(f"config.json: quantization_config: {target!r:.200} {error}") from None
    return 2 if target == _LINEAR and is_linear else None


def parse_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Returns the quantisation of a model by its config.json, None if it has none. Raises ModelLoadError, which names
    what is not read and what is."""
    # Checkpoints of the year 2024 call it `compression_config`.
    section = config.get("quantization_config") or config.get("compression_config")
    if not section:
        return None
    try:
        if not isinstance(section, dict):
            raise NotRead(f"it is {section!r:.200}", "an object")
        method = section.get("quant_method")
        if not isinstance(method, str) or method not in _METHODS:
            raise NotRead(f"quant_method {method!r:.200}", ", ".join(_METHODS))
        return _METHODS[method](section, _dtype(config))
    except NotRead as error:
        raise ModelLoadError(f"config.json: quantization_config: {error}") from None


def _dtype(config: Mapping[str, Any]) -> Dtype:
    """Returns the type of weights before they were quantised; that of scales, where files keep it."""
    found = config.get("dtype") or config.get("torch_dtype")
    inner = config.get("text_config")
    if not found and isinstance(inner, dict):
        found = inner.get("dtype") or inner.get("torch_dtype")
    return DTYPES.get(str(found), Dtype.F32)


def _compressed_tensors(section: Mapping[str, Any], dtype: Dtype) -> Quantization:
    for key, harmless in (("sparsity_config", "dense"), ("transform_config", None)):
        found = section.get(key)
        if found and not (isinstance(found, dict) and harmless is not None and found.get("format") == harmless):
            raise NotRead(f"{key} {found!r:.200}", "none")
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise NotRead(f"config_groups {groups!r:.200}", "an object with groups")
    parsed = []
    for name, group in groups.items():
        form = format_of_group(name, group, section.get("format"), dtype)
        parsed.append((_names(group, "targets"), form))
    return Quantization(tuple(parsed), _names(section, "ignore"))


def _fp8(section: Mapping[str, Any], dtype: Dtype) -> Quantization:
    if section.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise NotRead(f"fmt {section['fmt']!r:.200}", "e4m3")
    schemes = {"dynamic": Inputs.PER_TOKEN, "static": Inputs.STATIC}
    scheme = section.get("activation_scheme")
    if not isinstance(scheme, str) or scheme not in schemes:
        raise NotRead(f"activation_scheme {scheme!r:.200}", "dynamic or static")
    ignore, parts = _names(section, "ignored_layers"), _strings(section, "modules_to_not_convert")
    form: WeightFormat = Fp8(schemes[scheme])
    blocks = section.get("weight_block_size")
    if blocks:
        if not isinstance(blocks, list) or len(blocks) != 2 or not all(map(is_group, blocks)) or scheme != "dynamic":
            raise NotRead(f"weight_block_size {blocks!r:.200}, activation_scheme {scheme}", "[128, 128] and dynamic")
        rows, group = blocks
        form = BlockCodes.of(Code.F8_E4M3, rows, group, ".weight_scale_inv")
    # In this format the head is never quantised, whether the list has it or not.
    return Quantization((((_LINEAR,), form),), (*ignore, _HEAD), parts)


def _mxfp4(section: Mapping[str, Any], dtype: Dtype) -> Quantization:
    # Modules that it does not convert have other tensors, of which reading says that.
    return Quantization(((_EXPERTS, MXFP4),), ())


def _gptq(section: Mapping[str, Any], dtype: Dtype) -> Quantization:
    for key in ("adapter", "rotation"):
        if section.get(key):
            raise NotRead(f"{key} {section[key]!r:.200}", "none")
    if section.get("is_marlin_format"):
        raise NotRead("is_marlin_format true", "weights as GPTQ stores them: convert them back, or quantise again")
    if section.get("pack_dtype", "int32") != "int32":
        raise NotRead(f"pack_dtype {section['pack_dtype']!r:.200}", "int32")
    groups: list[tuple[tuple[str, ...], WeightFormat | None]] = []
    dynamic = section.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise NotRead(f"dynamic {dynamic!r:.200}", "an object of patterns")
    for pattern, changes in dynamic.items():  # the first that matches counts
        target = _PATTERN + _checked_pattern("dynamic", pattern.removeprefix("+:").removeprefix("-:"))
        if pattern.startswith("-:"):
            groups.append(((target,), None))
        elif isinstance(changes, dict):
            groups.append(((target,), _gptq_format({**section, **changes})))
        else:
            raise NotRead(f"dynamic of {pattern!r:.200} {changes!r:.200}", "an object")
    groups.append(((_LINEAR,), _gptq_format(section)))
    head = () if section.get("lm_head") is True else (_HEAD,)
    return Quantization(tuple(groups), head, _strings(section, "modules_to_not_convert"))


def _gptq_format(section: Mapping[str, Any]) -> Gptq:
    steps = {"gptq": 1, "gptq_v2": 0}
    stored = section.get("checkpoint_format") or section.get("format") or "gptq"
    if not isinstance(stored, str) or stored not in steps:
        raise NotRead(f"checkpoint_format {stored!r:.200}", " or ".join(steps))
    bits = section.get("bits")
    if type(bits) is not int or bits not in (4, 8):
        raise NotRead(f"bits {bits!r:.200} of GPTQ", "4 or 8")
    return Gptq.of(
        bits,
        _group_size(section),
        symmetric=_flag(section, "sym", True),
        zero_step=steps[stored],
        has_order=_flag(section, "desc_act", False),
    )


def _awq(section: Mapping[str, Any], dtype: Dtype) -> Quantization:
    version = section.get("version") or section.get("checkpoint_format") or "gemm"
    wanted = {
        "version": (str(version).lower(), "gemm"),
        "bits": (section.get("bits", section.get("w_bit")), 4),
        "zero_point": (section.get("zero_point", True), True),
        "backend": (section.get("backend") or "autoawq", "autoawq"),
    }
    for key, (found, right) in wanted.items():
        if found != right:
            raise NotRead(f"{key} {found!r:.200} of AWQ", repr(right))
    size = section.get("group_size", section.get("q_group_size", 128))
    form = Awq.of(_group_size({"group_size": size}))
    return Quantization((((_LINEAR,), form),), (_HEAD,), _strings(section, "modules_to_not_convert"))


def _bitsandbytes(section: Mapping[str, Any], dtype: Dtype) -> Quantization:
    is_four, is_eight = (_flag(section, f"load_in_{bits}bit", False) for bits in (4, 8))
    if is_four == is_eight:
        raise NotRead(f"load_in_4bit {is_four}, load_in_8bit {is_eight}", "one of both true")
    if section.get("llm_int8_has_fp16_weight"):
        raise NotRead("llm_int8_has_fp16_weight true", "false")
    form: WeightFormat = EIGHT_BITS
    if is_four:
        table, storage = section.get("bnb_4bit_quant_type", "fp4"), section.get("bnb_4bit_quant_storage") or "uint8"
        if not isinstance(table, str) or table not in TABLES:
            raise NotRead(f"bnb_4bit_quant_type {table!r:.200}", " or ".join(TABLES))
        if storage != "uint8":
            raise NotRead(f"bnb_4bit_quant_storage {storage!r:.200}", "uint8")
        form = FourBits.of(table, dtype)
    # Without a list the library leaves the head as it is.
    skipped = _strings(section, "llm_int8_skip_modules") or (_HEAD,)
    return Quantization((((_LINEAR,), form),), (), skipped)


_METHODS: Mapping[str, Callable[[Mapping[str, Any], Dtype], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _group_size(section: Mapping[str, Any]) -> int:
    """Returns the inputs of a group, 0 for all."""
    size = section.get("group_size", 128)
    if size == -1:
        return 0
    if not is_group(size):
        raise NotRead(f"group_size {size!r:.200}", "-1 or a multiple of 16")
    return int(size)


def _flag(section: Mapping[str, Any], key: str, default: bool) -> bool:
    found = section.get(key, default)
    if not isinstance(found, bool):
        raise NotRead(f"{key} {found!r:.200}", "true or false")
    return found


def _names(fields: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = _strings(fields, key)
    for name in names:
        if name.startswith(_PATTERN):
            _checked_pattern(key, name.removeprefix(_PATTERN))
    return names


def _strings(fields: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = fields.get(key) or []
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise NotRead(f"{key} {names!r:.200}", "a list of names")
    return tuple(names)


def _checked_pattern(key: str, pattern: str) -> str:
    try:
        name_pattern(pattern)
    except PatternError as error:
        raise NotRead(f"{key} {_PATTERN + pattern!r:.200}, which {error},", "a regular expression") from None
    return pattern
