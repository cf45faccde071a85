"""The histogram of due times, and progress on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bide
from bide.cli.pipeline import view
from bide.cli.pipeline.replay_view import InterruptedReplay
from bide.cli.pipeline.view import histogram, progress, span_for, summary_lines
from bide.pipelines.schedule.plan import SchedulePlan
from bide.pipelines.schedule.progress import Survey
from bide.spark.sink_settings import SinkSettings
from tests.timeouts import TIMEOUT

START = datetime(2026, 11, 21, tzinfo=UTC)


@given(st.timedeltas(timedelta(0), timedelta(days=3199)))
def test_a_histogram_has_at_most_32_spans(length: timedelta) -> None:
    span = span_for(START, START + length)
    assert length / span <= 32
    assert span_for(None, None) > timedelta(0)


def test_a_histogram_abbreviates_empty_spans() -> None:
    hour = timedelta(hours=1)
    times = [(START, 10), (START + 2 * hour, 40), (START + 6 * hour, 1)]
    assert histogram(times, hour) == [
        f"2026-11-21 00:00  {'10':>11}  {'█' * 10}",
        f"2026-11-21 01:00  {'0':>11}",
        f"2026-11-21 02:00  {'40':>11}  {'█' * 40}",
        "                  (3 spans with none)",
        f"2026-11-21 06:00  {'1':>11}  █",
    ]
    assert histogram([], hour) == []


def test_a_histogram_can_end_in_the_year_9999() -> None:
    year = timedelta(days=365)
    spans = (datetime.max.replace(tzinfo=UTC) - START) // year
    lines = histogram([(START, 1), (START + spans * year, 2)], year)
    assert lines == [
        f"2026-11-21  {'1':>11}  {'█' * 20}",
        f"            ({spans - 1} spans with none)",
        f"{START + spans * year:%Y-%m-%d}  {'2':>11}  {'█' * 40}",
    ]


@pytest.mark.parametrize(
    ("every", "text"),
    [
        (timedelta(seconds=5), "2026-11-21 00:00:00"),
        (timedelta(minutes=30), "2026-11-21 00:00"),
        (timedelta(days=7), "2026-11-21"),
    ],
)
def test_times_have_the_precision_of_the_spans(every: timedelta, text: str) -> None:
    (line,) = histogram([(START, 1)], every)
    assert line.split("  ")[0] == text


@pytest.mark.parametrize(
    ("already_due", "overdue", "line"),
    [
        (1, 0, "due already: 1 message"),
        (1, 1, "due already: 1 message, 1 for more than 5 min"),
        (2_000, 1_500, "due already: 2,000 messages, 1,500 for more than 5 min"),
    ],
)
def test_messages_that_are_due_already_are_counted(already_due: int, overdue: int, line: str) -> None:
    settings = SinkSettings.make("amqp://localhost/", infrastructure=bide.Clock(), constants={"to": "mails"})
    plan = SchedulePlan(at_column="due", settings=settings)
    found = Survey(
        rows=2_000,
        checksum=0,
        without_time=0,
        without_body=0,
        too_late=0,
        bad_headers=0,
        already_due=already_due,
        overdue=overdue,
        first=START,
        last=START,
    )
    assert summary_lines(found, plan, [])[-1] == line


class Terminal:
    """A terminal, read at its other end."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._bytes = b""

    def read(self, seconds: float = 0) -> str:
        """What has come so far, without colours and movements; waits so long for more."""
        while select.select([self._end], [], [], seconds)[0]:
            self._bytes += os.read(self._end, 65536)
            seconds = 0
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._bytes.decode(errors="replace"))

    def shows(self, text: str) -> bool:
        """Whether it shows a text within some seconds."""
        deadline = time.monotonic() + TIMEOUT
        while text not in self.read(0.1):
            if time.monotonic() > deadline:
                return False
        return True


@contextmanager
def at_terminal() -> Iterator[Terminal]:
    """One that standard error goes to. No fixture: pytest takes standard error back before the test begins."""
    near, far = pty.openpty()
    with os.fdopen(far, "w") as stderr, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        patch.setattr(view, "_UPDATE_INTERVAL", 0.05)
        for name, value in (("TERM", "xterm"), ("COLUMNS", "100")):
            patch.setenv(name, value)
        yield Terminal(near)
    os.close(near)


def test_a_progress_bar_continues_after_a_failed_count() -> None:
    """A ledger in a store may not be readable for a moment."""
    number, busy, failed = 0, threading.Event(), threading.Event()

    def done() -> int:
        if busy.is_set():
            failed.set()
            raise OSError("the store is busy")
        return number

    with at_terminal() as terminal:
        with progress("scheduling", total=7, done=done):
            for number in (0, 2):
                assert terminal.shows(f"{number}/7"), terminal.read()[-200:]
            busy.set()
            assert failed.wait(TIMEOUT)
            number = 5
            busy.clear()
            assert terminal.shows("5/7"), terminal.read()[-200:]
        assert "scheduling" in terminal.read()
        assert "busy" not in terminal.read()


def test_progress_of_unknown_length_shows_the_count() -> None:
    with at_terminal() as terminal:
        with progress("looking through the rows"):
            assert terminal.shows("looking through the rows"), terminal.read()[-200:]
        with progress("auditing", done=lambda: 3):
            assert terminal.shows("3/?"), terminal.read()[-200:]


def test_an_error_during_progress_is_raised_unchanged() -> None:
    with at_terminal() as terminal:
        with pytest.raises(ValueError, match="no such part"), progress("scheduling", total=7, done=lambda: 1):
            raise ValueError("no such part")
        with progress("scheduling", total=8, done=lambda: 1):
            assert terminal.shows("1/8"), "and the terminal is free for another"


def test_no_progress_is_shown_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("scheduling", total=7, done=lambda: 1):
        pass
    with progress("looking through the rows"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_continued_replay_chooses_kept_messages_and_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    """Kept messages are in front of the rest, so they count towards the limit, and have due times."""
    stopped = InterruptedReplay(source="error", sent=30, left=60, kept=10)
    given = ["pipeline", "replay", "--limit", "100", "--over", "200s"]
    stopped.show(given, over=timedelta(seconds=200), as_json=False)
    assert capsys.readouterr().err.endswith("bide: go on with: bide pipeline replay --limit 70 --over 140s\n")
