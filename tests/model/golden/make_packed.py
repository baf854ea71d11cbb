"""Writes packed.npz: random tensors as libraries store quantised weights, and the values that these give them.

They are auto-gptq 0.7.1, autoawq 0.2.9, compressed-tensors 0.20.0 and bitsandbytes 0.50.2, which have to be installed
for this alone, the first two as unpacked sources:
`python -m tests.model.golden.make_packed AUTO_GPTQ_FOLDER AUTOAWQ_FOLDER`.
"""

import ast
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb  # type: ignore[import-not-found]
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-not-found]
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # type: ignore[import-not-found]
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize  # type: ignore[import-not-found]

RNG = np.random.default_rng(0)
OUTPUTS, INPUTS = 8, 64


def words(*shape: int) -> np.ndarray:
    return RNG.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def stored(tensor: torch.Tensor) -> np.ndarray:
    """Returns a tensor as NumPy's; bfloat16 as its bits, fp8 as bytes."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype is torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def gptq(folder: Path) -> dict[str, Any]:
    """Multiplies by the identity with the library's own forward, extracted from its source."""
    source = (folder / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py").read_text()
    linear = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    forward = next(node for node in linear.body if isinstance(node, ast.FunctionDef) and node.name == "forward")
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([forward], []), "forward", "exec"), names)
    found: dict[str, Any] = {}
    for bits in (4, 8):
        order = RNG.permutation(np.repeat(np.arange(2, dtype=np.int32), INPUTS // 2))
        zeros = words(2, OUTPUTS * bits // 32) & ~(1 << 24)  # no zero point of 256, where bits are 8
        if bits == 8:
            zeros = (zeros.view(np.uint8) & 0x7F).view(np.int32)
        tensors = {
            "up.qweight": words(INPUTS * bits // 32, OUTPUTS),
            "up.qzeros": zeros,
            "up.scales": (RNG.random((2, OUTPUTS)) * 0.1).astype(np.float16),
            "up.g_idx": order,
        }
        module = types.SimpleNamespace(
            outfeatures=OUTPUTS,
            autogptq_cuda_available=False,
            kernel_switch_threshold=0,
            wf=torch.tensor(list(range(0, 32, bits)), dtype=torch.int32).unsqueeze(0),
            qzeros=torch.from_numpy(tensors["up.qzeros"]),
            qweight=torch.from_numpy(tensors["up.qweight"]),
            bits=bits,
            scales=torch.from_numpy(tensors["up.scales"].astype(np.float32)),
            g_idx=torch.from_numpy(order),
            bias=None,
        )
        found[f"gptq{bits}"] = tensors | {"values": names["forward"](module, torch.eye(INPUTS)).numpy().T}
    return found


def awq(folder: Path) -> dict[str, Any]:
    sys.path.insert(0, str(folder / "awq/utils"))
    spec = importlib.util.spec_from_file_location("packing_utils", folder / "awq/utils/packing_utils.py")
    assert spec is not None
    assert spec.loader is not None
    packing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packing)
    tensors = {
        "up.qweight": words(INPUTS, OUTPUTS // 8),
        "up.qzeros": words(2, OUTPUTS // 8),
        "up.scales": (RNG.random((2, OUTPUTS)) * 0.1).astype(np.float16),
    }
    weight, zeros, scales = (torch.from_numpy(tensor) for tensor in tensors.values())
    values = packing.dequantize_gemm(weight, zeros, scales, 4, INPUTS // 2).numpy().T
    return {"awq": tensors | {"values": values.astype(np.float32)}}


def compressed() -> dict[str, Any]:
    found: dict[str, Any] = {}
    outputs = 12  # not a multiple of the codes in a word
    for bits in (4, 8):
        for symmetric in (True, False):
            for strategy in ("group", "channel"):
                groups = 2 if strategy == "group" else 1
                size = INPUTS // 2 if strategy == "group" else None
                args = QuantizationArgs(
                    num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=size
                )
                scheme = QuantizationScheme(targets=["Linear"], weights=args)
                packing = BaseCompressor.get_value_from_registry("pack-quantized")
                low = 0 if symmetric else -(1 << bits - 1)
                state = {
                    "weight": torch.randn(outputs, INPUTS),
                    "weight_scale": (torch.rand(outputs, groups) * 0.1 + 0.05).bfloat16().float(),
                    "weight_zero_point": torch.randint(low, 1 - low, (outputs, groups)).clamp(max=127).to(torch.int8),
                }
                packed = packing.compress(state, scheme)
                values = packing.decompress(packed, scheme)["weight"]
                tensors = {f"up.{name}": stored(one) for name, one in packed.items()}
                tensors["up.weight_scale"] = stored(packed["weight_scale"].bfloat16())
                name = f"int{bits} {'symmetric' if symmetric else 'asymmetric'} {strategy}"
                found[name] = tensors | {"values": values.numpy()}
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="block", block_structure=[16, 32])
    weight, scale = torch.randn(29, 103), torch.rand(2, 4) * 0.01 + 0.005
    codes = quantize(weight, scale, None, args, dtype=torch.float8_e4m3fn)
    values = dequantize(codes, scale, None, args=args).numpy()
    found["fp8 blocks"] = {"up.weight": stored(codes), "up.weight_scale": scale.numpy(), "values": values}
    return found | fp4()


def fp4() -> dict[str, Any]:
    found: dict[str, Any] = {}
    weight = torch.randn(OUTPUTS, INPUTS)
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)
    packing = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    above = torch.tensor([448 * 6 / weight.abs().max()])
    scale = (weight.reshape(OUTPUTS, -1, 16).abs().amax(-1) / 6 * above).to(torch.float8_e4m3fn).float()
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": above}
    packed = packing.compress(state, QuantizationScheme(targets=["Linear"], weights=args))
    tensors = {f"up.{name}": stored(one) for name, one in packed.items()}
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8  # type: ignore[import-not-found]

    codes = unpack_fp4_from_uint8(packed["weight_packed"], OUTPUTS, INPUTS).float()
    # In float32; the library's own decompress computes in bfloat16.
    values = dequantize(codes, scale, args=args, global_scale=above, dtype=torch.float32)
    found["nvfp4"] = tensors | {"values": values.numpy()}
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    packing = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    scale = 2.0 ** torch.floor(torch.log2(weight.reshape(OUTPUTS, -1, 32).abs().amax(-1)) - 2)
    packed = packing.compress({"weight": weight, "weight_scale": scale}, scheme)
    values = packing.decompress(dict(packed), scheme)["weight"].float().numpy()
    found["mxfp4"] = {f"up.{name}": stored(one) for name, one in packed.items()} | {"values": values}
    return found


def bitsandbytes() -> dict[str, Any]:
    found: dict[str, Any] = {}
    cases = [(table, nested, torch.bfloat16, INPUTS) for table in ("nf4", "fp4") for nested in (False, True)]
    cases += [("nf4", True, torch.float16, 48), ("nf4", False, torch.float32, INPUTS)]
    for table, nested, dtype, inputs in cases:
        weight = torch.randn(OUTPUTS, inputs, dtype=dtype)
        codes, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=table)
        tensors = {f"up.weight.{name}": stored(one) for name, one in state.as_dict(packed=True).items()}
        values = bnb.dequantize_4bit(codes, state).float().numpy()
        name = f"{table} {'nested ' if nested else ''}{str(dtype).removeprefix('torch.')} {inputs}"
        found[name] = tensors | {"up.weight": codes.numpy(), "values": values}
    weight = torch.randn(OUTPUTS, INPUTS, dtype=torch.float16)
    codes, scale, _ = bnb.int8_vectorwise_quant(weight)
    values = bnb.int8_vectorwise_dequant(codes, scale).numpy()
    found["int8"] = {"up.weight": codes.numpy().view(np.uint8), "up.SCB": scale.numpy(), "values": values}
    return found


def main() -> None:
    torch.manual_seed(0)
    cases = gptq(Path(sys.argv[1])) | awq(Path(sys.argv[2])) | compressed() | bitsandbytes()
    arrays = {f"{case}/{name}": array for case, tensors in cases.items() for name, array in tensors.items()}
    np.savez_compressed(Path(__file__).parent / "packed.npz", **arrays)


if __name__ == "__main__":
    main()
