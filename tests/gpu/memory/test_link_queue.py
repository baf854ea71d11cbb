"""The link queue: layer groups, order of spans, predicted arrivals."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraserve.gpu.memory.link_queue import (
    LayerGroup,
    LinkQueue,
    LoraSource,
    Span,
    choose_source,
    groups_until,
    layer_groups,
)

MB = 1 << 20
SPAN = 8  # bytes; at most two spans are issued ahead
LINK = 1000.0  # bytes/s


def ends(*sizes: int) -> tuple[int, ...]:
    return tuple(int(end) for end in np.cumsum(sizes))


# --- groups ---


def test_invalid_ends_of_groups_are_ignored() -> None:
    assert layer_groups(ends(5, 7, 1), (0, 2, 2, 9)) == (LayerGroup(0, 2, 0, 12), LayerGroup(2, 3, 12, 13))
    assert layer_groups(ends(5, 7), ()) == (LayerGroup(0, 2, 0, 12),)


def test_groups_before_the_first_layer_come_last() -> None:
    groups = layer_groups(ends(5, 7, 1), (1, 2), 1)
    assert groups == (LayerGroup(1, 2, 5, 12), LayerGroup(2, 3, 12, 13), LayerGroup(0, 1, 0, 5))
    assert [groups_until(groups, layers) for layers in range(4)] == [0, 3, 3, 3]
    assert [groups_until(groups[2:] + groups[:2], layers) for layers in range(4)] == [0, 1, 2, 3]


# --- the queue ---


def queue() -> LinkQueue:
    return LinkQueue(LINK, SPAN)


def ask(made: LinkQueue, slot: int, *sizes: int) -> None:
    """Queues a load in groups of one layer each."""
    made.ask(slot, layer_groups(ends(*sizes), range(1, len(sizes))))


def drain(made: LinkQueue) -> list[Span]:
    """Returns all spans, with each arriving as soon as it is issued."""
    spans = []
    while (span := made.next()) is not None:
        spans.append(span)
        made.arrived(span.end - span.start)
    return spans


def test_loads_are_issued_in_order_layer_by_layer() -> None:
    made = queue()
    ask(made, 2, 4, 4, 4)
    ask(made, 1, 4, 4)
    assert [(span.slot, span.group) for span in drain(made)] == [(2, 0), (2, 1), (2, 2), (1, 0), (1, 1)]


def test_little_is_issued_ahead_of_what_has_arrived() -> None:
    made = queue()
    ask(made, 1, 10 * SPAN)
    assert made.next() is not None
    assert made.next() is not None
    assert made.next() is None
    made.arrived(SPAN)
    assert made.next() is not None
    assert made.next() is None


def test_a_copy_takes_no_longer_than_the_link_where_arrivals_are_seen_late() -> None:
    """The launching thread looks every 1 ms, and waits for the interpreter now and then."""
    link, size = 55e9, 320 * MB
    made = LinkQueue(link)
    made.ask(1, layer_groups(ends(size), ()))
    now_s, free_s = 0.0, 0.0
    flying: list[tuple[float, int]] = []
    for look in range(1000):
        while flying and flying[0][0] <= now_s:
            made.arrived(flying.pop(0)[1])
        while (span := made.next()) is not None:
            free_s = max(now_s, free_s) + (span.end - span.start) / link
            flying.append((free_s, span.end - span.start))
        now_s += 0.0025 if look % 2 else 0.001
    assert free_s == pytest.approx(size / link)


@pytest.mark.parametrize("link", [1e8, 12e9, 55e9])
def test_an_urgent_copy_waits_for_no_more_than_a_few_milliseconds_of_others(link: float) -> None:
    made = LinkQueue(link)
    made.ask(1, layer_groups(ends(10**9), ()))
    while made.next() is not None:
        pass
    assert made.arrival_of_issued(0.0) < 0.0055


def test_answers_of_cpu_workers_delay_predictions_and_hold_no_load_back() -> None:
    made = queue()
    ask(made, 1, SPAN, SPAN)
    assert made.next() is not None
    alone_s = made.arrivals(1, 0.0)[1]
    made.await_answers(1000 * SPAN)
    assert made.arrival_of_issued(0.0) == pytest.approx(1001 * SPAN / LINK)
    assert made.arrivals(1, 0.0) == pytest.approx({1: 1002 * SPAN / LINK})
    made.answered(1000 * SPAN)
    assert made.arrivals(1, 0.0) == {1: alone_s}
    made.await_answers(1000 * SPAN)
    assert made.next() is not None


def test_an_emulated_link_delays_loads_and_no_answers() -> None:
    made = queue()
    ask(made, 1, SPAN, SPAN)
    made.emulated_bytes_per_s = LINK / 10
    made.await_answers(100)
    assert made.arrivals(1, 0.0) == pytest.approx({0: 100 / LINK + 10 * SPAN / LINK, 1: 100 / LINK + 20 * SPAN / LINK})


def test_committed_layers_are_issued_at_once_before_all_others() -> None:
    made = queue()
    for slot in (1, 2):
        ask(made, slot, *[SPAN] * 4)
    made.commit(2, 3)
    assert [(span.slot, span.group) for span in (made.next(), made.next(), made.next()) if span] == [
        (2, 0),
        (2, 1),
        (2, 2),
    ]
    assert made.next() is None
    made.cancel(2)  # drops the rest of it
    made.commit(1, 1)
    with pytest.raises(AssertionError, match="an iteration waits"):
        made.cancel(1)


def test_a_load_whose_memory_is_in_use_does_not_delay_others() -> None:
    made = queue()
    for slot in (1, 2):
        ask(made, slot, 4)
    span = made.next(blocked={1})
    assert span is not None
    assert span.slot == 2
    span = made.next(blocked={1})  # no other load is left
    assert span is not None
    assert span.slot == 1


def test_a_slot_has_one_load_and_only_issued_bytes_arrive() -> None:
    made = queue()
    ask(made, 1, 4)
    with pytest.raises(AssertionError, match="already"):
        ask(made, 1, 4)
    with pytest.raises(AssertionError, match="more has arrived"):
        made.arrived(1)


loads = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=5), max_size=5)


@given(loads)
def test_predicted_arrivals_are_those_that_happen(asked: list[list[int]]) -> None:
    made = queue()
    for slot, sizes in enumerate(asked):
        ask(made, slot, *sizes)
    expected = {(slot, group): at for slot in range(len(asked)) for group, at in made.arrivals(slot, 100.0).items()}
    sent, seen = 0, {}
    for span in drain(made):
        sent += span.end - span.start
        if span.group is not None:
            seen[span.slot, span.group] = 100.0 + sent / LINK
    assert seen == pytest.approx(expected)
    assert sent == sum(map(sum, asked))


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5), data=st.data())
def test_a_load_from_a_later_layer_on_issues_every_byte_once(sizes: list[int], data: st.DataObject) -> None:
    made, first = queue(), data.draw(st.integers(0, len(sizes) - 1))
    made.ask(1, layer_groups(ends(*sizes), range(1, len(sizes)), first))
    expected = made.arrivals(1, 100.0)
    spans = drain(made)
    issued = [byte for span in spans for byte in range(span.start, span.end)]
    start = sum(sizes[:first])
    assert issued == [*range(start, sum(sizes)), *range(start)]
    sent = np.cumsum([span.end - span.start for span in spans])
    seen = {span.group: 100.0 + at / LINK for span, at in zip(spans, sent, strict=True) if span.group is not None}
    assert seen == pytest.approx(expected)


@given(loads, st.integers(0, 2**32))
def test_every_byte_is_issued_once_and_in_order(asked: list[list[int]], seed: int) -> None:
    random, made, flying, sent = Random(seed), queue(), [0], dict.fromkeys(range(len(asked)), 0)
    left = dict(enumerate(asked))
    while left or flying:
        if left and random.random() < 0.5:
            slot, sizes = left.popitem()
            ask(made, slot, *sizes)
        if (span := made.next()) is not None:
            assert span.start == sent[span.slot]
            assert span.end - span.start <= SPAN
            assert made.in_flight <= 3 * SPAN
            sent[span.slot] = span.end
            flying.append(span.end - span.start)
        elif flying:
            made.arrived(flying.pop(0))
    assert made.next() is None
    assert list(sent.values()) == [sum(sizes) for sizes in asked]


def test_choose_source_returns_device_wait_or_workers() -> None:
    def answer(arrives_s: float, stall_s: float | None, *, arrived: bool = False) -> LoraSource:
        return choose_source(arrived=arrived, arrives_s=arrives_s, use_s=1.0, stall_s=stall_s)

    assert answer(9.0, 0.1, arrived=True) is LoraSource.DEVICE
    assert answer(1.1, 0.2) is LoraSource.WAIT
    assert answer(1.3, 0.2) is LoraSource.WORKERS
    assert answer(1.3, None) is LoraSource.WAIT
