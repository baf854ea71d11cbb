"""Compares changes of the embedding and the head with torch in double precision; run by test_triton_cases.py in
Triton's interpreter, or on a GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from caraserve.core.lora_layout import MAX_RANK, AdapterSpec, VocabularyChange, place_a, place_b, stored_columns
from caraserve.gpu.kernels.paged_cache import TokenTables
from caraserve.gpu.kernels.vocabulary import VocabularyTables, change_embeddings, change_logits
from caraserve.gpu.memory.adapter_tables import AdapterTables
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan
from tests.gpu.filled_tables import write_column
from tests.gpu.small_model import mixed_plan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
VOCAB, RANK, SCALE, FACTOR = 300, 13, 0.7, 3.5  # more than two blocks of logits; a rank that is padded
TOKENS = (5, 299, 0, *range(20, 40))
CHANGES = {
    1: (VocabularyChange("embedding", RANK, SCALE), VocabularyChange("head", RANK, SCALE)),
    2: (VocabularyChange("embedding", tokens=TOKENS), VocabularyChange("head", tokens=TOKENS[:3])),
    3: (VocabularyChange("head", RANK, SCALE),),
}
# Of each token in the batch: its adapter, its place in the history (none: padding), and its id; negative: a vector.
ADAPTERS = [0, 1, 2, 2, 3, 1, 1, 2]
POSITIONS = [0, 1, 2, 3, 4, 5, -1, 7]
IDS = [5, 299, 299, 6, 5, -1, 7, 30]


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Case:
    """Three adapters of one dtype in device memory, and what they do to the embedding and the head, in double
    precision."""

    def __init__(self, plan: DecoderPlan, dtype: Dtype) -> None:
        self.plan = replace(plan, vocab_size=VOCAB)
        self.rng, self.images = np.random.default_rng(0), list[Tensor]()
        self.tables = AdapterTables(self.plan, 4, DEVICE)
        self.matrices = {slot: self._load(slot, dtype, changes) for slot, changes in CHANGES.items()}

    @property
    def vocabulary(self) -> VocabularyTables:
        return self.tables.vocabulary

    def random(self, *shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """Returns numbers that every dtype has."""
        return self.rng.integers(-8, 8, shape).astype(np.float32) / 16

    def _load(self, slot: int, dtype: Dtype, changes: tuple[VocabularyChange, ...]) -> dict[str, list[Tensor]]:
        spec = AdapterSpec.of(self.plan, dtype, {}, vocabulary=changes)
        data, found = np.zeros(spec.num_bytes, np.uint8), dict[str, list[Tensor]]()
        for span in spec.vocabulary:
            change, width = span.change, self.plan.hidden
            if change.tokens:
                made = [self.random(len(change.tokens), width)]
                place_a(stored(made[0], dtype), data, span, dtype)
            else:
                inputs, outputs = (VOCAB, width) if change.side == "embedding" else (width, VOCAB)
                made = [self.random(RANK, inputs), self.random(outputs, RANK)]
                if change.side == "embedding":
                    stored_columns(data, span, VOCAB, dtype)[:, :RANK] = stored(made[0], dtype).T
                else:
                    place_a(stored(made[0], dtype), data, span, dtype)
                place_b(stored(made[1], dtype), data, span, dtype)
            found[change.side] = [torch.from_numpy(each).double() for each in made]
        self.images.append(torch.from_numpy(data).to(DEVICE))
        write_column(self.tables, self.plan, slot, spec, self.images[-1].data_ptr())
        return found


def stored(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]], dtype: Dtype) -> np.ndarray:  # type: ignore[type-arg]
    """Returns values in a storage dtype, none of which is rounded."""
    if dtype is Dtype.F32:
        return values
    half = torch.from_numpy(values).to(torch.bfloat16 if dtype is Dtype.BF16 else torch.float16)
    return half.view(torch.int16).numpy().view(np.uint16)


@pytest.fixture(params=list(Dtype), ids=lambda dtype: dtype.name)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(mixed_plan(), request.param)


@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_embeddings_are_changed_by_each_tokens_adapter(case: Case, dtype: torch.dtype, has_positions: bool) -> None:
    width = case.plan.hidden
    hidden = torch.from_numpy(case.random(len(IDS), width)).to(dtype).to(DEVICE)
    positions = torch.from_numpy(case.random(10, width)).to(DEVICE) if has_positions else None
    history = torch.zeros((3, 10), dtype=torch.int32, device=DEVICE)
    wanted = hidden.double().cpu()
    for number, (adapter, position, token) in enumerate(zip(ADAPTERS, POSITIONS, IDS, strict=True)):
        history[1, position] = token
        change = case.matrices.get(adapter, {}).get("embedding")
        if change is None or position < 0 or token < 0:
            continue
        if len(change) == 2:
            wanted[number] += FACTOR * SCALE * change[1] @ change[0][:, token]
        elif token in TOKENS:
            wanted[number] = FACTOR * change[0][TOKENS.index(token)]
            wanted[number] += 0.0 if positions is None else positions[position].double().cpu()
    tokens = TokenTables(ints([1] * len(IDS)), ints(POSITIONS))
    change_embeddings(hidden, history, tokens, ints(ADAPTERS), case.vocabulary, FACTOR, positions)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(hidden.double().cpu(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_logits_are_changed_by_each_outputs_adapter(case: Case, dtype: torch.dtype, has_bias: bool) -> None:
    named = [4, 0, 2, -1, 1, 7]  # tokens whose logits are wanted; -1: padding
    x = torch.from_numpy(case.random(len(named), case.plan.hidden)).to(dtype).to(DEVICE)
    logits = torch.from_numpy(case.random(len(named), VOCAB)).to(dtype).to(DEVICE)
    bias = torch.from_numpy(case.random(VOCAB)).to(dtype).to(DEVICE) if has_bias else None
    wanted = logits.double().cpu()
    for output, number in enumerate(named):
        change = None if number < 0 else case.matrices.get(ADAPTERS[number], {}).get("head")
        if change is None:
            continue
        found = change[0] @ x[output].double().cpu()
        if len(change) == 2:
            wanted[output] += SCALE * change[1] @ found
        else:
            changed = list(TOKENS[:3])
            wanted[output, changed] = found + (0.0 if bias is None else bias[changed].double().cpu())
    products = torch.full((8, MAX_RANK), torch.nan, device=DEVICE)
    change_logits(logits, x, products, ints(named), ints(ADAPTERS), case.vocabulary, bias)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(logits.double().cpu(), wanted, atol=tolerance, rtol=tolerance)
