"""Measures the first use of adapters, and the start with them: a real server over HTTP, with adapters of an 8B model.

    .venv/bin/python scripts/bench/first_use.py [--tree OTHER_CHECKOUT]

Makes 32 adapters of rank 16 on all modules, 84 MB each, whose files stay in the page cache. The server's device
computes nothing, so a time to the first token is that of the adapter, beside 1 to 2 ms for HTTP. In each round a server
starts twice: the first time with an empty cache folder, the second time with what the first has left there. Then half
of the adapters are used for the first time one after another, and the others at once. With `--tree` the servers of
several checkouts run in turns, so that their figures compare. The last line of stdout is one JSON document.
"""

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from queue import SimpleQueue
from statistics import median, quantiles
from typing import Any

import numpy as np
from safetensors.numpy import save

_ROOT = Path(__file__).parents[2]
_READY = re.compile(rb"ready at http://\S+:(\d+)")
_RANK, _LAYERS, _HIDDEN = 16, 32, 4096
_LINEARS = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (4096, 1024),
    "self_attn.v_proj": (4096, 1024),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (4096, 14336),
    "mlp.up_proj": (4096, 14336),
    "mlp.down_proj": (14336, 4096),
}
_SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128}
_SIZES |= {"num_attention_heads": 32, "num_key_value_heads": 8}
_TARGETS = [name.rpartition(".")[2] for name in _LINEARS]
_ADAPTER = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 32}
_TOKEN = 65


@dataclass(frozen=True)
class Figure:
    """What one server took, in milliseconds. Starts include imports; times to the first token are those of streams."""

    tree: str
    start_ms: float  # with an empty cache folder
    start_again_ms: float
    one_ms: float  # median, one after another
    one_whole_ms: float  # until the answer of two tokens has ended
    at_once_p50_ms: float  # of all others at once
    at_once_p95_ms: float
    used_ms: float  # median of second uses, one after another


def main() -> None:
    """Measures every server in turns, and prints a line for each."""
    if sys.argv[1:2] == ["server"]:
        _serve(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout to measure too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--adapters", type=int, default=32, help="half are used one by one (default %(default)s)")
    parser.add_argument(
        "--targets", type=lambda text: text.split(","), default=_TARGETS, help="modules, as q_proj,v_proj: 14 MB each"
    )
    parser.add_argument("--folder", type=Path, help="where the adapters are made, 2.7 GB (default: a temporary folder)")
    args = parser.parse_args()
    trees, figures = [_ROOT, *args.tree], []
    names = [field.name.removesuffix("_ms") for field in fields(Figure)]
    print("  ".join(f"{name:>14}" for name in names), flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        _make_files(Path(made), args.adapters, args.targets)
        for tree in trees:  # kernels are compiled
            _round(tree, Path(made), 2)
        for number in range(args.rounds):
            for tree in trees if number % 2 == 0 else trees[::-1]:
                figures.append(_round(tree, Path(made), args.adapters))
                _show(figures[-1])
    for tree in trees:
        mine = [asdict(one) for one in figures if one.tree == tree.name]
        numbers = {name: median(one[name] for one in mine) for name in mine[0] if name != "tree"}
        _show(Figure(tree.name, **numbers), "median")
    print(json.dumps({"benchmark": "first_use", "cores": os.cpu_count(), "figures": [asdict(one) for one in figures]}))


def _show(one: Figure, note: str = "") -> None:
    tree, *numbers = asdict(one).values()
    print("  ".join([f"{tree:>14}", *(f"{number:14.1f}" for number in numbers), note]), flush=True)


# --- files ---


def _make_files(folder: Path, count: int, targets: Sequence[str]) -> None:
    """Makes a folder of a model without weights, and one of adapters that differ in one value."""
    from caraserve import demo

    model = folder / "model"
    shutil.copytree(demo.model_folder(), model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | _SIZES))
    fields = json.dumps(_ADAPTER | {"target_modules": targets})
    data = bytearray(save(_tensors(targets)))
    for number in range(count):
        adapter = folder / "adapters" / f"a{number:02}"
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").write_text(fields)
        data[-2:] = number.to_bytes(2, "little")
        (adapter / "adapter_model.safetensors").write_bytes(data)
    os.sync()


def _tensors(targets: Sequence[str]) -> dict[str, Any]:
    draw, tensors = np.random.default_rng(1), {}
    for layer in range(_LAYERS):
        for name, (inputs, outputs) in _LINEARS.items():
            if name.rpartition(".")[2] not in targets:
                continue
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = (draw.random((_RANK, inputs), np.float32) - 0.5).astype(np.float16)
            tensors[f"{prefix}.lora_B.weight"] = (draw.random((outputs, _RANK), np.float32) - 0.5).astype(np.float16)
    return tensors


# --- the client ---


def _round(tree: Path, made: Path, count: int) -> Figure:
    names = [f"a{number:02}" for number in range(count)]
    with tempfile.TemporaryDirectory(dir=made) as cache:
        kernels = Path.home() / ".cache" / "caraserve" / "kernels"
        (Path(cache) / "caraserve").mkdir()
        kernels.mkdir(parents=True, exist_ok=True)
        (Path(cache) / "caraserve" / "kernels").symlink_to(kernels)
        with _server(tree, made, names, cache) as (_, start_ms):
            pass
        with _server(tree, made, names, cache) as (port, start_again_ms):
            _first_token_ms(port, "model")
            half = count // 2
            one = [_first_token_ms(port, name) for name in names[:half]]
            with ThreadPoolExecutor(half) as threads:
                at_once = list(threads.map(lambda name: _first_token_ms(port, name)[0], names[half:]))
            used = [_first_token_ms(port, name)[0] for name in names]
    parts = quantiles([*at_once, *at_once], n=20, method="inclusive")
    first, whole = (median(times) for times in zip(*one, strict=True))
    return Figure(tree.name, start_ms, start_again_ms, first, whole, parts[9], parts[18], median(used))


@contextmanager
def _server(tree: Path, made: Path, names: Sequence[str], cache: str) -> Iterator[tuple[int, float]]:
    """Starts the server of a checkout; yields its port and the milliseconds until it was ready."""
    modules = [f"{name}={made / 'adapters' / name}" for name in names]
    command = [
        "serve",
        str(made / "model"),
        "--port",
        "0",
        "--load-format",
        "dummy",
        "--served-model-name",
        "model",
        "--loading-mode",
        "overlapped",
    ]
    command += ["--max-host-adapters-bytes", "2700MiB", "--lora-modules", *modules]
    began_s = time.monotonic()
    with subprocess.Popen(
        [sys.executable, __file__, "server", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(tree), "XDG_CACHE_HOME": cache},
        cwd=tree,
    ) as process:
        try:
            port, ready_s = _port(process), time.monotonic()
            assert process.stdout is not None
            threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would stop the server
            yield port, 1000 * (ready_s - began_s)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def _port(process: "subprocess.Popen[bytes]") -> int:
    assert process.stdout is not None
    shown = b""
    for line in process.stdout:
        shown += line
        if (ready := _READY.search(line)) is not None:
            return int(ready[1])
    raise SystemExit(f"The server ended:\n{shown.decode(errors='replace')[-3000:]}")


def _first_token_ms(port: int, adapter: str) -> tuple[float, float]:
    """Returns the times to the first event of a stream, and to its end."""
    body = {"model": adapter, "prompt": [_TOKEN] * 8, "max_tokens": 2, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    began_s = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    while (line := response.readline()).startswith((b":", b"\n")):  # comments, while the prompt is computed
        pass
    first_s = time.monotonic()
    rest = response.read()
    whole_s = time.monotonic()
    connection.close()
    if response.status != 200 or not line.startswith(b"data: {") or b"[DONE]" not in rest:
        raise SystemExit(f"The server answered {response.status}: {(line + rest)[:1000]!r}")
    return 1000 * (first_s - began_s), 1000 * (whole_s - began_s)


# --- the server ---


def _serve(command: Sequence[str]) -> None:
    """Runs `caraserve` with a device that computes nothing, and takes no time for copies."""
    from caraserve import serve
    from caraserve.__main__ import run
    from caraserve.config import LoraConfig

    def build(plan: Any, model: Any, engine: Any, lora: LoraConfig, *more: object) -> Any:
        return _Device(lora.max_host_adapters_bytes)

    vars(serve)["build_backend"] = build
    sys.argv[1:] = command
    run()


class _Workers:
    """No CPU workers."""

    def __len__(self) -> int:
        return 0

    def states(self) -> list[Any]:
        return []


class _Device:
    """A backend whose batches and copies end at once, on a thread of its own."""

    device_name, accelerator = "no device", ""
    shares_cores = pads_to_largest_rank = False
    delta_itemsize = slices_handed_off = modules_redone = adapters_merged = late_kernels = 0

    def __init__(self, host_bytes: int) -> None:
        from caraserve.core.backend import Limits
        from caraserve.cpu.shared_memory import SharedRegion

        self.limits = Limits(
            num_blocks=4096,
            block_tokens=16,
            num_slots=64,
            adapter_slots=1025,
            max_step_tokens=256,
            max_context=1024,
            embedding_size=_HIDDEN,
        )
        self._region = SharedRegion(host_bytes)
        self.host_memory = self._region.carve(host_bytes)
        self._is_warm = False
        self.workers = _Workers()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._calls.get()()

    def launch(self, batch: Any, done: Callable[[Any], None]) -> None:
        from caraserve.core.batch import RowResult, StepResult

        if not self._is_warm:
            self._is_warm, self.host_memory[:] = True, 0  # a GPU's driver has locked all pages
        rows = tuple([RowResult((_TOKEN,)) if row.samples else RowResult() for row in batch.rows])
        now_s = time.monotonic()
        self._calls.put(lambda: done(StepResult(rows, now_s, now_s)))

    def load_adapter(self, adapter: Any, slot: int, done: Callable[[None], None], *more: object) -> None:
        self._calls.put(lambda: done(None))

    def device_bytes(self, spec: Any) -> int:
        return int(spec.num_bytes)

    def unload_adapter(self, slot: int) -> None: ...
    def resize_kv(self, blocks: int, done: Callable[[None], None]) -> None: ...
    def start_workers(self, tokens_per_worker: Callable[[int], int]) -> None: ...
    def release_vectors(self, slot: int) -> None: ...
    def close(self) -> None: ...


if __name__ == "__main__":
    main()
