"""Prompts computed with the help of real CPU workers, over the CUDA backend and an emulated device whose link a test
can stop: which side computes a layer, and what happens if workers die, stop or are missing."""

import asyncio
import os
import signal
from functools import partial

import pytest

from caraserve.cpu.lora_workers import pool
from caraserve.gpu import builder
from caraserve.gpu.assist import assisted_prefill
from caraserve.gpu.assist.assisted_prefill import AssistedPrefills
from caraserve.gpu.driver.streams import Lane, Timelines
from caraserve.gpu.forward import iteration
from caraserve.model.families import load_plan
from tests.fake_grammar import FakeGrammar
from tests.gpu.assisted_engine import LAYERS, PATIENCE_S, TOKENS, assisted_engine, prompt_of
from tests.gpu.host_backend import NO_NUMBER, hold_second_copy, note_calls, on_a_loop
from tests.oracle.subject import Subject
from tests.oracle.vectors import vectors_of_tokens, with_vectors
from tests.serving import embed, submit

STUCK_S = pool._STUCK_S
LONG = 150  # tokens: two chunks


pytestmark = pytest.mark.usefixtures("torch_for_triton")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the killing of stuck workers, because on a busy machine a healthy worker may seem stuck; and lets graphs
    of chunks have all of the graphs' memory."""
    monkeypatch.setattr(pool, "_STUCK_S", PATIENCE_S)
    monkeypatch.setattr(builder, "_CHUNKS_SHARE", 1.0)


@pytest.mark.parametrize("captured", [True, False], ids=["graphs", "kernel by kernel"])
@on_a_loop
async def test_workers_compute_every_layer_while_nothing_arrives(subject: Subject, captured: bool) -> None:
    """Prompts of one chunk and of two, one after another; later ones start when workers are idle again."""
    async with assisted_engine(subject, captured=captured) as at:
        for name, tokens in (("r8", 20), ("half", LONG), ("r13", 1), ("mixed", 40)):
            assert await at.help_with(name, tokens) == LAYERS
        assert at.host.backend.modules_redone == 0
        assert at.driver.replays == (5 if captured else 0)


@on_a_loop
async def test_all_tokens_of_a_prompt_are_scored(subject: Subject) -> None:
    """In several batches, because one batch cannot score so many tokens."""
    async with assisted_engine(subject) as at:
        at.driver.held = {Lane.COPY}
        answer = at.ask("r8", LONG, prompt_logprobs=0)
        await at.until(lambda: not at.assisted.is_open and at.assisted.slices > 0)
        at.driver.held = set()
        assert await at.check("r8", LONG, answer) >= LAYERS  # of its first batch at least
        prompt, (first, *rest) = prompt_of(LONG), (await answer).prompt_logprobs
        assert first is None
        scores = [entry.logprob for entry in rest if entry is not None]
        at.oracle.check_logprobs(prompt[:1], "r8", prompt[1:], scores)


@on_a_loop
async def test_a_prompt_that_workers_help_with_is_embedded(subject: Subject) -> None:
    """Only the last of its two chunks has the embedding."""
    async with assisted_engine(subject) as at:
        at.driver.held = {Lane.COPY}
        prompt = prompt_of(LONG)
        done = await asyncio.wait_for(embed(at.engine, prompt, "r8"), PATIENCE_S)
        assert done.finish.phases.cpu_layers == LAYERS
        at.oracle.check_embedding(prompt, "r8", done.embedding)
        at.driver.held = set()


@on_a_loop
async def test_vectors_stand_in_prompts_that_workers_help_with(subject: Subject) -> None:
    """In both chunks."""
    async with assisted_engine(subject) as at:
        at.driver.held = {Lane.COPY}
        mixed, embeds = with_vectors(prompt_of(LONG), range(3, LONG), vectors_of_tokens(subject.model))
        answer = submit(at.engine, mixed, "r8", prompt_embeds=embeds, max_tokens=TOKENS)
        await at.until(lambda: not at.assisted.is_open and at.assisted.slices > 0)
        at.driver.held = set()
        assert await at.check("r8", LONG, answer) == LAYERS


def one_of(token_ids: list[int], index: int) -> list[int]:
    return token_ids[index : index + 1]


@on_a_loop
async def test_grammars_limit_the_first_token_of_prompts_that_workers_help_with(subject: Subject) -> None:
    """Two in flight, whose masks differ; the later one has two chunks, and only the last samples."""
    async with assisted_engine(subject) as at:
        at.driver.held = {Lane.COPY, Lane.ASSIST}
        wanted = [("r8", 20, [7, 8, 9]), ("half", LONG, [13, 12, 11])]
        answers = [
            at.ask(name, tokens, grammar=FakeGrammar(partial(one_of, ids)), logprobs=1) for name, tokens, ids in wanted
        ]
        await at.until_launched(2)
        at.driver.held = {Lane.COPY}
        await at.until(lambda: not at.assisted.is_open)
        at.driver.held = set()
        for answer, (_, _, ids) in zip(answers, wanted, strict=True):
            done = await asyncio.wait_for(answer, PATIENCE_S)
            assert done.token_ids == ids
            assert [entry.token_id for entry in done.logprobs] == ids
            assert done.finish.phases.cpu_layers == LAYERS


@on_a_loop
async def test_two_assisted_prefills_are_launched_before_the_first_has_begun(subject: Subject) -> None:
    """Both are launched before the device has begun the first one."""
    async with assisted_engine(subject) as at:
        at.driver.held = {Lane.COPY, Lane.ASSIST}
        asked = [("r8", 20), ("half", 40)]
        answers = [at.ask(*each) for each in asked]
        await at.until_launched(2)
        assert await at.check(None, 5, at.ask(None, 5)) == 0
        at.driver.held = {Lane.COPY}
        await at.until(lambda: not at.assisted.is_open)
        at.driver.held = set()
        assert [await at.check(*each, answer) for each, answer in zip(asked, answers, strict=True)] == [LAYERS] * 2
        assert at.host.backend.modules_redone == 0


@on_a_loop
async def test_weights_that_arrive_before_the_device_reaches_the_layer_are_used(subject: Subject) -> None:
    """Work orders are written, but the workers' input is NaN by then, which shows that they are not asked."""
    async with assisted_engine(subject) as at:
        at.driver.held = {Lane.COPY, Lane.ASSIST}  # weights that arrive before the launch leave nothing to assist
        answer = at.ask("r8", 20)
        await at.until_launched()
        at.driver.held = {Lane.ASSIST}
        await at.until_loaded()
        for bound in at.host.parts.images.bound.values():
            bound.adapter.data[:] = NO_NUMBER
        at.driver.held = set()
        assert await at.check("r8", 20, answer) == 0
        assert all(state.hand_offs == 0 for state in at.host.backend.workers.states())


@on_a_loop
async def test_an_iteration_computes_what_is_left_of_a_prompt_when_its_adapter_has_arrived(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its two chunks, CPU workers are asked for the first alone."""
    chunks: list[str] = []
    note_calls(monkeypatch, AssistedPrefills, "_issue_chunk", chunks)
    async with assisted_engine(subject) as at:
        at.driver.held = {Lane.COPY, Lane.ASSIST}
        answer = at.ask("r8", LONG)
        await at.until_launched()
        at.driver.held = {Lane.ASSIST}
        await at.until_loaded()
        at.driver.held = set()
        await at.check("r8", LONG, answer)
        assert len(chunks) == 1


@on_a_loop
async def test_over_a_slow_link_any_layer_may_come_from_workers_or_device(subject: Subject) -> None:
    async with assisted_engine(subject, last=Lane.COPY) as at:
        at.driver.link_bytes_per_s = 1e6
        at.driver.held = {Lane.COPY}
        asked = [(name, tokens) for name in ("r8", "half", "mixed", "r13") for tokens in (30, 3)]
        answers = [at.ask(*each, seed=3) for each in asked]
        await at.until(lambda: at.assisted.slices > 0)
        at.driver.held = set()
        for each, answer in zip(asked, answers, strict=True):
            await at.check(*each, answer, seed=3)


@on_a_loop
async def test_a_layer_that_has_arrived_comes_from_the_device_and_the_other_from_workers(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two layers is copied by itself, and the second copy does not end."""
    async with assisted_engine(subject, pipeline_groups=LAYERS) as at:
        begun = hold_second_copy(monkeypatch)
        at.driver.held = {Lane.ASSIST}
        answer = at.ask("r8", 30)
        await at.until_launched()
        await at.until(lambda: len(begun) == 2)
        at.driver.held = {Lane.COPY}
        await at.until(lambda: not at.assisted.is_open)
        at.driver.held = set()
        assert await at.check("r8", 30, answer) == 1


@on_a_loop
async def test_weights_that_arrive_end_the_wait_for_a_late_worker(subject: Subject) -> None:
    """The worker may still write to the chunk's sync slot, which is not used again before it has answered."""
    async with assisted_engine(subject) as at:
        at.predict_hand_offs(PATIENCE_S)
        at.driver.held = {Lane.COPY}
        at.signal_workers(signal.SIGSTOP)
        answer = at.ask("r8", 20)
        await at.until_asked()
        at.driver.held = set()
        assert await at.check("r8", 20, answer) == 0
        sync_slots = at.assisted._sync_slots
        assert len(sync_slots._quarantine) == 1
        at.signal_workers(signal.SIGCONT)
        await at.until(lambda: not any(state.is_busy for state in at.host.backend.workers.states()))
        assert await at.help_with("half", 30) == LAYERS
        assert not sync_slots._quarantine
        assert at.host.backend.modules_redone == 0


@on_a_loop
async def test_decoding_continues_while_a_chunk_waits_for_workers(subject: Subject) -> None:
    async with assisted_engine(subject) as at:
        at.predict_hand_offs(PATIENCE_S)
        at.driver.held = {Lane.COPY}
        at.signal_workers(signal.SIGSTOP)
        stuck = at.ask("r8", 20)
        await at.until_asked()
        for tokens in (1, 40):
            assert await at.check(None, tokens, at.ask(None, tokens)) == 0
        assert not stuck.done()
        assert at.assisted.is_open
        at.signal_workers(signal.SIGCONT)
        await at.until(lambda: not at.assisted.is_open)
        at.driver.held = set()
        assert await at.check("r8", 20, stuck) == LAYERS


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@on_a_loop
async def test_a_prompt_whose_workers_fail_is_computed_again_without_them(
    subject: Subject, blow: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fail in the middle of a slice. No other request loses a token, and replaced workers help again."""
    if blow is signal.SIGSTOP:
        monkeypatch.setattr(pool, "_STUCK_S", STUCK_S)

    async with assisted_engine(subject) as at:
        at.predict_hand_offs(5.0 if blow is signal.SIGKILL else 0.0)
        at.driver.held = {Lane.COPY}
        beside = [at.ask(None, tokens) for tokens in (1, 90)]
        at.signal_workers(signal.SIGSTOP)
        answer = at.ask("half", LONG)
        if blow is signal.SIGKILL:
            await at.until_asked()
            at.signal_workers(blow)
        await at.until(lambda: at.host.backend.modules_redone > 0)
        at.driver.held = set()
        assert await at.check("half", LONG, answer) == 0
        assert at.host.backend.modules_redone == 1
        for tokens, other in zip((1, 90), beside, strict=True):
            await at.check(None, tokens, other)
        await at.until(lambda: sum(s.deaths for s in at.host.backend.workers.states()) > 0)
        assert await asyncio.to_thread(at.host.backend.workers.await_all, PATIENCE_S)
        at.predict_hand_offs(5.0)
        assert await at.help_with("mixed", 30) == LAYERS


@on_a_loop
async def test_a_layer_whose_worker_has_died_waits_for_its_weights(subject: Subject) -> None:
    """The work order names the worker, but it is dead when the device reaches the layer, and has not been replaced."""
    async with assisted_engine(subject) as at:
        fork_server = at.host.backend.workers._fork_server
        assert fork_server is not None
        at.driver.held = {Lane.COPY, Lane.ASSIST}
        answer = at.ask("r8", 20)
        await at.until_launched()
        os.kill(fork_server.pid, signal.SIGSTOP)
        try:
            at.signal_workers(signal.SIGKILL)
            await at.until(lambda: not at.pids())
            at.driver.held = {Lane.COPY}
            assert await at.check(None, 7, at.ask(None, 7)) == 0
            assert not answer.done()
            at.driver.held = set()
            assert await at.check("r8", 20, answer) == 0
        finally:
            os.kill(fork_server.pid, signal.SIGCONT)
        assert at.host.backend.modules_redone == 0


@on_a_loop
async def test_without_workers_every_layer_waits(subject: Subject) -> None:
    """There are none from the start, so work orders name no worker."""
    async with assisted_engine(subject) as at:
        fork_server = at.host.backend.workers._fork_server
        assert fork_server is not None
        os.kill(fork_server.pid, signal.SIGSTOP)
        at.signal_workers(signal.SIGKILL)
        await at.until(lambda: not at.pids())
        at.driver.held = {Lane.COPY}
        answers = [at.ask(name, 25) for name in ("r8", "half")]
        await at.until_launched()
        assert await at.check(None, 7, at.ask(None, 7)) == 0
        at.driver.held = set()
        layers = [await at.check(name, 25, answer) for name, answer in zip(("r8", "half"), answers, strict=True)]
        os.kill(fork_server.pid, signal.SIGCONT)
        assert layers == [0, 0]
        assert at.host.backend.slices_handed_off == 0


@on_a_loop
async def test_generations_of_chunks_wrap(subject: Subject) -> None:
    async with assisted_engine(subject) as at:
        for sync_slot in at.assisted._sync_slots._free:
            sync_slot.generation = (1 << 32) - 2
        for number, name in enumerate(("r8", "half", "mixed", "r13")):
            assert await at.help_with(name, LONG, seed=number) == LAYERS
        assert at.host.backend.modules_redone == 0
        assert all(sync_slot.generation < 8 for sync_slot in at.assisted._sync_slots._free)


@on_a_loop
async def test_a_cancelled_assisted_prefill_leaves_nothing_behind(subject: Subject) -> None:
    """Its slot and its blocks are released only after the device has finished with them."""
    async with assisted_engine(subject) as at:
        at.predict_hand_offs(PATIENCE_S)
        at.driver.held = {Lane.COPY}
        at.signal_workers(signal.SIGSTOP)
        answer = at.ask("half", LONG)
        await at.until_asked()
        answer.cancel()
        await at.until(lambda: len(at.engine._side_batches.finished) == 1)
        assert await at.check(None, 60, at.ask(None, 60)) == 0
        at.engine.check()
        assert len(at.engine._side_batches.finished) == 1
        at.signal_workers(signal.SIGCONT)
        await at.until(lambda: not at.engine._side_batches.finished)
        at.driver.held = set()
        assert await at.check("half", 12, at.ask("half", 12)) == 0


@on_a_loop
async def test_workers_answers_count_as_in_flight_until_the_chunk_has_ended(subject: Subject) -> None:
    outputs = sum(linear.outputs for linear in load_plan(subject[0]).layers[0].linears)

    async with assisted_engine(subject) as at:
        queue = at.host.parts.context.queue
        at.driver.held = {Lane.COPY, Lane.ASSIST}
        answer = at.ask("r8", 20)
        await at.until_launched()
        assert queue.answers == 4 * 20 * outputs * LAYERS
        at.driver.held = {Lane.COPY}
        await at.until(lambda: not at.assisted.is_open)
        assert queue.answers == 0
        at.driver.held = set()
        assert await at.check("r8", 20, answer) == LAYERS


@on_a_loop
async def test_a_chunk_that_fails_after_its_launch_has_ended_before_its_memory_is_released(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph runs as a whole and writes keys and values."""
    happened: list[str] = []

    def fail(*given: object) -> None:
        note_calls(monkeypatch, Timelines, "settle", happened)
        note_calls(monkeypatch, AssistedPrefills, "_release", happened)
        raise RuntimeError("no results today")

    async with assisted_engine(subject) as at:
        at.driver.held = {Lane.COPY}
        monkeypatch.setattr(AssistedPrefills, "_return_results", fail)
        assert (await at.ask("r8", 20)).finish.reason == "error"
        monkeypatch.undo()
        assert happened[:2] == ["settle", "_release"]
        at.driver.held = set()
        assert await at.help_with("half", 30) == LAYERS


@on_a_loop
async def test_a_chunk_whose_results_cannot_be_read_fails_its_request_and_no_other(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **named: object) -> None:
        raise RuntimeError("not this time")

    async with assisted_engine(subject) as at:
        for owner, what in (
            (assisted_prefill, "collect"),
            (iteration, "copy_results"),
            (assisted_prefill, "append_tokens"),
        ):
            for _ in range(4):  # more often than there are blocks for results, or slots for hand-offs
                at.driver.held = {Lane.COPY}
                monkeypatch.setattr(owner, what, fail)
                assert (await at.ask("r8", 20)).finish.reason == "error", what
                monkeypatch.undo()
                at.driver.held = set()
        assert await at.help_with("half", 30) == LAYERS
