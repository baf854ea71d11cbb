"""Copies of adapters: no layer is read before it has arrived, under any schedule; copies of the padded baseline."""

import time
from functools import partial
from itertools import accumulate
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.core.lora_layout import A_COLUMNS, PANEL, AdapterSpec
from caraserve.errors import AdapterRejected
from caraserve.gpu.driver.streams import NOTHING, Lane, Marks, Timelines, at
from caraserve.gpu.memory.copier import AdapterCopier, CopyRequest
from caraserve.gpu.memory.link_pacer import LinkPacer
from caraserve.gpu.memory.link_queue import LayerGroup, LinkQueue, layer_groups
from caraserve.gpu.memory.padding import copies, padded
from caraserve.model.dtype import Dtype
from caraserve.util.units import align_up
from tests.gpu.host_driver import HostDriver, Operation, word
from tests.gpu.lora_case import address
from tests.gpu.small_model import mixed_plan

SPAN = 8  # bytes; at most two spans are issued ahead
LINK = 1000.0  # bytes/s

# --- on a device, under any schedule ---

LAYERS, ROOM = 4, 64


class CopierCase:
    """Loads into fixed places, and passes that read them, all launched without host waits."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.driver = HostDriver(random.randrange(1 << 30), finds_races=True)
        self.memory, self.host = np.zeros(8 * ROOM, np.uint8), (np.arange(8 * ROOM) % 251 + 1).astype(np.uint8)
        self.words = np.zeros(8 * LAYERS + 1, np.uint32)  # by slot and layer: ready; the last: arrivals
        self.lanes = Timelines(self.driver)
        self.queue = LinkQueue(LINK, SPAN)
        self.copier = AdapterCopier(self.driver, self.lanes, self.queue, address(self.words[-1:]))
        self.layer_ends: dict[int, tuple[int, ...]] = {}
        self.free_after = dict.fromkeys(range(8), NOTHING)
        self.generation: dict[int, int] = {}
        self.open: set[int] = set()

    def load(self) -> None:
        slot = self.random.randrange(8)
        if slot in self.layer_ends:
            return
        layer_ends = tuple(accumulate(self.random.randint(0, ROOM // LAYERS) for _ in range(LAYERS)))
        ends = self.random.sample(range(1, LAYERS), self.random.randrange(LAYERS))
        groups = layer_groups(layer_ends, ends, self.random.choice([0, *ends]))
        image = self.image(slot, layer_ends[-1], groups, self.free_after[slot])
        self.generation[slot] = self.copier.load(image, lambda: self.open.remove(slot))
        self.open.add(slot)
        self.layer_ends[slot] = layer_ends

    def image(self, slot: int, num_bytes: int, groups: tuple[LayerGroup, ...], after: Marks) -> CopyRequest:
        source, target = (address(part[slot * ROOM :]) for part in (self.host, self.memory))
        return CopyRequest(slot, source, target, num_bytes, groups, after, self.ready(slot))

    def ready(self, slot: int) -> list[int]:
        return [address(self.words[slot * LAYERS + layer :]) for layer in range(LAYERS)]

    def layer(self, slot: int, layer: int) -> tuple[slice, tuple[int, int]]:
        """Returns a layer's bytes as a part of `memory`, and their addresses."""
        low, high = (slot * ROOM + ((0, *self.layer_ends[slot])[layer + more]) for more in (0, 1))
        return slice(low, high), (address(self.memory) + low, address(self.memory) + high)

    def unload(self) -> None:
        if self.layer_ends:
            slot = self.random.choice(list(self.layer_ends))
            self.copier.cancel(slot)
            self.open.discard(slot)
            del self.layer_ends[slot]
            self.free_after[slot] = self.lanes.issued()

    def run_pass(self) -> None:
        """Launches an iteration that uses some slots and waits for layers that have not arrived."""
        slots = self.random.sample(list(self.layer_ends), self.random.randint(0, len(self.layer_ends)))
        layers = self.random.randint(1, LAYERS)
        self.copier.commit(slots, layers)
        for layer in range(layers):
            self.lanes.wait(Lane.COMPUTE, self.copier.arrival_of_all(slots, layer))
            for slot in slots:
                self.kernel(slot, layer)
        self.lanes.mark(Lane.COMPUTE)

    def kernel(self, slot: int, layer: int) -> None:
        part, span = self.layer(slot, layer)

        def read() -> None:
            assert np.array_equal(self.memory[part], self.host[part]), "a layer was read too early"

        self.driver.issue(self.lanes.streams[Lane.COMPUTE], Operation("read", read, reads=[span]))

    def look_at_ready(self) -> None:
        """Acts like a late-bound kernel: reads the layer if its ready word shows that this load has brought it."""
        if not self.layer_ends:
            return
        slot, layer = self.random.choice(list(self.layer_ends)), self.random.randrange(LAYERS)
        ready, generation = self.ready(slot)[layer], self.generation[slot]
        part, _ = self.layer(slot, layer)

        def look() -> None:
            if word(ready) == generation:
                assert np.array_equal(self.memory[part], self.host[part])

        self.driver.issue(self.lanes.streams[Lane.ASSIST], Operation("look", look))
        self.lanes.mark(Lane.ASSIST)

    def act(self) -> None:
        self.random.choice(
            [self.load, self.load, self.unload, self.run_pass, self.run_pass, self.copier.poll, self.look_at_ready]
        )()
        for _ in range(self.random.choice((0, 0, 1, 4, 16))):
            self.driver.step()


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_no_kernel_reads_a_layer_before_its_copy(seed: int) -> None:
    random = Random(seed)
    case = CopierCase(random)
    for _ in range(50):
        case.act()
    while case.open:
        case.driver.run_all()
        case.copier.poll()
    case.driver.run_all()
    assert case.queue.next() is None
    case.copier.poll()
    assert case.queue.in_flight == 0


def test_waiting_for_copies_that_have_not_been_issued_raises() -> None:
    case = CopierCase(Random(0))
    case.load()
    (slot,) = case.open
    with pytest.raises(AssertionError, match="there is no event yet"):
        case.copier.arrival_of_all([slot], 0)
    with pytest.raises(AssertionError, match="nothing would be waited for"):
        case.lanes.wait(Lane.COMPUTE, at(Lane.COPY, 1))


def test_bytes_of_a_cancelled_load_are_reused_after_its_issued_copies() -> None:
    for spans in range(3):
        case = CopierCase(Random(0))
        case.copier.load(case.image(0, 4 * SPAN, layer_groups((4 * SPAN,), ()), NOTHING), lambda: None)
        if spans:
            case.copier.poll()  # issues two spans of four
        if spans == 2:
            case.copier.commit([0], 1)
        until = case.copier.cancel(0)
        assert (until == NOTHING) == (spans == 0)
        case.lanes.wait(Lane.COMPUTE, until)
        start = address(case.memory)
        case.driver.issue(case.lanes.streams[Lane.COMPUTE], Operation("KV", writes=[(start, start + 4 * SPAN)]))
        case.driver.run_all()
        assert case.copier.cancel(0) == NOTHING
        assert case.queue.next() is None


@pytest.mark.parametrize(
    ("ends", "first_layer", "at_once"),
    [((), 0, [True, True]), ((2,), 0, [False, False, True]), ((2,), 2, [False, True, True])],
    ids=["one group", "two groups", "the first layers last"],
)
def test_an_adapter_arrives_at_once_unless_a_layer_is_of_use_before_another(
    ends: tuple[int, ...], first_layer: int, at_once: list[bool]
) -> None:
    case = CopierCase(Random(0))
    groups = layer_groups((2, 4, 6, 8), ends, first_layer)
    case.copier.load(case.image(0, 8, groups, NOTHING), lambda: None)
    case.copier.commit([0], LAYERS)
    found = [case.copier.arrives_at_once(0)]
    for _ in groups:
        arrived = case.lanes.passed()[Lane.COPY]
        while case.lanes.passed()[Lane.COPY] == arrived:
            case.driver.step()
        found.append(case.copier.arrives_at_once(0))
    assert found == at_once


def test_what_is_seen_late_arrived_when_the_links_speed_says() -> None:
    """The launching thread looks at 1 s, and again when it has launched kernels for 9 s. The link is as fast as
    measured, then ten times slower."""
    driver, memory, now_s = HostDriver(finds_races=True), np.zeros(4000, np.uint8), [0.0]
    arrivals, seen = np.zeros(1, np.uint32), list[tuple[int, float]]()
    lanes = Timelines(driver)
    copier = AdapterCopier(driver, lanes, LinkQueue(LINK, 2000), address(arrivals), now=lambda: now_s[0])
    groups = layer_groups((500, 1000, 1500, 2000), (1, 2, 3))
    where = address(memory), address(memory[2000:])
    copier.load(
        CopyRequest(
            1, *where, 2000, groups, NOTHING, arrived=lambda group, at_s: seen.append((group.first_layer, at_s))
        ),
        lambda: None,
    )
    for at_s, arrived in ((0.0, 1), (1.0, 3), (10.0, 4), (11.0, 4)):
        now_s[0] = at_s
        copier.poll()
        while lanes.passed()[Lane.COPY] < arrived:
            driver.step()
    assert seen == [(0, 0.5), (1, 1.0), (2, 1.5), (3, 10.0)]


def test_ready_words_identify_their_load() -> None:
    case = CopierCase(Random(0))
    for _ in range(3):
        case.load()
    while case.open:
        case.copier.poll()
        case.driver.run_all()
    for slot, generation in case.generation.items():
        assert [word(at) for at in case.ready(slot)] == [generation] * LAYERS


def test_bytes_still_being_read_delay_only_their_own_load() -> None:
    case, done = CopierCase(Random(0)), list[int]()
    case.driver.issue(case.lanes.streams[Lane.COMPUTE], Operation("slow", ready=lambda: False))
    reader = at(Lane.COMPUTE, case.lanes.mark(Lane.COMPUTE))
    for slot, after in ((1, reader), (2, NOTHING)):
        case.copier.load(case.image(slot, 4, layer_groups((4,), ()), after), partial(done.append, slot))
    for _ in range(3):
        case.copier.poll()
        while case.driver.step():
            pass
    assert done == [2]


def test_the_link_is_measured_by_large_copies_alone() -> None:
    driver, arrivals = HostDriver(), np.zeros(1, np.uint32)
    driver.link_bytes_per_s = 1e8
    queue = LinkQueue(LINK)
    copier = AdapterCopier(driver, Timelines(driver), queue, address(arrivals))
    source, target = np.zeros(2 << 20, np.uint8), np.zeros(2 << 20, np.uint8)
    copier.time_link(address(target), address(source), 1000)
    assert queue.bytes_per_s == LINK
    copier.time_link(address(target), address(source), len(source))
    assert 0.2e8 < queue.bytes_per_s < 1.05e8


# --- an emulated link ---


@pytest.mark.parametrize("committed", [False, True])
def test_copies_over_an_emulated_link_take_their_time_one_after_another(committed: bool) -> None:
    link, size, done = 2e7, 100_000, list[float]()
    driver, memory, words = HostDriver(), np.zeros(4 * size, np.uint8), np.zeros(2, np.uint32)
    driver.register_host(address(words[1:]), 4)
    pacer, lanes = LinkPacer(link, words[1:], address(words[1:])), Timelines(driver)
    copier = AdapterCopier(driver, lanes, LinkQueue(1e12), address(words))
    copier.emulate_link(pacer)
    started_s = time.monotonic()
    for slot in range(2):
        where = address(memory[slot * size :]), address(memory[(2 + slot) * size :])
        groups = layer_groups((size // 2, size), (1,))
        image = CopyRequest(slot, *where, size, groups, NOTHING)
        copier.load(image, lambda: done.append(time.monotonic() - started_s))
    if committed:
        copier.commit([0, 1], 2)
    while len(done) < 2:
        copier.poll()
    pacer.close()
    assert done[0] >= size / link
    assert done[1] >= 2 * size / link


def test_an_emulated_link_ends_all_waits_when_it_is_closed() -> None:
    word = np.zeros(1, np.uint32)
    pacer = LinkPacer(1.0, word, address(word))
    waits = [pacer.after(1000), pacer.after(1000)]
    assert word[0] == 0
    pacer.close()
    waits.append(pacer.after(1000))
    assert word[0] == waits[-1].value == 3


# --- the padded baseline ---

PLAN = mixed_plan()


def adapter(rank: int) -> AdapterSpec:
    """Returns an adapter of some modules, of which some are fused: their parts share A."""
    modules = {(0, 0): (rank, 2.0), (0, 1): (rank, 2.0), (0, 3): (max(1, rank - 9), 2.0), (1, 0): (rank, 1.0)}
    return AdapterSpec.of(PLAN, Dtype.F16, modules)


@pytest.mark.parametrize("rank", [1, 8, 20, 32])
def test_a_padded_adapter_has_all_rows_with_zeros_past_its_rank(rank: int) -> None:
    spec = adapter(rank)
    wide = padded(spec, PLAN, 32)
    image = np.random.default_rng(rank).integers(1, 255, spec.num_bytes).astype(np.uint8)
    memory = np.full(wide.num_bytes, 0xEE, np.uint8)  # bytes of the previous owner
    driver, arrivals = HostDriver(rank), np.zeros(1, np.uint32)
    copier = AdapterCopier(driver, Timelines(driver), LinkQueue(1e9, 1 << 20), address(arrivals))
    copier.load(
        CopyRequest(
            slot=1,
            source=address(image),
            target=address(memory),
            num_bytes=wide.num_bytes,
            groups=layer_groups(spec.layer_ends, (1,)),
            after=NOTHING,
            rows=lambda group: copies(spec, wide, PLAN, range(group.first_layer, group.end_layer)),
        ),
        lambda: None,
    )
    copier.poll()
    driver.run_all()
    for narrow, span in zip(spec.spans, wide.spans, strict=True):
        site = PLAN.layers[span.layer].sites[span.site]
        columns, panels = align_up(site.inputs, A_COLUMNS), align_up(site.outputs, PANEL) // PANEL
        assert (span.rank, span.scale) == (32, narrow.scale)
        for offset, offset_before, shape in (
            (span.a_offset, narrow.a_offset, (1, -1, columns)),
            (span.b_offset, narrow.b_offset, (panels, -1, PANEL)),
        ):
            rows, rows_before = 32, narrow.padded_rank
            size = shape[0] * shape[2] * 2
            now = memory[offset : offset + size * rows].view(np.uint16).reshape(shape)
            before = image[offset_before : offset_before + size * rows_before].view(np.uint16).reshape(shape)
            assert np.array_equal(now[:, :rows_before], before)
            assert not now[:, rows_before:].any()


def test_padded_adapters_of_all_ranks_take_equal_bytes_and_larger_ranks_are_rejected() -> None:
    assert len({padded(adapter(rank), PLAN, 32).num_bytes for rank in (1, 8, 32)}) == 1
    with pytest.raises(AdapterRejected, match="exceeds the 32 rows"):
        padded(adapter(33), PLAN, 32)
