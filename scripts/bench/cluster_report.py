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
_SIMULATION = ("--preset", "toppings-sim", "--duration-s", "60", "--need-attainment", "0.95")
_LORASERVE = ("--request-rate", "36", "--duration-s", "200", "--instances", "20", "--need-ttft-p95-ms", "10000")
_SETTINGS = {
    "toppings-bgmv": ("Toppings' simulation, padded kernel", _SIMULATION),
    "toppings-mbgmv": ("Toppings' simulation, unpadded kernel", (*_SIMULATION, "--kernel", "unpadded")),
    "toppings-mbgmv-20": (
        "the same on a third of the instances",
        (*_SIMULATION, "--kernel", "unpadded", "--instances", "20"),
    ),
    "bursts-top5": (
        "the same with bursts (gamma 0.25), 70 % of requests for five adapters; padded",
        (*_SIMULATION, "--burstiness", "0.25", "--lora-assignment", "top5"),
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
    parts = [(_RESULTS / "preface.md").read_text(encoding="utf-8").rstrip(), _beside(told)]
    for name, document in told.items():
        parts.append(_setting(name, _SETTINGS[name][0], document))
    return "\n\n".join(parts) + "\n"


def _beside(told: dict[str, dict[str, Any]]) -> str:
    """What the papers report, ours in the same terms, and `auto`'s."""
    rows = ["## Beside the papers", "", "| | the paper's | its policy here | `auto` |", "|---|---|---|---|"]
    for name, kernel in (("toppings-bgmv", "BGMV"), ("toppings-mbgmv", "MBGMV")):
        if name in told:
            runs = {run["routing"]: run for run in told[name]["runs"]}
            ours, auto = runs["rank-aware"], runs["auto"]
            rows.append(f"| SLO attainment, {kernel} | 99 % | {ours['attainment']:.1%} | {auto['attainment']:.1%} |")
            for other, theirs in (("first-fit", -57), ("random", -23), ("dlora", -22)):
                cells = [_change(run["tpt_mean_ms"], runs[other]["tpt_mean_ms"]) for run in (ours, auto)]
                rows.append(f"| mean TPT beside {other}, {kernel} | {theirs:+} % | {cells[0]} | {cells[1]} |")
    for name in ("loraserve-shifting", "loraserve-production"):
        if name in told:
            runs = {run["routing"]: run for run in told[name]["runs"]}
            ours, auto = runs["loraserve"], runs["auto"]
            for other, theirs in (("s-lora-random", -50), ("s-lora-contiguous", -50), ("rank-aware", -17)):
                cells = [_change(run["needed"], runs[other]["needed"]) for run in (ours, auto)]
                rows.append(f"| instances beside {other}, {name} | {theirs:+} % | {cells[0]} | {cells[1]} |")
            most = runs["rank-aware"]["adapters_held_max"]
            cells = [f"{most / run['adapters_held_max']:.1f} times" for run in (ours, auto)]
            rows.append(
                f"| adapters held at most, fewer than rank-aware, {name} | 16 times | {cells[0]} | {cells[1]} |"
            )
    return "\n".join(rows)


def _change(ours: float | None, theirs: float | None) -> str:
    if theirs is None:
        return "the other serves it with no number tried"
    return "–" if ours is None else f"{ours / theirs - 1:+.0%}"


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
    lines += ["", f"![latencies]({name}/latencies.png)"]
    if (_RESULTS / name / "sizes.png").exists():
        lines += ["", f"![sizes]({name}/sizes.png)"]
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return "∞" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


if __name__ == "__main__":
    main()
