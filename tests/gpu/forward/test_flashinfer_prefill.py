"""FlashInfer for prompt chunks: which batches it attends for, when it plans again, and when it is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import caraserve.backend_factory as factory
from caraserve.core.batch import ScheduledRow
from caraserve.errors import ConfigError
from caraserve.gpu.driver.detect import DeviceChoice
from caraserve.gpu.forward import flashinfer_prefill
from caraserve.gpu.forward.flashinfer_prefill import (
    ChunkRequest,
    FlashInferPrefill,
    PlannedPrefill,
    check_flashinfer,
    chunk_requests,
)
from caraserve.gpu.kernels.attention import NO_WINDOW, PagedCache
from caraserve.model.dtype import Dtype
from tests.gpu import host_device
from tests.gpu.fake_flashinfer import Ints, Used, install, prefill_on
from tests.gpu.host_backend import note_calls
from tests.gpu.host_device import HostDriver
from tests.gpu.small_model import SPEC
from tests.serving import engine_config, lora_config, model_config

SLOTS, MOST_BLOCKS = 4, 20


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Used:
    return install(monkeypatch)


def row(slot: int, start: int, count: int) -> ScheduledRow:
    return ScheduledRow(slot, start, count, 0, samples=False)


# --- which batches ---


def test_chunks_are_requests_and_so_are_rows_that_decode_between_them() -> None:
    rows = [row(0, 9, 1), row(1, 0, 70), row(2, 7, 1), row(3, 8, 1), row(4, 32, 90), row(5, 3, 80), row(6, 4, 1)]
    assert chunk_requests(rows) == (
        1,
        [ChunkRequest(1, 70, 70), ChunkRequest(None, 2, 2), ChunkRequest(4, 90, 122), ChunkRequest(5, 80, 83)],
    )


def test_a_context_has_the_blocks_of_its_slot() -> None:
    table = np.arange(40, dtype=np.int32).reshape(2, 20)
    assert ChunkRequest(1, 20, 33).blocks(table).tolist() == [20, 21, 22]
    assert ChunkRequest(None, 17, 17).blocks(table).tolist() == [0, 0]


@pytest.mark.parametrize("rows", [[], [row(0, 5, 1)], [row(0, 0, 64)], [row(0, 0, 120), row(1, 3, 1), row(2, 0, 70)]])
def test_decoding_and_small_chunks_are_left_to_our_kernels(used: Used, rows: list[ScheduledRow]) -> None:
    prefill = prefill_on(HostDriver(), SPEC, np.zeros((SLOTS, MOST_BLOCKS), np.int32))
    assert prefill.plan(rows, np.zeros((SLOTS, MOST_BLOCKS), np.int32)) is None
    assert used.windows == []


def test_layers_of_different_windows_have_plans_of_their_own(used: Used) -> None:
    """FlashInfer counts the keys before the query, we count the query's own too."""
    spec = replace(SPEC, windows=(None, 100, None, 24))
    prefill = prefill_on(HostDriver(), spec, np.zeros((SLOTS, MOST_BLOCKS), np.int32))
    planned = prefill.plan([row(0, 0, 65)], np.zeros((SLOTS, MOST_BLOCKS), np.int32))
    assert planned is not None
    assert set(planned.wrappers) == {NO_WINDOW, 100, 24}
    assert sorted(used.windows) == [-1, 23, 99]
    assert {is_window for *_, is_window in used.compiled} == {True, False}


# --- plans of iterations that are launched one after another ---


class Iterations:
    """Plans batches of one chunk each, of different lengths, and attends before any has run."""

    def __init__(self, sets: int) -> None:
        self.driver = HostDriver()
        generator = torch.Generator().manual_seed(0)
        shape = (SLOTS * MOST_BLOCKS, 16, SPEC.kv_heads, SPEC.head_dim)
        keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
        self.table: Ints = np.random.default_rng(0).permutation(shape[0]).astype(np.int32).reshape(SLOTS, MOST_BLOCKS)
        self.cache = PagedCache(keys, values, torch.from_numpy(self.table))
        self.prefill: FlashInferPrefill = prefill_on(self.driver, SPEC, self.table, sets)
        self.q = torch.randn((200, SPEC.heads * SPEC.head_dim), generator=generator)

    def attend(self, number: int) -> torch.Tensor:
        planned = self.prefill.plan([row(number % SLOTS, number, 70 + 9 * number)], self.table)
        assert isinstance(planned, PlannedPrefill)
        out = torch.full_like(self.q, torch.nan)
        self.driver.call(self.prefill._stream, lambda: planned.attend(self.q, self.cache, out, NO_WINDOW))
        return out

    def settle(self) -> None:
        event = self.driver.create_event()
        self.driver.record(event, self.prefill._stream)
        self.driver.synchronize(event)

    def alone(self, number: int) -> torch.Tensor:
        out = self.attend(number)
        self.settle()
        return out


def check(together: Iterations, count: int) -> None:
    """Launches iterations before any has run; their results must be those of iterations that have run before the next
    is planned."""
    outs = [together.attend(number) for number in range(count)]
    together.settle()
    apart = Iterations(sets=1)
    for number, out in enumerate(outs):
        torch.testing.assert_close(out, apart.alone(number), equal_nan=True)


@pytest.fixture
def late(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a device on which nothing runs until a thread waits for it."""
    monkeypatch.setattr(host_device, "_AHEAD", 1)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("count", [3, 9])
def test_a_plan_is_overwritten_only_after_it_was_copied(count: int) -> None:
    check(Iterations(sets=3), count)


@pytest.mark.usefixtures("late")
def test_as_many_plans_as_there_are_turns_are_made_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    note_calls(monkeypatch, HostDriver, "synchronize", waits)
    iterations = Iterations(sets=3)
    for number in range(3):
        iterations.attend(number)
    assert waits == []
    iterations.attend(3)
    assert waits == ["synchronize"]


@pytest.mark.usefixtures("late")
def test_the_emulated_device_finds_a_plan_that_is_overwritten_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above would fail."""
    monkeypatch.setattr(HostDriver, "is_done", lambda driver, event: True)
    with pytest.raises(Exception, match=r"an operation failed|not close"):
        check(Iterations(sets=2), 3)


# --- when it is refused ---


def refusal(*, head_dim: int = 128, dtype: Dtype = Dtype.BF16) -> str:
    with pytest.raises(ConfigError) as refused:
        check_flashinfer(replace(SPEC, head_dim=head_dim), dtype)
    return str(refused.value)


def test_it_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_prefill, "find_spec", lambda name: None)
    assert refusal() == "--attention-backend flashinfer: it is not installed; pip install 'caraserve[flashinfer]'"


@pytest.mark.usefixtures("used")
def test_dtypes_and_heads_that_it_lacks_are_refused() -> None:
    assert "bfloat16 and float16" in refusal(dtype=Dtype.F32)
    assert "heads of 64, 128, 256 numbers, and this model has 96" in refusal(head_dim=96)
    for dtype in (Dtype.BF16, Dtype.F16):
        for dim in (64, 128, 256):
            check_flashinfer(replace(SPEC, head_dim=dim), dtype)


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize(("device", "said"), [("cpu", "needs a GPU"), ("cuda", "computes in bfloat16 and float16")])
def test_a_start_that_cannot_use_it_ends_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, device: str, said: str
) -> None:
    monkeypatch.setattr(factory, "detect", lambda wanted: DeviceChoice(device))  # type: ignore[arg-type]
    engine = replace(engine_config(), attention_backend="flashinfer")
    model, lora = model_config(tmp_path), lora_config({})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"--attention-backend flashinfer {said}"):
        factory.build_backend(SPEC, model, engine, lora)
