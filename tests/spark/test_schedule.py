"""``bide pipeline schedule`` and its functions."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import bide
from bide.cli.app import run
from bide.errors import InvalidColumnError, InvalidInputError, InvalidRowError
from bide.pipelines.ledger import Ledger
from bide.pipelines.schedule.plan import SchedulePlan
from bide.pipelines.schedule.progress import head_for
from bide.pipelines.schedule.rows import messages
from bide.pipelines.schedule.run import due_times, send, survey
from bide.spark.sink_settings import SinkSettings
from tests.broker.conftest import SMALL_CLOCK, clock_url
from tests.spark.receiving import drain, drain_all, new_queue, rest
from tests.spark.spark_processes import LOCAL, started
from tests.spark.test_folder_lock import holder_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["clock_url"]

NOW = datetime(2026, 11, 21, 6, tzinfo=UTC)
ON_SMALL_CLOCK = ("--max-delay", "20s", "--resolution", "50ms")


def plan_for(url: str, queue: str, **values: Any) -> SchedulePlan:
    settings = SinkSettings.make(url, infrastructure=SMALL_CLOCK, constants={"to": queue})
    return SchedulePlan(**{"at_column": "due", "settings": settings, **values})


def with_clock(plan: SchedulePlan, **values: Any) -> SchedulePlan:
    """The same, delayed by another infrastructure."""
    return replace(plan, settings=replace(plan.settings, infrastructure=bide.Clock(**values)))


def reminders(spark: SparkSession, count: int, *, due: str = "current_timestamp() + interval '1' second") -> DataFrame:
    return spark.range(0, count, 1, 3).selectExpr("concat('o-', id) as order_id", "id % 7 as shop", f"{due} as due")


@pytest.fixture
def queue(clock_url: str) -> str:
    return new_queue(clock_url)


def test_rows_become_messages(spark: SparkSession) -> None:
    rows = spark.createDataFrame(
        [("o-1", None, NOW, "de"), ("o-1", None, NOW, "de"), ("o-2", 5, NOW, None)],
        "order_id string, points int, due timestamp, language string",
    )
    plan = plan_for("amqp://localhost:1", "orders", header_columns=("language",))
    found = sorted(messages(rows, plan).collect(), key=lambda one: (one["value"], one["message_id"]))
    assert [json.loads(one["value"]) for one in found] == [
        {"order_id": "o-1", "points": None},
        {"order_id": "o-1", "points": None},
        {"order_id": "o-2", "points": 5},
    ]
    assert [one["headers"] for one in found] == [{"language": "de"}, {"language": "de"}, {}]
    first, second, other = (one["message_id"] for one in found)
    assert second == f"{first}-2", "a row that is there twice is sent twice"
    assert other[:32] != first
    again = {one["message_id"] for one in messages(rows.repartition(5), plan).collect()}
    assert again == {first, second, other}, "whatever order Spark reads the rows in"
    named = {one["message_id"] for one in messages(rows, plan_for("amqp://x", "orders", name="second")).collect()}
    assert not again & named
    elsewhere = {one["message_id"] for one in messages(rows, with_clock(plan, prefix="others")).collect()}
    assert elsewhere == again, "however they are delayed"


def test_a_survey_counts_bad_past_and_far_rows(spark: SparkSession) -> None:
    rows = spark.createDataFrame(
        [("a", "2026-11-21 05:59:59"), ("b", "2026-11-21T06:00:10Z"), ("c", "soon"), ("d", None), ("e", "2026-11-22")],
        "body string, due string",
    )
    plan = plan_for("amqp://localhost:1", "orders", body_column="body")
    found = survey(rows, plan, now=NOW)
    assert (found.rows, found.without_time, found.already_due, found.too_late, found.invalid) == (5, 2, 1, 1, 3)
    assert found.first == NOW - timedelta(seconds=1)
    assert found.last == datetime(2026, 11, 22, tzinfo=UTC)
    counts = (
        due_times(messages(rows, plan), timedelta(hours=1)).selectExpr("unix_seconds(due) as due", "count").collect()
    )
    at_six = int(NOW.timestamp())
    assert {one["due"]: one["count"] for one in counts} == {at_six - 3600: 1, at_six: 1, at_six + 18 * 3600: 1}


def test_due_times_outside_the_years_1_to_9999_are_bad_rows(spark: SparkSession) -> None:
    """Spark reads years of five digits, and years before the first."""
    times = [
        "2026-11-21 06:00:10",
        "20261-11-21",
        "9999-12-31 23:59:59.999999",
        "0000-12-31",
        "0001-01-01",
        "-0044-03-15",
    ]
    rows = spark.createDataFrame([("x", time) for time in times], "body string, due string")
    plan = plan_for("amqp://localhost:1", "orders", body_column="body")
    found = survey(rows, plan, now=NOW)
    assert (found.rows, found.without_time, found.already_due, found.too_late, found.invalid) == (6, 2, 1, 2, 4)
    assert (found.first, found.last) == (datetime(1, 1, 1, tzinfo=UTC), datetime.max.replace(tzinfo=UTC))
    counts = due_times(messages(rows, plan), timedelta(days=365)).selectExpr("unix_seconds(due) as due", "count")
    assert sorted((datetime.fromtimestamp(one["due"], UTC).year, one["count"]) for one in counts.collect()) == [
        (1, 1),
        (2025, 1),
        (9999, 2),
    ], "where their spans begin"


@pytest.mark.parametrize(
    ("kind", "delays"),
    [
        ("string", ["90s", "1h", "soon", None, "PT20S", "-5s", "400d"]),
        ("long", [90_000, 3_600_000, -1, None, 20_000, -(2**63), 2**63 - 1]),
        ("interval day to second", [timedelta(seconds=90), timedelta(hours=1), timedelta(seconds=-1), None,
                                    timedelta(seconds=19, microseconds=999_001), timedelta(-1), timedelta(400)]),
    ],
)  # fmt: skip
def test_delays_can_be_text_numbers_or_intervals(spark: SparkSession, kind: str, delays: list[Any]) -> None:
    rows = spark.createDataFrame([("x", delay) for delay in delays], f"body string, wait {kind}")
    settings = SinkSettings.make(
        "amqp://localhost", infrastructure=bide.Clock(max_delay=timedelta(days=300)), constants={"to": "orders"}
    )
    plan = SchedulePlan(delay_column="wait", body_column="body", settings=settings)
    found = survey(rows, plan, now=NOW)
    assert (found.rows, found.without_time, found.already_due, found.too_late, found.invalid) == (7, 3, 0, 1, 4)
    assert found.first == NOW + timedelta(seconds=20), "rounded up"
    table = messages(rows, plan)
    assert table.columns == ["value", "delay", "message_id"]
    assert len({row["message_id"] for row in table.collect()}) == 7
    counts = due_times(table, timedelta(minutes=1), now=NOW).selectExpr("unix_seconds(due) as due", "count").collect()
    start = int(NOW.timestamp())
    near = {one["due"] - start: one["count"] for one in counts if one["due"] <= start + 3_600}
    assert near == {0: 1, 60: 1, 3_600: 1}


def test_exactly_one_of_due_times_and_delays_is_required(spark: SparkSession) -> None:
    rows = spark.sql("select 'x' as body, current_timestamp() as due, true as wait")
    for names in ({"at_column": None}, {"delay_column": "wait"}):
        with pytest.raises(InvalidInputError, match="name either the column of due times or the column of delays"):
            messages(rows, plan_for("amqp://localhost", "orders", **names))
    with pytest.raises(InvalidColumnError, match="is boolean, which is not a delay: convert it to interval day to"):
        messages(rows, plan_for("amqp://localhost", "orders", at_column=None, delay_column="wait"))
    usual, other = (plan_for("amqp://localhost", "q", at_column=at, delay_column=delay)
                    for at, delay in (("t", None), (None, "t")))  # fmt: skip
    assert usual.digest() != other.digest()


def test_bad_columns_and_duplicate_ids_are_refused(spark: SparkSession) -> None:
    rows = spark.sql("select 'x' as body, 'k' as id, 5 as due union all select 'y', 'k', 6")
    for values, expected in (
        ({"at_column": "when"}, "no column 'when': choose from body, id, due"),
        ({}, "'due' is int, which is not a time"),
        ({"at_column": "body", "body_column": "due"}, "'due' is int, but a body is a string or binary"),
    ):
        with pytest.raises(InvalidColumnError, match=expected):
            messages(rows, plan_for("amqp://localhost", "orders", **values))
    timed = rows.selectExpr("body", "id", "current_timestamp() as due")
    with pytest.raises(InvalidRowError, match=r"'id' has values that are not unique, valid message ids: k \(2 times\)"):
        survey(timed, plan_for("amqp://localhost", "orders", id_column="id"), now=NOW)
    for value, expected in (("''", "an empty text"), ("cast(null as string)", "null")):
        one = timed.where("body = 'x'").selectExpr("body", "due", f"{value} as id")
        with pytest.raises(InvalidRowError, match=rf"not unique, valid message ids: {expected}\."):
            survey(one, plan_for("amqp://localhost", "orders", id_column="id"), now=NOW)


def test_every_row_is_sent_once_across_runs_with_one_ledger(
    spark: SparkSession, clock_url: str, queue: str, tmp_path: Path
) -> None:
    due = datetime.now(UTC) + timedelta(seconds=3)
    rows = reminders(spark, 1_000, due=f"timestamp'{due.isoformat()}'")
    plan, ledger = plan_for(clock_url, queue), Ledger(str(tmp_path / "ledger"))
    found = survey(rows, plan, now=datetime.now(UTC))
    head = head_for(ledger, plan, found, part_rows=100)
    assert head.parts == 10
    sent = send(rows, plan, ledger, head)
    assert sum(one["sent"] for one in sent.collect()) == 1_000
    assert {one["part"] for one in sent.collect()} == ledger.numbers()
    assert send(rows, plan, ledger, head_for(ledger, plan, found)).collect() == []
    (tmp_path / "ledger" / "part-00003.json").unlink()
    again = send(rows.repartition(7), plan, ledger, head).collect()
    assert [one["part"] for one in again] == [3]

    arrived = Counter((one.message_id, one.body) for one in drain(clock_url, queue, 1_000 + again[0]["sent"]))
    assert len(arrived) == len({message_id for message_id, _ in arrived}) == 1_000
    assert sum(arrived.values()) - 1_000 == again[0]["sent"], "that part alone was repeated, with equal ids"
    assert rest(clock_url, queue) == []


def test_rows_of_an_inactive_session_are_sent(spark: SparkSession, clock_url: str, queue: str, tmp_path: Path) -> None:
    """In a notebook with two sessions, the active one is that which was used last."""
    rows = reminders(spark, 3, due=f"timestamp'{datetime.now(UTC).isoformat()}'")
    plan, ledger = plan_for(clock_url, queue), Ledger(str(tmp_path / "ledger"))
    head = head_for(ledger, plan, survey(rows, plan, now=datetime.now(UTC)))
    spark.newSession().createDataFrame([], "nothing int")
    assert sum(one["sent"] for one in send(rows, plan, ledger, head).collect()) == 3
    assert len(drain(clock_url, queue, 3)) == 3


def test_a_ledger_refuses_another_plan_broker_or_rows(spark: SparkSession, tmp_path: Path) -> None:
    rows = reminders(spark, 10, due="timestamp'2026-11-21 07:00:00'")
    plan, ledger = plan_for("amqp://localhost:1/a", "orders"), Ledger(str(tmp_path / "ledger"))
    ledger.begin(head_for(ledger, plan, survey(rows, plan, now=NOW)))
    for other, of_rows, expected in (
        (plan_for("amqp://localhost:1/a", "others"), rows, "with other settings of target, columns, name or delay"),
        (with_clock(plan, prefix="others"), rows, "with other settings of target, columns, name or delay infrastruc"),
        (
            with_clock(plan, max_delay=timedelta(hours=1)),
            rows,
            "delay infrastructure: repeat those to continue",
        ),
        (plan_for("amqp://localhost:1/b", "orders"), rows, "was begun for the broker localhost:1/a, but this run"),
        (plan, rows.limit(9), r"\(10 rows then, 9 now, or other values\)"),
        (plan, rows.selectExpr("order_id", "shop + 1 as shop", "due"), r"\(10 rows then, 10 now, or other values\)"),
    ):
        with pytest.raises(InvalidInputError, match=expected):
            head_for(ledger, other, survey(of_rows, other, now=NOW))


def schedule(*arguments: object) -> int:
    return run(["pipeline", "schedule", *ON_SMALL_CLOCK, *(str(one) for one in arguments)])


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    """Ten reminders, due in some seconds, their times without a zone."""
    path = tmp_path / "reminders.csv"
    begin = datetime.now(UTC) + timedelta(seconds=8)
    lines = [f"o-{n},{(begin + timedelta(seconds=n / 10)).replace(tzinfo=None).isoformat()}" for n in range(10)]
    path.write_text("\n".join(["order_id,due", *lines]) + "\n")
    return path


@pytest.mark.usefixtures("spark")
def test_the_command_sends_every_row(
    clock_url: str, queue: str, csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--url", clock_url, "--to", queue, "--at-column", "due", "--ledger", tmp_path / "ledger")
    assert schedule(csv, *where, "--dry-run", "--json") == 0
    dry = json.loads(capsys.readouterr().out)
    assert (dry["rows"], sum(one["count"] for one in dry["due"])) == (10, 10)
    assert not (tmp_path / "ledger").exists()
    assert schedule(csv, *where, "--dry-run") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"10 messages to the queue {queue} on 127.0.0.1:")
    assert "█" in text

    assert schedule(csv, *where, "--json") == 0
    assert json.loads(capsys.readouterr().out)["sent"] == 10
    assert schedule(csv, *where) == 0
    assert "10 rows were finished by an earlier run" in capsys.readouterr().out
    found = drain(clock_url, queue, 10)
    assert sorted(json.loads(one.body)["order_id"] for one in found) == [f"o-{n}" for n in range(10)]
    assert all(one.lateness is not None and one.lateness >= timedelta(0) for one in found)
    assert {one.content_type for one in found} == {"application/json"}
    assert rest(clock_url, queue) == []


@pytest.mark.usefixtures("spark")
def test_the_command_reads_a_delay_column(
    clock_url: str, queue: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "reminders.csv"
    source.write_text("order_id,wait\n" + "".join(f"o-{n},{wait}\n" for n, wait in enumerate(("2s", "2500ms", "x"))))
    where = ("--url", clock_url, "--to", queue, "--delay-column", "wait", "--ledger", tmp_path / "ledger", "--json")
    assert schedule(source, *where) == 2
    assert "1 of 3 rows cannot be sent (1 with a missing or invalid delay)" in capsys.readouterr().err
    began = datetime.now(UTC)
    assert schedule(source, *where, "--rejects", tmp_path / "rejects") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["sent"], report["rejected"], report["without_time"]) == (2, 1, 1)
    assert datetime.fromisoformat(report["last_due"]) >= began + timedelta(seconds=2.5)
    found = drain(clock_url, queue, 2)
    waited = {json.loads(one.body)["order_id"]: one.due - one.sent_at for one in found if one.due and one.sent_at}
    assert waited.keys() == {"o-0", "o-1"}
    assert timedelta(seconds=2) <= waited["o-0"] < timedelta(seconds=2.4)
    assert timedelta(seconds=2.5) <= waited["o-1"] < timedelta(seconds=2.9)


@pytest.mark.usefixtures("spark")
def test_the_command_reports_due_times_out_of_range(
    clock_url: str, queue: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "reminders.csv"
    source.write_text("order_id,due\no-0,2026-01-01\no-1,9999-12-31\no-2,20261-11-21\n")
    where = ("--url", clock_url, "--to", queue, "--at-column", "due", "--ledger", tmp_path / "ledger")
    assert schedule(source, *where, "--dry-run") == 2
    captured = capsys.readouterr()
    assert "due from 2026-01-01 00:00:00 to 9999-12-31 23:59:59 UTC" in captured.out
    assert "2 of 3 rows cannot be sent (2 with a due time beyond the longest delay)" in captured.err
    assert schedule(source, *where, "--rejects", tmp_path / "rejects", "--past", "send", "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["sent"], done["rejected"], done["too_late"], done["overdue"]) == (1, 2, 2, 1)
    assert [json.loads(one.body)["order_id"] for one in drain(clock_url, queue, 1)] == ["o-0"]


@pytest.mark.usefixtures("spark")
def test_another_infrastructure_has_another_ledger(
    clock_url: str, queue: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    source = tmp_path / "reminders.csv"
    source.write_text("order_id,due\no-0,2026-01-01\n")
    where = (source, "--url", clock_url, "--to", queue, "--at-column", "due", "--past", "send", "--json")
    found = []
    for arguments in ((), ("--prefix", "others"), ("--prefix", "others")):
        assert schedule(*where, *arguments) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [(one["sent"], one["sent_before"]) for one in found] == [(1, 0), (1, 0), (0, 1)]
    first, second, third = (one["ledger"] for one in found)
    assert first != second == third
    assert schedule(*where, "--prefix", "others", "--ledger", first) == 2
    assert f"the ledger {first} was begun with other settings of target, columns, name or delay infra" in (
        capsys.readouterr().err
    )
    assert len({one.message_id for one in drain(clock_url, queue, 2)}) == 1, "one message, sent twice"


@pytest.mark.usefixtures("spark")
def test_a_file_uri_with_one_slash_is_the_same_source(
    clock_url: str, queue: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one slash. It is the same file wherever the command is run, so it has the same ledger."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    source = tmp_path / "reminders.csv"
    source.write_text("order_id,due\no-0,2026-01-01\n")
    found = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        where = ("--url", clock_url, "--to", queue, "--at-column", "due", "--past", "send", "--json")
        assert schedule(f"file:{source}", *where) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [(one["sent"], one["sent_before"]) for one in found] == [(1, 0), (0, 1)]
    assert len(drain(clock_url, queue, 1)) == 1


@pytest.mark.usefixtures("spark")
def test_a_missing_target_is_reported_before_spark_starts(
    clock_url: str, queue: str, csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # An unknown time zone is reported as soon as Spark has started.
    where = (csv, "--at-column", "due", "--ledger", tmp_path / "ledger", "--time-zone", "Mars/Olympus")
    for arguments, error in (
        (("--url", clock_url, "--to", "typo"), "the queue 'typo' does not exist on 127.0.0.1:"),
        (("--url", clock_url, "--exchange", "typo"), "the exchange 'typo' does not exist on 127.0.0.1:"),
        (("--url", "amqp://127.0.0.1:1", "--to", queue), "127.0.0.1:1"),
    ):
        assert schedule(*where, *arguments) == 1
        assert error in capsys.readouterr().err
    for there in (("--to", queue), ("--exchange", "amq.topic", "--routing-key", "x")):
        assert schedule(*where, "--url", clock_url, *there) == 2
        assert "does not know the time zone" in capsys.readouterr().err


@pytest.mark.usefixtures("spark")
def test_a_dry_run_needs_no_broker(csv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--url", "amqp://127.0.0.1:1", "--to", "typo", "--at-column", "due", "--dry-run")
    assert schedule(csv, *where) == 0
    assert capsys.readouterr().out.startswith("10 messages to the queue typo on 127.0.0.1:1/; nothing was sent")


@pytest.mark.usefixtures("spark")
def test_invalid_command_lines_are_refused(
    clock_url: str, queue: str, csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with csv.open("a") as file:
        file.write("o-10,tomorrow\n")
    where = ("--url", clock_url, "--at-column", "due", "--ledger", tmp_path / "ledger")
    assert schedule(csv, "--to", queue, *where, "--delay-column", "due") == 2
    assert schedule(csv, "--to", queue) == 2
    assert capsys.readouterr().err.count("either --at-column or --delay-column") == 2
    for arguments, code, error in (
        ((csv, "--to", queue), 2, "1 of 11 rows cannot be sent (1 with a missing or invalid due time)"),
        ((csv, "--to", f"{queue}-x", "--rejects", tmp_path / "r"), 1, f"the queue '{queue}-x' does not exist"),
        ((tmp_path / "none.csv", "--to", queue), 2, "none.csv does not exist: name a file or a folder of csv files"),
        ((tmp_path / "none*.csv", "--to", queue), 1, "Path does not exist"),
        ((tmp_path / "none.xyz", "--to", queue), 2, "does not have the suffix of a known format"),
        ((csv,), 2, "give the target of the messages"),
    ):
        assert schedule(*arguments, *where) == code
        assert error in capsys.readouterr().err
    assert rest(clock_url, queue) == []

    with holder_of(tmp_path / "held") as process:
        held = (*where, "--rejects", tmp_path / "r", "--ledger", tmp_path / "held")
        assert schedule(csv, "--to", queue, *held) == 1
        assert f"held is in use by the process {process.pid} on " in capsys.readouterr().err
    assert rest(clock_url, queue) == []

    full = f"{queue}-full"
    with bide.connect_sync(clock_url) as client:
        limits = bide.Queue(full, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
        client.declare(bide.Topology(queues=[limits]))
    past = tmp_path / "past.csv"
    past.write_text("order_id,due\n" + "o-1,2026-01-01\n" * 10)
    assert schedule(past, "--to", full, *where, "--part-rows", 100, "--past", "send") == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "bide: 9 of the last 10 messages were not confirmed (1 confirmed, 9 refused): row 1, message id "
    )
    assert error.count("\n") == 1

    assert schedule(csv, "--to", queue, *where, "--rejects", tmp_path / "rejects", "--name", "2", "--ledger",
                    tmp_path / "ledger-2") == 0  # fmt: skip
    assert "1 rejected row is in" in capsys.readouterr().out
    assert len(drain(clock_url, queue, 10)) == 10


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_schedule_is_continued(
    spark: SparkSession, clock_url: str, queue: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``kill -9`` of Python and JVM while parts are under way, and the same command again."""
    rows, source = 8_000, tmp_path / "reminders.parquet"
    due = datetime.now(UTC) + timedelta(seconds=10)
    reminders(spark, rows, due=f"timestamp'{due.isoformat()}'").write.parquet(str(source))
    ledger = Ledger(str(tmp_path / "ledger"))
    arguments = [str(source), "--to", queue, "--at-column", "due", "--ledger", ledger.folder, "--part-rows", "200",
                 "--json", "--url", clock_url, *ON_SMALL_CLOCK]  # fmt: skip
    with started([sys.executable, "-m", "bide", "pipeline", "schedule", *arguments, *LOCAL]) as program:
        program.wait_until(lambda: len(ledger.numbers()) >= 2, "two parts were sent")
        program.kill()
    done = sum(one.sent for one in ledger.parts())
    assert 0 < done < rows

    assert run(["pipeline", "schedule", *arguments]) == 0
    summary = json.loads(capsys.readouterr().out)
    # A Python worker that has all its rows outlives the JVM by as long as it takes to send them.
    assert summary["sent_before"] >= done
    assert summary["sent_before"] + summary["sent"] == rows
    found = drain_all(clock_url, queue, rows)
    ids: dict[str | None, set[bytes]] = {}
    for one in found:
        ids.setdefault(one.message_id, set()).add(one.body)
    assert len(ids) == rows, "every row at least once"
    assert all(len(bodies) == 1 for bodies in ids.values()), "and those that came twice with equal ids"
    assert len(found) - rows <= 2 * 300, "of no more than the two parts that were under way"
