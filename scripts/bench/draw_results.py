"""Draws the figures of docs/benchmarks.md again, from the documents in scripts/bench/results/.

    .venv/bin/python scripts/bench/draw_results.py

Needs matplotlib, of the package's `plot` extra.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import msgspec

from caraserve.bench.lora import run as lora
from caraserve.bench.lora.handoff import RoundTripPoint, ThreadsPoint
from caraserve.bench.lora.kernels import KernelPoint

_ROOT = Path(__file__).parents[2]
_RESULTS, _IMAGES = _ROOT / "scripts/bench/results", _ROOT / "docs/images"


def _lora(document: dict[str, Any]) -> bytes:
    return lora.draw(
        msgspec.convert(document["kernels"], list[KernelPoint]),
        msgspec.convert(document["round_trips"], list[RoundTripPoint]),
        msgspec.convert(document["threads"], list[ThreadsPoint]),
    )


# By image: the result it shows, and what draws it.
_FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], bytes]]] = {
    "engine_cpu": ("engine_cpu", lambda document: engine.draw(document["reports"])),
    "lora_cpu": ("lora_cpu", _lora),
}


def main() -> None:
    """Writes every figure."""
    for image, (result, draw) in _FIGURES.items():
        document = json.loads((_RESULTS / f"{result}.json").read_text(encoding="utf-8"))
        (_IMAGES / f"{image}.png").write_bytes(draw(document))
        print(f"written: docs/images/{image}.png")


if __name__ == "__main__":
    main()
