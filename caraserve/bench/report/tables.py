"""What benchmarks write to stdout: tables as text (`TextTable`) and as a terminal shows them; JSON for programs."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from caraserve.bench.report.ratios import RATIO_METRICS, PairedRatio, Ratio, by_label, ratios_to_first
from caraserve.bench.report.summary import LATENCIES, Distribution, RequestGroup, Summary

NONE = "–"
_WIDTH = 200  # of tables in a file or a pipe
_LENGTH_TOLERANCE = 0.05  # a mean length that differs by more from the requested one is marked


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table as text. The first `left` columns hold words, the others numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    note: str = ""


def to_rich(text: TextTable) -> Table:
    """Returns the table for a terminal. Cells are shown unchanged: an adapter's name is not markup."""
    title, note = (Text(words) if words else None for words in (text.title, text.note))
    shown = Table(title=title, title_justify="left", caption=note, caption_justify="left")
    for index, head in enumerate(text.heads):
        # Numbers stay on one line; words may wrap.
        words = index < text.left or len(text.heads) == 2
        shown.add_column(Text(head), justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for row in text.rows:
        shown.add_row(*map(Text, row))
    return shown


def open_console() -> Console:
    """Returns a console as wide as the terminal; in a file or a pipe, lines are not wrapped."""
    width = None if sys.stdout.isatty() else _WIDTH
    return Console(width=width, soft_wrap=True, highlight=False, markup=False)


def write_document(document: Mapping[str, object], asked: bool) -> None:
    """Writes a report as one line of JSON if it was asked for (`--json`), or if stdout is not a terminal."""
    if asked or not sys.stdout.isatty():
        sys.stdout.write(json.dumps(document) + "\n")


def in_words(summary: Summary) -> str:
    """Returns a run's main figures as one sentence."""
    words = f"{summary.completed} of {summary.sent} requests were answered"
    if (first := summary.latency.ttft) is not None:
        slowest_ms = first.percentiles_ms["p95"]
        words += f", with the first token after {first.mean_ms:.4g} ms on average (95 % within {slowest_ms:.4g} ms)"
    if (later := summary.latency.tpot) is not None:
        words += f" and each later one {later.mean_ms:.3g} ms after the one before"
    return f"{words}: {summary.requests_per_s:.3g} requests and {summary.output_tokens_per_s:.4g} tokens a second."


def report_tables(summaries: Sequence[Summary], latencies: Sequence[str] = LATENCIES) -> Iterator[Table]:
    """Yields every table of one run; for several, the ratios between them, then each run's facts and latencies."""
    if len(by_label(summaries)) > 1:
        yield to_rich(ratio_table(summaries))
    for summary in summaries:
        tables = list(_summary_tables(summary, latencies))
        for table in tables if len(summaries) == 1 else tables[:2]:
            yield to_rich(table)


def _summary_tables(summary: Summary, latencies: Sequence[str]) -> Iterator[TextTable]:
    yield TextTable(summary.label, ("", "value"), list(_facts(summary)))
    named = [(name.upper(), getattr(summary.latency, name)) for name in latencies]
    percentiles = next((list(found.percentiles_ms) for _, found in named if found is not None), [])
    cells = [(name, *_latency_cells(found, percentiles)) for name, found in named]
    yield TextTable("Latency, ms", ("", "mean", *percentiles), cells)
    if summary.errors:
        rows = [(kind, str(count)) for kind, count in summary.errors.items()]
        yield TextTable("Failures", ("kind", "requests"), rows)
    if len(summary.ranks) > 1:
        yield _group_table("By rank", "rank", summary.ranks)
    if len(summary.adapters) > 1:
        yield _group_table("By adapter", "adapter", summary.adapters)


def _latency_cells(found: Distribution | None, percentiles: Sequence[str]) -> list[str]:
    if found is None:
        return [NONE] * (len(percentiles) + 1)
    return [number(found.mean_ms), *(number(found.percentiles_ms[name]) for name in percentiles)]


def _facts(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "valid", "yes" if summary.valid else "NO: " + " ".join(summary.invalid_because)
    if summary.interrupted:
        yield "interrupted", "yes: of what was sent until then"
    yield "requests", f"{summary.sent:,} sent, {summary.completed:,} complete, {summary.failed:,} failed"
    yield "duration", f"{summary.wall_s:,.1f} s"
    offered = NONE if summary.offered_per_s is None else f"{summary.offered_per_s:.2f}"
    yield "requests/s", f"{summary.requests_per_s:.2f} complete, {offered} by the schedule"
    yield "tokens/s", f"{summary.output_tokens_per_s:,.1f} output, {summary.total_tokens_per_s:,.1f} with prompts"
    if (late := summary.lateness) is not None:
        share = NONE if late.share_of_gap is None else f"{late.share_of_gap:.2%}"
        times = f"{late.mean_ms:.2f} ms mean, {late.p99_ms:.2f} ms p99, {late.max_ms:.2f} ms at most"
        yield "sent late", f"{times}; mean is {share} of the mean gap"
    if (held := summary.held) is not None:
        how = f"at most {held.concurrency} requests under way"
        yield "closed loop", f"{how}; {held.share_of_requests:.0%} waited for a place, {held.mean_ms:.1f} ms on average"
    if (lengths := summary.lengths) is not None:
        yield "prompt tokens", _length(lengths.prompt, lengths.prompt_asked)
        yield "answer tokens", _length(lengths.output, lengths.output_asked)
    yield "lost to cold starts", percent(summary.cold_start_share)
    yield "of it to others' loads", percent(summary.interrupted_share)
    if summary.cpu_lora_ms is not None:
        yield "CPU LoRA", f"{summary.cpu_lora_ms:.1f} ms for a request that CPU workers helped"
    if (use := summary.use) is not None:
        link = "" if use.link_share is None else f"; the link was busy for {percent(use.link_share)} of the time"
        workers = f", {use.worker_cores:.2f} of them by CPU LoRA workers" if use.worker_cores else ""
        yield "used", f"{use.cpu_cores:.2f} cores{workers}, {use.loads:,} loads of adapters{link}"
    if (pauses := summary.interruptions) is not None:
        each = f"{pauses.median_per_request:g} median, {pauses.mean_per_request:.2f} mean"
        yield "decode interruptions", f"{each} a request; gaps above {number(pauses.threshold_ms)} ms"
        yield "decode time lost in them", percent(pauses.lost_share_of_decode)
    if (kept := summary.attainment) is not None:
        each = ", ".join(f"{name.upper()} {share:.1%}" for name, share in kept.by_limit.items())
        yield "SLO", str(kept.slo)
        yield "SLO attainment", f"{kept.share:.1%} ({each})"
        yield "goodput", f"{kept.goodput_per_s:.2f} requests/s"


def _length(got: float, requested: float | None) -> str:
    if requested is None:
        return f"{got:.1f} on average"
    far = "; NOT what was asked for" if abs(got - requested) > _LENGTH_TOLERANCE * requested else ""
    return f"{got:.1f} on average, {requested:.1f} asked for{far}"


def _group_table(title: str, kind: str, groups: Sequence[RequestGroup]) -> TextTable:
    judged = any(group.attainment is not None for group in groups)
    heads = ["rank"] if kind == "adapter" else ["adapters"]
    heads += ["requests", "failed", "TTFT\nmean", "TTFT\np95", "TPT\nmean", "E2E\nmean"]  # names get the rest of 80
    rows = []
    for group in groups:
        second = str(group.members) if kind == "rank" else str(group.rank) if group.rank else NONE
        times = (group.ttft_mean_ms, group.ttft_p95_ms, group.tpt_mean_ms, group.e2e_mean_ms)
        row = [group.name, second, f"{group.requests:,}", str(group.failed), *(optional(value) for value in times)]
        rows.append([*row, percent(group.attainment)] if judged else row)
    attained = ("SLO\nattainment",) if judged else ()
    return TextTable(f"{title}, ms", (kind, *heads, *attained), rows)


def ratio_table(summaries: Sequence[Summary]) -> TextTable:
    """Returns the mean latencies of several runs and their ratios to the first label's, as in the papers' bars."""
    rows = []
    for line in ratios_to_first(summaries):
        row = [line.label if line.valid else f"{line.label} (not valid)", str(line.repeats)]
        for metric in RATIO_METRICS:
            row += [optional(line.mean_ms.get(metric)), _ratio(line.ratios.get(metric))]
        rows.append((*row, percent(line.cold_start_share), percent(line.interrupted_share)))
    heads = [head for metric in RATIO_METRICS for head in (f"{metric.upper()}, ms", "ratio")]
    note = "Ratio of means to the first line's; ± is the standard deviation over repeats, each set against the same "
    note += "repeat of the first line. Lost to cold starts: a share of E2E; the last column is the part of it that "
    note += "other requests' loads have caused."
    heads += ["lost to cold starts", "to others' loads"]
    return TextTable("Beside one another", ("mode", "repeats", *heads), rows, note=note)


def paired_table(ratios: Mapping[str, Mapping[str, PairedRatio]]) -> TextTable:
    """Returns a line for each label but the first."""
    rows = []
    for label, found in ratios.items():
        every = (found.get(metric) for metric in RATIO_METRICS)
        shown = (NONE if one is None else f"{one.median:.3f} ({one.low:.3f} to {one.high:.3f})" for one in every)
        rows.append((label, str(max(one.requests for one in found.values())), *shown))
    note = "Median over requests of the latency over that of the same request under the first mode, with its 95 % "
    note += "interval. A stall of the machine changes means, but hardly these."
    return TextTable("Request by request", ("mode", "requests", *map(str.upper, RATIO_METRICS)), rows, note=note)


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return NONE
    return f"{ratio.median:.3f}" if ratio.spread is None else f"{ratio.median:.3f} ± {ratio.spread:.3f}"


def number(value: float) -> str:
    """Formats a number with at least three significant digits: `0.123`, `12.3`, `1,234`."""
    if value == 0:
        return "0"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def optional(value: float | None) -> str:
    return NONE if value is None else number(value)


def percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"
