"""From a `Plan` to the arrays that `step` reads, and from its results to a `StepResult`. Level 1; the lane's thread."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu.adapters import DeviceAdapters
from caraserve.cpu.assist import WORKERS
from caraserve.cpu.records import BATCH, SAMPLE, SCORE, filled
from caraserve.plan import BASE_ADAPTER_SLOT, Plan, Row, RowResult
from caraserve.request import MAX_LOGPROBS, TokenLogprob

Words = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One iteration's BATCH record, the arrays behind its addresses, and room for the results."""

    record: NDArray[np.void]
    arrays: tuple[Words, ...]
    out_logprobs: Words
    chosen: Words  # [outputs]
    logprob: NDArray[np.float32]  # [outputs]
    top_ids: Words  # [outputs, MAX_LOGPROBS]
    top_logprobs: NDArray[np.float32]  # [outputs, MAX_LOGPROBS]
    segments: tuple["Segment", ...]
    sources: Words  # [layers, segments] as in assist.py; meaningless unless the batch is arriving
    waited_ns: Words  # [segments]
    layer_ns: Words  # [layers + 1], or empty when not wanted
    worker_ns: Words  # [layers, 4, workers, 2], likewise

    @property
    def is_arriving(self) -> bool:
        """Whether some adapter had not wholly arrived when the batch was made."""
        return bool(self.record["arriving"][0])


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one adapter."""

    first_token: int
    tokens: int
    adapter_slot: int
    assist: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """What a batch's side tables are sized by."""

    layers: int
    workers: int
    traced: bool


def build_batch(plan: Plan, adapters: DeviceAdapters, prompt_tokens: Words, shape: Shape) -> HostBatch:
    """`prompt_tokens` by request slot. Where an adapter is merged into the weights, no row has LoRA of its own."""
    rows = plan.rows
    counts = np.array([row.count for row in rows], np.int64)
    first = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    starts = np.array([row.start for row in rows], np.int64)
    segments = _segments(rows, first) if plan.merged is None else []
    out_token, out_kind, out_logprobs = (np.array(part, np.int64) for part in _outputs(rows, first, prompt_tokens))
    traced = shape.layers if shape.traced else 0
    tables = {
        "sources": np.zeros((shape.layers, len(segments)), np.int64),
        "waited_ns": np.zeros(len(segments), np.int64),
        "layer_ns": np.zeros(traced + 1 if traced else 0, np.int64),
        "worker_ns": np.zeros((traced, 4, shape.workers, 2), np.int64),
    }
    arrays = {
        "slot": np.repeat(np.array([row.slot for row in rows], np.int64), counts),
        "position": np.arange(first[-1], dtype=np.int64) + np.repeat(starts - first[:-1], counts),
        "row_first": first,
        "segment_first": np.array([segment.first_token for segment in segments], np.int64),
        "segment_tokens": np.array([segment.tokens for segment in segments], np.int64),
        "segment_adapter": np.array([segment.adapter_slot for segment in segments], np.int64),
        "segment_assist": np.array([segment.assist for segment in segments], np.int64),
        "out_token": out_token,
        "out_kind": out_kind,
        "out_logprobs": out_logprobs,
        **tables,
    }
    outputs = len(out_token)
    record = filled(
        BATCH,
        tokens=int(first[-1]),
        rows=len(rows),
        segments=len(segments),
        outputs=outputs,
        max_rank=max((int(adapters.max_rank[segment.adapter_slot]) for segment in segments), default=0),
        arriving=any(adapters.is_arriving(segment.adapter_slot) for segment in segments),
        **{name: int(array.ctypes.data) if array.size else 0 for name, array in arrays.items()},
    )
    return HostBatch(
        record=record,
        arrays=tuple(arrays.values()),
        out_logprobs=out_logprobs,
        chosen=np.zeros(outputs, np.int64),
        logprob=np.zeros(outputs, np.float32),
        top_ids=np.zeros((outputs, MAX_LOGPROBS), np.int64),
        top_logprobs=np.zeros((outputs, MAX_LOGPROBS), np.float32),
        segments=tuple(segments),
        **tables,
    )


def _segments(rows: tuple[Row, ...], first: Words) -> list[Segment]:
    """Runs of rows with one adapter, the base model's left out."""
    segments: list[Segment] = []
    for index, row in enumerate(rows):
        if row.adapter_slot == BASE_ADAPTER_SLOT:
            continue
        last = segments[-1] if segments else None
        if last and last.adapter_slot == row.adapter_slot and last.first_token + last.tokens == first[index]:
            segments[-1] = replace(last, tokens=last.tokens + row.count, assist=last.assist or row.assist)
        else:
            segments.append(Segment(int(first[index]), row.count, row.adapter_slot, row.assist))
    return segments


def scored_positions(row: Row, prompt_tokens: int) -> range:
    """Positions of `row` whose following prompt token is to be scored."""
    if row.prompt_logprobs is None:
        return range(0)
    return range(row.start, min(row.start + row.count, prompt_tokens - 1))


def _outputs(rows: tuple[Row, ...], first: Words, prompt_tokens: Words) -> tuple[list[int], list[int], list[int]]:
    tokens: list[int] = []
    kinds: list[int] = []
    logprobs: list[int] = []
    for index, row in enumerate(rows):
        base = int(first[index])
        for position in scored_positions(row, int(prompt_tokens[row.slot])):
            tokens.append(base + position - row.start)
            kinds.append(SCORE)
            logprobs.append(row.prompt_logprobs or 0)
        if row.samples:
            tokens.append(base + row.count - 1)
            kinds.append(SAMPLE)
            logprobs.append(-1 if row.logprobs is None else row.logprobs)
    return tokens, kinds, logprobs


def collect(plan: Plan, batch: HostBatch, prompt_tokens: Words) -> tuple[RowResult, ...]:
    """Row results in the plan's order."""
    chosen = batch.chosen.tolist()
    loads = _loads(batch)
    results = []
    index = 0
    for row in plan.rows:
        count = len(scored_positions(row, int(prompt_tokens[row.slot])))
        prompt = tuple(_scored(batch, at) for at in range(index, index + count))
        index += count
        token, scored = None, None
        if row.samples:
            token = chosen[index]
            scored = _scored(batch, index) if row.logprobs is not None else None
            index += 1
        cpu_layers, waited_ms = loads.get(row.adapter_slot, (0, 0.0))
        results.append(RowResult(token, scored, prompt, cpu_layers, waited_ms))
    return tuple(results)


def _loads(batch: HostBatch) -> dict[int, tuple[int, float]]:
    """By adapter slot: layers that CPU workers computed, and ms spent waiting for weights."""
    if not batch.is_arriving:
        return {}
    return {
        segment.adapter_slot: (int((batch.sources[:, at] == WORKERS).sum()), float(batch.waited_ns[at]) / 1e6)
        for at, segment in enumerate(batch.segments)
    }


def _scored(batch: HostBatch, index: int) -> TokenLogprob:
    count = int(batch.out_logprobs[index])
    top = zip(batch.top_ids[index, :count].tolist(), batch.top_logprobs[index, :count].tolist(), strict=True)
    return TokenLogprob(int(batch.chosen[index]), float(batch.logprob[index]), tuple(top))
