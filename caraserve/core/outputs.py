"""The outputs of an iteration: which tokens are sampled, scored or embedded, and each row's result; the same on every
device.

A backend computes outputs in this order: for each row first the prompt tokens to be scored, then the tokens to be
sampled: one, or one more than the row has drafts. Embeddings are apart, in the order of the rows, because they need no
logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from caraserve.core.batch import Batch, RowResult, ScheduledRow
from caraserve.core.request import TokenLogprob
from caraserve.errors import GrammarFailed

# Kinds of output. SAMPLE_MASKED: of a row with a matcher. VERIFY: of a row with drafts, which follow in the history.
SAMPLE, SCORE, SAMPLE_MASKED, VERIFY = 0, 1, 2, 3
NOT_FINITE = -1  # in a token's place: a logit is infinite or not a number, so no token can be chosen or scored


@dataclass(frozen=True, slots=True)
class Output:
    """Arrays [outputs]: index of the token in the batch, kind, and alternatives to report (-1: no log-probability).
    `embedded`: index of each token whose hidden state is an embedding, or a part of its mean, [embeddings]; no output
    has the same token.
    `most_logprobs`: the largest number of alternatives. `tokens_only`: nothing is wanted but a token of each row that
    samples."""

    token: NDArray[np.int64]
    kind: NDArray[np.int64]
    logprobs: NDArray[np.int64]
    embedded: NDArray[np.int64]
    most_logprobs: int
    tokens_only: bool = False

    def arrays(self) -> tuple[NDArray[np.int64], ...]:
        return self.token, self.kind, self.logprobs


@dataclass(frozen=True, slots=True)
class OutputValues:
    """The values that the device computed, as arrays [outputs, …]."""

    chosen: NDArray[np.integer]  # token id; NOT_FINITE: the other values are undefined
    logprob: NDArray[np.float32]
    rank: NDArray[np.integer]  # of scored tokens
    top_ids: NDArray[np.integer]  # [outputs, at least `Output.most_logprobs`]
    top_logprobs: NDArray[np.float32]
    embeddings: NDArray[np.float32]  # [embeddings, hidden]


def scored_positions(row: ScheduledRow, prompt_tokens: int) -> range:
    """Returns the positions of `row` whose following prompt token is to be scored."""
    if row.prompt_logprobs is None:
        return range(0)
    return range(row.start, min(row.start + row.count, prompt_tokens - 1))


def _num_embedded(row: ScheduledRow) -> int:
    """Returns of how many last tokens of a row the hidden states are wanted."""
    return row.count if row.averages else int(row.embeds)


def _num_sampled(row: ScheduledRow) -> int:
    """Returns after how many last tokens of a row a token is drawn."""
    return row.samples + len(row.drafts)


def outputs_of(rows: tuple[ScheduledRow, ...], prompt_tokens: NDArray[np.int64]) -> Output:
    """Returns the outputs of a batch. `prompt_tokens`: int64, by request slot."""
    if any(row.prompt_logprobs is not None or row.embeds or row.drafts for row in rows):
        return _outputs_of_any(rows, prompt_tokens)
    # Of rows that have one output or none, ten times as fast: 64 rows take 25 µs.
    ends = np.cumsum(np.fromiter([row.count for row in rows], np.int64, len(rows)))
    sampling = [row for row in rows if row.samples]
    kinds = [SAMPLE if row.matcher is None else SAMPLE_MASKED for row in sampling]
    logprobs = [-1 if row.logprobs is None else row.logprobs for row in sampling]
    most = max(logprobs, default=-1)
    return Output(
        token=(ends if len(sampling) == len(rows) else ends[np.array([row.samples for row in rows], bool)]) - 1,
        kind=np.array(kinds, np.int64),
        logprobs=np.array(logprobs, np.int64),
        embedded=np.zeros(0, np.int64),
        most_logprobs=max(0, most),
        tokens_only=most < 0,
    )


def _outputs_of_any(rows: tuple[ScheduledRow, ...], prompt_tokens: NDArray[np.int64]) -> Output:
    tokens: list[int] = []
    kinds: list[int] = []
    logprobs: list[int] = []
    embedded: list[int] = []
    first = 0
    for row in rows:
        scored = scored_positions(row, int(prompt_tokens[row.slot]))
        tokens += [first + position - row.start for position in scored]
        kinds += [SCORE] * len(scored)
        logprobs += [row.prompt_logprobs or 0] * len(scored)
        sampled = _num_sampled(row)
        first += row.count
        tokens += range(first - sampled, first)
        kinds += [VERIFY if row.drafts else SAMPLE if row.matcher is None else SAMPLE_MASKED] * sampled
        logprobs += [-1 if row.logprobs is None else row.logprobs] * sampled
        embedded += range(first - _num_embedded(row), first)
    token, kind, wanted, at = (np.array(part, np.int64) for part in (tokens, kinds, logprobs, embedded))
    return Output(token, kind, wanted, at, most_logprobs=max([0, *logprobs]))


@dataclass(frozen=True, slots=True)
class ColdStartCost:
    """What an iteration with an adapter that had not arrived has cost: layers that CPU workers computed, their time for
    each token of the adapter, and the time for which the iteration waited for weights."""

    cpu_layers: int = 0
    token_cpu_lora_ms: float = 0.0
    waited_ms: float = 0.0


NO_COST = ColdStartCost()


def collect(
    batch: Batch,
    outputs: Output,
    found: OutputValues,
    prompt_tokens: NDArray[np.int64],
    loads: Mapping[int, ColdStartCost] | None = None,
    failures: Mapping[int, GrammarFailed] | None = None,
) -> tuple[RowResult, ...]:
    """Returns row results in the batch's order. `loads`: what missing weights have cost, by adapter slot. `failures`:
    of grammars, by request slot."""
    chosen = found.chosen[: len(outputs.token)].tolist()
    if outputs.tokens_only and NOT_FINITE not in chosen:
        return _tokens(batch.rows, chosen, loads or {}, failures or {})
    results = []
    index = embedded = 0
    for row in batch.rows:
        count = len(scored_positions(row, int(prompt_tokens[row.slot])))
        is_finite = NOT_FINITE not in chosen[index : index + count + row.samples]
        prompt = tuple(_scored(outputs, found, at) for at in range(index, index + count)) if is_finite else ()
        index += count
        drawn = chosen[index : index + _num_sampled(row)] if is_finite else []
        tokens = _verified(drawn, row.drafts)
        wanted = range(index, index + len(tokens)) if row.logprobs is not None else ()
        scored = tuple(_scored(outputs, found, at) for at in wanted)
        index += _num_sampled(row)
        states = found.embeddings[embedded : embedded + _num_embedded(row)]
        embedding, embedded = _embedding(states) if row.embeds else None, embedded + len(states)
        is_finite = is_finite and (embedding is not None or not row.embeds)
        cost = (loads or {}).get(row.adapter_slot, NO_COST)
        failure = (failures or {}).get(row.slot)
        results.append(
            RowResult(
                tokens,
                scored,
                prompt,
                cost.cpu_layers,
                cost.waited_ms,
                cost.token_cpu_lora_ms * row.count,
                is_finite=is_finite,
                failure=failure,
                embedding=embedding,
            )
        )
    return tuple(results)


def _tokens(
    rows: Sequence[ScheduledRow],
    chosen: Sequence[int],
    loads: Mapping[int, ColdStartCost],
    failures: Mapping[int, GrammarFailed],
) -> tuple[RowResult, ...]:
    """Returns the results of rows of which nothing is wanted but a token of each that samples."""
    if len(chosen) == len(rows):
        results = [RowResult((token,)) for token in chosen]
    else:
        tokens = iter(chosen)
        results = [RowResult((next(tokens),) if row.samples else ()) for row in rows]
    for index, row in enumerate(rows) if loads or failures else ():
        cost, failure = loads.get(row.adapter_slot, NO_COST), failures.get(row.slot)
        results[index] = structs.replace(
            results[index],
            cpu_layers=cost.cpu_layers,
            waited_ms=cost.waited_ms,
            cpu_lora_ms=cost.token_cpu_lora_ms * row.count,
            failure=failure,
        )
    return tuple(results)


def _verified(drawn: Sequence[int], drafts: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens drawn as far as each was drawn after the right ones: up to the first that differs from its
    draft, or before the first place where none could be drawn. That place is then computed again."""
    right = next((at for at, draft in enumerate(drafts) if at < len(drawn) and drawn[at] != draft), len(drafts))
    tokens = drawn[: right + 1]
    return tuple(tokens[: tokens.index(NOT_FINITE)] if NOT_FINITE in tokens else tokens)


def _embedding(states: NDArray[np.float32]) -> bytes | None:
    """Returns the bytes of the sum of a row's hidden states; None if one of its numbers is not finite."""
    vector = states[0] if len(states) == 1 else states.sum(axis=0)
    return vector.tobytes() if np.isfinite(vector).all() else None


def _scored(outputs: Output, found: OutputValues, index: int) -> TokenLogprob:
    count = int(outputs.logprobs[index])
    top_ids, top_logprobs = found.top_ids[index, :count].tolist(), found.top_logprobs[index, :count].tolist()
    token_id, logprob, rank = int(found.chosen[index]), float(found.logprob[index]), int(found.rank[index])
    return TokenLogprob(token_id, logprob, tuple(top_ids), tuple(top_logprobs), rank)


def append_tokens(rows: Sequence[ScheduledRow], results: Sequence[RowResult]) -> None:
    """Appends the tokens of a batch to the matchers of its rows."""
    for row, result in zip(rows, results, strict=True):
        if row.matcher is not None:
            for token_id in result.token_ids:
                row.matcher.append(token_id)
