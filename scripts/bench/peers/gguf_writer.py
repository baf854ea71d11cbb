"""Writes Llama-shaped models and their adapters as GGUF files, from Hugging Face and PEFT folders."""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.peft_fields import CONFIG_NAME
from caraserve.model.safetensors_reader import TensorFile

_ALIGNMENT = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # types of metadata
_TENSOR_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.uint16): 30}  # the last: bfloat16's bits
_FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}  # of `general.file_type`
_NORMAL, _CONTROL = 1, 3  # types of tokens
_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}


def write_model(folder: Path, path: Path) -> None:
    """Writes the model of a folder with its byte-level vocabulary, in the dtype of the folder's weights."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    metadata = {
        "general.architecture": "llama",
        "general.name": folder.name,
        "general.file_type": _FILE_TYPES[config["dtype"]],
        "llama.vocab_size": config["vocab_size"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": float(config.get("rope_theta", 10000.0)),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL if name in ("<s>", "</s>") else _NORMAL for name in tokens],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    with TensorFile(folder / "model.safetensors") as file:
        tensors = {
            _name(name.removesuffix(".weight")) + ".weight": _stored(file.raw(name), _order(name, config))
            for name in file.names
        }
    _write(path, metadata, tensors)


def write_adapter(folder: Path, model: Path, path: Path) -> None:
    """Writes the adapter of a PEFT folder, which is one of the model in the folder `model`."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    adapter = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    metadata = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(adapter["lora_alpha"]),
    }
    tensors = {}
    with TensorFile(folder / TENSORS_NAME) as file:
        for name in file.names:
            module, _, half = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
            rows = _order(module, config) if half == "B" else None
            tensors[f"{_name(module)}.weight.lora_{half.lower()}"] = _stored(file.raw(name), rows)
    _write(path, metadata, tensors)


def _name(module: str) -> str:
    if module in _OUTSIDE:
        return _OUTSIDE[module]
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{_MODULES[inner]}"


def _order(module: str, config: Mapping[str, Any]) -> NDArray[np.int64] | None:
    """Returns the order of a module's outputs: in GGUF, neighbours in q and k are rotated together."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, count in heads.items():
        if part in module:
            head_size = config["hidden_size"] // config["num_attention_heads"]
            rows = np.arange(config[count] * head_size).reshape(config[count], 2, head_size // 2)
            return rows.transpose(0, 2, 1).reshape(-1)
    return None


def _stored(values: NDArray[Any], order: NDArray[np.int64] | None) -> NDArray[Any]:
    if values.ndim == 1:  # norms are always in fp32
        is_bfloat16 = values.dtype == np.uint16
        return (values.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else values.astype(np.float32)
    return values if order is None else np.ascontiguousarray(values[order])


def _write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
    """Writes a whole file or none."""
    head = [b"GGUF", struct.pack("<I2Q", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, content = _value(value)
        head += [_text(key), struct.pack("<I", kind), content]
    start = 0
    for name, values in tensors.items():
        shape = values.shape[::-1]
        head += [_text(name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape)]
        head.append(struct.pack("<IQ", _TENSOR_TYPES[values.dtype], start))
        start += values.nbytes + -values.nbytes % _ALIGNMENT
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("wb") as file:
        file.writelines(head)
        file.write(bytes(-file.tell() % _ALIGNMENT))
        for values in tensors.values():
            file.write(values.data.cast("B"))
            file.write(bytes(-values.nbytes % _ALIGNMENT))
    unfinished.rename(path)


def _text(value: str) -> bytes:
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> tuple[int, bytes]:
    """Returns the type and the bytes of a value of the metadata; an empty list is one of strings."""
    simple: tuple[tuple[type, int, Callable[[Any], bytes]], ...] = (
        (bool, _BOOL, lambda one: bytes([one])),
        (int, _U32, lambda one: struct.pack("<I", one)),
        (float, _F32, lambda one: struct.pack("<f", one)),
        (str, _STRING, _text),
    )
    for type_, kind, pack in simple:
        if isinstance(value, type_):
            return kind, pack(value)
    is_numbers = bool(value) and isinstance(value[0], int)
    parts: Iterator[bytes] = (struct.pack("<i", one) if is_numbers else _text(one) for one in value)
    return _ARRAY, struct.pack("<IQ", _I32 if is_numbers else _STRING, len(value)) + b"".join(parts)
