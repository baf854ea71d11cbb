"""The order of stream operations: iterations, gated graphs, assisted prefills."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.core.lora_layout import GROUPS
from caraserve.gpu.assist.handshake import CHECK_S
from caraserve.gpu.assist.lane import AssistedChunk, chunk_ends
from caraserve.gpu.driver.streams import NOTHING, Lane, at
from caraserve.gpu.forward.lanes import capture_pass
from caraserve.gpu.memory.host_memory import ASSISTED_CHUNK_TOKENS
from caraserve.gpu.memory.link_queue import LoraSource
from tests.gpu.fake_driver import Operation, Stuck
from tests.gpu.fake_pass import GATE, LAYER_BYTES, LAYERS, SLOTS, TOP, FakePass, World

WORKERS, WAIT = LoraSource.WORKERS, LoraSource.WAIT


# --- iterations ---


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_an_iteration_waits_for_each_layer_it_uses(seed: int) -> None:
    random = Random(seed)
    world = World(piece_bytes=random.choice([3, 8, 100]))
    stream = world.lanes.streams[Lane.COMPUTE]
    passes: list[FakePass] = []
    ready: set[int] = set()
    for _ in range(6):
        new = [slot for slot in range(SLOTS) if slot not in ready and random.random() < 0.4]
        for slot in new:
            ends = random.sample([1, 2], random.randrange(3))
            world.bring(slot, ends, random.choice([0, *ends]))
        ready.update(new)
        slots = random.sample(sorted(ready), random.randint(0, len(ready)))
        work = FakePass(world, slots)
        passes.append(work)
        if (kind := random.choice(["eager", "gated", "plain"])) == "eager":
            world.iterations.launch(world.metadata, work, slots, NOTHING)
        else:
            gate = GATE if kind == "gated" else None
            captured = capture_pass(world.driver, work, stream, LAYERS, gate)
            world.iterations.launch(world.metadata, captured, slots, NOTHING)
        for _ in range(random.choice([0, 3, 40])):
            world.driver.step(random.randrange)
        if random.random() < 0.5:
            world.copier.poll()
    world.driver.run_all(random.randrange)
    for work in passes:
        assert len(work.done) == 2 + LAYERS * (5 + 2 * len(GROUPS))


def test_an_iteration_does_not_wait_for_adapters_that_it_does_not_use() -> None:
    world = World()
    world.bring(1)
    world.driver.issue(world.lanes.streams[Lane.COPY], Operation("slow", ready=lambda: False))
    world.copier.poll()
    work = FakePass(world, [])
    world.iterations.launch(world.metadata, work, [], NOTHING)
    world.settle()
    assert work.done[-1] == ("sample", 0, 0)


def test_layers_run_while_later_ones_are_being_copied() -> None:
    for gate in (None, GATE):
        world = World(piece_bytes=LAYER_BYTES)
        world.bring(1)
        world.copier.commit([1], 1)
        world.driver.issue(world.lanes.streams[Lane.COPY], Operation("slow", ready=lambda: False))
        work = FakePass(world, [1])
        stream = world.lanes.streams[Lane.COMPUTE]
        launched = work if gate is None else capture_pass(world.driver, work, stream, LAYERS, gate)
        world.iterations.launch(world.metadata, launched, [1], NOTHING)
        world.settle()
        assert work.done[-1] == ("add_lora", 0, len(GROUPS) - 1)


def test_a_pass_waits_for_the_marks_that_its_caller_gives() -> None:
    for other in (Lane.ASSIST, Lane.COMPUTE):
        world = World()
        world.driver.issue(world.lanes.streams[other], Operation("slow", ready=lambda: False))
        after = at(other, world.lanes.mark(other))
        work = FakePass(world, [1])
        if other is Lane.ASSIST:
            world.iterations.launch(world.metadata, work, [], after)
        else:
            world.launch_chunk(work, world.chunk(1, 1, [WAIT] * LAYERS), after)
        world.settle()
        assert work.done == []


# --- assisted prefills ---


def test_chunks_are_capped_and_cover_the_prompt() -> None:
    assert list(chunk_ends(0, ASSISTED_CHUNK_TOKENS)) == [ASSISTED_CHUNK_TOKENS]
    assert list(chunk_ends(5, 5 + 2 * ASSISTED_CHUNK_TOKENS + 1)) == [133, 261, 262]
    assert list(chunk_ends(7, 7)) == []


def test_workers_compute_missing_layers_while_the_base_product_runs() -> None:
    world = World()
    world.hold_copies()
    chunk = world.chunk(1, world.bring(1), [WORKERS] * LAYERS)
    work = world.assisted(chunk)
    world.settle()
    assert work.done == [("embed", 0, 0), ("attention_norm", 0, 0), ("project", 0, 0)]  # waits for y of layer 0
    while world.work(chunk):
        world.settle()
    assert [kind for kind, _, group in work.done if group == 0 and kind != "attention_norm"] == [
        "embed",
        *["project", "add"] * LAYERS,
        "sample",
    ]
    assert not [kind for kind, _, group in work.done if group in (1, 2) and kind in ("add", "add_lora")]
    names = world.driver.log
    assert names.index("publish 1.3") < names.index("project 1.3") < names.index("add 1.3")
    assert not world.watchdog.unwatch(chunk.sync_slot)


def test_all_missing_layers_are_issued_before_a_chunk() -> None:
    world = World(piece_bytes=3)
    world.assisted(world.chunk(1, world.bring(1), [WORKERS] * LAYERS))
    assert world.copier.arrival(1, LAYERS - 1) is not None


def test_every_hand_off_of_a_chunk_has_its_own_words() -> None:
    world = World()
    chunk = world.chunk(1, 1, [WORKERS] * LAYERS, groups=range(len(GROUPS)))
    asked = list(chunk.hand_offs())
    assert [(layer, group) for layer, group, *_ in asked] == [(i, j) for i in range(LAYERS) for j in range(len(GROUPS))]
    assert [index for *_, index, _ in asked] == list(range(LAYERS * len(GROUPS)))
    assert [entry for *_, entry in asked] == list(chunk.sync_slot.flags)


def test_a_layer_that_arrives_in_time_is_computed_on_the_device() -> None:
    world = World()
    world.hold_copies()
    chunk = world.chunk(1, world.bring(1), [WORKERS] * LAYERS)
    work = world.assisted(chunk)
    world.settle()
    world.copies_run = True
    world.settle()  # the copy runs while layer 0 waits
    assert [kind for kind, *_ in work.done if kind in ("add", "expand")] == ["expand"] * 2 * LAYERS
    for now_s in (0.0, 1.0):
        world.watchdog.check(now_s, world.statuses)  # the device does not wait for the worker any more
    assert not world.watchdog.unwatch(chunk.sync_slot)


def test_a_previous_adapters_layers_are_never_used_for_the_next_adapter() -> None:
    world = World()
    world.bring(1)
    world.copier.poll()
    world.driver.run_all()
    world.copier.poll()
    world.hold_copies()
    chunk = world.chunk(1, world.bring(1), [WORKERS] * LAYERS)
    work = world.assisted(chunk)
    world.settle()
    assert work.outcomes == {(0, 0): "by workers"}


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_every_hand_off_is_computed_or_aborted_under_any_schedule(seed: int) -> None:
    """Meanwhile decoding continues, sync slots are reused, generations wrap, and workers die or are late. One graph
    serves any chunk."""
    random = Random(seed)
    world = World(piece_bytes=random.choice([5, 100]), sync_slots=2, generation=TOP - 1 - random.randrange(3))
    captured, graph = world.capture_chunk()
    for _ in range(4):
        slot = random.randrange(SLOTS)
        world.copier.cancel(slot)
        generation = world.bring(slot)
        if (sync_slot := world.sync_slots.acquire()) is None:
            world.sync_slots.reclaim(world.statuses)
            continue
        sources = [random.choice([WORKERS, WORKERS, WAIT]) for _ in range(LAYERS)]
        chunk = AssistedChunk(slot, sync_slot, sources, [(0, 1)] * LAYERS, world.ready(slot), generation)
        is_captured = random.random() < 0.5
        work = world.assisted(chunk, graph) if is_captured else world.assisted(chunk)
        answered = len(captured.done)
        workers_until = random.choice([0, 2, 99])  # hand-offs until all workers have died
        decode = FakePass(world, [])
        world.iterations.launch(world.metadata, decode, [], NOTHING)
        while not world.driver.is_idle(world.lanes.streams[Lane.ASSIST]):
            for _ in range(random.randrange(6)):
                world.driver.step(random.randrange)
            if workers_until and random.random() < 0.3:
                workers_until -= world.work(chunk)
            if random.random() < 0.3:
                world.copier.poll()
            world.now_s += random.choice([0.0, CHECK_S])
            assert world.now_s < 1.0, "a wait has no way out"
            world.watchdog.check(world.now_s, world.statuses if workers_until else [])
        was_aborted = world.watchdog.unwatch(sync_slot)
        issued = captured.done[answered:] if is_captured else work.done
        answers = [kind for kind, *_ in issued if kind in ("add", "expand", "skip")]
        assert len(answers) == 2 * LAYERS
        assert work.done[-1] == ("sample", 0, 0)
        assert was_aborted or "skip" not in answers
        world.sync_slots.release(sync_slot, world.statuses if was_aborted else [])
    world.driver.run_all(random.randrange)
    assert decode.done[-1] == ("sample", 0, 0)


def test_decoding_does_not_wait_for_a_lane_that_waits_for_workers() -> None:
    world = World()
    world.bring(2)
    world.copier.poll()
    world.driver.run_all()
    world.hold_copies()
    world.assisted(world.chunk(1, world.bring(1), [WORKERS] * LAYERS))
    stream = world.lanes.streams[Lane.COMPUTE]
    for gate in (None, GATE):
        work = FakePass(world, [2])
        captured = capture_pass(world.driver, work, stream, LAYERS, gate)
        world.iterations.launch(world.metadata, captured, [2], NOTHING)
        world.settle()
        assert work.done[-1] == ("sample", 0, 0)
    with pytest.raises(Stuck):
        world.driver.run_all()
