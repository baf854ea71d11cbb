"""Manifests: equal adapters have equal digests, and an image can be verified in pieces of any size."""

import dataclasses
import hashlib
import json
from itertools import pairwise
from typing import Any

import pytest

from caraserve.errors import AdapterRejected
from caraserve.lora.manifest import ChunkHasher, chunk_ends, identified, manifest_of, read_manifest
from caraserve.model.dtype import Dtype
from tests.cluster.images import MODEL, image
from tests.lora.folders import SPEC

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("layer_ends", "ends"),
    [
        ([300 * KIB, 600 * KIB], [300 * KIB, 600 * KIB]),
        ([100 * KIB, 200 * KIB, 300 * KIB, 400 * KIB], [300 * KIB, 400 * KIB]),
        ([2 * MIB + 1], [MIB, 2 * MIB, 2 * MIB + 1]),
        ([0, 0, 64, 64], [64]),
        ([300 * KIB, 300 * KIB, 300 * KIB], [300 * KIB]),
        ([MIB, 3 * MIB], [MIB, 2 * MIB, 3 * MIB]),
    ],
)
def test_chunks_follow_layers_that_are_neither_tiny_nor_huge(layer_ends: list[int], ends: list[int]) -> None:
    assert chunk_ends(layer_ends) == ends


@pytest.mark.parametrize("piece", [1000, 300 * KIB, 5 * MIB])
def test_hashes_are_those_of_the_chunks_for_pieces_of_any_size(piece: int) -> None:
    one = image(rank=16)
    hasher = ChunkHasher(one.spec.layer_ends)
    for at in range(0, one.spec.num_bytes, piece):
        hasher.update(one.data[at : at + piece].data)
    starts = (0, *chunk_ends(one.spec.layer_ends))
    right = [hashlib.sha256(one.data[start:end]).digest() for start, end in pairwise(starts)]
    assert hasher.hashes == right


def test_a_manifest_describes_all_of_an_adapter_except_its_bytes() -> None:
    spec = image(rank=16).spec
    assert read_manifest(manifest_of(spec), spec.digest, MODEL) == spec
    activated = identified(dataclasses.replace(spec, invocation=(5, 6)), spec.chunks)
    assert read_manifest(manifest_of(activated), activated.digest, MODEL) == activated
    assert activated.digest != spec.digest


@pytest.mark.parametrize("written", [[], [-1], [1.0], [True], "text", [1] * 257, None, 5])
def test_invocation_tokens_that_are_none_are_refused(written: Any) -> None:
    body = json.dumps([*json.loads(manifest_of(image().spec)), {"invocation": written}]).encode()
    with pytest.raises(AdapterRejected, match="invocation"):
        read_manifest(body, hashlib.sha256(body).hexdigest(), MODEL)


def test_other_bytes_have_another_digest() -> None:
    assert image(seed=1).spec.digest != image(seed=2).spec.digest
    assert image(seed=1).spec == image(seed=1).spec


def test_a_manifest_with_another_digest_is_refused() -> None:
    spec = image().spec
    with pytest.raises(AdapterRejected, match="not its manifest"):
        read_manifest(manifest_of(spec) + b" ", spec.digest, MODEL)


GOOD = json.loads(manifest_of(image().spec))


def but(index: int, value: Any) -> list[Any]:
    return [*GOOD[:index], value, *GOOD[index + 1 :]]


HOSTILE: dict[str, Any] = {
    "no list": {},
    "too short": GOOD[:3],
    "another version": but(0, 2),
    "a dtype that is none": but(1, 7),
    "a layer too far": but(2, [[len(MODEL.layers), 0, 8, 1.0]]),
    "a layer too far, of no bytes": [*GOOD[:2], [[0, 0, 8, 1.0], [len(MODEL.layers), 0, 8, 1.0]], GOOD[3][:1]],
    "a layer before the first": but(2, [[-1, 0, 8, 1.0]]),
    "a site that is none": but(2, [[0, 7, 8, 1.0]]),
    "a site from the end": but(2, [[0, -1, 8, 1.0]]),
    "a module twice": but(2, [*GOOD[2], GOOD[2][0]]),
    "no modules": but(2, []),
    "nothing": [*GOOD[:2], [], []],
    "no rank": but(2, [[0, 0, 0, 1.0]]),
    "a rank past all": but(2, [[0, 0, 1 << 40, 1.0]]),
    "a rank that is none": but(2, [[0, 0, True, 1.0]]),
    "a scale that is none": but(2, [[0, 0, 8, "1"]]),
    "an endless scale": but(2, [[0, 0, 8, float("inf")]]),
    "a scale of 400 digits": but(2, [[0, 0, 8, 10**400]]),
    "a layer of 400 digits": but(2, [[10**400, 0, 8, 1.0]]),
    "a chunk missing": but(3, GOOD[3][:-1]),
    "a chunk too many": but(3, [*GOOD[3], GOOD[3][0]]),
    "a short hash": but(3, [GOOD[3][0][:-2], *GOOD[3][1:]]),
    "no hash": but(3, ["?", *GOOD[3][1:]]),
    "vectors that are none": [*GOOD, {"vectors": False}],
    "a field of tomorrow": [*GOOD, {"vectors": True, "more": 1}],
    "a version that cannot be written": but(0, "\ud800"),
    "a field without end": [*GOOD, {"x" * 100_000: 1}],
    "deep": json.loads("[" * 900 + "]" * 900),
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_an_invalid_manifest_with_the_right_digest_is_refused(value: Any) -> None:
    body = json.dumps(value).encode()
    with pytest.raises(AdapterRejected, match="not for this base model") as caught:
        read_manifest(body, hashlib.sha256(body).hexdigest(), MODEL)
    assert len(caught.value.message.encode()) < 400  # and it can be written


def test_a_manifest_of_another_base_model_is_refused() -> None:
    spec = image().spec
    with pytest.raises(AdapterRejected, match="not for this base model"):
        read_manifest(manifest_of(spec), spec.digest, SPEC)


def test_the_dtype_is_part_of_the_digest() -> None:
    spec = image().spec
    assert manifest_of(dataclasses.replace(spec, dtype=Dtype.BF16)) != manifest_of(spec)
