"""``bide pipeline schedule`` with a column of queues and a column of headers."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from bide.cli.app import run
from bide.errors import InvalidColumnError, InvalidInputError
from bide.pipelines.schedule.plan import SchedulePlan
from bide.pipelines.schedule.rows import count_targets, messages
from bide.pipelines.schedule.run import survey
from bide.pipelines.schedule.targets import check_targets
from bide.spark.sink_settings import SinkSettings
from tests.broker.conftest import SMALL_CLOCK, clock_url
from tests.spark.receiving import drain, new_queue

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["clock_url"]

NOW = datetime(2026, 11, 21, 6, tzinfo=UTC)
LAYOUT = ("--max-delay", "20s", "--resolution", "50ms")
COLUMNS = (
    *("--to-column", "destination", "--at-column", "due", "--id-column", "id"),
    *("--body-column", "body", "--headers-column", "headers"),
)


def plan_for(**values: Any) -> SchedulePlan:
    settings = SinkSettings.make("amqp://localhost:1", infrastructure=SMALL_CLOCK, constants={})
    given = {"to_column": "destination", "at_column": "due", "body_column": "body", "settings": settings}
    return SchedulePlan(**{**given, **values})


def write(folder: Path, *rows: tuple[str, str | None, Any], kind: str = "json") -> Path:
    """A file of stored timeouts: id, destination and headers; the body is the id, and all are due in two seconds."""
    due = (datetime.now(UTC) + timedelta(seconds=2)).isoformat()
    path = folder / f"timeouts.{kind}"
    fields = ("id", "destination", "headers", "body", "due")
    found = [dict(zip(fields, (*row, row[0], due), strict=True)) for row in rows]
    if kind == "json":
        path.write_text("\n".join(map(json.dumps, found)))
        return path
    # A database exports the headers as the text that it stores.
    found = [{**one, "headers": json.dumps(one["headers"])} for one in found]
    if kind == "csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, fields)
            table.writeheader()
            table.writerows(found)
    else:
        bodies = [one["body"].encode() for one in found]
        parquet.write_table(pa.table({**{name: [one[name] for one in found] for name in fields}, "body": bodies}), path)
    return path


def test_the_destination_changes_the_id_and_the_options_do_not_change_old_ids(spark: SparkSession) -> None:
    rows = spark.createDataFrame([("a", "x", NOW), ("a", "y", NOW)], "body string, destination string, due timestamp")
    found = messages(rows, plan_for()).collect()
    assert {one["queue"] for one in found} == {"x", "y"}
    assert len({one["message_id"][:32] for one in found}) == 2
    assert plan_for().digest() == plan_for(allow=("x",)).digest()
    assert plan_for().ledger_digest() != plan_for(allow=("x",)).ledger_digest()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("string", ['{"a": "1", "b": null}', "", "[]", '{"a": 1}', "{'a': '1'}"]),
        ("map<string, string>", [{"a": "1"}, {}]),
        ("struct<a: string, b: string>", [("1", None), (None, None)]),
    ],
)
def test_headers_are_json_a_map_or_a_struct(spark: SparkSession, kind: str, values: list[Any]) -> None:
    rows = spark.createDataFrame(
        [("a", "x", NOW, one) for one in values], f"body string, destination string, due timestamp, headers {kind}"
    )
    plan = plan_for(headers_column="headers")
    assert survey(rows, plan, now=NOW).bad_headers == (3 if kind == "string" else 0)
    assert len({one["message_id"][:32] for one in messages(rows, plan).collect()}) == len(values)


def test_columns_that_cannot_be_used_are_refused(spark: SparkSession) -> None:
    rows = spark.createDataFrame([("a", b"x", NOW)], "body string, destination binary, due timestamp")
    with pytest.raises(InvalidColumnError, match="'destination' is binary"):
        messages(rows, plan_for())
    with pytest.raises(InvalidColumnError, match="'due' is timestamp, but headers are a map"):
        messages(rows, plan_for(headers_column="due"))
    with pytest.raises(InvalidColumnError, match="no column 'queue'"):
        messages(rows, plan_for(to_column="queue"))
    with pytest.raises(InvalidInputError, match="give only one"):
        messages(rows, plan_for(headers_column="body", header_columns=("body",)))


def test_targets_are_counted_and_checked_without_a_broker(spark: SparkSession, tmp_path: Path) -> None:
    delay_queue = SMALL_CLOCK.topology().queues[0].name
    names = ["x", "x", "y", "z", None, "", delay_queue, "x" * 256]
    rows = spark.createDataFrame([("a", name, NOW) for name in names], "body string, destination string, due timestamp")
    plan = plan_for(allow=("[xy]*", delay_queue))
    targets = count_targets(rows, plan)
    assert (targets[0].queue, targets[0].rows) == ("x", 2)
    assert {one.queue: one.rows for one in targets} == {**dict.fromkeys(names, 1), "x": 2}
    with pytest.raises(InvalidInputError, match="5 of 8 rows cannot be sent to their queues"):
        check_targets(targets, plan, is_offline=True)
    settings = replace(plan.settings, rejects=str(tmp_path))
    found = check_targets(targets, replace(plan, settings=settings), is_offline=True)
    assert {name for name, reason in found.items() if reason is None} == {"x", "y"}
    assert "'q:z' matches no allowed pattern" in str(found["z"])
    assert "delay" in str(found[delay_queue])


@pytest.mark.parametrize(
    ("kind", "options"),
    [("json", ()), ("parquet", ()), ("csv", ("--read-option", 'escape="'))],
    ids=["json", "parquet", "csv"],
)
def test_a_file_of_timeouts_reaches_its_endpoints(
    kind: str, options: tuple[str, ...], clock_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sales, billing = new_queue(clock_url), new_queue(clock_url)
    source = write(
        tmp_path,
        *((f"s{n}", sales, {"NServiceBus.MessageId": f"s{n}"}) for n in range(3)),
        *((f"b{n}", billing, {"Other": "é", "Two": 'a "b", c'}) for n in range(2)),
        kind=kind,
    )
    command = ["--url", clock_url, "pipeline", "schedule", str(source), *options, *COLUMNS, *LAYOUT]
    command += ["--allow", sales, "--allow", billing, "--ledger", str(tmp_path / "ledger")]
    assert run([*command, "--dry-run"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("5 messages to the queues in the column destination on ")
    assert out[1:3] == [f"        3  to {sales}", f"        2  to {billing}"]
    assert run([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["destinations"], result["sent"]) == ({sales: 3, billing: 2}, 5)
    found = {one.message_id: one for one in drain(clock_url, sales, 3)}
    assert {key: one.body for key, one in found.items()} == {f"s{n}": f"s{n}".encode() for n in range(3)}
    assert found["s1"].headers["NServiceBus.MessageId"] == "s1"
    assert "Other" not in found["s1"].headers
    assert [(one.headers["Other"], one.headers["Two"]) for one in drain(clock_url, billing, 2)] == [
        ("é", 'a "b", c')
    ] * 2


def test_rows_with_wrong_targets_and_headers_are_named_and_rejected(
    clock_url: str, tmp_path: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = new_queue(clock_url)
    other = new_queue(clock_url)
    source = write(
        tmp_path,
        ("good", queue, "{}"),
        ("missing", "gone", "{}"),
        ("none", None, "{}"),
        ("denied", other, "{}"),
        ("headers", queue, '{"a": 1}'),
    )
    command = [
        "--url",
        clock_url,
        "pipeline",
        "schedule",
        str(source),
        *COLUMNS,
        "--headers-column",
        "headers",
        *LAYOUT,
    ]
    command += ["--allow", queue, "--allow", "gone", "--ledger", str(tmp_path / "ledger")]
    assert run(command) != 0
    assert "1 with headers that are not an object of text" in capsys.readouterr().err
    write(tmp_path, ("good", queue, "{}"), ("missing", "gone", "{}"), ("none", None, "{}"), ("denied", other, ""))
    assert run(command) != 0
    error = capsys.readouterr().err
    for text in (
        "3 of 4 rows cannot be sent to their queues, and nothing was sent",
        "'missing': the queue 'gone' does not exist",
        "'none': the column 'destination' is null",
        f"'denied': the target 'q:{other}' matches no allowed pattern",
    ):
        assert text in error
    write(
        tmp_path,
        ("good", queue, "{}"),
        ("missing", "gone", "{}"),
        ("none", None, "{}"),
        ("denied", other, "{}"),
        ("headers", queue, '{"a": 1}'),
    )
    rejects = tmp_path / "rejects"
    assert run([*command, "--rejects", str(rejects), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["sent"], result["rejected"]) == (1, 4)
    reasons = {one["message_id"]: one["reject_reason"] for one in spark.read.parquet(str(rejects)).collect()}
    assert set(reasons) == {"missing", "none", "denied", "headers"}
    assert "does not exist" in reasons["missing"]
    assert "null" in reasons["none"]
    assert "matches no allowed pattern" in reasons["denied"]
    assert "'a' is of type int and not text" in reasons["headers"]
    (message,) = drain(clock_url, queue, 1)
    assert message.message_id == "good"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--to-column", "a", "--to", "b"), "give the target"),
        (("--to", "b", "--allow", "b"), "--allow needs --to-column"),
        (("--to-column", "a", "--allow", ""), "not a pattern"),
        (("--to", "b", "--headers-column", "h", "--header-columns", "a"), "either --headers-column"),
        (("--to-column", "a", "--routing-key", "k"), "--routing-key needs --exchange"),
    ],
)
def test_contradictory_options_are_refused(
    options: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pipeline", "schedule", "x.csv", "--at-column", "due", *options]) == 2
    assert expected in capsys.readouterr().err


def test_rows_with_keys_have_queues_of_their_own() -> None:
    settings = SinkSettings.make("amqp://localhost:1", infrastructure=SMALL_CLOCK, constants={})
    plan_for(key_column="id", settings=settings).check_messages()
