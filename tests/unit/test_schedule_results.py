"""Schedules as clients see them, and the methods of the two clients."""

from __future__ import annotations

import inspect
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bide.cli.schedule_view import write_filter_result
from bide.client.schedule_methods import ScheduleMethods
from bide.client.schedule_methods_sync import SyncScheduleMethods
from bide.client.schedule_result import FilterResult, ScheduleOutcome, ScheduleView
from bide.errors import InvalidInputError
from bide.schedules.entries import ANSWER_OUTCOMES, ScheduleAnswer, UnderWay, WaitingSchedule
from bide.schedules.message import ScheduledMessage
from bide.schedules.recurrence import Recurrence

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
MESSAGE = ScheduledMessage.of({"headers": {"mine": 1, "bide-sent": 2}, "type": "t"}, b"body")


def waiting(
    recurrence: Recurrence | None = None, *, target: str = "q:mail", is_paused: bool = False
) -> WaitingSchedule:
    nominal = int(NOON.timestamp()) * 1000
    return WaitingSchedule(
        key="k",
        id="a-1",
        version="a-2",
        target=target,
        routing_key="r",
        nominal=nominal,
        due=nominal if recurrence is None else recurrence.due("a-1", nominal),
        recurrence=None if recurrence is None else recurrence.spec(),
        is_paused=is_paused,
        message=MESSAGE,
    )


def view(entry: WaitingSchedule | UnderWay, *, with_message: bool = True) -> ScheduleView:
    return ScheduleView.of(entry, (), with_message=with_message)


def test_a_view_has_the_target_and_the_senders_headers() -> None:
    found = view(waiting())
    assert (found.to, found.exchange, found.state, found.due_time) == ("mail", None, "waiting", NOON)
    assert (found.headers, found.body, found.properties["type"]) == ({"mine": 1}, b"body", "t")
    assert view(waiting(target="x:a:b")).exchange == "a:b"
    assert view(waiting(is_paused=True)).state == "paused"
    listed = view(waiting(), with_message=False)
    assert (listed.body, listed.headers) == (None, {})


def test_a_due_time_beyond_the_year_9999_is_shown_as_the_last_one() -> None:
    entry = UnderWay(
        occurrence="a-1",
        key="k",
        id="a-1",
        target="q:mail",
        routing_key="",
        nominal=2**62,
        due=2**62,
        is_recurring=False,
        message=MESSAGE,
    )
    found = view(entry)
    assert (found.state, found.version, found.due_time.year) == ("under-way", None, 9999)


@pytest.mark.parametrize("jitter", ["0s", "30s", "20m"])
def test_the_next_runs_are_those_of_the_rule(jitter: str) -> None:
    recurrence = Recurrence.of("15m", now=NOON - timedelta(hours=1), first_run=NOON, jitter=jitter)
    found = view(waiting(recurrence))
    runs = found.next_runs(4)
    start = int(NOON.timestamp()) * 1000
    due = [recurrence.due("a-1", start + number * 900_000) for number in range(4)]
    assert [round(one.timestamp() * 1000) for one in runs] == due
    assert found.next_runs(0) == []
    assert (found.every, found.time_zone) == ("15m", None)


@pytest.mark.parametrize("count", [-1, 2.5, "2", None])
def test_a_number_of_runs_that_is_none_is_refused(count: Any) -> None:
    for entry in (waiting(), waiting(Recurrence.of("15m", now=NOON))):
        with pytest.raises(InvalidInputError, match="the number of runs"):
            view(entry).next_runs(count)


def test_a_rule_that_ends_has_no_more_runs() -> None:
    recurrence = Recurrence.of(
        "0 12 * * *", now=NOON - timedelta(hours=1), time_zone="UTC", last_run=NOON + timedelta(days=1)
    )
    assert view(waiting(recurrence)).next_runs() == [NOON, NOON + timedelta(days=1)]


def test_every_answer_of_a_gate_is_an_outcome() -> None:
    assert {one.value for one in ScheduleOutcome} == set(ANSWER_OUTCOMES)


def test_the_result_of_a_filter_adds_up_the_partitions() -> None:
    answers = {
        0: ScheduleAnswer(outcome="cancelled", count=2, keys=("b", "d")),
        1: ScheduleAnswer(outcome="cancelled", count=1, keys=("c",)),
    }
    assert FilterResult.of(answers) == FilterResult(
        outcome=ScheduleOutcome.CANCELLED, count=3, keys=("b", "c", "d"), partitions={0: 2, 1: 1}
    )


def test_the_result_of_a_filter_names_partitions_whose_changes_are_not_known() -> None:
    answers = {
        0: ScheduleAnswer(outcome="forgotten"),
        1: ScheduleAnswer(outcome="cancelled", count=1, keys=("c",)),
        2: ScheduleAnswer(outcome="forgotten"),
    }
    assert FilterResult.of(answers) == FilterResult(
        outcome=ScheduleOutcome.CANCELLED, count=1, keys=("c",), partitions={1: 1}, forgotten=(0, 2)
    )
    assert FilterResult.of({0: answers[0]}).outcome is ScheduleOutcome.FORGOTTEN


def test_the_command_line_counts_partitions_whose_changes_are_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    answers = {
        0: ScheduleAnswer(outcome="forgotten"),
        1: ScheduleAnswer(outcome="cancelled", count=1, keys=("c",)),
    }
    write_filter_result(FilterResult.of(answers), as_json=False)
    output, errors = capsys.readouterr()
    assert output == "cancelled 1\n"
    assert "1 partition applied the change more than an hour ago, and no longer knows how many schedules it" in errors
    write_filter_result(FilterResult.of({**answers, 2: answers[0]}), as_json=False)
    assert "2 partitions applied the change more than an hour ago, and no longer know" in capsys.readouterr().err


def test_the_synchronous_methods_have_the_parameters_of_the_others() -> None:
    names = {name for name in vars(ScheduleMethods) if not name.startswith("_")}
    assert names <= set(vars(SyncScheduleMethods))
    for name in names:
        own, twin = (inspect.signature(getattr(one, name)) for one in (ScheduleMethods, SyncScheduleMethods))
        assert own.parameters == twin.parameters, name
