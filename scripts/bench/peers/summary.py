"""Medians and ratios of a comparison, beside their targets: from its document to a table and a figure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from caraserve.bench.report.plots import Look, Panel, Series, draw_panels
from caraserve.bench.report.tables import NONE, TextTable
from scripts.bench.peers.servers import LLAMA, OURS, VLLM

BEST = "best peer"


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a load. `higher`: whether more of it is better."""

    name: str
    title: str
    unit: str
    higher: bool = False


METRICS = (
    Metric("tpot_ms", "one request: TPOT", "ms"),
    Metric("ttft_ms", "TTFT of 128 tokens", "ms"),
    Metric("long_ttft_ms", "TTFT of 2,048 tokens", "ms"),
    Metric("tokens_per_s", "16 requests", "tokens/s", higher=True),
    Metric("adapters_tokens_per_s", "16 requests on 16 adapters", "tokens/s", higher=True),
)


@dataclass(frozen=True, slots=True)
class Target:
    """A bound of the ratio of our figure to a peer's: at most `value`, or at least for figures where more is better."""

    form: str
    metric: str
    peer: str  # LLAMA, VLLM or BEST
    value: float
    exact: bool = True  # of the server without further arguments; otherwise of those with them


TARGETS = (
    Target("fp32", "tpot_ms", LLAMA, 0.95),
    Target("bf16", "tpot_ms", LLAMA, 0.9),
    Target("q8_0", "tpot_ms", LLAMA, 1.0),
    Target("q4_0", "tpot_ms", LLAMA, 0.95),
    Target("q4_k_m", "tpot_ms", LLAMA, 0.9),
    *(Target(form, "tpot_ms", LLAMA, 0.7, exact=False) for form in ("q8_0", "q4_0", "q4_k_m")),
    Target("fp32", "ttft_ms", BEST, 0.78),
    Target("bf16", "ttft_ms", BEST, 0.7),
    Target("bf16", "long_ttft_ms", LLAMA, 0.4),
    Target("bf16", "long_ttft_ms", VLLM, 0.9),
    Target("fp32", "tokens_per_s", BEST, 1.6),
    Target("bf16", "tokens_per_s", BEST, 1.6),
    Target("q4_0", "tokens_per_s", BEST, 1.0),
    Target("q4_0", "tokens_per_s", BEST, 1.5, exact=False),
    Target("fp32", "adapters_tokens_per_s", BEST, 4.6),
    Target("bf16", "adapters_tokens_per_s", BEST, 4.0),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of one of our servers and of the peers', in one format. Ratios are medians over rounds, each of two
    figures of the same round, with the least and the greatest."""

    form: str
    metric: Metric
    server: str
    ours: float
    peers: Mapping[str, float]
    ratios: Mapping[str, tuple[float, float, float]]
    targets: Mapping[str, float]  # by peer, BEST resolved

    def is_met(self, peer: str) -> bool:
        """Returns whether the ratio to a peer is within its target."""
        ratio, target = self.ratios[peer][0], self.targets[peer]
        return ratio >= target if self.metric.higher else ratio <= target


def comparisons(document: Mapping[str, Any]) -> list[Comparison]:
    """Returns the comparison of each format, metric and server of ours that was measured beside a peer."""
    found = []
    for form, measured in document["formats"].items():
        for metric in METRICS:
            per_round = [
                {name: median(taken[metric.name]) for name, taken in one["samples"].items() if metric.name in taken}
                for one in measured["rounds"]
            ]
            names = sorted({name for one in per_round for name in one})
            peers = [name for name in (LLAMA, VLLM) if name in names]
            medians = {name: median(one[name] for one in per_round if name in one) for name in names}
            for server in (name for name in names if name not in peers):
                ratios = {}
                for peer in peers:
                    pairs = [one[server] / one[peer] for one in per_round if server in one and peer in one]
                    if pairs:
                        ratios[peer] = (median(pairs), min(pairs), max(pairs))
                shown = {peer: medians[peer] for peer in ratios}
                targets = _targets(form, metric, server, shown)
                found.append(Comparison(form, metric, server, medians[server], shown, ratios, targets))
    return found


def _targets(form: str, metric: Metric, server: str, peers: Mapping[str, float]) -> dict[str, float]:
    """Returns the targets of a figure by the peer that each is about; the best of those measured, where any counts."""
    if not peers:
        return {}
    best = (max if metric.higher else min)(peers, key=peers.__getitem__)
    found = {}
    for target in TARGETS:
        if (target.form, target.metric, target.exact) == (form, metric.name, server == OURS):
            peer = best if target.peer == BEST else target.peer
            if peer in peers:
                found[peer] = target.value
    return found


def table(document: Mapping[str, Any]) -> TextTable:
    """Returns every figure with its ratios and targets, unflattering ones too."""
    rows = []
    for one in comparisons(document):
        row = [one.form, one.metric.title, one.server, f"{one.ours:.4g} {one.metric.unit}"]
        for peer in (LLAMA, VLLM):
            if peer not in one.ratios:
                row += [NONE, NONE, NONE]
                continue
            ratio, least, most = one.ratios[peer]
            target = NONE
            if peer in one.targets:
                sign, verdict = "≥" if one.metric.higher else "≤", "met" if one.is_met(peer) else "missed"
                target = f"{sign} {one.targets[peer]:g} {verdict}"
            row += [f"{one.peers[peer]:.4g}", f"{ratio:.2f} ({least:.2f}–{most:.2f})", target]
        rows.append(row)
    heads = ["format", "figure", "server", "ours"]
    for peer in (LLAMA, VLLM):
        heads += [peer, f"ours ÷ {peer}", "target"]
    return TextTable("", heads, rows, left=3, note=_note(document))


def _note(document: Mapping[str, Any]) -> str:
    lines = ["Medians; a ratio is the median over rounds of figures of the same round (least–greatest)."]
    for form, measured in document["formats"].items():
        rounds = measured["rounds"]
        others = median(one["cores_of_others"] for one in rounds) if rounds else 0.0
        lines.append(f"{form}: {len(rounds)} rounds; other processes took {others:.2f} cores.")
        lines += [f"{form}: {name} is not measured: {why}" for name, why in measured["unavailable"].items()]
    return "\n".join(lines)


def draw(document: Mapping[str, Any]) -> bytes:
    """Draws each metric as bars by format, a bar for each server, which has its colour in all of them."""
    found = comparisons(document)
    servers = dict.fromkeys([OURS, *(one.server for one in found)])
    panels = []
    for metric in METRICS:
        here = [one for one in found if one.metric == metric]
        forms = list(dict.fromkeys(one.form for one in here))
        series = [
            Series(
                name, tuple(_only(one.ours for one in here if (one.form, one.server) == (form, name)) for form in forms)
            )
            for name in servers
        ]
        for peer in (peer for peer in (LLAMA, VLLM) if any(peer in one.peers for one in found)):
            values = (
                _only(one.peers[peer] for one in here if one.form == form and peer in one.peers) for form in forms
            )
            series.append(Series(peer, tuple(values)))
        if here:
            better = "more is better" if metric.higher else "less is better"
            panels.append(Panel(metric.title, f"{metric.unit} ({better})", tuple(series), categories=tuple(forms)))
    return draw_panels(panels, [Look()] * len(panels), columns=3)


def _only(values: Iterable[float]) -> float | None:
    return next(iter(values), None)


def missing_rounds(measured: Mapping[str, Any], rounds: int) -> Sequence[int]:
    """Returns the numbers of the rounds of a format that are still to be measured."""
    return range(len(measured["rounds"]), rounds)
