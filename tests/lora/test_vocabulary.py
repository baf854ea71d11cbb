"""Tensors of the embedding and the head become the image's first and last bytes, and are refused where they cannot be
applied exactly."""

import dataclasses
import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.core.lora_layout import (
    AdapterSpec,
    HostAdapter,
    VocabularyChange,
    VocabularySpan,
    aligned_bytes,
    stored_a,
    stored_b,
    stored_columns,
)
from caraserve.errors import AdapterRejected
from caraserve.gpu.memory.padding import padded
from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.manifest import manifest_of, read_manifest
from caraserve.lora.peft import inspect_adapter, specify
from caraserve.lora.upload_stream import ArrivingImage
from caraserve.lora.writers import peft_adapter
from caraserve.model.dtype import Dtype
from caraserve.model.families import plan_of
from caraserve.model.safetensors_reader import TensorFile
from tests.lora.folders import FIELDS, RANK, SPEC, Tensors, read, tensors_for, write_adapter

VOCAB, HIDDEN = SPEC.vocab_size, SPEC.hidden
EMBED, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
ROWS = f"{EMBED}.token_adapter.trainable_tokens_delta"
TOKENS = [7, 0, 95]
TIED = plan_of(FIELDS | {"tie_word_embeddings": True})
BOTH = {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}


def random(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def lora() -> Tensors:
    """Returns LoRA of q_proj, the embedding and the head."""
    return tensors_for() | {
        f"{EMBED}.lora_embedding_A": random(RANK, VOCAB),
        f"{EMBED}.lora_embedding_B": random(HIDDEN, RANK),
        f"{HEAD}.lora_A.weight": random(RANK, HIDDEN),
        f"{HEAD}.lora_B.weight": random(VOCAB, RANK),
    }


def rows(count: int = len(TOKENS)) -> Tensors:
    """Returns LoRA of q_proj, and rows of the embedding."""
    return tensors_for() | {ROWS: random(count, HIDDEN)}


def span_of(adapter: HostAdapter, side: str) -> VocabularySpan:
    return next(span for span in adapter.spec.vocabulary if span.change.side == side)


def test_the_image_begins_with_the_embedding_and_ends_with_the_head(tmp_path: Path) -> None:
    tensors = lora()
    adapter, plain = (
        read(write_adapter(tmp_path / "both", BOTH, tensors), SPEC, 0xFF),
        inspect_adapter(write_adapter(tmp_path / "plain"), SPEC),
    )
    spec, (embedding, head) = adapter.spec, adapter.spec.vocabulary
    before, after = spec.spans[0].a_offset, spec.layer_ends[-1]
    assert (embedding.a_offset, before) == (0, plain.spans[0].a_offset + spec.layer_ends[0] - plain.layer_ends[0])
    assert head.a_offset - before == plain.layer_ends[-1]
    assert after == spec.num_bytes > head.b_offset
    assert spec.targets == ("q_proj", "embed_tokens", "lm_head")
    columns = stored_columns(adapter.data, embedding, VOCAB, spec.dtype)
    assert (columns[:, :RANK] == tensors[f"{EMBED}.lora_embedding_A"].T).all()
    assert not columns[:, RANK:].any()
    for span, name, outputs in (
        (embedding, f"{EMBED}.lora_embedding_B", HIDDEN),
        (head, f"{HEAD}.lora_B.weight", VOCAB),
    ):
        panels = stored_b(adapter.data, span, outputs, spec.dtype)
        b = panels.transpose(0, 2, 1).reshape(-1, span.padded_rank)
        assert (b[:outputs, :RANK] == tensors[name]).all()
        assert not b[outputs:].any()
    a = stored_a(adapter.data, head, HIDDEN, spec.dtype)
    assert (a[:RANK, :HIDDEN] == tensors[f"{HEAD}.lora_A.weight"]).all()


@pytest.mark.parametrize("tokens", [TOKENS, {"embed_tokens": TOKENS}], ids=["list", "by module"])
def test_trained_tokens_change_the_head_too_if_it_is_tied(tmp_path: Path, tokens: Any) -> None:
    folder = write_adapter(tmp_path, {"trainable_token_indices": tokens}, rows())
    tied, untied = read(folder, TIED), read(folder, SPEC)
    assert [span.change.side for span in tied.spec.vocabulary] == ["embedding", "head"]
    assert [span.change.side for span in untied.spec.vocabulary] == ["embedding"]
    for adapter in (tied, untied):
        for span in adapter.spec.vocabulary:
            assert span.change.tokens == tuple(TOKENS)
            stored = stored_a(adapter.data, span, HIDDEN, adapter.spec.dtype)
            assert (stored[: len(TOKENS), :HIDDEN] == rows()[ROWS]).all()


@pytest.mark.parametrize("kind", ["lora", "rows"])
def test_an_image_can_be_read_while_its_tensors_arrive(tmp_path: Path, kind: str) -> None:
    folder = write_adapter(
        tmp_path, *((BOTH, lora()) if kind == "lora" else ({"trainable_token_indices": TOKENS}, rows()))
    )
    path, whole = folder / TENSORS_NAME, read(folder, TIED)
    content = path.read_bytes()
    (header,) = struct.unpack("<Q", content[:8])
    path.write_bytes(content[: 8 + header] + bytes(len(content) - 8 - header))
    with TensorFile(path) as file, path.open("r+b") as growing:
        layout = specify(peft_adapter(folder, file, TIED), TIED, is_arriving=True)
        arriving = ArrivingImage(layout, aligned_bytes(layout.spec.num_bytes))
        for num_bytes in range(0, len(content) + 1000, 1000):
            os.pwrite(growing.fileno(), content[:num_bytes], 0)
            arriving.advance(num_bytes)
            there = layout.spec.layer_ends[arriving.layers - 1] if arriving.layers else 0
            assert (arriving.so_far().data[:there] == whole.data[:there]).all()
        assert arriving.finished().spec == whole.spec


@pytest.mark.parametrize(
    ("changes", "tensors", "why"),
    [
        (BOTH, {f"{HEAD}.lora_B.weight": None}, f"tensor {HEAD}.lora_A.weight has no lora_B beside it"),
        (BOTH, {f"{EMBED}.lora_embedding_A": None}, "has no lora_embedding_A beside it"),
        (BOTH, {f"{HEAD}.lora_B.weight": random(VOCAB + 1, RANK)}, f"rank {RANK} on this base model needs [96,"),
        (BOTH, {f"{EMBED}.lora_embedding_A": random(VOCAB, RANK)}, f"needs [{RANK}, 96]"),
        (BOTH, {f"{EMBED}.lora_embedding_B": np.full((HIDDEN, RANK), np.inf, np.float32)}, "are not finite"),
        (BOTH, {f"{HEAD}.lora_B.weight": np.full((VOCAB, RANK), 1e18, np.float32)}, "their product may reach"),
        ({}, {}, "adapter_config.json does not target this module"),
        (BOTH | {"layers_to_transform": [0, 1]}, {}, "adapter_config.json does not target this module"),
        (BOTH | {"alora_invocation_tokens": [1]}, {}, "activated LoRA of the embedding or the head"),
        (BOTH, {f"{HEAD}.lora_magnitude_vector": random(VOCAB)}, "is not LoRA A or B of one of"),
        (BOTH, {f"{HEAD}.lora_embedding_A": random(RANK, VOCAB)}, "is not LoRA A or B of one of"),
        (BOTH, {f"{HEAD}.lora_A.other.weight": random(RANK, HIDDEN)}, "are the same module's"),
        (BOTH, {f"{HEAD}.weight": random(VOCAB, HIDDEN)}, "is not LoRA A or B of one of"),  # without a base model
    ],
)  # fmt: skip
def test_lora_that_cannot_be_applied_is_named(
    tmp_path: Path, changes: dict[str, Any], tensors: dict[str, Any], why: str
) -> None:
    made = {name: values for name, values in (lora() | tensors).items() if values is not None}
    with pytest.raises(AdapterRejected) as caught:
        inspect_adapter(write_adapter(tmp_path, changes, made), SPEC)
    assert why in caught.value.message


@pytest.mark.parametrize(
    ("indices", "tensors", "why"),
    [
        ([7, 0], rows(), "has shape [3, 64]; trainable_token_indices on this base model need [2, 64]"),
        ([7, 0, 96], rows(), "has 96; the base model has the tokens 0 to 95"),
        ([7, 0, -1], rows(), "has -1"),
        ([7, 7, 0], rows(), "has a token twice"),
        ([7, 0, True], rows(), "a list of tokens of embed_tokens is needed"),
        ({"lm_head": TOKENS}, rows(), "a list of tokens of embed_tokens is needed"),
        ("all", rows(), "a list of tokens of embed_tokens is needed"),
        ([], rows(), "has 0 tokens"),
        (list(range(257)), rows(257), "has 257 tokens of embed_tokens; 1 to 256 are supported"),
        (TOKENS, tensors_for(), "is set, but adapter_model.safetensors has no trainable_tokens_delta"),
        (TOKENS, rows() | lora(), "embed_tokens has LoRA and replaced rows; only one of the two is supported"),
        (TOKENS, {name.replace(EMBED, HEAD): each for name, each in rows().items()}, "a list of tokens of lm_head"),
        ({"lm_head": TOKENS}, {name.replace(EMBED, HEAD): each for name, each in rows().items()}, "the embedding's"),
    ],
)
def test_rows_that_cannot_be_applied_are_named(tmp_path: Path, indices: Any, tensors: Tensors, why: str) -> None:
    changes = {"trainable_token_indices": indices} | (BOTH if f"{EMBED}.lora_embedding_A" in tensors else {})
    with pytest.raises(AdapterRejected) as caught:
        inspect_adapter(write_adapter(tmp_path, changes, tensors), TIED)
    assert why in caught.value.message


# --- descriptions ---

CHANGES = (VocabularyChange("embedding", tokens=(5, 3)), VocabularyChange("head", 13, 0.5))


def described(changes: tuple[VocabularyChange, ...] = CHANGES) -> AdapterSpec:
    spec = AdapterSpec.of(SPEC, Dtype.BF16, {(0, 0): (8, 1.0)}, vocabulary=changes)
    return dataclasses.replace(spec, chunks=(bytes(32),), digest="")


def test_a_manifest_describes_changes_of_the_vocabulary() -> None:
    spec = described()
    body = manifest_of(spec)
    digest = hashlib.sha256(body).hexdigest()
    assert read_manifest(body, digest, SPEC) == dataclasses.replace(spec, digest=digest)


@pytest.mark.parametrize(
    "change",
    [
        ["middle", 4, 1.0, []],
        ["head", 0, 1.0, []],
        ["head", 4, 1.0, [1]],
        ["head", 513, 1.0, []],
        ["head", 4, 1e999, []],
        ["head", 0, 1.0, [VOCAB]],
        ["head", 0, 1.0, [-1]],
        ["head", 0, 1.0, [1, 1]],
        ["head", 0, 1.0, list(range(257))],
        ["head", 0, 1.0, "text"],
        ["head", 4],
    ],
)
def test_a_manifest_with_other_changes_is_refused(change: list[Any]) -> None:
    """Above all with tokens that the base model does not have: kernels write to their logits."""
    written = json.loads(manifest_of(described()))
    written[-1]["vocabulary"] = [change]
    body = json.dumps(written).encode()
    with pytest.raises(AdapterRejected):
        read_manifest(body, hashlib.sha256(body).hexdigest(), SPEC)


def test_a_manifest_of_an_activated_lora_with_changes_is_refused() -> None:
    """Requests of the base model would reuse KV of tokens whose embeddings are changed."""
    for others in ({"vocabulary": [["embedding", 0, 1.0, [1]]]}, {"vectors": True}):
        body = json.dumps([*json.loads(manifest_of(described()))[:4], others | {"invocation": [1]}]).encode()
        with pytest.raises(AdapterRejected, match="activated LoRA with vocabulary or vectors"):
            read_manifest(body, hashlib.sha256(body).hexdigest(), SPEC)


def test_two_changes_of_one_side_are_refused() -> None:
    written = json.loads(manifest_of(described()))
    written[-1]["vocabulary"] *= 2
    body = json.dumps(written).encode()
    with pytest.raises(AdapterRejected, match="vocabulary"):
        read_manifest(body, hashlib.sha256(body).hexdigest(), SPEC)


def test_the_padded_baseline_refuses_them() -> None:
    with pytest.raises(AdapterRejected, match="the embedding or the head"):
        padded(described(), SPEC, 64)
