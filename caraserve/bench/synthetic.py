"""Writes models and adapters with random weights as Hugging Face and peft folders: benchmarks need no checkpoint."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import modules_of
from caraserve.model.families import plan_of
from caraserve.model.plan import DecoderPlan

WEIGHTS_NAME = "model.safetensors"
MODULES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)  # in the order of use
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_SAFETENSORS_NAME = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama-shaped decoder whose embeddings and head are separate matrices."""

    hidden: int
    layers: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int

    @property
    def parameters(self) -> int:
        """The number of parameters, without those of norms."""
        attention = 2 * self.hidden * self.hidden * (self.heads + self.kv_heads) // self.heads
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + 2 * self.vocab * self.hidden


SHAPES = {
    "10M": Shape(hidden=256, layers=6, intermediate=704, vocab=8192, heads=4, kv_heads=4),  # to try a benchmark itself
    "100M": Shape(hidden=640, layers=12, intermediate=1728, vocab=32000, heads=10, kv_heads=10),
    "160M": Shape(hidden=768, layers=12, intermediate=2048, vocab=50304, heads=12, kv_heads=12),
    "1B": Shape(hidden=2048, layers=22, intermediate=5632, vocab=32000, heads=32, kv_heads=4),
    "llama2-7b": Shape(hidden=4096, layers=32, intermediate=11008, vocab=32000, heads=32, kv_heads=32),
    "llama2-13b": Shape(hidden=5120, layers=40, intermediate=13824, vocab=32000, heads=40, kv_heads=40),
    "llama2-70b": Shape(hidden=8192, layers=80, intermediate=28672, vocab=32000, heads=64, kv_heads=8),
}


def adapter_bytes(plan: DecoderPlan, rank: int, targets: Sequence[str], dtype: str) -> int:
    """Returns the bytes of an adapter's matrices A and B over all layers."""
    return sum(int(np.prod(shape)) for _, shape in _adapter_shapes(plan, rank, targets)) * ITEMSIZE[dtype]


def llama_config(shape: Shape, max_position: int) -> dict[str, Any]:
    """Returns the architecture and sizes of a Llama-shaped model as in a checkpoint's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
    }


def shape_plan(shape: Shape, max_position: int) -> DecoderPlan:
    """Returns the specification of a Llama-shaped model that is not on disk."""
    return plan_of(llama_config(shape, max_position))


def write_model(
    folder: Path, shape: Shape, dtype: str, max_position: int, *, seed: int = 0, weights: bool = True
) -> DecoderPlan:
    """Writes config, random weights and a tokenizer to `folder`, as a Hugging Face checkpoint.

    Without `weights` it can only be served with `--load-format dummy`.
    """
    folder.mkdir(parents=True)
    config = llama_config(shape, max_position) | {
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": None,  # no answer ends before its length limit
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    _write_tokenizer(folder, shape.vocab)
    plan = plan_of(config)
    if weights:
        values = partial(_values, rng=np.random.default_rng(seed), dtype=dtype)
        _write_safetensors(folder / WEIGHTS_NAME, dict(_model_shapes(plan)), dtype, values)
    return plan


def write_repeating_weights(folder: Path, plan: DecoderPlan, dtype: str) -> None:
    """Writes weights made of a few random numbers over and over: several times as fast, for measuring loads."""
    some = _values("", (1024, 1024), np.random.default_rng(0), dtype)
    folder.mkdir(parents=True)
    _write_safetensors(
        folder / WEIGHTS_NAME, dict(_model_shapes(plan)), dtype, lambda name, shape: np.resize(some, shape)
    )


def write_adapters(
    folder: Path, plan: DecoderPlan, *, count: int, ranks: Sequence[int], targets: Sequence[str], dtype: str
) -> dict[str, Path]:
    """Writes `count` random peft adapters; adapter i has rank ranks[i % len(ranks)]. Returns their folders by name."""
    paths = {f"adapter-{index:02}": folder / f"adapter-{index:02}" for index in range(count)}

    def write(index: int, path: Path) -> None:
        rank = ranks[index % len(ranks)]
        path.mkdir(parents=True)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "dummy",
            "r": rank,
            "lora_alpha": 2 * rank,
            "target_modules": list(targets),
            "bias": "none",
        }
        (path / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        shapes = dict(_adapter_shapes(plan, rank, targets))
        values = partial(_values, rng=np.random.default_rng(1000 + index), dtype=dtype)
        _write_safetensors(path / "adapter_model.safetensors", shapes, dtype, values)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # drawing numbers leaves other threads alone
        list(pool.map(write, range(count), paths.values()))
    return paths


def _model_shapes(plan: DecoderPlan) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (plan.vocab_size, plan.hidden)
    yield "lm_head.weight", (plan.vocab_size, plan.hidden)
    yield "model.norm.weight", (plan.hidden,)
    for index, layer in enumerate(plan.layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{index}.{norm}.weight", (plan.hidden,)
        for linear in layer.linears:
            yield f"{linear.module}.weight", (linear.outputs, linear.inputs)


def _adapter_shapes(plan: DecoderPlan, rank: int, targets: Sequence[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for layer, index in modules_of(plan, targets):
        linear = plan.layers[layer].linears[index]
        yield f"base_model.model.{linear.module}.lora_A.weight", (rank, linear.inputs)
        yield f"base_model.model.{linear.module}.lora_B.weight", (linear.outputs, rank)


def _write_safetensors(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: str,
    values: Callable[[str, tuple[int, ...]], NDArray[np.generic]],
) -> None:
    """Writes tensors of the given shapes; `values(name, shape)` are their numbers in `dtype`.

    The safetensors library cannot: NumPy has no bfloat16 to pass it."""
    sizes = [int(np.prod(shape)) * ITEMSIZE[dtype] for shape in shapes.values()]
    offsets = np.cumsum([0, *sizes]).tolist()
    header = json.dumps(
        {
            name: {"dtype": _SAFETENSORS_NAME[dtype], "shape": shape, "data_offsets": span}
            for (name, shape), span in zip(shapes.items(), pairwise(offsets), strict=True)
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, shape in shapes.items():
            file.write(values(name, shape).data.cast("B"))


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator, dtype: str) -> NDArray[np.generic]:
    """Returns ones for norms, otherwise random values that keep activations near 1 and an adapter's part near 0.1."""
    if len(shape) == 1:
        values = np.ones(shape, np.float32)
    else:
        fan_in = 1 if "embed_tokens" in name else shape[1]
        std = (0.1 if "lora_B" in name else 1.0) / fan_in**0.5
        values = rng.standard_normal(shape, np.float32) * np.float32(std)
    if dtype != "bfloat16":
        return values.astype(dtype)
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def _write_tokenizer(folder: Path, vocab: int) -> None:
    """Writes a byte-level vocabulary of short words, in which every token id has text."""
    letters, digits = "abcdefghijklmnop", 4 if vocab <= 1 << 16 else 5
    words = ["<s>", "</s>", *_byte_alphabet()]
    while len(words) < vocab:
        number = len(words)
        words.append("Ġ" + "".join(letters[number >> shift & 15] for shift in range(4 * digits - 4, -1, -4)))
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": words[i], "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for i in (0, 1)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _byte_alphabet() -> list[str]:
    """Returns the 256 characters for bytes in a byte-level vocabulary; printable characters stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [256 + index for index in range(256 - len(printable))]
    return [chr(code) for code in (*printable, *moved)]
