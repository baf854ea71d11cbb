"""Batches after one another, of which the device keeps what does not differ: each is computed as if it came first."""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue

import pytest
from msgspec import structs

from caraserve.core.batch import Batch, BlockGrant, ScheduledRow, SlotSampling, SlotStart, StepResult
from caraserve.core.lora_layout import HostAdapter
from caraserve.gpu.driver.streams import Lane
from tests.gpu.host_backend import PATIENCE_S, Host, alone, host_tier
from tests.gpu.torch_kernels import torch_kernels
from tests.oracle.models import prompt_of
from tests.oracle.subject import KINDS, make_subject

SLOTS, PROMPT, BLOCKS_EACH = 6, 5, 2
Outcome = StepResult | Exception
Values = list[tuple[int, float]]  # a row's tokens, with their log-probabilities


class Device:
    """A backend on which a request has begun in each slot, with a history of its own and no adapter; adapters of
    several kinds are in host memory."""

    def __init__(self, host: Host, images: dict[str, HostAdapter]) -> None:
        self.host, self._images = host, images
        self.ended: SimpleQueue[Outcome] = SimpleQueue()
        starts, grants, rows = [], [], []
        for slot in range(SLOTS):
            starts.append(start(slot))
            grants.append(BlockGrant(slot, 0, tuple(range(BLOCKS_EACH * slot, BLOCKS_EACH * (slot + 1)))))
            rows.append(ScheduledRow(slot, 0, PROMPT, 0, samples=True))
        self.host.backend.launch(Batch(tuple(starts), tuple(grants), tuple(rows)), self.ended.put)
        assert isinstance(self.ended.get(timeout=PATIENCE_S), StepResult)

    def bind(self, slot: int, name: str) -> None:
        """Binds an adapter to a slot, in place of the one that it has."""
        if slot in self.host.parts.images.bound:
            self.host.backend.unload_adapter(slot)
        loaded: SimpleQueue[Exception | None] = SimpleQueue()
        self.host.backend.load_adapter(self._images[name], slot, loaded.put)
        assert loaded.get(timeout=PATIENCE_S) is None

    def run(self, *batches: Batch) -> list[Values]:
        """Launches batches without waiting for any of them; returns the values of the last one's rows."""
        for batch in batches:
            self.host.backend.launch(batch, self.ended.put)
        self.host.driver.held = set()
        outcomes = [self.ended.get(timeout=PATIENCE_S) for _ in batches]
        return values(outcomes[-1])

    def run_as_the_first(self, batch: Batch) -> list[Values]:
        """Runs a batch again, and sends everything that it needs."""
        runner = self.host.parts.iterations

        def forget() -> None:
            runner._last = None

        self.host.on_launching_thread(forget)
        return self.run(batch)

    def check(self, batch: Batch, differs_from: list[Values] | None = None) -> list[Values]:
        """Checks the values of a batch that follows others. `differs_from`: what they must not be."""
        found = self.run(batch)
        assert found == self.run_as_the_first(batch)
        assert found != differs_from
        return found


def values(outcome: Outcome) -> list[Values]:
    assert isinstance(outcome, StepResult), outcome
    assert all(row.is_finite for row in outcome.rows)
    return [[(score.token_id, score.logprob) for score in row.scored] for row in outcome.rows]


def start(slot: int, tokens: int = PROMPT) -> SlotStart:
    return SlotStart(slot, tuple(prompt_of(random.Random(slot), tokens)), SlotSampling.greedy(tokens))


def decodes(adapters: Sequence[int], step: int = 0) -> Batch:
    """Returns a batch in which each slot's request decodes, with one of these adapters."""
    rows = [
        ScheduledRow(slot, PROMPT + step, 1, adapter, samples=True, logprobs=0) for slot, adapter in enumerate(adapters)
    ]
    return Batch((), (), tuple(rows))


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """Yields a device with graphs and memory for merged weights."""
    names = ("r8", "r64", "half", "mlp")
    subject = make_subject(tmp_path_factory.mktemp("equal"), {name: KINDS[name] for name in names})
    cores = (min(os.sched_getaffinity(0)),)
    sizes = {"num_slots": SLOTS, "graph_bytes": 1 << 30, "merging": True, "lora_cpus": cores}
    with torch_kernels(), alone(subject.model, **sizes) as host:
        yield Device(host, host_tier(host, subject.adapters, subject.model))


@pytest.fixture(autouse=True)
def bound(device: Device) -> None:
    """Binds an adapter of each kind to a slot of its own."""
    for slot, name in enumerate(("r8", "r64", "half", "mlp"), start=1):
        device.bind(slot, name)


def test_rows_that_decode_on_are_computed_at_their_new_positions(device: Device) -> None:
    before = device.run(decodes([0, 1, 2, 3, 4, 1]))
    device.check(decodes([0, 1, 2, 3, 4, 1], step=1), differs_from=before)


@pytest.mark.parametrize("name", ["r64", "mlp"])
def test_an_adapter_that_replaces_another_under_its_slot(device: Device, name: str) -> None:
    """Of another rank, or with other modules."""
    before = device.run(decodes([0, 0, 1, 1]))
    device.bind(1, name)
    device.check(decodes([0, 0, 1, 1]), differs_from=before)


def test_an_adapter_that_was_evicted_and_is_bound_to_another_slot(device: Device) -> None:
    before = device.run(decodes([0, 1, 2]))
    device.bind(1, "half")
    device.bind(3, "r8")
    device.check(decodes([0, 1, 2]), differs_from=before)
    assert device.check(decodes([0, 3, 2]))[1] == before[1]


def test_a_row_whose_request_has_an_adapter_of_another_rank(device: Device) -> None:
    before = device.run(decodes([0, 1, 1, 4]))
    device.check(decodes([0, 1, 2, 4]), differs_from=before)
    assert device.check(decodes([0, 1, 1, 4])) == before


def test_rows_without_adapters_between_rows_with_them(device: Device) -> None:
    before = device.run(decodes([1, 2, 3]))
    device.check(decodes([0, 0, 0]), differs_from=before)
    assert device.check(decodes([1, 2, 3])) == before


def test_weights_with_an_adapter_merged_and_without(device: Device) -> None:
    """The merged adapter has not the same bits as the same one beside the weights, and must not be added twice."""
    beside = device.run(decodes([1, 1, 1]))
    merged = device.check(replace(decodes([1, 1, 1]), merged=1), differs_from=beside)
    assert [[token for token, _ in row] for row in merged] == [[token for token, _ in row] for row in beside]
    for one, other in zip(merged, beside, strict=True):
        assert one[0][1] == pytest.approx(other[0][1], abs=1e-3)
    assert device.check(decodes([1, 1, 1])) == beside


def test_a_prompt_between_rows_that_decode_moves_their_tokens(device: Device) -> None:
    before = device.run(decodes([1, 2, 3]))
    first, second, third = decodes([1, 2, 3]).rows
    prompt = ScheduledRow(4, 0, PROMPT, 1, samples=True, logprobs=0)
    found = device.check(Batch((start(4),), (), (first, prompt, second, third)))
    assert [found[0], *found[2:]] == before
    assert device.check(decodes([1, 2, 3])) == before


def test_a_request_that_begins_with_one_token_in_the_place_of_one_that_decoded(device: Device) -> None:
    before = device.run(decodes([1, 2, 3]))
    rows = [structs.replace(row, start=0) if row.slot == 1 else row for row in decodes([1, 2, 3]).rows]
    changed = device.check(Batch((start(1, 1),), (), tuple(rows)))
    assert (changed[0], changed[2]) == (before[0], before[2])
    assert changed[1] != before[1]
    whole = ScheduledRow(1, 0, PROMPT, 0, samples=True)  # it is preempted, and the other one begins again
    device.run(Batch((start(1),), (), (whole,)))
    assert device.check(decodes([1, 2, 3])) == before


def test_scores_of_a_prompt_follow_the_position_of_its_chunk(device: Device) -> None:
    def scores(at: int) -> Values:
        row = ScheduledRow(0, at, 2, 1, samples=False, prompt_logprobs=0)
        device.host.backend.launch(Batch((), (), (row,)), device.ended.put)
        outcome = device.ended.get(timeout=PATIENCE_S)
        assert isinstance(outcome, StepResult)
        return [(score.token_id, score.logprob) for score in outcome.rows[0].prompt_scored]

    device.run(Batch((start(0),), (), (ScheduledRow(0, 0, PROMPT, 1, samples=True),)))
    before = scores(PROMPT - 3)
    device.run(decodes([1]))
    assert len(scores(PROMPT - 2)) == 1  # nothing follows the prompt's last token
    assert scores(PROMPT - 3) == before


def test_a_prompt_that_workers_help_with_beside_rows_that_decode(device: Device) -> None:
    before = device.run(decodes([1, 2, 3]))
    helped = ScheduledRow(4, 0, PROMPT, 2, samples=True, assist=True)
    ended: SimpleQueue[Outcome] = SimpleQueue()
    device.host.backend.launch(Batch((start(4),), (), (helped,), is_side_batch=True), ended.put)
    assert device.check(decodes([1, 2, 3])) == before
    assert isinstance(ended.get(timeout=PATIENCE_S), StepResult)


def test_lists_that_are_sent_while_an_iteration_before_them_has_not_begun(device: Device) -> None:
    expected = [device.run(decodes(adapters)) for adapters in ([1, 2, 3], [3, 1, 0], [0, 0, 4])]
    device.host.driver.held = {Lane.COMPUTE}
    ended = [SimpleQueue[Outcome]() for _ in range(3)]
    for adapters, queue in zip(([1, 2, 3], [3, 1, 0], [0, 0, 4]), ended, strict=True):
        device.host.backend.launch(decodes(adapters), queue.put)
    device.host.on_launching_thread(lambda: None)
    device.host.driver.held = set()
    assert [values(queue.get(timeout=PATIENCE_S)) for queue in ended] == expected


def test_a_batch_that_fails_before_it_is_issued(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    before = device.run(decodes([1, 2, 3]))

    def refuse(*given: object) -> None:
        raise RuntimeError("not now")

    failed: SimpleQueue[Outcome] = SimpleQueue()
    with monkeypatch.context() as patch:
        patch.setattr(device.host.parts.iterations._lane, "launch", refuse)
        device.host.backend.launch(decodes([3, 0, 4, 1]), failed.put)
        assert isinstance(failed.get(timeout=PATIENCE_S), RuntimeError)
    assert device.check(decodes([1, 2, 3])) == before
