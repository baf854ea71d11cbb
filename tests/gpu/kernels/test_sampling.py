"""Sampling: the CUDA source, run on the CPU, beside the CPU backend and thresholds that a bisection finds."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from caraserve import demo
from caraserve.core.batch import SlotSampling
from caraserve.core.grammar import mask_words
from caraserve.core.outputs import NOT_FINITE, SAMPLE, SAMPLE_MASKED, SCORE
from caraserve.core.request import MAX_LOGPROBS, MAX_PROMPT_LOGPROBS
from caraserve.cpu import sampling as cpu_sampling
from caraserve.cpu.sampling import SLOT_SAMPLING, write_sampling
from caraserve.gpu.driver.launch import Launch
from caraserve.gpu.forward.batch import make_batch
from caraserve.gpu.forward.decoder import outputs_between
from caraserve.gpu.kernels.paged_cache import TokenTables
from caraserve.gpu.kernels.sampling import MaskedRows, Outputs, SamplerState, sample, score
from caraserve.gpu.memory.pass_shape import Capacity
from caraserve.gpu.memory.results import Results, result_bytes
from caraserve.model.dtype import Dtype
from caraserve.model.families import load_plan
from tests.cpu.as_python import callable_from_python
from tests.gpu.emulator import run

choose = callable_from_python(cpu_sampling.choose)
uniform = callable_from_python(cpu_sampling.uniform)

VOCAB = 700  # several tiles, and not a multiple of one
GREEDY: dict[str, Any] = {
    "prompt_tokens": 3, "seed": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    "min_tokens": 0, "end_ids": (), "logit_bias": (),
}  # fmt: skip
NO_MASK = np.zeros(0, np.uint32)
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.4, "top_k": 5},
    {"temperature": 1.5, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 2.0, "top_p": 0.95, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 3.0, "min_p": 0.01, "top_k": 300, "top_p": 0.9},
    {"temperature": 1.0, "top_k": VOCAB + 5, "top_p": 0.0},
    {"repetition_penalty": 1.9},
    {"repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.1},
    {"presence_penalty": 2.0, "frequency_penalty": 1.5, "temperature": 0.7},
    {"logit_bias": ((11, 30.0), (12, 29.5))},
    {"min_tokens": 9, "end_ids": (21, 22, 23), "logit_bias": ((22, 100.0),), "temperature": 0.5},
]


def random_logits(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 3).to(dtype)


def issue(launch: Launch, logits: Tensor) -> None:
    """Runs a launch. All tensors that it addresses must be alive."""
    run(launch, {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}[logits.dtype])


class Bench:
    """Slots, their histories, and one output row for each of `slots`."""

    def __init__(self, ways: Sequence[dict[str, Any]], blocks: int = 3, vocab: int = VOCAB) -> None:
        generator = np.random.default_rng(4)
        self.table = np.zeros(len(ways), SLOT_SAMPLING)
        for slot, way in enumerate(ways):
            write_sampling(self.table, slot, SlotSampling(**GREEDY | way))
        self.history = generator.integers(0, vocab, (len(ways), 40))
        self.history[:, 2:6] = self.history[:, 4:5]  # tokens in the prompt that are generated more than once
        self.state = SamplerState(
            torch.from_numpy(self.table.view(np.uint8).reshape(len(ways), -1).copy()),
            torch.from_numpy(self.history.astype(np.int32)),
            torch.full((blocks, vocab), float("nan")),
            torch.zeros((blocks, vocab), dtype=torch.int32),
        )

    def run(self, logits: Tensor, slots: list[int], positions: list[int], kinds: list[int]) -> list[int]:
        outputs = make_outputs(list(range(len(slots))), kinds, [-1] * len(slots))
        tokens = TokenTables(*(torch.tensor(part, dtype=torch.int32) for part in (slots, positions)))
        before = logits.clone()
        issue(sample(logits, outputs, tokens, self.state), logits)
        assert torch.equal(logits, before)
        assert not self.state.counts.any()
        return outputs.chosen.tolist()

    def on_the_cpu(self, logits: Tensor, slot: int, position: int, mask: NDArray[np.uint32] = NO_MASK) -> int:
        rooms = np.zeros(len(logits), np.float32), np.zeros(len(logits), np.uint8), mask
        return int(choose(logits.float().numpy(), position, self.history[slot], self.table[slot], *rooms))


def make_outputs(token: list[int], kinds: list[int], wanted: list[int], most: int = MAX_LOGPROBS) -> Outputs:
    ints = [torch.tensor(part, dtype=torch.int32) for part in (token, kinds, wanted, [-7] * len(token))]
    shape = (len(token), most)
    floats = [torch.full(size, float("nan")) for size in (shape[:1], shape)]
    return Outputs(*ints, floats[0], ints[-1].clone(), torch.full(shape, -7, dtype=torch.int32), floats[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_of_sampling_chooses_as_the_cpu_backend_does(dtype: torch.dtype) -> None:
    ways = [way | {"seed": seed} for way in WAYS for seed in (7, 2**64 - 3)]
    bench, logits = Bench(ways), random_logits(len(ways), dtype)
    positions = [5 + slot for slot in range(len(ways))]
    chosen = bench.run(logits, list(range(len(ways))), positions, [SAMPLE] * len(ways))
    wanted = [bench.on_the_cpu(logits[slot], slot, positions[slot]) for slot in range(len(ways))]
    assert chosen == wanted
    assert bench.state.history[range(len(ways)), [position + 1 for position in positions]].tolist() == wanted


def make_masked(outputs: list[int], masks: NDArray[np.uint32]) -> MaskedRows:
    rows = torch.tensor(outputs, dtype=torch.int32)
    return MaskedRows(rows, torch.from_numpy(masks.view(np.int32)))


def test_masks_allow_the_same_tokens_as_on_the_cpu_and_change_no_other_row() -> None:
    """Every second row has a mask, from one that allows all tokens to one that allows a single one."""
    ways = [way | {"seed": 3} for way in WAYS for _ in range(2)]
    bench, logits = Bench(ways, blocks=2), random_logits(len(ways))
    rows, masked = list(range(len(ways))), list(range(1, len(ways), 2))
    positions = [6 + slot for slot in rows]
    masks = np.zeros((len(masked), mask_words(VOCAB)), np.uint32)
    for index, mask in enumerate(masks):
        mask[:] = np.packbits(np.random.default_rng(index).random(mask.size * 32) < 0.7**index).view(np.uint32)
        mask[21] |= np.uint32(1 << 27)  # token 699, the last one
    masks[0], masks[-1, :21] = ~np.uint32(0), 0
    kinds = [SAMPLE_MASKED if row in masked else SAMPLE for row in rows]
    outputs = make_outputs(rows, kinds, [2] * len(rows))
    tokens = TokenTables(*(torch.tensor(part, dtype=torch.int32) for part in (rows, positions)))
    wanted = [
        bench.on_the_cpu(logits[row], row, positions[row], masks[row // 2] if row in masked else NO_MASK)
        for row in rows
    ]
    history = bench.state.history.clone()
    issue(sample(logits, outputs, tokens, bench.state), logits)
    issue(score(logits, outputs), logits)
    first = outputs.chosen.tolist()
    assert first == [NOT_FINITE if row in masked else wanted[row] for row in rows]
    assert torch.equal(bench.state.history[masked], history[masked])
    assert torch.isnan(outputs.logprob[masked]).all()
    scores = outputs.logprob.clone()
    outputs.logprob[::2] = float("nan")
    only = make_masked(masked, masks)
    issue(sample(logits, outputs, tokens, bench.state, only), logits)
    issue(score(logits, outputs, only), logits)
    assert outputs.chosen.tolist() == wanted
    assert bench.state.history[rows, [position + 1 for position in positions]].tolist() == wanted
    assert torch.isnan(outputs.logprob[::2]).all()
    assert torch.isfinite(scores[::2]).all()
    exact = torch.log_softmax(logits.double(), 1)  # scores are those of the unmasked distribution
    got = outputs.logprob[masked].double().cpu()
    torch.testing.assert_close(got, exact[masked, [wanted[row] for row in masked]], atol=1e-4, rtol=1e-4)
    assert not bench.state.counts.any()


def test_a_masked_row_that_is_not_finite_has_no_token() -> None:
    bench, logits = Bench([{}]), random_logits(1)
    logits[0, 5] = float("inf")
    outputs = make_outputs([0], [SAMPLE_MASKED], [-1])
    tokens = TokenTables(*(torch.tensor([part], dtype=torch.int32) for part in (0, 8)))
    masks = np.full((1, mask_words(VOCAB)), 2, np.uint32)
    only = make_masked([0], masks)
    issue(sample(logits, outputs, tokens, bench.state, only), logits)
    assert outputs.chosen.tolist() == [NOT_FINITE]
    assert 0 <= int(bench.state.history[0, 9]) < VOCAB


def test_draws_equal_the_cpus_over_many_positions() -> None:
    bench, logits = Bench([{"temperature": 1.2, "top_p": 0.98}]), random_logits(30)
    positions = list(range(4, 34))
    chosen = bench.run(logits, [0] * 30, positions, [SAMPLE] * 30)
    assert chosen == [bench.on_the_cpu(logits[index], 0, position) for index, position in enumerate(positions)]
    assert len(set(chosen)) > 5


def test_a_draw_does_not_depend_on_its_batch() -> None:
    ways = [{"temperature": 1.0, "seed": 5, "presence_penalty": 1.0}, {"temperature": 2.0}, {}]
    logits = random_logits(3)
    together = Bench(ways).run(logits, [0, 1, 2], [6, 9, 4], [SAMPLE] * 3)
    alone = [
        Bench(ways, blocks=1).run(logits[slot : slot + 1], [slot], [position], [SAMPLE])[0]
        for slot, position in ((0, 6), (1, 9), (2, 4))
    ]
    assert together == alone


def test_penalties_are_exact_to_the_bit() -> None:
    """Logits that penalties make equal on the CPU are equal here, so the first of them is chosen."""
    way = {"frequency_penalty": 0.1, "presence_penalty": 0.7, "repetition_penalty": 1.7}
    bench = Bench([way])
    bench.history[0, :12] = [500, 600, 9, 600, 600, 600, 500, 77, 77, 77, 77, 77]
    bench.state.history[0, :12] = torch.from_numpy(bench.history[0, :12].astype(np.int32))
    penalised = np.float32(10.3) / np.float32(1.7) - np.float32(0.1) - np.float32(0.7)
    for _ in range(4):
        penalised -= np.float32(0.1)
    for other in (penalised, np.nextafter(penalised, np.float32(0.0)), np.nextafter(penalised, np.float32(9.0))):
        logits = torch.zeros(1, VOCAB)
        logits[0, 77], logits[0, 78] = 10.3, float(other)
        wanted = bench.on_the_cpu(logits[0], 0, 11)
        assert bench.run(logits, [0], [11], [SAMPLE]) == [wanted]
        assert wanted == (78 if other > penalised else 77)


def test_penalties_count_no_vectors_in_place_of_tokens() -> None:
    ways = [way | {"prompt_tokens": 5} for way in WAYS]
    bench, logits = Bench(ways, blocks=2), random_logits(len(ways))
    bench.history[:, :4] = [-1, -VOCAB, 9, -2]
    bench.state.history[:, :4] = torch.from_numpy(bench.history[:, :4].astype(np.int32))
    room = torch.full((3, VOCAB), 7, dtype=torch.int32)  # what a negative token would be counted in
    room[1:] = 0
    bench.state = replace(bench.state, counts=room[1:])
    rows = list(range(len(ways)))
    chosen = bench.run(logits, rows, [9] * len(ways), [SAMPLE] * len(ways))
    assert chosen == [bench.on_the_cpu(logits[row], row, 9) for row in rows]
    assert bool((room[0] == 7).all())


def test_greedy_chooses_the_first_of_equal_logits() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [699, 130, 400]] = 5.0
    assert Bench([{}, {}]).run(logits, [0, 1], [3, 3], [SAMPLE] * 2) == [130, 0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [SAMPLE, SCORE])
def test_a_non_finite_row_has_no_token_and_affects_no_other_row(way: dict[str, Any], kind: int) -> None:
    bench, logits = Bench([way] * 5), random_logits(5)
    logits[0] = float("nan")
    logits[1, 300], logits[2, 699], logits[3, 0] = float("inf"), float("-inf"), float("nan")
    outputs = make_outputs([0, 1, 2, 3, 4], [kind] * 4 + [SAMPLE], [3] * 5)
    tokens = TokenTables(*(torch.tensor(part, dtype=torch.int32) for part in (range(5), [8] * 5)))
    issue(sample(logits, outputs, tokens, bench.state), logits)
    issue(score(logits, outputs), logits)
    right = bench.on_the_cpu(logits[4], 4, 8)
    assert outputs.chosen.tolist() == [NOT_FINITE] * 4 + [right]
    assert torch.isfinite(outputs.logprob[4])
    following = bench.state.history[:, 9]  # the next iteration reads it in any case
    assert int(following[4]) == right
    assert all(0 <= int(token) < VOCAB for token in following)
    assert not bench.state.counts.any()


def test_a_scored_row_reads_its_token_from_the_history() -> None:
    bench = Bench([{}, {}])
    chosen = bench.run(random_logits(2), [0, 1], [8, 8], [SCORE, SAMPLE])
    assert chosen[0] == bench.history[0, 9]
    assert bench.state.history[0].tolist() == bench.history[0].tolist()


def test_random_numbers_equal_the_cpus() -> None:
    """With VOCAB equal weights, the uniform number itself chooses the token."""
    bench = Bench([{"temperature": 1.0, "seed": seed} for seed in (0, 1, 2**63)])
    chosen = bench.run(torch.zeros(3, VOCAB), [0, 1, 2], [3, 20, 38], [SAMPLE] * 3)
    numbers = [uniform(np.uint64(seed), position) for seed, position in ((0, 3), (1, 20), (2**63, 38))]
    assert chosen == [int(number * VOCAB) for number in numbers]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_log_probabilities(dtype: torch.dtype, tolerance: float) -> None:
    wanted = [0, 5, -1, MAX_LOGPROBS, 3]
    logits = random_logits(5, dtype)
    logits[1, [3, 600]] = 50.0  # equal values are in order of their ids
    outputs = make_outputs([0, 1, 2, 3, -1], [SAMPLE] * 5, wanted)
    outputs.chosen.copy_(torch.tensor([9, 3, 5, 699, 1]))
    issue(score(logits, outputs), logits)
    exact = torch.log_softmax(logits.double(), 1)
    for row in (0, 1, 3):
        assert abs(float(outputs.logprob[row]) - float(exact[row, int(outputs.chosen[row])])) < tolerance * 50
        order = torch.argsort(exact[row], descending=True, stable=True)[: wanted[row]]
        assert outputs.top_ids[row, : wanted[row]].tolist() == order.tolist()
        got = outputs.top_logprobs[row, : wanted[row]].double().cpu()
        torch.testing.assert_close(got, exact[row, order], atol=tolerance, rtol=tolerance)
    for row in (2, 4):
        assert torch.isnan(outputs.logprob[row])
    assert torch.all(outputs.top_ids[[0, 2, 4]] == -7)


def bisected(weights: NDArray[np.float32], floor: np.float32, wanted: float, sums: NDArray[np.int64]) -> np.float32:
    """Returns the largest t >= floor such that the `sums` of the weights >= t reach `wanted`, or floor."""
    low, high = int(floor.view(np.uint32)), int(np.float32(1.0).view(np.uint32))
    while low < high:
        middle = high - (high - low) // 2
        reached = float(sums[weights >= np.uint32(middle).view(np.float32)].sum()) >= wanted
        low, high = (middle, high) if reached else (low, middle - 1)
    return np.uint32(low).view(np.float32)


def drawn(weights: NDArray[np.float32], params: Any, position: int) -> int:
    """Returns the token that a row of weights and a slot's parameters lead to."""
    mass = (weights.astype(np.float64) * 2.0**44).astype(np.int64)
    floor = np.maximum(params["min_p"], np.float32(0.0))
    if 0 < params["top_k"] < len(weights):
        floor = bisected(weights, floor, float(params["top_k"]), np.ones_like(mass))
    if params["top_p"] < 1.0:
        wanted = float(mass[weights >= floor].sum()) * float(params["top_p"])
        floor = bisected(weights, floor, wanted, mass)
    kept = np.where(weights >= floor, mass, 0)
    target = int(uniform(params["seed"], position) * 2.0**53) * int(kept.sum()) >> 53
    return int(np.argmax(np.cumsum(kept) > target))


def adversarial(kind: str, vocab: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Returns a row of finite logits, most of which make equal or nearly equal weights."""
    row = rng.standard_normal(vocab) * 3
    if kind == "flat":
        row[:] = -1.25
    elif kind == "one-hot":
        row[:] = -1e30
        row[rng.integers(vocab)] = 7.0
    elif kind == "ties":
        row = rng.integers(-3, 3, vocab).astype(np.float64)
    elif kind == "neighbours":  # weights that differ in their last bits only
        row = 5.0 + rng.integers(0, 40, vocab) * 2.0**-21
    elif kind == "ascending":
        row = np.linspace(-30.0, 4.0, vocab)
    elif kind == "two values":
        row = np.where(rng.random(vocab) < 0.5, 0.0, -40.0)
    return row.astype(np.float32)


KINDS = ("random", "flat", "one-hot", "ties", "neighbours", "ascending", "two values")


@settings(max_examples=60)
@given(st.data())
def test_thresholds_are_those_of_a_bisection(data: st.DataObject) -> None:
    """For weights that the kernel itself computed: the same tokens are kept, whatever else the row holds."""
    vocab = data.draw(st.sampled_from([1, 3, 64, 257, 700, 1003]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    way = {
        "temperature": data.draw(st.sampled_from([0.01, 0.7, 1.0, 30.0])),
        "top_k": data.draw(st.sampled_from([0, 1, 2, 5, max(vocab // 2, 1), max(vocab - 1, 1), vocab, vocab + 1])),
        "top_p": data.draw(st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0])),
        "min_p": data.draw(st.sampled_from([0.0, 1e-30, 1e-3, 0.5, 1.0])),
        "seed": data.draw(st.integers(0, 2**64 - 1)),
    }
    row = adversarial(data.draw(st.sampled_from(KINDS)), vocab, rng)
    row[rng.random(vocab) < data.draw(st.sampled_from([0.0, 0.0, 0.7]))] = -np.inf
    row[rng.integers(vocab)] = row.max() if np.isfinite(row.max()) else 0.0
    mask = np.packbits(rng.random(mask_words(vocab) * 32) < data.draw(st.sampled_from([0.5, 0.1, 2.0]))).view(np.uint32)
    has_mask = data.draw(st.booleans())
    bench, logits = Bench([way], blocks=1, vocab=vocab), torch.from_numpy(row[None])
    outputs = make_outputs([0], [SAMPLE_MASKED if has_mask else SAMPLE], [-1])
    tokens = TokenTables(torch.tensor([0], dtype=torch.int32), torch.tensor([7], dtype=torch.int32))
    only = make_masked([0], mask[None]) if has_mask else None
    issue(sample(logits, outputs, tokens, bench.state, only), logits)
    chosen, weights = int(bench.state.history[0, 8]), bench.state.weights[0].numpy()
    assert chosen == drawn(weights, bench.table[0], 7)
    if has_mask and np.isfinite(row[np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab] == 1]).any():
        assert int(mask[chosen // 32]) >> (chosen % 32) & 1


def test_rows_of_many_warps() -> None:
    """A block of as many threads as it can have, on rows that cannot be read in vectors, and on others."""
    for vocab in (20000, 20001):
        ways = [{"temperature": 1.0, "top_k": 900, "top_p": 0.8}, {"temperature": 0.9}, {}]
        bench = Bench(ways, blocks=2, vocab=vocab)
        logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
        outputs = make_outputs([0, 1, 2], [SAMPLE] * 3, [MAX_LOGPROBS] * 3)
        tokens = TokenTables(torch.arange(3, dtype=torch.int32), torch.full((3,), 7, dtype=torch.int32))
        launches = sample(logits, outputs, tokens, bench.state), score(logits, outputs)
        for launch in launches:
            assert launch.block == 1024
            issue(launch, logits)
        assert outputs.chosen.tolist() == [bench.on_the_cpu(logits[row], row, 7) for row in range(3)]
        exact = torch.log_softmax(logits.double(), 1).topk(MAX_LOGPROBS)
        assert outputs.top_ids.tolist() == exact.indices.tolist()
        torch.testing.assert_close(outputs.top_logprobs.double(), exact.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", [0, 1, MAX_LOGPROBS, 32, 65, MAX_PROMPT_LOGPROBS])
def test_the_best_tokens_and_the_rank_are_those_of_a_stable_sort(kind: str, wanted: int) -> None:
    rows = np.stack([adversarial(kind, VOCAB, np.random.default_rng(seed)) for seed in (wanted, wanted + 1)])
    logits, outputs = torch.from_numpy(rows), make_outputs([0, 1], [SAMPLE, SCORE], [wanted] * 2, MAX_PROMPT_LOGPROBS)
    order = np.argsort(-rows, kind="stable", axis=1)
    tokens = [5, int(order[1, -3])]
    outputs.chosen.copy_(torch.tensor(tokens))
    issue(score(logits, outputs), logits)
    assert outputs.top_ids[:, :wanted].tolist() == order[:, :wanted].tolist()
    exact = torch.log_softmax(logits.double(), 1)
    for row, token in enumerate(tokens):
        assert int(outputs.rank[row]) == order[row].tolist().index(token) + 1
        got = outputs.top_logprobs[row, :wanted].double()
        torch.testing.assert_close(got, exact[row, order[row, :wanted].copy()], atol=1e-5, rtol=1e-5)
    assert torch.isnan(outputs.top_logprobs[:, wanted:]).all()


def test_results_are_written_as_they_are_copied_to_the_host() -> None:
    """Place after place, so that a copy of fewer alternatives is a beginning of the results."""
    batch = make_batch(load_plan(demo.model_folder()), Capacity(8, 4, 16, 8, 1), 8, torch.device("cpu"))
    logits, outputs = random_logits(3), outputs_between(batch.outputs, 2, 5)
    for part, values in zip(
        (outputs.token, outputs.wanted, outputs.chosen), ([0, 1, 2], [40, 0, 100], [9, 8, 7]), strict=True
    ):
        part.copy_(torch.tensor(values, dtype=torch.int32))
    issue(score(logits, outputs), logits)
    order = torch.argsort(logits, dim=1, descending=True, stable=True)
    for alternatives in (40, MAX_PROMPT_LOGPROBS):
        block = np.full(result_bytes(16), 0xFF, np.uint8)
        copied = result_bytes(16, alternatives)
        block[:copied] = batch.results.numpy()[:copied]
        results = Results(block, 16)
        for row, wanted in ((0, 40), (2, alternatives)):
            assert results.top_ids[2 + row, :wanted].tolist() == order[row, :wanted].tolist()
            assert np.isfinite(results.top_logprobs[2 + row, :wanted]).all()
        assert results.rank[2:5].tolist() == [order[row].tolist().index(9 - row) + 1 for row in range(3)]
        assert results.chosen[2:5].tolist() == [9, 8, 7]
