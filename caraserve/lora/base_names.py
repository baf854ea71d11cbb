"""Compares the name of the base model that an adapter was trained on with the names of the one that is served. No I/O.

Names are compared without organisation, case and marks of quantisation. A name that says nothing, such as `model` or
the path of another machine's folder, is neither the same nor another one.
"""

import re
from collections.abc import Iterable
from enum import Enum
from functools import lru_cache

# As in models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f, the folder of a hub's cache.
_CACHED = re.compile(r"(?:^|/)models--(?P<name>[^/]+)(?:/|$)")
_PATH = re.compile(r"[./~]|[A-Za-z]:")  # how the path of a folder begins; a hub's name has one slash at most
# As at the end of Llama-3.2-1B-unsloth-bnb-4bit, Qwen2.5-7B-GPTQ-Int4, Llama-3.1-8B-quantized.w4a16, Qwen3-8B-FP8.
_QUANTISED = re.compile(
    r"[-_.](?:unsloth|bnb|[48]-?bits?|gptq|awq|int[48]|fp8|nf4|nvfp4|mxfp4|mxfp8|gguf|quantized|dynamic|w4a16|w8a8|w8a16)$"
)
_BITS = re.compile(r"[48](?=-?bit)|(?<=int)[48]|(?<=w)[48](?=a)")
# The mark of a method says more than that of numbers.
_METHOD, _NUMBERS = re.compile(r"bnb|gptq|awq"), re.compile(r"fp8|nf4|nvfp4|mxfp4")
_OLD_PREFIX = re.compile(r"^meta-(?=llama)")  # Meta-Llama-3.1-8B was renamed Llama-3.1-8B
_SAYS_NOTHING = re.compile(
    r"|\.+|dummy|base|(?:base|my|the|final|merged|full|local)?[-_]?(?:model|checkpoint|output|weights|snapshot|merged)s?"
    r"|(?:checkpoint|step|epoch|tmp)[-_]?[a-z0-9_]*|[0-9a-f]{7,64}"
)


class Likeness(Enum):
    """How the base model that an adapter was trained on is like the one that is served."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"


@lru_cache(1 << 12)
def _last_part(name: str) -> str:
    """Returns a name without organisation and folders, in lower case."""
    name = name.strip().replace("\\", "/").rstrip("/")
    if (cached := _CACHED.search(name)) is not None:
        name = cached["name"].replace("--", "/")
    return _OLD_PREFIX.sub("", name.rpartition("/")[2].lower())


def _plain(name: str) -> str:
    """Returns the last part of a name without marks of quantisation."""
    plain = _last_part(name)
    while shorter := _QUANTISED.sub("", plain):
        if shorter == plain:
            break
        plain = shorter
    return plain


def is_quantised(name: str) -> bool:
    """Returns whether a name is that of a model whose weights are quantised."""
    return _plain(name) != _last_part(name)


def is_in(name: str, formats: str) -> bool:
    """Returns whether the marks of a name are those of a format that weights are in. `formats`: names of such, as of
    `DecoderPlan.format_names`."""
    marks, formats = _last_part(name).removeprefix(_plain(name)), formats.lower()
    found = _BITS.search(marks)
    bits = found[0] if found else ""
    if method := _METHOD.search(marks):
        word = method[0].replace("bnb", "bitsandbytes")
        return (f"{bits}-bit {word}" if bits else word) in formats
    return any(word in formats for word in (*_NUMBERS.findall(marks), *([f"int{bits}"] if bits else [])))


def names_of_base(names: Iterable[str]) -> tuple[str, ...]:
    """Returns those of a base model's names by which an adapter's can be compared."""
    return tuple(dict.fromkeys(plain for name in names if not _SAYS_NOTHING.fullmatch(plain := _plain(name))))


@lru_cache(1 << 12)
def likeness(trained_on: str, served: tuple[str, ...]) -> Likeness:
    """Compares a name with those of `names_of_base`."""
    plain = _plain(trained_on)
    if plain in served:
        return Likeness.SAME
    is_path = _CACHED.search(trained_on) is None and (_PATH.match(trained_on) or trained_on.strip("/").count("/") > 1)
    if not served or is_path or "\\" in trained_on or _SAYS_NOTHING.fullmatch(plain):
        return Likeness.UNKNOWN
    return Likeness.OTHER
