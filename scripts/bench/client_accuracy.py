"""Measures the error of the load client's figures, with an endpoint whose delays are known.

    .venv/bin/python scripts/bench/client_accuracy.py

The endpoint (tests/bench/fake_endpoint.py) answers after given delays and records when it really did. The client runs
on one core. The last line of stdout is one JSON document: measured over known values of TTFT, TPOT and the rate.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from urllib.request import urlopen

import uvloop

from caraserve.bench.client.dialects import LoadSettings
from caraserve.bench.client.endpoint import find_endpoint
from caraserve.bench.client.player import Player
from caraserve.bench.records import Run, machine, versions
from caraserve.bench.report.summary import summarize
from caraserve.bench.report.tables import TextTable, open_console, to_rich
from caraserve.bench.workload.arrivals import parse_arrivals
from caraserve.bench.workload.build import WorkloadSpec, build
from caraserve.bench.workload.lengths import parse_lengths
from caraserve.bench.workload.popularity import parse_popularity

_FAKE = Path(__file__).parents[2] / "tests" / "bench" / "fake_endpoint.py"


def main() -> None:
    """Performs one run and prints a table, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--ttft-ms", type=int, default=100, help="delay of the first token")
    parser.add_argument("--tpot-ms", type=int, default=10, help="delay of every other")
    args = parser.parse_args()
    model = f"ttft-{args.ttft_ms}-tpot-{args.tpot_ms}"
    with subprocess.Popen(
        [sys.executable, str(_FAKE), model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as fake:
        try:
            assert fake.stdout is not None
            url = f"http://127.0.0.1:{int(fake.stdout.readline())}"
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
            run, cores = uvloop.run(_play(url, args))
            with urlopen(f"{url}/log") as answer:
                log = json.load(answer)
        finally:
            fake.kill()
    result = _compared(run, log, args) | {"cores_used": cores, "machine": machine(), "versions": versions()}
    rows = tuple((name.replace("_", " "), f"{value:.4g}") for name, value in result.items() if isinstance(value, float))
    open_console().print(to_rich(TextTable("measured by the client", ("", ""), rows)))
    print(json.dumps(result))


async def _play(url: str, args: argparse.Namespace) -> tuple[Run, float]:
    """Performs the run. Returns it, and the share of its core that the client used."""
    endpoint = await find_endpoint(url, "openai", None, None)
    lengths, arrivals = parse_lengths(f"fixed:16/{args.output_tokens}"), parse_arrivals("poisson")
    spec = WorkloadSpec(lengths, arrivals, args.rate, parse_popularity("uniform"), 1, (8,), args.requests)
    player = Player(endpoint, build(spec), endpoint.adapters, LoadSettings(seed=0), "fake")
    cpu_s, started_s = time.process_time(), time.perf_counter()
    run = await player.play()
    return run, (time.process_time() - cpu_s) / (time.perf_counter() - started_s)


def _compared(run: Run, log: list[dict[str, list[float]]], args: argparse.Namespace) -> dict[str, object]:
    summary = summarize(run)
    assert summary.latency.ttft is not None
    assert summary.latency.tpot is not None
    assert summary.lateness is not None
    sent_s = sorted(record.sent_s for record in run.records)
    due_s = sorted(record.due_s for record in run.records)
    made_ttft_ms = 1000 * fmean(each["sent_s"][0] - each["came_s"] for each in log)  # type: ignore[operator]
    made_tpot_ms = 1000 * fmean((each["sent_s"][-1] - each["sent_s"][0]) / (len(each["sent_s"]) - 1) for each in log)
    return {
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "failed": summary.failed,
        "ttft_over_known": summary.latency.ttft.mean_ms / args.ttft_ms,
        "ttft_over_made": summary.latency.ttft.mean_ms / made_ttft_ms,
        "tpot_over_known": summary.latency.tpot.mean_ms / args.tpot_ms,
        "tpot_over_made": summary.latency.tpot.mean_ms / made_tpot_ms,
        "rate_over_schedule": (due_s[-1] - due_s[0]) / (sent_s[-1] - sent_s[0]),
        "late_mean_us": 1000 * summary.lateness.mean_ms,
        "late_p99_us": 1000 * summary.lateness.p99_ms,
        "late_share_of_gap": summary.lateness.share_of_gap,
        "valid": summary.valid,
    }


if __name__ == "__main__":
    main()
