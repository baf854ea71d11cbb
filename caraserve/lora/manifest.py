"""The manifest of an adapter: a description of all its bytes, whose hash is the adapter's digest. No I/O.

    digest = sha256(manifest),   manifest = dtype, modules with rank and scale, sha256 of each chunk of the image,
                                            and, if there are any, invocation tokens, changes of the vocabulary, that
                                            modules have vectors, and the score head

The image is laid out as in `core/lora_layout.py`, the same on every instance. A manifest from another instance holds no
offsets, because they follow from the modules. Chunks follow the layers, so an image can be verified chunk by chunk
while it is downloaded, from its first layer on, from any number of instances.
"""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from caraserve.core.adapter_rules import are_invocation_tokens
from caraserve.core.lora_layout import MAX_RANK, MAX_ROWS, AdapterSpec, Module, RankAndScale, VocabularyChange
from caraserve.core.score_head import (
    ACTIVATIONS,
    MAX_CLASS_CHARACTERS,
    MAX_CLASSES,
    MAX_HEAD_BYTES,
    MAX_HEAD_WEIGHT,
    ScoreHead,
)
from caraserve.errors import AdapterRejected
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.plan import DecoderPlan
from caraserve.model.vocabulary import SIDES
from caraserve.util.text import is_text

MAX_MANIFEST_BYTES = 4 << 20

_MOST_SHOWN = 200  # characters of a message
_FORMAT = 1  # changes with the layout of images
_LEAST_CHUNK_BYTES, _MOST_CHUNK_BYTES = 256 << 10, 1 << 20


def chunk_ends(layer_ends: Sequence[int]) -> list[int]:
    """Returns the offsets at which an image's chunks end. A chunk has at most 1 MiB and, except for the last, at least
    256 KiB. Chunks end with layers where layers are not larger than that."""
    ends: list[int] = []
    start = 0
    for end in layer_ends:
        while end - start > _MOST_CHUNK_BYTES:
            start += _MOST_CHUNK_BYTES
            ends.append(start)
        if end - start >= _LEAST_CHUNK_BYTES or (end > start and end == layer_ends[-1]):
            ends.append(end)
            start = end
    return ends


class ChunkHasher:
    """Computes the hashes of an image's chunks from its bytes, given in order in pieces of any size."""

    def __init__(self, layer_ends: Sequence[int]) -> None:
        self.hashes: list[bytes] = []
        self._ends = chunk_ends(layer_ends)
        self._at = 0
        self._hash = hashlib.sha256()

    def update(self, data: memoryview) -> None:
        """Adds the next bytes of the image."""
        while data:
            room = self._ends[len(self.hashes)] - self._at
            self._hash.update(data[:room])
            self._at += min(room, len(data))
            if len(data) >= room:
                self.hashes.append(self._hash.digest())
                self._hash = hashlib.sha256()
            data = data[room:]


def identified(spec: AdapterSpec, hashes: Sequence[bytes]) -> AdapterSpec:
    """Returns `spec` with the hashes of its chunks, and the digest that follows from them."""
    spec = replace(spec, chunks=tuple(hashes))
    return replace(spec, digest=hashlib.sha256(manifest_of(spec)).hexdigest())


def manifest_of(spec: AdapterSpec) -> bytes:
    """Returns an adapter's manifest as JSON. Equal adapters have equal manifests."""
    modules = list(dict.fromkeys((*span.module, span.rank, span.scale) for span in spec.spans))
    chunks = [one.hex() for one in spec.chunks]
    changes = [(one.change.side, one.change.rank, one.change.scale, one.change.tokens) for one in spec.vocabulary]
    head = [] if spec.head is None else _head_fields(spec.head)
    more = {"invocation": spec.invocation, "vocabulary": changes, "vectors": spec.has_vectors, "head": head}
    others = [kept] if (kept := {name: value for name, value in more.items() if value}) else []
    return json.dumps([_FORMAT, spec.dtype.value, modules, chunks, *others], separators=(",", ":")).encode()


def _head_fields(head: ScoreHead) -> list[Any]:
    return [head.classes, head.activation, head.dtype.value, base64.b64encode(head.data).decode()]


def _read_head(fields: Any, plan: DecoderPlan) -> ScoreHead:
    """Returns the score head in a manifest. Raises ValueError."""
    classes, activation, dtype, data = fields
    head = ScoreHead(tuple(classes), activation, Dtype(dtype), base64.b64decode(data, validate=True))
    are_names = all(isinstance(name, str) and len(name) <= MAX_CLASS_CHARACTERS and is_text(name) for name in classes)
    size = len(head.classes) * plan.hidden * head.dtype.itemsize
    if not are_names or not 0 < len(head.classes) <= MAX_CLASSES or activation not in ACTIVATIONS:
        raise ValueError("head")
    if len(head.data) != size or not 0 < size <= MAX_HEAD_BYTES:
        raise ValueError("head")
    weights = to_float32(np.frombuffer(head.data, head.dtype.storage), head.dtype)
    if not np.abs(weights).max() <= MAX_HEAD_WEIGHT:  # nor NaN
        raise ValueError("weights of the head")
    return head


def read_manifest(body: bytes, digest: str, plan: DecoderPlan) -> AdapterSpec:
    """Returns the adapter that a manifest describes. Raises AdapterRejected if its hash is not `digest`, or if the
    adapter does not fit `model`."""
    if hashlib.sha256(body).hexdigest() != digest:
        raise AdapterRejected(f"adapter {digest[:12]}: what was read is not its manifest")

    try:
        written, dtype, listed, chunks, *others = json.loads(body)
        if written != _FORMAT:
            raise ValueError(f"format {written}")
        modules = dict(_module(value, plan) for value in listed)
        invocation, vocabulary, has_vectors, head = _others(others, plan)
        if not (modules or vocabulary) or len(modules) != len(listed):
            raise ValueError("modules")
        spec = AdapterSpec.of(plan, Dtype(dtype), modules, digest, invocation, vocabulary, has_vectors=has_vectors)
        hashes = tuple(bytes.fromhex(one) for one in chunks)
        if len(hashes) != len(chunk_ends(spec.layer_ends)) or any(len(one) != 32 for one in hashes):
            raise ValueError("chunks")
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        why = ascii(str(error))[1:-1][:_MOST_SHOWN]  # which may have text of another instance
        raise AdapterRejected(f"adapter {digest[:12]} is not for this base model or this version: {why}") from None
    return replace(spec, chunks=hashes, head=head)


def _others(
    written: list[Any], plan: DecoderPlan
) -> tuple[tuple[int, ...], list[VocabularyChange], bool, ScoreHead | None]:
    """Returns the invocation tokens, the changes of the vocabulary, whether modules have vectors, and the score
    head."""
    if not written:
        return (), [], False, None
    (others,) = written
    if not isinstance(others, dict):
        raise ValueError(f"others {others}")
    tokens, listed = others.get("invocation", []), others.get("vocabulary", [])
    if ("invocation" in others and not are_invocation_tokens(tokens)) or others.get("vectors", True) is not True:
        raise ValueError(f"invocation {tokens} or vectors {others.get('vectors')}")
    if not others.keys() <= {"invocation", "vocabulary", "vectors", "head"}:
        raise ValueError(f"fields {list(others)}")
    changes = [_vocabulary_change(value, plan) for value in listed]
    if len({change.side for change in changes}) != len(changes):
        raise ValueError("vocabulary")
    head = _read_head(others["head"], plan) if "head" in others else None
    # As of folders: tokens before the invocation have KV that requests of the base model reuse.
    if tokens and (changes or "vectors" in others):
        raise ValueError("activated LoRA with vocabulary or vectors")
    if plan.has_unit_head_rows and any(change.side == "head" for change in changes):
        raise ValueError("a head that cannot be changed")
    return tuple(tokens), changes, "vectors" in others, head


def _vocabulary_change(value: Any, plan: DecoderPlan) -> VocabularyChange:
    side, rank, scale, tokens = value
    if not (
        side in SIDES
        and type(rank) is int
        and (0 < rank <= MAX_RANK if not tokens else rank == 0)
        and math.isfinite(scale)
        and len(tokens) == len(set(tokens)) <= MAX_ROWS
        and all(type(token) is int and 0 <= token < plan.vocab_size for token in tokens)
    ):
        raise ValueError(f"vocabulary {value}")
    return VocabularyChange(side, rank, float(scale), tuple(tokens))


def _module(value: Any, plan: DecoderPlan) -> tuple[Module, RankAndScale]:
    layer, linear, rank, scale = value
    if not (
        all(type(number) is int for number in (layer, linear, rank))
        and 0 <= layer < len(plan.layers)
        and 0 <= linear < len(plan.layers[layer].linears)
        and 0 < rank <= MAX_RANK
        and math.isfinite(scale)
    ):
        raise ValueError(f"module {value}")
    return (layer, linear), (rank, float(scale))
