"""Converts a `Batch` to the arrays that the compiled `step` reads, and its results to row results."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from caraserve.core import outputs
from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch, RowResult, ScheduledRow
from caraserve.core.outputs import ColdStartCost, Output, OutputValues
from caraserve.cpu.adapters import DeviceAdapters
from caraserve.cpu.lora_workers.compute_side import WORKERS
from caraserve.cpu.structs import BATCH, filled
from caraserve.errors import GrammarFailed

Words = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CpuBatch:
    """One iteration: its BATCH record, the arrays behind its addresses, and arrays for the results."""

    record: NDArray[np.void]
    arrays: tuple[Words, ...]
    outputs: Output
    chosen: Words  # [outputs]
    logprob: NDArray[np.float32]  # [outputs]
    rank: Words  # [outputs]
    top_ids: Words  # [outputs, most alternatives]
    top_logprobs: NDArray[np.float32]  # [outputs, most alternatives]
    segments: tuple["Segment", ...]
    sources: Words  # [layers, segments] DEVICE, WORKERS or HOST (compute_side.py); valid if `is_arriving`
    waited_ns: Words  # [segments]
    lora_ns: Words  # [segments] time that CPU workers spent on them
    layer_ns: Words  # [layers + 1], or empty when not wanted
    worker_ns: Words  # [layers, groups, workers, 2], likewise
    grammar_failures: dict[int, GrammarFailed]  # by request slot
    masks_written: Words  # [1] 1 once the masks of rows with matchers are written

    def set_layers(self, first_layer: int, end_layer: int) -> None:
        """Limits the next `step` to the layers [first_layer, end_layer)."""
        self.record["first_layer"], self.record["end_layer"] = first_layer, end_layer

    @property
    def computed_layers(self) -> range:
        """Returns the layers that the last `step` computed."""
        return range(int(self.record["first_layer"][0]), int(self.record["end_layer"][0]))

    @property
    def is_arriving(self) -> bool:
        """Returns whether layers of some adapter had not arrived when the batch was built."""
        return bool(self.record["arriving"][0])


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens with one adapter."""

    first_token: int
    tokens: int
    adapter_slot: int
    assist: bool
    rows: int = 1

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token."""
        return self.rows == self.tokens


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Sizes, besides the rows, that determine the sizes of a batch's tables."""

    layers: int
    groups: int  # of a layer at most
    workers: int
    traced: bool


def build_batch(batch: Batch, adapters: DeviceAdapters, prompt_tokens: Words, shape: BatchShape) -> CpuBatch:
    """Builds one iteration. `prompt_tokens` by request slot. With an adapter merged into the weights, no row has a
    segment."""
    rows = batch.rows
    counts = np.array([row.count for row in rows], np.int64)
    first = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    starts = np.array([row.start for row in rows], np.int64)
    segments = _segments(rows, first) if batch.merged is None else []
    wanted = outputs.outputs_of(rows, prompt_tokens)
    vocabulary = np.zeros(0, np.int64)
    if any(adapters.changes_vocabulary(row.adapter_slot) for row in rows):
        vocabulary = np.repeat(np.array([row.adapter_slot for row in rows], np.int64), counts)
    traced = shape.layers if shape.traced else 0
    tables = {
        "sources": np.zeros((shape.layers, len(segments)), np.int64),
        "waited_ns": np.zeros(len(segments), np.int64),
        "layer_ns": np.zeros(traced + 1 if traced else 0, np.int64),
        "worker_ns": np.zeros((traced, shape.groups, shape.workers, 2), np.int64),
    }
    arrays = {
        "slot": np.repeat(np.array([row.slot for row in rows], np.int64), counts),
        "position": np.arange(first[-1], dtype=np.int64) + np.repeat(starts - first[:-1], counts),
        "vocabulary": vocabulary,
        "row_first": first,
        "segment_first": np.array([segment.first_token for segment in segments], np.int64),
        "segment_tokens": np.array([segment.tokens for segment in segments], np.int64),
        "segment_adapter": np.array([segment.adapter_slot for segment in segments], np.int64),
        "segment_assist": np.array([segment.assist for segment in segments], np.int64),
        "padding": adapters.padding(
            [segment.adapter_slot for segment in segments], [not segment.is_decode for segment in segments]
        ),
        "out_token": np.concatenate((wanted.token, wanted.embedded)),
        "out_kind": wanted.kind,
        "out_logprobs": wanted.logprobs,
        **tables,
    }
    count = len(wanted.token)
    record = filled(
        BATCH,
        tokens=int(first[-1]),
        rows=len(rows),
        segments=len(segments),
        outputs=count,
        embeddings=len(wanted.embedded),
        first_layer=0,
        end_layer=shape.layers,
        groups=shape.groups,
        max_rank=max((int(adapters.max_rank[segment.adapter_slot]) for segment in segments), default=0),
        arriving=any(adapters.is_arriving(segment.adapter_slot) for segment in segments),
        **{name: int(array.ctypes.data) if array.size else 0 for name, array in arrays.items()},
    )
    return CpuBatch(
        record=record,
        arrays=tuple(arrays.values()),
        outputs=wanted,
        chosen=np.zeros(count, np.int64),
        logprob=np.zeros(count, np.float32),
        rank=np.zeros(count, np.int64),
        top_ids=np.zeros((count, wanted.most_logprobs), np.int64),
        top_logprobs=np.zeros((count, wanted.most_logprobs), np.float32),
        segments=tuple(segments),
        lora_ns=np.zeros(len(segments), np.int64),
        grammar_failures={},
        masks_written=np.zeros(1, np.int64),
        **tables,
    )


def _segments(rows: tuple[ScheduledRow, ...], first: Words) -> list[Segment]:
    """Returns the runs of rows with one adapter, without those of the base model."""
    segments: list[Segment] = []
    for index, row in enumerate(rows):
        if row.adapter_slot == BASE_ADAPTER_SLOT:
            continue
        last = segments[-1] if segments else None
        if last and last.adapter_slot == row.adapter_slot and last.first_token + last.tokens == first[index]:
            tokens, assist = last.tokens + row.count, last.assist or row.assist
            segments[-1] = replace(last, tokens=tokens, assist=assist, rows=last.rows + 1)
        else:
            segments.append(Segment(int(first[index]), row.count, row.adapter_slot, row.assist))
    return segments


def collect(
    batch: Batch, cpu_batch: CpuBatch, prompt_tokens: Words, normed: NDArray[np.float32]
) -> tuple[RowResult, ...]:
    """Returns row results in the order of the rows. `normed`: what `step` left there, [outputs + embeddings …,
    hidden]."""
    first, count = len(cpu_batch.outputs.token), len(cpu_batch.outputs.embedded)
    found = OutputValues(
        cpu_batch.chosen,
        cpu_batch.logprob,
        cpu_batch.rank,
        cpu_batch.top_ids,
        cpu_batch.top_logprobs,
        embeddings=normed[first : first + count],
    )
    failures = cpu_batch.grammar_failures
    return outputs.collect(batch, cpu_batch.outputs, found, prompt_tokens, _loads(cpu_batch), failures)


def _loads(cpu_batch: CpuBatch) -> dict[int, ColdStartCost]:
    """Returns what missing weights have cost, by adapter slot."""
    if not cpu_batch.is_arriving:
        return {}
    return {
        segment.adapter_slot: ColdStartCost(
            cpu_layers=int((cpu_batch.sources[:, at] == WORKERS).sum()),
            token_cpu_lora_ms=float(cpu_batch.lora_ns[at]) / 1e6 / segment.tokens,
            waited_ms=float(cpu_batch.waited_ns[at]) / 1e6,
        )
        for at, segment in enumerate(cpu_batch.segments)
    }
