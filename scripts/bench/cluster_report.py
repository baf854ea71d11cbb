"""The report of simulated fleets: runs `caraserve bench cluster` on the papers' settings and others, and sums up.

    .venv/bin/python scripts/bench/cluster_report.py            # about an hour on one core
    .venv/bin/python scripts/bench/cluster_report.py --only toppings-bgmv

Each setting is simulated under two loads, of seeds 0 and 1. Its folder in scripts/bench/results/cluster_sim has the
JSON of both and the figures of the first; report.md, which begins with preface.md, has all their tables. With --summary
nothing is simulated again.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_RESULTS = Path(__file__).parent / "results" / "cluster_sim"
_SEEDS = (0, 1)
_TOPPINGS = ("--preset", "toppings-sim", "--duration-s", "60")
_SIZED = (*_TOPPINGS, "--need-attainment", "0.95")
_UNPADDED, _PADDED = ("--kernel", "unpadded"), ("--kernel", "padded")
_LORASERVE = ("--request-rate", "36", "--duration-s", "200", "--instances", "20", "--need-ttft-p95-ms", "10000")
_SETTINGS = {
    "toppings-mbgmv": ("Toppings' simulation, ranks of a batch summed as in our kernels", (*_SIZED, *_UNPADDED)),
    "toppings-mbgmv-20": ("the same on a third of the instances", (*_SIZED, *_UNPADDED, "--instances", "20")),
    "bursts-top5": (
        "Toppings' simulation with bursts (gamma 0.25) and 70 % of requests for five adapters, ranks summed",
        (*_SIZED, *_UNPADDED, "--burstiness", "0.25", "--lora-assignment", "top5"),
    ),
    "toppings-bgmv": ("Toppings' simulation with Punica's BGMV, which is no kernel of ours", (*_SIZED, *_PADDED)),
    "toppings-bgmv-one-router": (
        "the same by Toppings' own assumptions: one router, beats of 20 ms, every adapter everywhere",
        (*_TOPPINGS, *_PADDED, "--routers", "1", "--beat-ms", "20", "--copies", "60"),
    ),
    "loraserve-shifting": (
        "LoRAServe's shifting skew, 36 requests/s, with BGMV, which is no kernel of ours",
        ("--preset", "loraserve-shifting-poisson", *_LORASERVE, *_PADDED),
    ),
    "loraserve-production": (
        "LoRAServe's production popularity, 100 adapters, 36 requests/s, with BGMV, which is no kernel of ours",
        ("--preset", "loraserve-production-100", *_LORASERVE, *_PADDED),
    ),
}
Runs = list[dict[str, Any]]  # of one policy, by seed


def main() -> None:
    """Simulates what is asked for, then writes the summary of all there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(_SETTINGS), help="one setting")
    parser.add_argument("--summary", action="store_true", help="only write report.md again")
    args = parser.parse_args()
    for name, (_, arguments) in _SETTINGS.items():
        if not args.summary and args.only in (None, name):
            print(name, flush=True)
            _simulate(_RESULTS / name, arguments)
    told = {name: _read(_RESULTS / name) for name in _SETTINGS if (_RESULTS / name / "cluster.json").exists()}
    (_RESULTS / "report.md").write_text(_report(told), encoding="utf-8")


def _simulate(folder: Path, arguments: tuple[str, ...]) -> None:
    first, *others = _SEEDS
    _run(folder, (*arguments, "--seed", str(first)))
    for seed in others:
        with TemporaryDirectory() as rest:
            document = _run(Path(rest), (*arguments, "--seed", str(seed)))
        for run in document["runs"]:
            del run["tpt_curve_ms"]  # drawn of the first seed alone, and most of the file
        (folder / f"seed-{seed}.json").write_text(json.dumps(document) + "\n", encoding="utf-8")


def _run(folder: Path, arguments: tuple[str, ...]) -> Any:
    command = [sys.executable, "-m", "caraserve", "bench", "cluster", *arguments, "--save", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "cluster.json").read_text(encoding="utf-8"))


def _read(folder: Path) -> list[dict[str, Any]]:
    """Of every seed."""
    files = [folder / "cluster.json", *(folder / f"seed-{seed}.json" for seed in _SEEDS[1:])]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _policies(documents: list[dict[str, Any]]) -> dict[str, Runs]:
    runs: dict[str, Runs] = {}
    for document in documents:
        for run in document["runs"]:
            runs.setdefault(run["routing"], []).append(run)
    return runs


def _report(told: dict[str, list[dict[str, Any]]]) -> str:
    parts = [(_RESULTS / "preface.md").read_text(encoding="utf-8").rstrip(), _beside(told)]
    for name, documents in told.items():
        parts.append(_setting(name, _SETTINGS[name][0], documents))
    return "\n\n".join(parts) + "\n"


def _beside(told: dict[str, list[dict[str, Any]]]) -> str:
    """What the papers report, ours in the same terms, and `auto`'s; by seed."""
    rows = ["## Beside the papers", "", "| | the paper's | its policy here | `auto` |", "|---|---|---|---|"]
    for name, kernel in (
        ("toppings-mbgmv", "MBGMV"),
        ("toppings-bgmv", "BGMV"),
        ("toppings-bgmv-one-router", "BGMV, one router"),
    ):
        if name in told:
            runs = _policies(told[name])
            both = runs["rank-aware"], runs["auto"]
            cells = [_each(_percent(run["attainment"]) for run in each) for each in both]
            rows.append(f"| SLO attainment, {kernel} | 99 % | {cells[0]} | {cells[1]} |")
            for other, theirs in (("first-fit", -57), ("random", -23), ("dlora", -22)):
                cells = [_changes(each, runs[other], "tpt_mean_ms") for each in both]
                rows.append(f"| mean TPT beside {other}, {kernel} | {theirs:+} % | {cells[0]} | {cells[1]} |")
    for name in ("loraserve-shifting", "loraserve-production"):
        if name in told:
            runs = _policies(told[name])
            both = runs["loraserve"], runs["auto"]
            for other, theirs in (("s-lora-random", -50), ("s-lora-contiguous", -50), ("rank-aware", -17)):
                cells = [_changes(each, runs[other], "needed") for each in both]
                rows.append(f"| instances beside {other}, {name} | {theirs:+} % | {cells[0]} | {cells[1]} |")
            cells = [
                _each(
                    f"{most['adapters_held_max'] / run['adapters_held_max']:.1f} times"
                    for run, most in zip(each, runs["rank-aware"], strict=True)
                )
                for each in both
            ]
            rows.append(
                f"| adapters held at most, fewer than rank-aware, {name} | 16 times | {cells[0]} | {cells[1]} |"
            )
    return "\n".join(rows)


def _each(values: Iterable[str]) -> str:
    """Of one seed after the other; equal ones once."""
    return " / ".join(dict.fromkeys(values))


def _changes(ours: Runs, theirs: Runs, what: str) -> str:
    return _each(_change(our[what], their[what]) for our, their in zip(ours, theirs, strict=True))


def _change(ours: float | None, theirs: float | None) -> str:
    if theirs is None:
        return "the other serves it with no number tried"
    return "–" if ours is None else f"{ours / theirs - 1:+.0%}"


def _setting(name: str, title: str, documents: list[dict[str, Any]]) -> str:
    runs = _policies(documents)
    first = documents[0]
    slo = _each(f"{document['slo_ms']:.1f} ms" for document in documents)
    bare = _each(_percent(document["base"]["attainment"]) for document in documents)
    lines = [
        f"## {title}",
        "",
        f"{first['instances']} instances, {first['requests']:,} requests; SLO {slo} a token, which {bare} of requests "
        "meet without any adapter.",
        "",
        "| routing | SLO attainment | TPT, ms | auto's is | P95 TTFT, ms | instances needed | adapters held, mean "
        "(most) | fetches | imbalance |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for routing, each in runs.items():
        cells = [
            routing,
            _each(_percent(run["attainment"]) for run in each),
            _each(_ms(run["tpt_mean_ms"]) for run in each),
            "–" if routing == "auto" else _changes(runs["auto"], each, "tpt_mean_ms"),
            _each(_ms(run["ttft_p95_ms"]) for run in each),
            _each(_needed(run) for run in each),
            f"{each[0]['adapters_held_mean']:,.0f} ({each[0]['adapters_held_max']:,})",
            f"{each[0]['fetches']:,}",
            f"{each[0]['imbalance']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"![latencies]({name}/latencies.png)"]
    if (_RESULTS / name / "sizes.png").exists():
        lines += ["", f"![sizes]({name}/sizes.png)"]
    return "\n".join(lines)


def _needed(run: dict[str, Any]) -> str:
    return str(run["needed"] or "–") if run["tried"] else "not searched"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _ms(value: float | None) -> str:
    return "∞" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


if __name__ == "__main__":
    main()
