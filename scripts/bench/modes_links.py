"""Compares `auto` with single loading modes over links of several speeds, request by request.

    .venv/bin/python -m scripts.bench.modes_links [--links 20,60,200] [--runs 5]

Sixteen adapters of ranks 8 to 64 on q, k and v, of which the device holds 0.6 of the bytes, three requests a second.
Every run starts its servers anew, because two servers of one mode differ by a few percent for as long as they run. What
remains of that shows in warm requests, whose adapter is on the device: all modes do the same for them. A request is
cold if mode `assisted`, which never waits, used CPU workers for it. It writes `scripts/bench/results/modes_links.json`
and takes 25 minutes on two cores, during which the machine should do nothing else.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from caraserve.bench.records import RequestRecord, Run, machine, versions
from caraserve.bench.report.ratios import PairedRatio, by_label, with_interval
from caraserve.bench.report.tables import TextTable, to_rich
from scripts.laboratory.papers.figures import PaperOptions
from scripts.laboratory.papers.servers import run_modes

_RESULT = Path(__file__).parent / "results/modes_links.json"
_MODES = ("cached", "assisted", "pipelined", "auto")
_PAIRS = (*((mode, "cached") for mode in _MODES[1:]), ("auto", "assisted"), ("auto", "pipelined"))
_REPEATS, _REQUESTS = 3, 12
_WORDS = (
    *("--adapters", "16", "--ranks", "8,16,32,64", "--targets", "qkv", "--resident", "5"),
    *("--lengths", "uniform:16-128/4-8", "--request-rate", "3", "--num-prompts", str(_REQUESTS)),
    *("--repeats", str(_REPEATS), "--modes", ",".join(_MODES)),
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request under every mode."""

    link_mb_per_s: float
    run: int
    is_cold: bool
    ttft_ms: dict[str, float]  # by mode


@dataclass(frozen=True, slots=True)
class LinkRatio:
    """A mode's TTFT over that of the same request under another mode: the median over requests."""

    link_mb_per_s: float
    is_cold: bool
    mode: str
    base: str
    ratio: PairedRatio


def requests_of(runs: Sequence[Run], link_mb_per_s: float, number: int) -> Iterator[Request]:
    """Yields the requests that every mode answered. `number`: of the run, for the servers of which these runs are."""
    for repeats in zip(*(by_label(runs)[mode] for mode in _MODES), strict=True):
        for records in zip(*(run.records for run in repeats), strict=True):
            of = dict(zip(_MODES, records, strict=True))
            times_ms = {mode: 1000 * record.ttft_s for mode, record in of.items() if record.ttft_s is not None}
            if len(times_ms) == len(_MODES):
                yield Request(link_mb_per_s, number, _used_workers(of["assisted"]), times_ms)


def _used_workers(record: RequestRecord) -> bool:
    return dict(record.phases).get("cpu_lora", 0.0) > 0


def link_ratios(requests: Sequence[Request]) -> Iterator[LinkRatio]:
    """Yields the ratios of warm and of cold requests, for each link."""
    links = list(dict.fromkeys(request.link_mb_per_s for request in requests))
    for link, is_cold, (mode, base) in product(links, (True, False), _PAIRS):
        chosen = [one for one in requests if (one.link_mb_per_s, one.is_cold) == (link, is_cold)]
        ratios = np.array([one.ttft_ms[mode] / one.ttft_ms[base] for one in chosen])
        yield LinkRatio(link, is_cold, mode, base, with_interval(ratios))


def report(requests: Sequence[Request]) -> None:
    """Prints the ratios and writes them."""
    found = list(link_ratios(requests))
    rows = [
        (
            f"{one.link_mb_per_s:g} MB/s",
            "cold" if one.is_cold else "warm",
            f"{one.mode} ÷ {one.base}",
            f"{one.ratio.median:.3f} ({one.ratio.low:.3f} to {one.ratio.high:.3f})",
            str(one.ratio.requests),
        )
        for one in found
    ]
    Console().print(to_rich(TextTable("TTFT by link", ("link", "requests", "modes", "median", "number"), rows)))
    document = {
        "bench": "modes over links",
        "machine": machine(),
        "versions": versions(),
        "arguments": " ".join(_WORDS),
        "ratios": found,
    }
    _RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def main() -> None:
    """Measures all links in each run, and reports them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="20,60,200", help="MB/s")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    requests: list[Request] = []
    for number in range(1, args.runs + 1):
        for link in args.links.split(","):
            options = PaperOptions(duration_s=0.0, repeats=_REPEATS, seed=number)
            runs = run_modes([*_WORDS, "--emulate-link-mb-per-s", link], options).runs
            requests += requests_of(runs, float(link), number)
    report(requests)


if __name__ == "__main__":
    main()
