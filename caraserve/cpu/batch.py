"""From a `Plan` to the arrays that `step` reads, and from its results to a `StepResult`. Level 1; the lane's thread."""

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu.step import SAMPLE, SCORE, Batch
from caraserve.plan import BASE_ADAPTER_SLOT, Plan, Row, RowResult, Scored
from caraserve.request import MAX_LOGPROBS


def build_batch(plan: Plan, max_rank: NDArray[np.int64], prompt_tokens: NDArray[np.int64]) -> Batch:
    """`max_rank` by adapter slot, `prompt_tokens` by request slot."""
    rows = plan.rows
    counts = np.array([row.count for row in rows], np.int64)
    first = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    tokens = int(first[-1])
    starts = np.array([row.start for row in rows], np.int64)
    position = np.arange(tokens, dtype=np.int64) + np.repeat(starts - first[:-1], counts)
    segments = _segments(rows, first)
    out_token, out_kind, out_logprobs = _outputs(rows, first, prompt_tokens)
    outputs = len(out_token)
    return Batch(
        tokens=tokens,
        slot=np.repeat(np.array([row.slot for row in rows], np.int64), counts),
        position=position,
        row_first=first,
        segments=len(segments),
        segment_first=np.array([at for at, _, _ in segments], np.int64),
        segment_tokens=np.array([count for _, count, _ in segments], np.int64),
        segment_adapter=np.array([adapter for _, _, adapter in segments], np.int64),
        max_rank=max((int(max_rank[adapter]) for _, _, adapter in segments), default=0),
        outputs=outputs,
        out_token=np.array(out_token, np.int64),
        out_kind=np.array(out_kind, np.int64),
        out_logprobs=np.array(out_logprobs, np.int64),
        chosen=np.zeros(outputs, np.int64),
        logprob=np.zeros(outputs, np.float32),
        top_ids=np.zeros((outputs, MAX_LOGPROBS), np.int64),
        top_logprobs=np.zeros((outputs, MAX_LOGPROBS), np.float32),
    )


def _segments(rows: tuple[Row, ...], first: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Runs of rows with one adapter: (first token, tokens, adapter slot), the base model's left out."""
    segments: list[tuple[int, int, int]] = []
    for index, row in enumerate(rows):
        if row.adapter_slot == BASE_ADAPTER_SLOT:
            continue
        if segments and segments[-1][2] == row.adapter_slot and sum(segments[-1][:2]) == first[index]:
            at, count, adapter = segments[-1]
            segments[-1] = (at, count + row.count, adapter)
        else:
            segments.append((int(first[index]), row.count, row.adapter_slot))
    return segments


def scored_positions(row: Row, prompt_tokens: int) -> range:
    """Positions of `row` whose following prompt token is to be scored."""
    if row.prompt_logprobs is None:
        return range(0)
    return range(row.start, min(row.start + row.count, prompt_tokens - 1))


def _outputs(
    rows: tuple[Row, ...], first: NDArray[np.int64], prompt_tokens: NDArray[np.int64]
) -> tuple[list[int], list[int], list[int]]:
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


def collect(plan: Plan, batch: Batch, prompt_tokens: NDArray[np.int64]) -> tuple[RowResult, ...]:
    """Row results in the plan's order."""
    chosen = batch.chosen.tolist()
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
        results.append(RowResult(token, scored, prompt))
    return tuple(results)


def _scored(batch: Batch, index: int) -> Scored:
    count = int(batch.out_logprobs[index])
    top = zip(batch.top_ids[index, :count].tolist(), batch.top_logprobs[index, :count].tolist(), strict=True)
    return Scored(int(batch.chosen[index]), float(batch.logprob[index]), tuple(top))
