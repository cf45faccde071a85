"""The longest waits of publishers and consumers in written histories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bide.check.history import DeliveredRow, Row, SentRow
from bide.check.judgement import LongestWaits, judge
from tests.check_histories import DELIVERED, FAULT, SECOND, SENT, write_history

AT = FAULT.began // SECOND
"""The second in which the fault of :data:`FAULT` begins."""


def publish(name: str, begins: float, ends: float, outcome: str = "confirmed", place: str = "q") -> SentRow:
    """A publish without a delivery."""
    row = replace(SENT, id=name, place=place, outcome=outcome, expected="unknown")
    return replace(row, sent_at=round(begins * SECOND), ended_at=round(ends * SECOND))


def delivery(name: str, due: float, received: float, role: str = "message") -> tuple[SentRow, DeliveredRow]:
    """A message and its delivery."""
    return (
        replace(SENT, id=name, role=role, due=round(due * SECOND), ended_at=None),
        replace(DELIVERED, id=name, received_at=round(received * SECOND)),
    )


def waits(folder: Path, *rows: Row) -> dict[str, tuple[float, float, float]]:
    """Seconds without a confirm, of a publish, and without a delivery; the key "" is for times without a fault."""
    return {
        one.during: (one.unconfirmed / SECOND, one.slowest / SECOND, one.undelivered / SECOND)
        for one in judge(write_history(folder, *rows)).waits
    }


CASES: dict[str, tuple[list[Row], tuple[float, float, float]]] = {
    "confirmed at once": ([publish("a", 1, 1.05), publish("b", 9, 9.05)], (0, 0, 0)),
    "nothing is published for a while": ([publish("a", 1, 1.05), publish("b", 9, 9.5)], (0.5, 0.5, 0)),
    "a later publish was confirmed meanwhile": (
        [publish("a", 1, 9), publish("b", 4, 5), publish("c", 5, 7)],
        (4, 8, 0),
    ),
    "another queue confirms": ([publish("a", 1, 5), publish("b", 2, 2.05, place="r")], (4, 4, 0)),
    "nothing is confirmed any more": (
        [publish("a", 11, 11.5), publish("b", 11, 41, outcome="PublishInDoubtError")],
        (29.5, 30, 0),
    ),
    "an error is not a confirm": (
        [publish("a", 1, 4, outcome="PublishRefusedError"), publish("b", 2, 7)],
        (5, 5, 0),
    ),
    "delivered on time": ([*delivery("a", 2, 2.01), *delivery("b", 8, 8.01)], (0, 0, 0)),
    "late, and nothing else came": ([*delivery("a", 2, 2.01), *delivery("b", 3, 7)], (0, 0, 4)),
    "late, while other messages came": (
        [*delivery("a", 2, 7), *delivery("b", 4, 4.05), *delivery("c", 5, 5.05)],
        (0, 0, 2.05),
    ),
    "late, because the queue is full": ([*delivery("a", 2, 9, role="blocked")], (0, 0, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wait_lasts_until_something_comes_while_something_is_expected(case: str, tmp_path: Path) -> None:
    rows, expected = CASES[case]
    assert waits(tmp_path, *rows) == {"": expected}


def test_a_wait_counts_for_each_kind_of_fault_that_it_overlaps(tmp_path: Path) -> None:
    pause = replace(FAULT, number=2, kind="pause", began=FAULT.ended + 4 * SECOND, ended=FAULT.ended + 5 * SECOND)
    ends = FAULT.ended / SECOND
    rows = [publish("a", AT - 2, AT + 1), publish("b", ends - 1, ends + 4.5), publish("c", ends + 6, ends + 7)]
    assert waits(tmp_path, *rows, FAULT, pause) == {"": (1, 1, 0), "kill": (5.5, 5.5, 0), "pause": (5.5, 5.5, 0)}


def test_a_fault_without_waits_has_no_figures(tmp_path: Path) -> None:
    assert waits(tmp_path, FAULT) == {"": (0, 0, 0), "kill": (0, 0, 0)}


def test_histories_without_the_end_of_a_publish_are_judged(tmp_path: Path) -> None:
    folder = write_history(tmp_path, *delivery("a", 2, 7))
    for path in folder.rglob("sent-*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns(["ended_at"]), path)
    verdict = judge(folder)
    assert verdict.violations == 0
    assert verdict.waits == (LongestWaits(during="", unconfirmed=0, slowest=0, undelivered=5 * SECOND),)
