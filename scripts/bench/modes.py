"""Loading modes side by side: what a request feels of its adapter's way to the device, over `cached`.

    .venv/bin/python scripts/bench/modes.py

One engine after another in this process, a new one for each mode and repeat, all given the same Poisson arrivals. The
host tier holds every adapter and is warm; the device tier holds `--resident` of them, in `cached` and `merged` all. The
link between the two is emulated. The machine's speed drifts: modes take turns, and each mean is compared with that of
`cached` in the same repeat. The last line of stdout is one JSON document.
"""

import argparse
import asyncio
import gc
import importlib.util
import json
import logging
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import uvloop
from arrivals import POPULARITIES, Arrival, Load, arrivals
from bandwidth import cores
from modes_report import Report, Run, Setting, document, plot, print_tables
from open_loop import Played, calm, play

from caraserve.bench.about import machine, versions
from caraserve.bench.synthetic import SHAPES, write_adapters, write_model
from caraserve.config import LOADING_MODES, PRELOADED_MODES, EngineConfig, LoraConfig, LoraModule, ModelConfig
from caraserve.loop import Engine
from caraserve.model.layout import Dtype, lay_out
from caraserve.model.spec import SITES, ModelSpec
from caraserve.serve import Served, build_engine
from caraserve.units import ceil_div

_TARGETS = {"all": SITES, "qkv": SITES[:3]}
_HOST_MARGIN_BYTES = 256 << 20  # a profile is measured there before adapters are read
_CALIBRATION_REQUESTS = 8
_TRIES = 3  # of one mode, while others use the machine
_CALM_PATIENCE_S = 60.0
_KV_REQUESTS = 24  # that the KV cache has room for
_WARM_AT_ONCE = 4  # cold requests, so that no load meets memory that was never touched
_ASSISTED = ("assisted", "auto")  # modes that use CPU LoRA workers
_BIRTH_S = 30.0
_WARM_SEED = 1 << 32  # apart from those of repeats

log = logging.getLogger("bench")


@dataclass(frozen=True, slots=True)
class Bench:
    """What every engine is built of, and what it is asked."""

    folder: Path
    adapters: Mapping[str, Path]
    spec: ModelSpec
    image_bytes: int  # of one adapter on the device
    load: Load
    args: argparse.Namespace


def main() -> None:
    """Runs the benchmark and prints the tables, then the JSON line."""
    parser = _arguments()
    args = parser.parse_args()
    if "cached" not in args.modes:
        parser.error("--modes: all others are compared with cached, which is missing")
    if not 0 < args.resident <= args.adapters:
        parser.error("--resident must lie between 1 and --adapters")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: install the package's `plot` extra")
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    log.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="caraserve-bench-") as folder:
        report = uvloop.run(measure(Path(folder), args))
    print_tables(report)
    result = document(report, vars(args), machine(), versions())
    if args.plot is not None:
        plot(report, args.plot)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=LOADING_MODES, default=list(LOADING_MODES))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the base weights")
    parser.add_argument("--model", choices=tuple(SHAPES), default="100M", help="size of the random model")
    parser.add_argument("--adapters", type=int, default=64, help="fp16 adapters in the host tier")
    parser.add_argument(
        "--resident", type=int, default=16, help="of them on the device at once, except in cached, merged"
    )
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--targets", choices=tuple(_TARGETS), default="all", help="adapted modules")
    parser.add_argument("--emulate-link-mb-per-s", type=float, default=1000.0, metavar="MB")
    parser.add_argument("--popularity", choices=POPULARITIES, default="uniform", help="of adapters")
    parser.add_argument("--zipf-exponent", type=float, default=1.0)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="mean; half as many to half as many again")
    parser.add_argument("--output-tokens", type=int, default=32, help="likewise")
    parser.add_argument("--requests", type=int, default=40, help="in each mode and repeat")
    parser.add_argument("--rps", type=float, help="requests per second (default: found by a calibration)")
    parser.add_argument("--cores-used", type=float, default=0.6, help="in cached, by which the rate is chosen")
    parser.add_argument(
        "--calm-cores", type=float, default=0.25, help="more used by others: the mode is measured again"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=cores(), help="compute threads")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of this machine (default: as the server does)")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write a Chrome trace of each mode and repeat")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON document here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios as bars; needs the `plot` extra")
    return parser


async def measure(folder: Path, args: argparse.Namespace) -> Report:
    """Makes model and adapters in `folder`, finds the rate of requests and measures every mode."""
    bench = _prepare(folder, args)
    cpu_s = None
    if args.rps is None:
        cpu_s = await _calibrate(bench)
        bench = replace(bench, load=replace(bench.load, rps=args.cores_used / cpu_s))
        log.info("calibration: %.0f ms of CPU a request, so %.3f requests/s", 1000 * cpu_s, bench.load.rps)
    runs: list[Run] = []
    for repeat in range(args.repeats):
        sent = arrivals(bench.load, [*bench.adapters], bench.spec.vocab_size, args.seed + repeat)
        order = _order(args.modes, repeat, args.repeats)
        runs += [Run(mode, repeat, await _run_calmly(bench, mode, repeat, sent)) for mode in order]
    return Report(_setting(bench, cpu_s), args.modes, runs)


def _order(modes: Sequence[str], repeat: int, repeats: int) -> list[str]:
    """Every repeat begins with another mode, and every other one goes backwards."""
    first = repeat * len(modes) // repeats
    turned = [*modes[first:], *modes[:first]]
    return turned[::-1] if repeat % 2 else turned


def _prepare(folder: Path, args: argparse.Namespace) -> Bench:
    load = Load(
        requests=args.requests,
        rps=args.rps or 0.0,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        popularity=args.popularity,
        zipf_exponent=args.zipf_exponent,
    )
    started_s = time.monotonic()
    targets = _TARGETS[args.targets]
    spec = write_model(folder / "model", SHAPES[args.model], args.dtype, max_position=load.most_tokens)
    adapters = write_adapters(folder, spec, count=args.adapters, ranks=[args.rank], targets=targets, dtype="float16")
    modules = {(layer, site): (args.rank, 1.0) for layer in range(spec.layers) for site in targets}
    image_bytes = lay_out(spec, Dtype.F16, modules)[1][-1]
    log.info("model and %d adapters written in %.1f s", args.adapters, time.monotonic() - started_s)
    return Bench(folder, adapters, spec, image_bytes, load, args)


def _setting(bench: Bench, cpu_s: float | None) -> Setting:
    return Setting(
        dtype=bench.args.dtype,
        num_parameters=bench.spec.num_parameters,
        adapters=len(bench.adapters),
        resident=bench.args.resident,
        rank=bench.args.rank,
        targets=bench.args.targets,
        image_bytes=bench.image_bytes,
        link_mb_per_s=bench.args.emulate_link_mb_per_s,
        threads=bench.args.threads,
        load=bench.load,
        cpu_s_per_request=cpu_s,
    )


async def _calibrate(bench: Bench) -> float:
    """CPU seconds of a request in `cached`, of requests one after another."""
    load = replace(bench.load, requests=_CALIBRATION_REQUESTS, rps=1.0)
    sent = arrivals(load, [*bench.adapters], bench.spec.vocab_size, _WARM_SEED)
    async with AsyncExitStack() as stack:
        engine = await _start(stack, bench, "cached", None)
        cpu_s = sum([(await play(engine, [replace(arrival, at_s=0.0)])).cpu_s for arrival in sent])
    gc.collect()
    return cpu_s / len(sent)


async def _run_calmly(bench: Bench, mode: str, repeat: int, sent: Sequence[Arrival]) -> Played:
    """One mode, again if other programs took too much of the machine meanwhile, which no ratio would survive."""
    for left in reversed(range(_TRIES)):
        started_s = time.monotonic()
        if bench.args.calm_cores < cores():
            await calm(bench.args.calm_cores, _CALM_PATIENCE_S)
        played = await _run(bench, mode, repeat, sent)
        log.info(
            "repeat %d of %d, %s: %.1f s, of which %.1f s measured; %.2f cores elsewhere",
            *(repeat + 1, bench.args.repeats, mode),
            *(time.monotonic() - started_s, played.wall_s, played.cores_elsewhere),
        )
        if left == 0 or played.cores_elsewhere <= bench.args.calm_cores:
            break
    return played


async def _run(bench: Bench, mode: str, repeat: int, sent: Sequence[Arrival]) -> Played:
    """One mode in an engine of its own."""
    trace = None
    if bench.args.trace is not None:
        bench.args.trace.mkdir(parents=True, exist_ok=True)
        trace = bench.args.trace / f"{mode}-{repeat}.json"
    async with AsyncExitStack() as stack:
        engine = await _start(stack, bench, mode, trace)
        played = await play(engine, sent)
        await engine.drain(timeout_s=1.0)
        engine.check()
    del engine
    gc.collect()  # the next engine needs the memory
    return played


async def _start(stack: AsyncExitStack, bench: Bench, mode: str, trace: Path | None) -> Engine:
    """The server without its HTTP. All adapters are in the host tier, and the first ones on the device."""
    args, count = bench.args, len(bench.adapters)
    model_config = ModelConfig(
        model=bench.folder / "model",
        served_model_name="base",
        dtype=args.dtype,
        load_format="auto",
        max_model_len=None,
        chat_template=None,
    )
    lora_config = LoraConfig(
        lora_modules=[LoraModule(name, path) for name, path in bench.adapters.items()],
        adapters_dir=None,
        registry=bench.folder / "registry.sqlite",  # so that digests are computed once
        loading_mode=mode,
        max_device_adapters_bytes=bench.image_bytes * (count if mode in PRELOADED_MODES else args.resident),
        max_host_adapters_bytes=bench.image_bytes * count + _HOST_MARGIN_BYTES,
        lora_cpus=None,
        emulate_link_mb_per_s=args.emulate_link_mb_per_s,
        profile=args.profile,
        allow_runtime_lora_updating=False,
    )
    engine_config = EngineConfig(
        max_num_seqs=64,
        max_num_batched_tokens=None,
        max_queue=4096,
        kv_cache_bytes=_KV_REQUESTS * bench.load.most_tokens * bench.spec.kv_bytes_per_token(4),
        enable_prefix_caching=True,
        cpu_threads=args.threads,
        seed=0,
        trace=trace,
    )
    served = await build_engine(stack, model_config, lora_config, engine_config)
    if mode in _ASSISTED:
        await _await_workers(served)
    await _warm(served.engine, bench)
    return served.engine


async def _await_workers(served: Served) -> None:
    """Returns when every CPU LoRA worker is there. Raises TimeoutError."""
    async with asyncio.timeout(_BIRTH_S):
        while _gauge(served, "caraserve:lora_workers") < max(1, cores() - 1):  # noqa: ASYNC110  # a gauge tells nobody
            await asyncio.sleep(0.01)


def _gauge(served: Served, name: str) -> float:
    return next(family.samples[0].value for family in served.metrics.collect() if family.name == name)


async def _warm(engine: Engine, bench: Bench) -> None:
    """Asks every adapter, the most popular ones last, which are then on the device; as often as it takes to write the
    whole KV cache: the first touch of memory costs more than computing does. Raises RuntimeError when the host tier
    does not hold all."""
    rng = np.random.default_rng(_WARM_SEED)
    names, prompt = [*bench.adapters][::-1], bench.load.prompt_tokens
    rounds = ceil_div(2 * _KV_REQUESTS * bench.load.most_tokens, prompt * len(names))
    for first in range(0, rounds * len(names), _WARM_AT_ONCE):
        some = [names[index % len(names)] for index in range(first, first + _WARM_AT_ONCE)]
        prompts = rng.integers(2, bench.spec.vocab_size, (_WARM_AT_ONCE, prompt)).tolist()
        await play(engine, [Arrival(0.0, tuple(ids), 1, name) for ids, name in zip(prompts, some, strict=True)])
    if (held := len(engine.snapshot().host_adapters)) < len(bench.adapters):
        raise RuntimeError(f"the host tier holds {held} of {len(bench.adapters)} adapters")


if __name__ == "__main__":
    main()
