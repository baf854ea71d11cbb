"""Writes the compared models and adapters, each in the files that the servers read: the same numbers in all of them."""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from caraserve.bench.synthetic import MODULES, Shape, shape_plan, write_adapters
from caraserve.bench.synthetic import write_model as write_folder
from caraserve.errors import ConfigError
from scripts.bench.peers.gguf_writer import write_adapter, write_model

SHAPE = Shape(hidden=768, layers=12, intermediate=2048, vocab=16384, heads=12, kv_heads=4)
_MAX_POSITION = 4096
_QUANTISED = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k_m": "Q4_K_M"}  # llama-quantize's names
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_SHOWN_CHARACTERS = 500  # of what llama-quantize says when it fails
FORMATS = (*_DTYPES, *_QUANTISED)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model in one format; None where it has no such file."""

    folder: Path | None  # Hugging Face's
    gguf: Path | None
    dtype: str  # for servers that are told one
    adapters: tuple[tuple[str, Path, Path], ...] = ()  # name, PEFT folder, GGUF file


def synthetic(cache: Path, form: str, ranks: Sequence[int], count: int, quantize: Path | None) -> ModelFiles:
    """Returns the random model in a format, written below `cache` unless it is there. Only formats with a folder have
    adapters. `quantize`: llama-quantize; without it there are no quantised files. Raises ConfigError if it fails."""
    dtype = _DTYPES.get(form, "float32")
    folder = _made(cache / "100M" / dtype, lambda path: write_folder(path, SHAPE, dtype, _MAX_POSITION))
    gguf = folder.with_suffix(".gguf")
    if not gguf.exists():
        write_model(folder, gguf)
    if form in _QUANTISED:
        return ModelFiles(None, _quantised(gguf, _QUANTISED[form], quantize), "auto")
    parts = "-".join(map(str, ranks))
    made = _made(
        cache / "100M" / f"adapters-{dtype}-{count}x{parts}",
        lambda path: _write_adapters(path, folder, dtype, ranks, count),
    )
    named = tuple((path.name, path, path.with_suffix(".gguf")) for path in sorted(made.glob("adapter-*[0-9]")))
    return ModelFiles(folder, gguf, dtype, named)


def _write_adapters(path: Path, model: Path, dtype: str, ranks: Sequence[int], count: int) -> None:
    plan = shape_plan(SHAPE, _MAX_POSITION)
    for folder in write_adapters(path, plan, count=count, ranks=ranks, targets=MODULES, dtype=dtype).values():
        write_adapter(folder, model, folder.with_suffix(".gguf"))


def _made(path: Path, write: Callable[[Path], object]) -> Path:
    """Returns a folder that `write` has written completely, now or earlier."""
    if not path.exists():
        unfinished = path.with_name(f".{path.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished)
        unfinished.rename(path)
    return path


def _quantised(source: Path, kind: str, quantize: Path | None) -> Path | None:
    path = source.with_name(f"{kind}.gguf")
    if not path.exists():
        if quantize is None:
            return None
        unfinished = path.with_name(f".{path.name}")
        done = subprocess.run([quantize, source, unfinished, kind], capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"{quantize} could not write {source} as {kind}: {done.stderr[-_SHOWN_CHARACTERS:]}")
        unfinished.rename(path)
    return path
