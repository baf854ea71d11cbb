"""Random weights as checkpoints pack them, with the numbers that they stand for, computed from the formats' definitions
without any code of the product."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Tensors = dict[str, Any]  # torch's or NumPy's, by the end of their names
Numbers = NDArray[np.float64]  # [outputs, inputs]
Make = Callable[[int, int, np.random.Generator], tuple[Tensors, Numbers]]  # of outputs and inputs

FP4 = [sign * value for sign in (1.0, -1.0) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
_POSITIVE = [0.0, 0.0052083334885537624, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25]
TABLES = {"nf4": NF4, "fp4": [*_POSITIVE, *(-value for value in _POSITIVE)]}


def words(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Puts codes into words along the last axis, the first one into the lowest bits."""
    per_word = 32 // bits
    filled = np.concatenate([codes, np.zeros((len(codes), -codes.shape[1] % per_word), codes.dtype)], 1)
    lanes = filled.reshape(len(codes), -1, per_word).astype(np.uint32) << np.arange(0, 32, bits, dtype=np.uint32)
    return np.bitwise_or.reduce(lanes, -1).view(np.int32)


def _drawn(outputs: int, inputs: int, bits: int, group: int, rng: np.random.Generator) -> list[NDArray[Any]]:
    """Returns codes [outputs, inputs], and scales (float16) and zero points other than 0, [outputs, groups]."""
    groups = outputs, -(-inputs // (group or inputs))
    scale = (rng.uniform(1, 3, groups) * 3 / (inputs**0.5 * (1 << bits))).astype(np.float16)
    codes = rng.integers(0, 1 << bits, (outputs, inputs))
    return [codes, scale, rng.integers(1, 1 << bits, groups)]


def _numbers(codes: NDArray[Any], scale: NDArray[Any], zero: Any, group_of: NDArray[Any]) -> Numbers:
    numbers: Numbers = scale.astype(np.float64)[:, group_of] * (codes - np.asarray(zero)[:, group_of])
    return numbers


def gptq(bits: int, group: int, *, version: int = 1, symmetric: bool = False, shuffled: bool = False) -> Make:
    """Stored zero points are one less than those of the weights in version 1. `group`: 0 for all inputs."""

    def make(outputs: int, inputs: int, rng: np.random.Generator) -> tuple[Tensors, Numbers]:
        codes, scale, zero = _drawn(outputs, inputs, bits, group, rng)
        if symmetric:
            zero[:] = 1 << bits - 1
        group_of = np.arange(inputs, dtype=np.int32) // (group or inputs)
        if shuffled:
            group_of = rng.permutation(group_of)
        stored = zero - 1 if version == 1 else zero
        tensors = {
            ".qweight": words(codes, bits).T,
            ".qzeros": words(stored.T, bits),
            ".scales": scale.T,
            ".g_idx": group_of,
        }
        return tensors, _numbers(codes, scale, zero, group_of)

    return make


def awq(group: int) -> Make:
    def in_places(codes: NDArray[Any]) -> NDArray[np.int32]:
        """Bits 4 n of a word have output (0, 2, 4, 6, 1, 3, 5, 7)[n] of eight."""
        return words(codes.reshape(len(codes), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(codes.shape), 4)

    def make(outputs: int, inputs: int, rng: np.random.Generator) -> tuple[Tensors, Numbers]:
        codes, scale, zero = _drawn(outputs, inputs, 4, group, rng)
        tensors = {".qweight": in_places(codes.T), ".qzeros": in_places(zero.T), ".scales": scale.T}
        numbers = _numbers(codes, scale, zero, np.arange(inputs) // group)
        return tensors, numbers.astype(np.float16).astype(np.float64)

    return make


def packed(bits: int, group: int, *, symmetric: bool, shuffled: bool = False) -> Make:
    """`pack-quantized` of compressed-tensors. `group`: 0 for all inputs."""

    def make(outputs: int, inputs: int, rng: np.random.Generator) -> tuple[Tensors, Numbers]:
        codes, scale, zero = _drawn(outputs, inputs, bits, group, rng)
        tensors = {
            ".weight_packed": words(codes, bits),
            ".weight_scale": scale,
            ".weight_shape": np.array([outputs, inputs]),
        }
        group_of = np.arange(inputs, dtype=np.int32) // (group or inputs)
        if shuffled:
            group_of = tensors[".weight_g_idx"] = rng.permutation(group_of)
        if symmetric:
            zero[:] = 1 << bits - 1
        else:
            tensors[".weight_zero_point"] = words(zero.T, bits).T
        return tensors, _numbers(codes, scale, zero, group_of)

    return make


def _pairs(codes: NDArray[Any]) -> NDArray[np.uint8]:
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)


def nvfp4(outputs: int, inputs: int, rng: np.random.Generator) -> tuple[Tensors, Numbers]:
    codes = rng.integers(0, 16, (outputs, inputs))
    above = np.float32(800 * inputs**0.5)
    scale = torch.from_numpy(rng.uniform(100, 448, (outputs, inputs // 16))).to(torch.float8_e4m3fn)
    divided = scale.float().numpy() / above
    tensors = {
        ".weight_packed": _pairs(codes),
        ".weight_scale": scale,
        ".weight_global_scale": np.array([above], np.float32),
    }
    return tensors, np.array(FP4)[codes] * np.repeat(divided, 16, 1)


def mxfp4(outputs: int, inputs: int, rng: np.random.Generator) -> tuple[Tensors, Numbers]:
    codes, power = rng.integers(0, 16, (outputs, inputs)), rng.integers(-5, -1, (outputs, inputs // 32))
    tensors = {".weight_packed": _pairs(codes), ".weight_scale": (power + 127).astype(np.uint8)}
    return tensors, np.array(FP4)[codes] * np.repeat(2.0**power, 32, 1)


def eight_bits(rows: int, columns: int, suffix: str, *, is_float: bool = True, is_scalar: bool = False) -> Make:
    """fp8 or int8 with a scale for each block, 0: for all outputs or inputs. `is_scalar`: the only scale is a scalar,
    with one for the inputs beside it, as transformers writes them."""

    def make(outputs: int, inputs: int, rng: np.random.Generator) -> tuple[Tensors, Numbers]:
        if is_float:
            codes = torch.from_numpy(rng.standard_normal((outputs, inputs)) * 50).to(torch.float8_e4m3fn)
        else:
            codes = torch.from_numpy(rng.integers(-127, 128, (outputs, inputs), np.int8))
        height, width = rows or outputs, columns or inputs
        blocks = -(-outputs // height), -(-inputs // width)
        scale = (rng.uniform(1, 2, blocks) / (50 * inputs**0.5)).astype(np.float32)
        spread = scale.repeat(height, 0)[:outputs].repeat(width, 1)[:, :inputs]
        tensors = {".weight": codes, suffix: scale.reshape(()) if is_scalar else scale}
        if is_scalar:
            tensors[".activation_scale"] = np.array(0.01, np.float32)
        return tensors, codes.double().numpy() * spread

    return make


def four_bits(table: str, dtype: torch.dtype, *, nested: bool) -> Make:
    """bitsandbytes; `nested`: with double quantisation."""

    def make(outputs: int, inputs: int, rng: np.random.Generator) -> tuple[Tensors, Numbers]:
        count, values = outputs * inputs, np.array(TABLES[table], np.float32)
        blocks = -(-count // 64)
        codes, scale = rng.integers(0, 16, count), (rng.uniform(2, 4, blocks) / inputs**0.5).astype(np.float32)
        state: dict[str, Any] = {"quant_type": table, "blocksize": 64, "shape": [outputs, inputs]}
        state["dtype"] = str(dtype).removeprefix("torch.")
        tensors: Tensors = {
            ".weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
            ".weight.quant_map": values,
            ".weight.absmax": scale,
        }
        if nested:
            places = rng.integers(0, 256, blocks)
            above = rng.uniform(0.5, 1, -(-blocks // 256)).astype(np.float32) / np.float32(inputs**0.5)
            map_of_all = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 3 / inputs**0.5}
            tensors |= {
                ".weight.absmax": places.astype(np.uint8),
                ".weight.nested_absmax": above,
                ".weight.nested_quant_map": map_of_all,
            }
            scale = map_of_all[places] * above.repeat(256)[:blocks] + np.float32(state["nested_offset"])
        tensors[f".weight.quant_state.bitsandbytes__{table}"] = np.array(bytearray(json.dumps(state).encode()))
        numbers = torch.from_numpy(values[codes] * scale.repeat(64)[:count]).to(dtype)
        return tensors, numbers.double().numpy().reshape(outputs, inputs)

    return make


def int8(outputs: int, inputs: int, rng: np.random.Generator) -> tuple[Tensors, Numbers]:
    """bitsandbytes."""
    codes = rng.integers(-127, 128, (outputs, inputs), np.int8)
    scale = (rng.uniform(2, 4, outputs) / inputs**0.5).astype(np.float32)
    tensors = {".weight": codes, ".SCB": scale, ".weight_format": np.array(0, np.uint8)}
    return tensors, codes * scale[:, None].astype(np.float64) / 127
