"""Log lines about long work at the start."""

import logging

import pytest

from caraserve.telemetry.progress import progress


def test_a_line_says_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        with progress("weights", 2) as advance:
            advance()
        with progress("measuring this machine", 2, done="machine measured") as advance:
            advance()
    assert [message.rpartition(" in ")[0] for message in caplog.messages] == ["weights loaded", "machine measured"]


def test_no_line_is_logged_where_there_was_nothing_to_do(caplog: pytest.LogCaptureFixture) -> None:
    """As where a profile of an earlier start is read."""
    with caplog.at_level(logging.INFO), progress("adapters", 0):
        pass
    assert caplog.messages == []
