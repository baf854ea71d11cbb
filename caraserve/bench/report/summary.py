"""Summary of one run: latencies, throughput, SLO attainment, decode interruptions. Times in ms unless named otherwise.

Only complete answers count, except in the number of failures and in SLO attainment, which a failed request misses.
Percentiles interpolate linearly between the two nearest requests.

A *decode interruption* is a pause between two successive tokens of an answer of more than 1.5 times the run's median
gap. The median is over all gaps of complete answers that are longer than 0, since tokens of one event have none between
them. The time lost in an interruption is its excess over that median; the share lost is the sum of these over the time
between first and last tokens. The median is the run's own, because models and batch sizes differ; a run interrupted in
more than half of its steps would hide that here, but shows it in TPOT.

*Lost to cold starts* is (load + stalled + interrupted) ÷ E2E, by the phases that the server reports: a request's wait
for its own adapter, and the time in which other requests' loads stopped it. *Goodput*: requests/s within the SLO.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from caraserve.bench.records import RequestRecord, Run, ServerUse
from caraserve.errors import ConfigError

LATENCIES = ("ttft", "tpot", "tpt", "itl", "e2e")
LIMITS = ("ttft", "tpot", "tpt", "e2e")
INTERRUPTION_FACTOR = 1.5
MAX_LATE_SHARE = 0.01  # of the mean gap between due times; a later sender would change the load that it measures
_TOP_ADAPTERS = 20
_DRAWN_PERCENTILE = 95.0  # that plots of sweeps and ranks show


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """Arrays `[requests]`. Times in seconds count from the run's start; NaN where a request has no such time."""

    due_s: Floats
    sent_s: Floats
    done_s: Floats
    ok: Bools  # a complete answer
    prompt_tokens: Ints
    output_tokens: Ints
    ttft_ms: Floats
    tpot_ms: Floats  # (e2e - ttft) / (tokens - 1)
    tpt_ms: Floats  # e2e / tokens, as in the papers
    e2e_ms: Floats
    token_s: Floats  # of all requests, one after another
    token_of: Ints  # index of the request of each entry of `token_s`

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> "Columns":
        """Builds the arrays. A failed request has the times and tokens that it reached."""
        counts = np.array([len(record.token_s) for record in records], np.int64)
        due_s, sent_s, done_s, first_s = (
            np.array(
                [(one.due_s, one.sent_s, one.done_s, one.token_s[0] if one.token_s else np.nan) for one in records]
            )
            .reshape(-1, 4)
            .T
        )
        tokens = np.array([record.output_tokens for record in records], np.int64)
        ttft_ms, e2e_ms = 1e3 * (first_s - sent_s), 1e3 * (done_s - sent_s)
        total = int(counts.sum())
        return cls(
            due_s=due_s,
            sent_s=sent_s,
            done_s=done_s,
            ok=np.array([record.error is None for record in records], np.bool_),
            prompt_tokens=np.array([record.prompt_tokens for record in records], np.int64),
            output_tokens=tokens,
            ttft_ms=ttft_ms,
            tpot_ms=np.where(tokens > 1, (e2e_ms - ttft_ms) / np.maximum(tokens - 1, 1), np.nan),
            tpt_ms=np.where(tokens > 0, e2e_ms / np.maximum(tokens, 1), np.nan),
            e2e_ms=e2e_ms,
            token_s=np.fromiter(chain.from_iterable(record.token_s for record in records), np.float64, total),
            token_of=np.repeat(np.arange(len(records)), counts),
        )

    def gaps(self) -> tuple[Floats, Ints]:
        """Returns the gaps in ms between successive output tokens of complete answers, and each gap's request index.

        Tokens of one event have a gap of 0 between them.
        """
        same = (self.token_of[1:] == self.token_of[:-1]) & self.ok[self.token_of[1:]]
        gaps_ms: Floats = 1e3 * np.diff(self.token_s)[same]
        return gaps_ms, self.token_of[1:][same]


@dataclass(frozen=True, slots=True)
class SloLimits:
    """Upper limits of a service level objective; None is no limit. A request that misses one misses the SLO."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tpt_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def scaled(cls, base: "Summary", factor: float) -> "SloLimits":
        """Returns a limit on TPT of `factor` times the mean of `base`, a run without adapters, as in the papers. Raises
        ConfigError if the run has no such mean."""
        if base.latency.tpt is None:
            raise ConfigError("--slo-scale: the run without LoRA has no TPT to scale")
        return cls(tpt_ms=factor * base.latency.tpt.mean_ms)

    def limits(self) -> dict[str, float]:
        """Returns the limits that are set, by name, in ms."""
        named = {name: getattr(self, f"{name}_ms") for name in LIMITS}
        return {name: limit for name, limit in named.items() if limit is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name.upper()} ≤ {limit:g} ms" for name, limit in self.limits().items()) or "no limit"


def parse_slo(text: str) -> SloLimits:
    """Reads limits in ms, as `ttft:200,tpot:30,e2e:5000`. Raises ConfigError that shows the right form."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, colon, digits = (piece.strip() for piece in part.partition(":"))
        try:
            limit = float(digits)
        except ValueError:
            limit = math.nan
        if not colon or name not in LIMITS or not (math.isfinite(limit) and limit > 0):
            raise ConfigError(
                f"--slo {text!r}: {part.strip()!r} is not one of {', '.join(LIMITS)} with ms, as ttft:200"
            )
        if f"{name}_ms" in found:
            raise ConfigError(f"--slo {text!r}: {name} is there twice")
        found[f"{name}_ms"] = limit
    return SloLimits(**found)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of one kind of latency."""

    count: int
    mean_ms: float
    percentiles_ms: dict[str, float]  # by name, as p95; ascending


@dataclass(frozen=True, slots=True)
class Latency:
    """Distributions by kind of latency; None where no answer has such a time."""

    ttft: Distribution | None  # from sending to the first token
    tpot: Distribution | None  # (e2e - ttft) / (tokens - 1)
    tpt: Distribution | None  # e2e / tokens: the papers' time per token, queueing and prefill included
    itl: Distribution | None  # every gap between successive tokens
    e2e: Distribution | None  # from sending to the last byte


@dataclass(frozen=True, slots=True)
class Lateness:
    """The lateness of requests: the times from when they were due until they were sent."""

    mean_ms: float
    p99_ms: float
    max_ms: float
    mean_gap_ms: float | None  # between due times; None where all were due at once or there is only one
    share_of_gap: float | None  # mean lateness over mean gap


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """The waits of a closed loop's requests, from their due time until fewer than `concurrency` were in flight."""

    concurrency: int
    mean_ms: float
    share_of_requests: float  # that waited more than 1 ms


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Mean tokens over complete answers, as counted by the server if it reports counts; and as requested."""

    prompt: float
    prompt_asked: float | None
    output: float
    output_asked: float | None


@dataclass(frozen=True, slots=True)
class Interruptions:
    """Decode interruptions, as this module's docstring defines them."""

    median_gap_ms: float
    threshold_ms: float
    mean_per_request: float
    median_per_request: float
    p95_per_request: float
    lost_share_of_decode: float


@dataclass(frozen=True, slots=True)
class Attainment:
    """Shares of all sent requests within the limits, and requests a second within all of them."""

    slo: SloLimits
    share: float
    goodput_per_s: float
    by_limit: dict[str, float]


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Requests of one adapter, of one rank, or of all adapters beyond the 20 most requested."""

    name: str
    members: int  # adapters in it
    rank: int | None  # 0: the base model; None: unknown, or several
    requests: int
    failed: int
    ttft_mean_ms: float | None
    ttft_p95_ms: float | None
    tpt_mean_ms: float | None
    e2e_mean_ms: float | None
    attainment: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of one run.

    It is `valid` if some requests were answered, and requests were sent at most 1 % of the mean gap late on average.
    """

    label: str
    sent: int
    completed: int
    failed: int
    errors: dict[str, int]  # failures by kind, most first
    interrupted: bool
    wall_s: float
    offered_per_s: float | None  # by the schedule
    requests_per_s: float  # completed
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompts included
    latency: Latency
    lateness: Lateness | None  # None in a closed loop
    held: ClosedLoop | None  # None in an open loop
    lengths: TokenCounts | None
    valid: bool
    invalid_because: tuple[str, ...]
    cold_start_share: float | None  # lost to cold starts; None: the server reports no phases
    interruptions: Interruptions | None
    attainment: Attainment | None
    adapters: tuple[RequestGroup, ...]  # most requests first, then the others as one
    ranks: tuple[RequestGroup, ...]  # ascending, the base model first
    interrupted_share: float | None = None  # part of cold_start_share by others' loads; not in old reports
    cpu_lora_ms: float | None = None  # of CPU workers, mean of the requests that they helped; not in old reports
    use: ServerUse | None = None  # not in old reports


def summarize(run: Run, slo: SloLimits | None = None, percentiles: Sequence[float] = (50, 90, 95, 99)) -> Summary:
    """Summarizes a run. The 95th percentile is added to the requested ones."""
    columns = Columns.of(run.records)
    wanted = tuple(sorted({*map(float, percentiles), _DRAWN_PERCENTILE}))
    lateness = _lateness(columns) if run.concurrency is None else None
    reasons = tuple(_reasons(columns, lateness))
    due_span_s = float(np.ptp(columns.due_s)) if columns.due_s.size else 0.0
    answered = [record for record in run.records if record.error is None]
    output_tokens = int(columns.output_tokens[columns.ok].sum())
    kept = None if slo is None else met(slo, columns)["all"]
    values_ms = {name: getattr(columns, f"{name}_ms")[columns.ok] for name in LIMITS} | {"itl": columns.gaps()[0]}
    return Summary(
        label=run.label,
        sent=len(run.records),
        completed=len(answered),
        failed=len(run.records) - len(answered),
        errors=dict(Counter(record.error for record in run.records if record.error is not None).most_common()),
        interrupted=run.interrupted,
        wall_s=run.wall_s,
        offered_per_s=(columns.due_s.size - 1) / due_span_s if due_span_s > 0 else None,
        requests_per_s=_per_s(len(answered), run),
        output_tokens_per_s=_per_s(output_tokens, run),
        total_tokens_per_s=_per_s(output_tokens + int(columns.prompt_tokens[columns.ok].sum()), run),
        latency=Latency(**{name: distribution(values, wanted) for name, values in values_ms.items()}),
        lateness=lateness,
        held=None if run.concurrency is None else _held(run.concurrency, columns),
        lengths=_lengths(answered),
        valid=not reasons,
        invalid_because=reasons,
        cold_start_share=_share(answered, "load", "stalled", "interrupted"),
        interruptions=_interruptions(columns),
        attainment=None if slo is None else _attainment(slo, columns, run),
        adapters=_by_adapter(run.records, columns, kept),
        ranks=_by_rank(run.records, columns, kept),
        interrupted_share=_share(answered, "interrupted"),
        cpu_lora_ms=known_mean(dict(record.phases).get("cpu_lora") or None for record in answered),
        use=run.use,
    )


def known_mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the values that are not None, or None without any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def distribution(values: Floats, percentiles: Sequence[float]) -> Distribution | None:
    """Returns mean and percentiles of the values that are not NaN, or None if there are none."""
    known = values[~np.isnan(values)]
    if not known.size:
        return None
    found = np.percentile(known, percentiles)
    named = {f"p{wanted:g}": float(value) for wanted, value in zip(percentiles, found, strict=True)}
    return Distribution(int(known.size), float(known.mean()), named)


def _lateness(columns: Columns) -> Lateness | None:
    if not columns.sent_s.size:
        return None
    late_ms = 1e3 * np.maximum(columns.sent_s - columns.due_s, 0.0)
    gap_ms = 1e3 * float(np.ptp(columns.due_s)) / max(columns.due_s.size - 1, 1)
    mean_ms = float(late_ms.mean())
    return Lateness(
        mean_ms=mean_ms,
        p99_ms=float(np.percentile(late_ms, 99)),
        max_ms=float(late_ms.max()),
        mean_gap_ms=gap_ms or None,
        share_of_gap=mean_ms / gap_ms if gap_ms else None,
    )


def _held(concurrency: int, columns: Columns) -> ClosedLoop:
    waited_ms = 1e3 * np.maximum(columns.sent_s - columns.due_s, 0.0)
    if not waited_ms.size:
        return ClosedLoop(concurrency, 0.0, 0.0)
    return ClosedLoop(concurrency, float(waited_ms.mean()), float((waited_ms > 1.0).mean()))


def _lengths(complete: Sequence[RequestRecord]) -> TokenCounts | None:
    if not complete:
        return None

    return TokenCounts(
        prompt=known_mean(record.prompt_tokens for record in complete) or 0.0,
        prompt_asked=known_mean(record.asked_prompt_tokens for record in complete),
        output=known_mean(record.output_tokens for record in complete) or 0.0,
        output_asked=known_mean(record.asked_output_tokens for record in complete),
    )


def _reasons(columns: Columns, lateness: Lateness | None) -> list[str]:
    reasons = []
    if not columns.sent_s.size:
        reasons.append("No request was sent.")
    elif not columns.ok.any():
        reasons.append("No request was answered.")
    if lateness is not None and lateness.share_of_gap is not None and lateness.share_of_gap > MAX_LATE_SHARE:
        reasons.append(
            f"Requests were sent {lateness.mean_ms:.2f} ms late on average, {lateness.share_of_gap:.1%} of the mean "
            f"gap of {lateness.mean_gap_ms:.2f} ms between due times; up to {MAX_LATE_SHARE:.0%} would do."
        )
    return reasons


def _share(complete: Sequence[RequestRecord], *phases: str) -> float | None:
    """Returns these phases' share of E2E over the requests for which the server reported all of them."""
    spent_ms = e2e_ms = 0.0
    for record in complete:
        phase_ms = dict(record.phases)
        if phase_ms.keys() >= {*phases}:
            spent_ms += sum(phase_ms[phase] for phase in phases)
            e2e_ms += 1e3 * record.e2e_s
    return spent_ms / e2e_ms if e2e_ms > 0 else None


def _interruptions(columns: Columns) -> Interruptions | None:
    gaps_ms, owner = columns.gaps()
    between_events = gaps_ms[gaps_ms > 0]
    if not between_events.size:
        return None
    median_ms = float(np.median(between_events))
    long = gaps_ms > INTERRUPTION_FACTOR * median_ms
    decoding = np.unique(owner)  # an answer of one token cannot be interrupted
    each = np.bincount(owner[long], minlength=columns.ok.size)[decoding]
    return Interruptions(
        median_gap_ms=median_ms,
        threshold_ms=INTERRUPTION_FACTOR * median_ms,
        mean_per_request=float(each.mean()),
        median_per_request=float(np.median(each)),
        p95_per_request=float(np.percentile(each, 95)),
        lost_share_of_decode=float((gaps_ms[long] - median_ms).sum() / gaps_ms.sum()),
    )


def _attainment(slo: SloLimits, columns: Columns, run: Run) -> Attainment:
    kept = met(slo, columns)
    shares = {name: float(mask.mean()) if mask.size else 0.0 for name, mask in kept.items()}
    return Attainment(slo, shares.pop("all"), _per_s(int(kept["all"].sum()), run), shares)


def _by_adapter(records: Sequence[RequestRecord], columns: Columns, kept: Bools | None) -> tuple[RequestGroup, ...]:
    counts = Counter(record.model for record in records)
    ranks = {record.model: record.rank for record in records}
    models = sorted(counts, key=lambda model: (-counts[model], model))
    top, rest = models[:_TOP_ADAPTERS], models[_TOP_ADAPTERS:]
    place = {model: index for index, model in enumerate(models)}
    at = np.array([place[record.model] for record in records], np.int64)
    groups = [_group(model, 1, ranks[model], at == index, columns, kept) for index, model in enumerate(top)]
    if rest:
        groups.append(_group(f"{len(rest)} others", len(rest), None, at >= len(top), columns, kept))
    return tuple(groups)


def _by_rank(records: Sequence[RequestRecord], columns: Columns, kept: Bools | None) -> tuple[RequestGroup, ...]:
    adapters: dict[int | None, set[str]] = {}
    for record in records:
        adapters.setdefault(record.rank, set()).add(record.model)
    of = np.array([-1 if record.rank is None else record.rank for record in records], np.int64)
    ranks = sorted(adapters, key=lambda rank: -1 if rank is None else rank)
    return tuple(
        _group(
            "unknown" if rank is None else str(rank) if rank else "base model",
            len(adapters[rank]),
            rank,
            of == (-1 if rank is None else rank),
            columns,
            kept,
        )
        for rank in ranks
    )


def _group(
    name: str, members: int, rank: int | None, chosen: Bools, columns: Columns, kept: Bools | None
) -> RequestGroup:
    ok = chosen & columns.ok
    ttft = distribution(columns.ttft_ms[ok], (_DRAWN_PERCENTILE,))
    tpt, e2e = distribution(columns.tpt_ms[ok], ()), distribution(columns.e2e_ms[ok], ())
    return RequestGroup(
        name=name,
        members=members,
        rank=rank,
        requests=int(chosen.sum()),
        failed=int((chosen & ~columns.ok).sum()),
        ttft_mean_ms=None if ttft is None else ttft.mean_ms,
        ttft_p95_ms=None if ttft is None else ttft.percentiles_ms["p95"],
        tpt_mean_ms=None if tpt is None else tpt.mean_ms,
        e2e_mean_ms=None if e2e is None else e2e.mean_ms,
        attainment=None if kept is None else float(kept[chosen].mean()),
    )


def _per_s(count: int, run: Run) -> float:
    return count / run.wall_s if run.wall_s > 0 else 0.0


def met(slo: SloLimits, columns: Columns) -> dict[str, Bools]:
    """Returns which requests meet each limit that is set, and under `all` which meet every limit.

    A failed request meets none. A complete answer of one token has no TPOT and meets that limit; an answer without
    tokens meets neither TTFT nor TPT, or a server that generates nothing would be the best.
    """
    kept: dict[str, Bools] = {}
    for name, limit_ms in slo.limits().items():
        with np.errstate(invalid="ignore"):  # NaN where a request has no such time
            below = getattr(columns, f"{name}_ms") <= limit_ms
        kept[name] = columns.ok & (below | (columns.output_tokens == 1) if name == "tpot" else below)
    return kept | {"all": np.logical_and.reduce([columns.ok, *kept.values()])}
