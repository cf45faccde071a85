"""Overdue rows, which are never sent without a choice of the user."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from bide.errors import InvalidInputError, InvalidOptionError
from bide.pipelines.ledger import Ledger, LedgerPart
from bide.pipelines.schedule.plan import SchedulePlan
from bide.pipelines.schedule.progress import head_for
from bide.pipelines.schedule.run import survey
from bide.spark.options import Options
from bide.spark.sink import TableWriter, TaskCommitMessage
from bide.spark.sink_settings import SinkSettings
from tests.broker.conftest import SMALL_CLOCK, clock_url
from tests.spark.receiving import drain, new_queue, rest
from tests.spark.test_schedule import plan_for, schedule
from tests.spark.test_sink import writer

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

__all__ = ["clock_url"]


@pytest.fixture
def queue(clock_url: str) -> str:
    return new_queue(clock_url)


@pytest.fixture
def source(spark: SparkSession, tmp_path: Path) -> Path:
    """Forty reminders, ten of which have seconds since 1970 where milliseconds are due, and ten are due just now."""
    seconds = int(datetime.now(UTC).timestamp())
    path = tmp_path / "reminders.parquet"
    spark.range(0, 40, 1, 2).selectExpr(
        "concat('o-', id) as order_id",
        f"case when id < 10 then timestamp_millis({seconds}) when id < 20 then timestamp_seconds({seconds} - 30)"
        f" else timestamp_seconds({seconds} + 4) end as due",
    ).write.parquet(str(path))
    return path


def ids(url: str, queue: str, number: int) -> list[int]:
    """The order numbers of exactly ``number`` messages."""
    found = sorted(int(json.loads(one.body)["order_id"][2:]) for one in drain(url, queue, number))
    assert rest(url, queue) == []
    return found


def test_overdue_rows_are_refused_by_default(
    source: Path, clock_url: str, queue: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = tmp_path / "ledger"
    where = (source, "--url", clock_url, "--to", queue, "--at-column", "due", "--ledger", ledger)
    for more in (("--dry-run",), ()):
        assert schedule(*where, *more) == 2
        captured = capsys.readouterr()
        first, due, already, *_ = captured.out.splitlines()
        assert first.startswith(f"40 messages to the queue {queue} on ")
        assert due.startswith("due from 1970-01-")
        assert re.fullmatch(r"due already: \d\d messages, 10 for more than 5 min", already)
        assert captured.err.startswith(
            "bide: 10 of 40 rows were due more than 5 min before this write began, the first at"
        )
        assert "usually seconds that were read as milliseconds" in captured.err
        assert "by --past: send (immediately), drop, or reject (with --rejects)" in captured.err
        assert captured.err.count("\n") == 1
    assert not list(ledger.glob("part-*"))
    assert rest(clock_url, queue) == []


@pytest.mark.parametrize("past", ["send", "drop", "reject"])
def test_overdue_rows_are_sent_dropped_or_rejected_and_counted(
    spark: SparkSession,
    source: Path,
    clock_url: str,
    queue: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    past: str,
) -> None:
    rejects = ("--rejects", tmp_path / "rejects") if past == "reject" else ()
    where = (source, "--url", clock_url, "--to", queue, "--at-column", "due", "--ledger", tmp_path / "ledger")
    assert schedule(*where, "--past", past, *rejects, "--json") == 0
    captured = capsys.readouterr()
    assert f" messages, 10 for more than 5 min (--past {past})" in captured.err
    done = json.loads(captured.out)
    expected = {"send": (40, 0, 0), "drop": (30, 0, 10), "reject": (30, 10, 0)}[past]
    assert (done["sent"], done["rejected"], done["dropped"]) == expected
    assert done["past"] >= 20
    assert done["overdue"] == 10
    assert ids(clock_url, queue, expected[0]) == list(range(40 - expected[0], 40))
    if rejects:
        found = spark.read.parquet(str(rejects[1])).collect()
        assert {row["reject_status"] for row in found} == {"past"}
        assert len(found) == 10
    assert schedule(*where, "--past", past, *rejects) == 0
    again = capsys.readouterr().out
    assert "scheduled 0 messages" in again
    assert "40 rows were finished by an earlier run" in again
    other = "send" if past == "drop" else "drop"
    assert schedule(*where, "--past", other, *rejects) == 2
    assert f"was begun with {past!r} for --past: repeat that to continue" in capsys.readouterr().err


def test_rows_that_became_due_do_not_stop_a_continued_run(
    spark: SparkSession, clock_url: str, queue: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = datetime.now(UTC) - timedelta(hours=2)
    path, folder = tmp_path / "reminders.parquet", tmp_path / "ledger"
    rows = spark.range(0, 10, 1, 1).selectExpr(
        "concat('o-', id) as order_id", "current_timestamp() - interval '1' hour as due"
    )
    rows.write.parquet(str(path))
    constants = {"to": queue, "content_type": "application/json"}
    settings = SinkSettings.make(clock_url, infrastructure=SMALL_CLOCK, constants=constants)
    plan, ledger = SchedulePlan(at_column="due", settings=settings), Ledger(str(folder))
    found = survey(spark.read.parquet(str(path)), plan, now=begun)
    assert (found.already_due, found.overdue) == (0, 0)
    ledger.begin(head_for(ledger, plan, found), begun)
    assert ledger.begun_at() == begun

    where = (path, "--url", clock_url, "--to", queue, "--at-column", "due")
    assert schedule(*where, "--ledger", tmp_path / "another") == 2
    assert "10 of 10 rows were due more than 5 min before" in capsys.readouterr().err
    assert schedule(*where, "--ledger", folder, "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["sent"], done["past"], done["overdue"]) == (10, 10, 0)
    assert ids(clock_url, queue, 10) == list(range(10))


def test_a_ledger_without_counts_of_overdue_rows_can_be_read(tmp_path: Path) -> None:
    """Ledgers of version 1 record neither the choice for overdue rows nor the number of dropped ones."""
    plan, ledger = plan_for("amqp://localhost:1", "orders"), Ledger(str(tmp_path))
    old = {"version": 1, "begun": "2026-11-21T10:00:00+00:00", "plan": plan.ledger_digest(), "broker": plan.broker,
           "rows": 1, "checksum": 0, "parts": 1}  # fmt: skip
    (tmp_path / "ledger.json").write_text(json.dumps(old))
    (tmp_path / "part-00000.json").write_text(json.dumps({"part": 0, "sent": 1, "rejected": 0}))
    assert ledger.begun_at() == datetime(2026, 11, 21, 10, tzinfo=UTC)
    assert ledger.parts() == [LedgerPart(part=0, sent=1, rejected=0)]
    head = ledger.head()
    assert head is not None
    assert head.past == "send"


def frame_of(spark: SparkSession) -> DataFrame:
    """Twelve rows, a quarter of which are overdue."""
    due = "if(id % 4 = 1, timestamp'2026-01-01', current_timestamp() - interval '1' minute) as deliver_at"
    return spark.range(0, 12, 1, 2).selectExpr("cast(id as string) as value", due)


def test_the_sink_refuses_overdue_rows_by_default(spark: SparkSession, clock_url: str, queue: str) -> None:
    with pytest.raises(PySparkException, match=r"rows of this partition were due more than 5 min before") as caught:
        writer(frame_of(spark), clock_url, queue=queue).save()
    assert "Set the option past to send, drop, or reject" in str(caught.value)
    assert rest(clock_url, queue) == []


@pytest.mark.parametrize("past", ["send", "drop", "reject"])
def test_the_sink_sends_drops_or_rejects_overdue_rows(
    spark: SparkSession, clock_url: str, queue: str, tmp_path: Path, past: str
) -> None:
    options: dict[str, Any] = {"rejects": str(tmp_path / "rejects")} if past == "reject" else {}
    writer(frame_of(spark), clock_url, queue=queue, past=past, **options).save()
    expected = [number for number in range(12) if past == "send" or number % 4 != 1]
    found = sorted(int(one.body) for one in drain(clock_url, queue, len(expected)))
    assert found == expected
    assert rest(clock_url, queue) == []
    if options:
        rejected = spark.read.parquet(options["rejects"]).collect()
        assert sorted((row["value"], row["reject_status"]) for row in rejected) == [
            ("1", "past"), ("5", "past"), ("9", "past"),
        ]  # fmt: skip


def test_the_sink_logs_the_number_of_overdue_rows(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    options = {"url": "amqp://localhost:1", "queue": "orders", "past": "drop"}
    table = TableWriter(options, {}, frame_of(spark).schema, overwrite=False)
    first = datetime(2026, 1, 1, tzinfo=UTC)
    one = TaskCommitMessage(confirmed=4, dropped=2, overdue=2, first=first, last=first + timedelta(days=1))
    with caplog.at_level(logging.WARNING):
        table.commit([one, TaskCommitMessage(confirmed=3), replace(one, overdue=1, last=first)])
    assert "3 rows were due more than 5 min before this write began, from 2026-01-01 00:00:00+00:00 to 2026-01-02" in (
        caplog.text
    )
    assert "past=drop" in caplog.text


def test_contradictory_options_are_refused() -> None:
    for given, expected in (
        ({"past": "later"}, "give one of send, drop, reject"),
        ({"past": "reject"}, "the option rejects is not set: set it to a folder"),
        ({"deliver_at": "2026-01-01T00:00:00Z"}, "which is in the past"),
    ):
        with pytest.raises(InvalidOptionError, match=expected):
            SinkSettings.read(Options({"url": "amqp://localhost:1", "queue": "q", **given}), {})
    SinkSettings.read(Options({"queue": "q", "deliver_at": "2026-01-01T00:00:00Z", "past": "send"}), {})


def test_the_option_past_requires_due_times(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule(source, "--to", "orders", "--delay-column", "due", "--past", "send") == 2
    assert "--past needs --at-column" in capsys.readouterr().err
    assert schedule(source, "--to", "orders", "--at-column", "due", "--past", "reject") == 2
    assert "--past reject needs --rejects DIR" in capsys.readouterr().err
    assert issubclass(InvalidOptionError, InvalidInputError)
