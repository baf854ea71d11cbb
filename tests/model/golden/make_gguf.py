"""Writes gguf.npz: random blocks of each type, and their values by the package gguf (0.19.0, which has to be installed
for this alone): `python -m tests.model.golden.make_gguf`."""

from pathlib import Path

import gguf  # type: ignore[import-not-found]
import numpy as np

SCALES = {  # bytes at which a block has a float16
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "MXFP4": (),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ4_XS": (0,),
}


def main() -> None:
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {}
    for name, scales in SCALES.items():
        kind = gguf.GGMLQuantizationType[name]
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows, blocks = 3, 4 if block == 32 else 1
        stored = rng.integers(0, 256, (rows * blocks, num_bytes), dtype=np.uint8)
        for at in scales:
            stored[:, at + 1] &= 0xBB  # not all bits of the exponent are set
        if name == "MXFP4":
            stored[:, 0] = rng.integers(0, 241, len(stored))
        stored = stored.reshape(rows, -1)
        found[name] = stored
        found[f"{name} values"] = gguf.quants.dequantize(stored, kind)
    np.savez_compressed(Path(__file__).parent / "gguf.npz", **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
