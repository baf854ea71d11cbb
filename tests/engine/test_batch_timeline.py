"""The last minute of batches, by adapter."""

from dataclasses import dataclass
from typing import Any

from caraserve.core.batch import ScheduledRow
from caraserve.engine.batch_timeline import INTERVAL_S, INTERVALS, BatchTimeline, TimelineRow, position

NOW_S = 1000.0
LAST = INTERVALS - 1


@dataclass
class Inputs:
    adapter: str | None


@dataclass
class Request:
    inputs: Inputs
    prompt_tokens: int = 10


@dataclass
class Active:
    request: Request


def row(adapter: str | None, start: int, count: int) -> Any:
    return Active(Request(Inputs(adapter))), ScheduledRow(0, start, count, 1, samples=False)


def everyone(name: str | None) -> bool:
    return True


def test_prompts_count_as_prefill_and_later_tokens_as_decode() -> None:
    timeline = BatchTimeline()
    timeline.record([row("a", 0, 8), row(None, 12, 1)], NOW_S)
    timeline.record([row("a", 8, 2), row(None, 13, 1)], NOW_S + 0.1)
    rows, others = timeline.rows(NOW_S + 0.2, 5, everyone)
    assert rows == [TimelineRow("a", ((LAST, 10, 0),)), TimelineRow(None, ((LAST, 0, 2),))]
    assert others.cells == ()


def test_tokens_move_to_the_past_and_are_dropped_after_a_minute() -> None:
    timeline = BatchTimeline()
    timeline.record([row("a", 10, 1)], NOW_S)
    timeline.record([row("a", 11, 1)], NOW_S + INTERVAL_S)
    assert timeline.rows(NOW_S + INTERVAL_S, 5, everyone)[0][0].cells == ((LAST - 1, 0, 1), (LAST, 0, 1))
    assert timeline.rows(NOW_S + LAST * INTERVAL_S, 5, everyone)[0][0].cells == ((0, 0, 1), (1, 0, 1))
    assert timeline.rows(NOW_S + INTERVALS * INTERVAL_S, 5, everyone)[0][0].cells == ((0, 0, 1),)
    assert timeline.rows(NOW_S + 1000, 5, everyone)[0] == []


def test_the_busiest_adapters_are_shown_and_the_others_counted_together() -> None:
    timeline = BatchTimeline()
    timeline.record([row("a", 10, 1), row("b", 0, 5), row("c", 0, 9), row("d", 10, 1)], NOW_S)
    rows, others = timeline.rows(NOW_S, 2, lambda name: name != "b")
    assert [one.adapter for one in rows] == ["c", "a"]
    assert others.cells == ((LAST, 5, 1),)


def test_names_in_an_interval_are_bounded_and_no_token_is_lost() -> None:
    timeline = BatchTimeline()
    timeline.record([row(f"adapter-{number}", 0, 2) for number in range(5000)], NOW_S)
    rows, others = timeline.rows(NOW_S, 20, everyone)
    assert len(rows) == 20
    assert others.cells == ((LAST, 2 * 4980, 0),)
    assert len(timeline.rows(NOW_S, 5000, everyone)[0]) <= 64


def test_a_batch_that_ended_after_the_question_counts_as_the_present() -> None:
    timeline = BatchTimeline()
    timeline.record([row("a", 0, 1)], NOW_S + INTERVAL_S)
    assert timeline.rows(NOW_S, 5, everyone)[0][0].cells == ((LAST, 1, 0),)


def test_a_load_lies_on_the_same_axis() -> None:
    assert position(NOW_S, NOW_S) == LAST
    assert position(NOW_S - 60.0, NOW_S) == -1
