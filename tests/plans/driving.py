"""Drives a backend with one request: probabilities of a prompt in pieces, and an adapter of every module."""

from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from caraserve.core.backend import Backend
from caraserve.core.batch import Batch, BlockGrant, ScheduledRow, SlotSampling, SlotStart, StepResult
from caraserve.core.lora_layout import AdapterSpec, HostAdapter, place_a, place_b
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan

BLOCK_TOKENS = 16
BLOCKS = 32  # of the KV cache


def logprobs(
    backend: Backend,
    vocab: int,
    tokens: Sequence[int],
    pieces: Sequence[int],
    alternatives: int,
    *,
    adapter: int = 0,
    is_merged: bool = False,
) -> NDArray[np.float64]:
    """Returns the log-probabilities after each token but the last, [tokens - 1, vocab].

    `pieces`: how many tokens each iteration computes. `alternatives`: how many tokens are reported at a place; NaN for
    the others. `adapter`: its slot, in loading mode `merged` if `is_merged`."""
    found = np.full((len(tokens) - 1, vocab), np.nan)
    starts = (SlotStart(0, tuple(tokens), SlotSampling.greedy(len(tokens))),)
    grants = (BlockGrant(0, 0, tuple(range(BLOCKS - 1, BLOCKS - 1 - -(-len(tokens) // BLOCK_TOKENS), -1))),)
    first = 0
    for count in pieces:
        row = ScheduledRow(0, first, count, adapter, samples=False, prompt_logprobs=alternatives)
        batch = Batch(starts, grants, (row,), merged=adapter if is_merged else None)
        for position, scored in enumerate(run(backend, batch).rows[0].prompt_scored, first):
            found[position, list(scored.top_ids)] = scored.top_logprobs
        starts, grants, first = (), (), first + count
    return found


def greedy(backend: Backend, prompt: Sequence[int], *, adapter: int, count: int) -> list[int]:
    """Returns a prompt and the `count` tokens that a backend chooses after it, one in an iteration."""
    tokens = list(prompt)
    starts = (SlotStart(0, tuple(tokens), SlotSampling.greedy(len(tokens))),)
    grants = (BlockGrant(0, 0, tuple(range(-(-(len(tokens) + count) // BLOCK_TOKENS)))),)
    first = 0
    while len(tokens) < len(prompt) + count:
        row = ScheduledRow(0, first, len(tokens) - first, adapter, samples=True)
        chosen = run(backend, Batch(starts, grants, (row,))).rows[0].token_id
        assert chosen is not None
        starts, grants, first = (), (), len(tokens)
        tokens.append(chosen)
    return tokens


def make_adapter(
    plan: DecoderPlan, memory: NDArray[np.uint8], rank: int = 5
) -> tuple[HostAdapter, dict[str, NDArray[np.float64]]]:
    """Returns an adapter of every module in `memory`, and what it adds to their weights, [outputs, inputs] by name."""
    modules = {
        (layer, index): (rank, 0.5) for layer, one in enumerate(plan.layers) for index in range(len(one.linears))
    }
    spec = AdapterSpec.of(plan, Dtype.F32, modules, digest="made up")
    data, deltas, rng = memory[: spec.num_bytes], dict[str, NDArray[np.float64]](), np.random.default_rng(0)
    data[:] = 0
    for (layer, index), (_, scale) in modules.items():
        linear = plan.layers[layer].linears[index]
        a = rng.standard_normal((rank, linear.inputs), np.float32) / 8
        b = rng.standard_normal((linear.outputs, rank), np.float32) / 8
        for span in (span for span in spec.spans if span.module == (layer, index)):
            place_a(a, data, span, spec.dtype)
            place_b(b[linear.parts[plan.layers[layer].sites[span.site].part].index], data, span, spec.dtype)
        deltas[linear.module] = scale * b.astype(np.float64) @ a
    return HostAdapter(spec, data), deltas


def run(backend: Backend, batch: Batch) -> StepResult:
    results: SimpleQueue[StepResult | Exception] = SimpleQueue()
    backend.launch(batch, results.put)
    result = results.get(timeout=60)
    assert isinstance(result, StepResult), result
    return result
