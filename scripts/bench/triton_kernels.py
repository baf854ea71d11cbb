"""Compiles every Triton kernel as the CUDA backend launches it, with several releases of Triton, for every kind of GPU.

    python scripts/bench/triton_kernels.py                  # downloads the releases; writes results/triton_kernels.md
    python scripts/bench/triton_kernels.py 3.6.0            # one release

No GPU is needed. Fails if a kernel does not fit a block's shared memory, or spills more than a few registers to the
stack.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "scripts" / "bench" / "results" / "triton_kernels.md"
RELEASES = ("3.5.1", "3.6.0", "3.7.1")
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}  # that a block may have
MOST_STACK_BYTES = 16  # of a thread, as products with codes of 5 and 6 bits keep on sm_86
LLAMA = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
QWEN = {"model_type": "qwen3", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
GROUPED = QWEN | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
_INT8 = {
    "targets": ["Linear"],
    "weights": _BITS | {"strategy": "channel", "dynamic": False},
    "input_activations": _BITS | {"strategy": "token", "dynamic": True},
}
# Model shapes, and their dtypes: all kernels with grouped heads, a key-value head for each, other head sizes, and
# quantised weights.
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "32 heads of 128, 8 for keys": (GROUPED, ("bfloat16", "float32")),
    "32 heads of 128": (LLAMA | {"num_attention_heads": 32}, ("bfloat16",)),
    "32 heads of 64, 8 for keys": (
        QWEN | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
        ("bfloat16",),
    ),
    "16 heads of 256, 8 for keys": (
        QWEN | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256},
        ("bfloat16", "float32"),
    ),
    "fp8 weights": (
        GROUPED | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
        ("bfloat16", "float32"),
    ),
    "int8 weights": (
        GROUPED
        | {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"group_0": _INT8},
                "ignore": ["lm_head"],
            }
        },
        ("bfloat16",),
    ),
}

# Weights in grouped codes: 4, 5, 6 and 8 bits, each way to find a value and each kind of scales.
CODES = ("Q8_0", "Q4_0", "Q4_1", "Q5_K", "Q6_K", "nf4", "NVFP4", "MXFP4", "AWQ", "fp8-blocks")


def main() -> int:
    """Returns the exit status: 1 if a kernel does not fit or spills much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--folder", type=Path, help="keeps the downloaded releases here")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # compile with the Triton on the path
    args = parser.parse_args()
    if args.here:
        json.dump(list(compiled()), sys.stdout)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        found = {release: with_release(release, folder / f"triton-{release}") for release in args.releases}
    TABLE.write_text(table(found), encoding="utf-8")
    complaints = [f"Triton {release}: {said}" for release, rows in found.items() for row in rows for said in wrong(row)]
    for said in complaints:
        print(said)
    return int(bool(complaints))


def wrong(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a kernel may not do."""
    named = f"{row['kernel']} of {row['model']} on sm_{row['capability']}"
    if row["shared"] > SHARED_KIB[row["capability"]] << 10:
        yield f"{named} needs {row['shared']} bytes of shared memory, more than a block may have"
    if row["stack"] > MOST_STACK_BYTES:
        yield f"{named} keeps {row['stack']} bytes on the stack"


def with_release(release: str, folder: Path) -> list[dict[str, Any]]:
    """Installs a release of Triton into a folder, unless it is there, and returns what it compiles."""
    if not (folder / "triton").exists():
        wanted = ["--target", str(folder), "--no-deps", f"triton=={release}"]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, __file__, "--here"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def compiled() -> Iterator[dict[str, Any]]:
    """Yields the registers, shared memory and stack of each kernel; kernels that models share once."""
    import torch

    from tests.gpu.kernels.triton_launches import launches_of, usage
    from tests.gpu_device.grouped_codes import MadeUp

    passes: list[tuple[str, str, dict[str, Any], MadeUp | None]]
    passes = [(model, dtype, config, None) for model, (config, dtypes) in MODELS.items() for dtype in dtypes]
    passes += [(f"weights in {kind}", "bfloat16", GROUPED, MadeUp.of(kind)) for kind in CODES]
    for capability in SHARED_KIB:
        seen: set[str] = set()
        for model, dtype, config, form in passes:
            for launch in launches_of(config, getattr(torch, dtype), capability, form):
                if launch.identity in seen:
                    continue
                seen.add(launch.identity)
                used = usage(launch.compile(capability))
                yield {"kernel": launch.name, "model": f"{model}, {dtype}", "capability": capability, **used}


def table(found: Mapping[str, list[dict[str, Any]]]) -> str:
    """Returns the page: of each kernel by model and GPU, the worst of its variants with any release."""
    worst: dict[tuple[str, str], dict[int, list[int]]] = {}
    for rows in found.values():
        for row in rows:
            used = worst.setdefault((row["kernel"], row["model"]), {}).setdefault(row["capability"], [0, 0, 0])
            used[:] = map(max, used, (row["registers"], row["shared"], row["stack"]))
    lines = [
        "# Triton kernels by kind of GPU",
        "",
        "Registers a thread · KiB of shared memory a block · bytes of stack if any: the most that a variant of",
        f"the kernel takes with Triton {', '.join(found)}. A kernel that is the same for several models is listed",
        "once. No GPU was used: `python scripts/bench/triton_kernels.py` compiles them.",
        "",
        f"| kernel | model | {' | '.join(f'sm_{capability}' for capability in SHARED_KIB)} |",
        "| --- | --- |" + " --- |" * len(SHARED_KIB),
    ]
    for (kernel, model), by_gpu in worst.items():
        cells = [cell(by_gpu[capability]) if capability in by_gpu else "" for capability in SHARED_KIB]
        lines.append(f"| {kernel.removesuffix('_kernel')} | {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(used: Sequence[int]) -> str:
    """Returns one figure of the table."""
    registers, shared, stack = used
    return f"{registers} · {shared / 1024:.1f}{f' · {stack} B' if stack else ''}"


if __name__ == "__main__":
    sys.exit(main())
