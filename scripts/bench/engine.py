"""Compares the engine, in-process, with transformers + peft: tokens/s and time per output token.

    .venv/bin/python scripts/bench/engine.py --dtype float32 bfloat16

Closed batches of 1, 8 and 16 requests: (a) on the base model, (b) all on one adapter, (c) each on its own. Both sides
run in one go, in alternating order; medians are reported. The floor is the time to read a decode step's bytes once at
this machine's measured memory bandwidth. Needs the package's `test` extra unless --no-peft. The last line of stdout is
one JSON document.
"""

import argparse
import asyncio
import importlib.util
import json
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bandwidth import ReadBandwidth, cores
from peft_baseline import PeftBaseline
from report import Measured, Report, document, plot, print_table
from rich.console import Console
from rich.progress import Progress
from workload import SITUATIONS, Answer, Batch, Case, Request, decode_weight_bytes, requests

from caraserve.bench.records import machine, versions
from caraserve.bench.synthetic import SHAPES, adapter_bytes, write_adapters, write_model
from caraserve.config import EngineConfig, LoraConfig, LoraModule, ModelConfig
from caraserve.core.request import GenerateRequest, SamplingParams
from caraserve.engine.active_request import TokenStream
from caraserve.loop import Engine
from caraserve.model.spec import SITES, ModelSpec
from caraserve.serve import build_engine

Side = Callable[[Sequence[Request]], Awaitable[Batch]]

_ALIASES = {site.removesuffix("_proj"): site for site in SITES}
_ADAPTER_BYTES = 8 << 30  # room for every adapter: no loading is measured here

log = logging.getLogger("bench")


def main() -> None:
    """Runs the benchmark for each dtype and prints the tables, then the JSON line."""
    parser = _arguments()
    args = parser.parse_args()
    if args.output_tokens < 2:
        parser.error("--output-tokens: time per token after the first needs at least 2")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: install the package's `plot` extra")
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    log.setLevel(logging.INFO)
    reports = []
    for dtype in args.dtype:
        with tempfile.TemporaryDirectory(prefix="caraserve-bench-") as folder:
            reports.append(asyncio.run(measure(Path(folder), args, dtype)))
        print_table(reports[-1])
    result = document(reports, vars(args), machine(), versions())
    if args.plot is not None:
        plot(reports, args.plot)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--model", choices=tuple(SHAPES), default="100M", help="size of the random model")
    parser.add_argument("--ranks", type=_integers, default=[16], help="adapters' ranks in turn, as 8,16,32")
    parser.add_argument("--targets", type=_targets, default=list(SITES), help="adapted modules, as q,k,v,o")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=_integers, default=[1, 8, 16], help="requests at once, as 1,8,16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=cores(), help="compute threads of either side")
    parser.add_argument("--no-peft", action="store_true", help="measure the engine alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON document here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the tables as bars; needs the `plot` extra")
    return parser


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _targets(text: str) -> list[str]:
    try:
        return [_ALIASES[part.removesuffix("_proj")] for part in text.split(",")]
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"{error} is no module; there are {', '.join(_ALIASES)}") from None


async def measure(folder: Path, args: argparse.Namespace, dtype: str) -> Report:
    """Writes a model and adapters of `dtype` to `folder`, and measures every case on both sides."""
    cases = [Case(situation, number) for number in args.concurrency for situation in SITUATIONS]
    max_tokens = args.prompt_tokens + args.output_tokens
    spec = write_model(folder / "model", SHAPES[args.model], dtype, max_position=max_tokens)
    adapters = write_adapters(
        folder, spec, count=max(args.concurrency), ranks=args.ranks, targets=args.targets, dtype=dtype
    )
    versions: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        sides: dict[str, Side] = {}
        if not args.no_peft:
            peft = PeftBaseline(folder / "model", adapters, dtype, args.threads, args.output_tokens)
            sides["peft"], versions = stack.enter_context(peft).run, peft.versions
        engine = await start_engine(stack, folder / "model", adapters, args, dtype)
        sides["caraserve"] = lambda sent: ask_engine(engine, sent, args.output_tokens)
        batches, bandwidths = await _run_cases(cases, sides, list(adapters), args, spec.vocab_size)
    return Report(
        dtype=dtype,
        num_parameters=spec.num_parameters,
        weight_bytes=decode_weight_bytes(spec, dtype),
        peft_versions=versions,
        cases=[Measured(case, batches[case], bandwidths[case], _step_bytes(spec, case, args, dtype)) for case in cases],
    )


def _step_bytes(spec: ModelSpec, case: Case, args: argparse.Namespace, dtype: str) -> int:
    """Returns the bytes that a decode step reads halfway through the outputs: weights, adapters and KV (fp32)."""
    ranks = [args.ranks[index % len(args.ranks)] for index in range(max(args.concurrency))]
    used = {"base": [], "one adapter": ranks[:1], "own adapters": ranks[: case.concurrency]}[case.situation]
    context: int = args.prompt_tokens + args.output_tokens // 2
    return (
        decode_weight_bytes(spec, dtype)
        + sum(adapter_bytes(spec, rank, args.targets, dtype) for rank in used)
        + case.concurrency * context * spec.kv_bytes_per_token(4)
    )


async def _run_cases(
    cases: Sequence[Case], sides: Mapping[str, Side], adapters: Sequence[str], args: argparse.Namespace, vocab: int
) -> tuple[dict[Case, dict[str, list[Batch]]], dict[Case, list[float]]]:
    """Runs all cases `repeats` times after one warm-up; the side that goes first alternates.

    The memory bandwidth of a shared machine varies, so it is measured beside each case.
    """
    bandwidth = ReadBandwidth()
    bandwidths: dict[Case, list[float]] = {case: [] for case in cases}
    batches: dict[Case, dict[str, list[Batch]]] = {case: {name: [] for name in sides} for case in cases}
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=len(cases) * (args.repeats + 1))
        for turn in range(args.repeats + 1):
            started_s = time.monotonic()
            for index, case in enumerate(cases):
                sent = requests(case, adapters, args.prompt_tokens, vocab, seed=1000 * index + turn)
                answers = {name: await sides[name](sent) for name in sorted(sides, reverse=bool(turn % 2))}
                progress.advance(task)
                if turn > 0:
                    bandwidths[case].append(bandwidth.bytes_per_s())
                    for name, batch in answers.items():
                        batches[case][name].append(batch)
            if not console.is_terminal:
                log.info("turn %d of %d: %.1f s", turn, args.repeats, time.monotonic() - started_s)
    return batches, bandwidths


async def start_engine(
    stack: AsyncExitStack, model: Path, adapters: Mapping[str, Path], args: argparse.Namespace, dtype: str
) -> Engine:
    """Yields the server's engine without HTTP, with all adapters loaded."""
    model_config = ModelConfig(
        model=model,
        served_model_name=("base",),
        dtype=dtype,
        load_format="auto",
        max_model_len=None,
        chat_template=None,
    )
    lora_config = LoraConfig(
        lora_modules=[LoraModule(name, path) for name, path in adapters.items()],
        adapters_dir=None,
        registry=None,
        loading_mode="cached",
        lora_kernel="bgmv",
        lora_pool_bytes=_ADAPTER_BYTES,
        max_host_adapters_bytes=_ADAPTER_BYTES,
        lora_cpus=None,
        emulate_link_mb_per_s=None,
        profile=None,
        allow_runtime_lora_updating=False,
        allow_adapter_path=[],
    )
    engine_config = EngineConfig(
        device="cpu",
        gpu_memory_utilization=0.9,
        max_num_seqs=max(args.concurrency),
        max_num_batched_tokens=None,
        max_queue=4096,
        kv_cache_bytes=None,
        enable_prefix_caching=True,
        cpu_threads=args.threads,
        seed=0,
        trace=None,
    )
    served = await build_engine(stack, model_config, lora_config, engine_config)
    return served.engine


async def ask_engine(engine: Engine, sent: Sequence[Request], output_tokens: int) -> Batch:
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    started_s = time.perf_counter()
    streams = [
        engine.submit(GenerateRequest(f"bench-{i}", request.prompt_ids, request.adapter, params, time.monotonic()))
        for i, request in enumerate(sent)
    ]
    return Batch(tuple(await asyncio.gather(*(_read(stream, started_s) for stream in streams))))


async def _read(stream: TokenStream, started_s: float) -> Answer:
    ids: list[int] = []
    times_ms: list[float] = []
    async for delta in stream:
        if delta.token_ids:
            times_ms.append(1000 * (time.perf_counter() - started_s))
        ids += delta.token_ids
        if delta.finish is not None and delta.finish.reason != "length":
            raise RuntimeError(f"a request ended with {delta.finish.reason}: {delta.finish.error}")
    return Answer(tuple(ids), times_ms[0], times_ms[-1])


if __name__ == "__main__":
    main()
