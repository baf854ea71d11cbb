"""Medians, ratios, the table, the figure and the JSON document of `engine.py`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from workload import Batch, Case

from caraserve.util.units import human_bytes

_WIDTH = 140  # columns of the table where stdout is no terminal


@dataclass(frozen=True, slots=True)
class Measured:
    """One case: the batches of each side, and the bytes that a decode step of it must read."""

    case: Case
    batches: Mapping[str, Sequence[Batch]]  # by side
    bandwidths: Sequence[float]  # bytes/s that all cores read, beside each repeat
    step_bytes: int

    def median(self, side: str, metric: Callable[[Batch], float]) -> float:
        """Returns the median of a metric over the repeats."""
        return median(metric(batch) for batch in self.batches[side])

    def tpot_vs_reading(self, num_bytes: int) -> float:
        """Returns our time per output token ÷ the time to read so many bytes, at the bandwidth measured beside it."""
        pairs = zip(self.batches["caraserve"], self.bandwidths, strict=True)
        return median(batch.tpot_ms / (1000 * num_bytes / bandwidth) for batch, bandwidth in pairs)

    @property
    def equal_answers(self) -> float | None:
        """Share of requests that both sides answered with the same tokens; None without the other side."""
        if "peft" not in self.batches:
            return None
        pairs = [
            (ours.output_ids, theirs.output_ids)
            for left, right in zip(self.batches["caraserve"], self.batches["peft"], strict=True)
            for ours, theirs in zip(left.answers, right.answers, strict=True)
        ]
        return sum(ours == theirs for ours, theirs in pairs) / len(pairs)


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all cases of one dtype."""

    dtype: str
    num_parameters: int
    weight_bytes: int  # read by every decode step
    peft_versions: Mapping[str, str]
    cases: Sequence[Measured]

    @property
    def bandwidth(self) -> float:
        """The median of the memory bandwidths measured during the run, in bytes/s over all cores."""
        return median(value for measured in self.cases for value in measured.bandwidths)

    def base_of(self, measured: Measured) -> Measured:
        """Returns the case on the base model with the same concurrency."""
        return next(other for other in self.cases if other.case == Case("base", measured.case.concurrency))


def _tokens_per_s(batch: Batch) -> float:
    return batch.tokens_per_s


def _tpot_ms(batch: Batch) -> float:
    return batch.tpot_ms


def _ttft_ms(batch: Batch) -> float:
    return batch.ttft_ms


_METRICS = {"tokens_per_s": _tokens_per_s, "tpot_ms": _tpot_ms, "ttft_ms": _ttft_ms}


def ratios(report: Report, measured: Measured) -> dict[str, float]:
    """Returns our figures over peft's, over those on the base model, and over the floor."""
    ours = {name: measured.median("caraserve", metric) for name, metric in _METRICS.items()}
    base = report.base_of(measured)
    result = {
        "tokens_per_s_vs_base": ours["tokens_per_s"] / base.median("caraserve", _tokens_per_s),
        "tpot_vs_floor": measured.tpot_vs_reading(measured.step_bytes),
        "tpot_vs_weights_once": measured.tpot_vs_reading(report.weight_bytes),
    }
    if "peft" in measured.batches:
        result |= {f"{name}_vs_peft": ours[name] / measured.median("peft", metric) for name, metric in _METRICS.items()}
    return result


def print_table(report: Report) -> None:
    """Prints the table of one dtype."""
    with_peft = "peft" in report.cases[0].batches
    table = Table(title=f"{report.dtype}, {report.num_parameters:,} parameters", caption=_caption(report))
    heads = ["requests", "situation", "tok/s", "tok/s ÷ base", "TPOT ms", "TPOT ÷ floor", "TPOT ÷ weights", "TTFT ms"]
    if with_peft:
        heads += ["peft tok/s", "peft TPOT ms", "peft TTFT ms", "tok/s ÷ peft", "TPOT ÷ peft", "same answers"]
    for head in heads:
        left = head == "situation"
        table.add_column(head, justify="left" if left else "right", no_wrap=left)
    for measured in report.cases:
        table.add_row(*_cells(report, measured, with_peft), end_section=measured.case.situation == "own adapters")
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)


def _caption(report: Report) -> str:
    return (
        f"A decode step reads {human_bytes(report.weight_bytes)} of weights: "
        f"{1000 * report.weight_bytes / report.bandwidth:.2f} ms at {report.bandwidth / 1e9:.1f} GB/s, the median; "
        "ratios take the bandwidth beside each repeat.\n"
        "The floor reads the batch's adapters and KV too. TPOT: time per output token after the first.\n"
        "Same answers: requests with every token equal; logits that rounding cannot tell apart may go either way."
    )


def _cells(report: Report, measured: Measured, with_peft: bool) -> list[str]:
    ratio = ratios(report, measured)
    ours = [measured.median("caraserve", metric) for metric in _METRICS.values()]
    cells = [
        str(measured.case.concurrency),
        measured.case.situation,
        f"{ours[0]:.1f}",
        f"{ratio['tokens_per_s_vs_base']:.2f}",
        f"{ours[1]:.2f}",
        f"{ratio['tpot_vs_floor']:.2f}",
        f"{ratio['tpot_vs_weights_once']:.2f}",
        f"{ours[2]:.0f}",
    ]
    if with_peft:
        theirs = [measured.median("peft", metric) for metric in _METRICS.values()]
        cells += [f"{theirs[0]:.1f}", f"{theirs[1]:.2f}", f"{theirs[2]:.0f}"]
        cells += [f"{ratio['tokens_per_s_vs_peft']:.2f}", f"{ratio['tpot_ms_vs_peft']:.2f}"]
        cells.append(f"{measured.equal_answers:.0%}")
    return cells


def document(
    reports: Sequence[Report], args: Mapping[str, Any], machine: Mapping[str, Any], versions: Mapping[str, str]
) -> dict[str, Any]:
    """Returns all results, including each repeat, as JSON values."""
    return {
        "benchmark": "engine",
        "machine": dict(machine),
        "versions": dict(versions),
        "args": {name: str(value) if isinstance(value, Path) else value for name, value in args.items()},
        "reports": [
            {
                "dtype": report.dtype,
                "num_parameters": report.num_parameters,
                "decode_weight_bytes": report.weight_bytes,
                "read_bandwidth_gb_per_s": report.bandwidth / 1e9,
                "peft_versions": dict(report.peft_versions),
                "cases": [_case(report, measured) for measured in report.cases],
            }
            for report in reports
        ],
    }


def _case(report: Report, measured: Measured) -> dict[str, Any]:
    sides = {
        side: {
            name: {"median": measured.median(side, metric), "repeats": [metric(batch) for batch in batches]}
            for name, metric in _METRICS.items()
        }
        for side, batches in measured.batches.items()
    }
    return {
        "situation": measured.case.situation,
        "concurrency": measured.case.concurrency,
        "step_bytes": measured.step_bytes,
        "read_bandwidths_gb_per_s": [value / 1e9 for value in measured.bandwidths],
        "equal_answers": measured.equal_answers,
        "sides": sides,
        "ratios": ratios(report, measured),
    }


def plot(reports: Sequence[Report], file: Path) -> None:
    """Draws tokens/s as bars, a panel for each dtype; our bars are labelled with their ratio to peft's."""
    # Imported here: matplotlib is an optional dependency, for this option only.
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(11, 4 * len(reports)), layout="constrained")
    axes = figure.subplots(len(reports), 1, squeeze=False)[:, 0]
    for axis, report in zip(axes, reports, strict=True):
        sides = sorted(report.cases[0].batches)
        for index, side in enumerate(sides):
            heights = [measured.median(side, _tokens_per_s) for measured in report.cases]
            places = [place + 0.4 * index for place in range(len(heights))]
            bars = axis.bar(places, heights, width=0.4, label=side)
            if side == "caraserve" and "peft" in sides:
                labels = [f"{ratios(report, measured)['tokens_per_s_vs_peft']:.1f}×" for measured in report.cases]
                axis.bar_label(bars, labels)
        names = [f"{measured.case.concurrency} × {measured.case.situation}" for measured in report.cases]
        axis.set_xticks([place + 0.2 * (len(sides) - 1) for place in range(len(names))], names, rotation=20)
        axis.set(ylabel="output tokens/s", title=f"{report.num_parameters / 1e6:.0f}M parameters, {report.dtype}")
        axis.legend()
    figure.savefig(file, dpi=150)
