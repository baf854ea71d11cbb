"""How long the event loop is kept from its other work while the engine computes.

    .venv/bin/python scripts/bench/loop_lag.py

A ticker asks to be woken every millisecond and records by how much it is late: on an idle engine, then under a closed
batch of requests, each on its own adapter. The last line of stdout is one JSON document.
"""

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import uvloop
from engine import ask_engine, start_engine
from workload import Case, requests

from caraserve.bench.synthetic import SHAPES, write_adapters, write_model
from caraserve.model.spec import SITES

_TICK_S = 0.001
_PROMPT_TOKENS, _OUTPUT_TOKENS, _REQUESTS, _RANK = 128, 64, 16, 16


async def _late_ms(work: "asyncio.Task[object]") -> dict[str, float]:
    """By how many milliseconds ticks came late until `work` was done."""
    late = []
    while not work.done():
        asked_s = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        late.append(1000 * (time.perf_counter() - asked_s - _TICK_S))
    p50, p99 = np.percentile(late, [50, 99])
    return {"ticks": len(late), "p50": round(float(p50), 3), "p99": round(float(p99), 3), "max": round(max(late), 3)}


async def _measure(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    spec = write_model(folder / "model", SHAPES[args.model], "float32", max_position=_PROMPT_TOKENS + _OUTPUT_TOKENS)
    adapters = write_adapters(folder, spec, count=_REQUESTS, ranks=[_RANK], targets=SITES, dtype="float32")
    case = Case("own adapters", _REQUESTS)
    async with AsyncExitStack() as stack:
        engine = await start_engine(stack, folder / "model", adapters, args, "float32")
        results = {"idle": await _late_ms(asyncio.create_task(asyncio.sleep(3.0)))}
        for seed in range(2):  # the first warms caches up
            sent = requests(case, list(adapters), _PROMPT_TOKENS, spec.vocab_size, seed)
            work = asyncio.create_task(ask_engine(engine, sent, _OUTPUT_TOKENS))
            results["under load"] = await _late_ms(work)
        return results


def main() -> None:
    """Measures, prints a line for each situation and one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="100M", help="size of the random model")
    parser.add_argument("--threads", type=int, help="compute threads (default: every core)")
    args = parser.parse_args()
    args.concurrency = [_REQUESTS]
    with tempfile.TemporaryDirectory() as folder:
        results = uvloop.run(_measure(Path(folder), args))
    for situation, late in results.items():
        print(f"{situation}: late by p50 {late['p50']} ms, p99 {late['p99']} ms, max {late['max']} ms")
    print(json.dumps({"benchmark": "loop_lag", "model": args.model, "requests": _REQUESTS, "late_ms": results}))


if __name__ == "__main__":
    main()
