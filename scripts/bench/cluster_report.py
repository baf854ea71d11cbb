"""The report of simulated fleets: runs `caraserve bench cluster` on the papers' settings and others, and sums up.

    .venv/bin/python scripts/bench/cluster_report.py            # some minutes on two cores
    .venv/bin/python scripts/bench/cluster_report.py --only toppings-bgmv

Each setting has a folder in scripts/bench/results/cluster_sim with its JSON and figures; report.md, which begins with
preface.md, has all their tables. With --summary nothing is simulated again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).parent / "results" / "cluster_sim"
_TOPPINGS = ("--preset", "toppings-sim", "--duration-s", "60", "--need-attainment", "0.95")
_LORASERVE = ("--request-rate", "36", "--duration-s", "200", "--instances", "14", "--need-ttft-p95-ms", "10000")
_SETTINGS = {
    "toppings-bgmv": ("Toppings' simulation, padded kernel", _TOPPINGS),
    "toppings-mbgmv": ("Toppings' simulation, unpadded kernel", (*_TOPPINGS, "--kernel", "unpadded")),
    "bursts-top5": (
        "the same with bursts (gamma 0.25), 70 % of requests for five adapters; padded",
        (*_TOPPINGS, "--burstiness", "0.25", "--lora-assignment", "top5"),
    ),
    "loraserve-shifting": (
        "LoRAServe's shifting skew, 36 requests/s; padded",
        ("--preset", "loraserve-shifting-poisson", *_LORASERVE),
    ),
    "loraserve-production": (
        "LoRAServe's production popularity, 100 adapters, 36 requests/s; padded",
        ("--preset", "loraserve-production-100", *_LORASERVE),
    ),
}


def main() -> None:
    """Simulates what is asked for, then writes the summary of all there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(_SETTINGS), help="one setting")
    parser.add_argument("--summary", action="store_true", help="only write report.md again")
    args = parser.parse_args()
    for name, (_, arguments) in _SETTINGS.items():
        if not args.summary and args.only in (None, name):
            print(name, flush=True)
            command = [
                sys.executable,
                "-m",
                "caraserve",
                "bench",
                "cluster",
                *arguments,
                "--save",
                str(_RESULTS / name),
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    told = {
        name: json.loads((_RESULTS / name / "cluster.json").read_text(encoding="utf-8"))
        for name in _SETTINGS
        if (_RESULTS / name / "cluster.json").exists()
    }
    (_RESULTS / "report.md").write_text(_report(told), encoding="utf-8")


def _report(told: dict[str, dict[str, Any]]) -> str:
    parts = [(_RESULTS / "preface.md").read_text(encoding="utf-8").rstrip()]
    for name, document in told.items():
        parts.append(_setting(name, _SETTINGS[name][0], document))
    return "\n\n".join(parts) + "\n"


def _setting(name: str, title: str, document: dict[str, Any]) -> str:
    runs = document["runs"]
    auto = next(run for run in runs if run["routing"] == "auto")
    lines = [
        f"## {title}",
        "",
        f"{document['instances']} instances, {document['requests']:,} requests; SLO {document['slo_ms']:.1f} ms a "
        f"token, which {document['base']['attainment']:.1%} of requests meet without any adapter.",
        "",
        "| routing | SLO attainment | TPT, ms | auto's is | P95 TTFT, ms | instances needed | adapters held, mean "
        "(most) | fetches | imbalance |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        tpt = run["tpt_mean_ms"]
        less = "–" if tpt is None or run is auto else f"{auto['tpt_mean_ms'] / tpt - 1:+.0%}"
        lines.append(
            f"| {run['routing']} | {run['attainment']:.1%} | {_ms(tpt)} | {less} | {_ms(run['ttft_p95_ms'])} "
            f"| {run['needed'] or '–'} | {run['adapters_held_mean']:,.0f} ({run['adapters_held_max']:,}) "
            f"| {run['fetches']:,} | {run['imbalance']:.2f} |"
        )
    lines += ["", f"![latencies]({name}/latencies.png)", "", f"![sizes]({name}/sizes.png)"]
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return "∞" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


if __name__ == "__main__":
    main()
