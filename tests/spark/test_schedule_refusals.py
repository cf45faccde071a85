"""Rows and settings that ``bide pipeline schedule`` refuses before it sends anything."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bide.cli.pipeline.schedule_rows import RowsOnSpark
from bide.errors import BideError, InvalidColumnError, InvalidInputError, InvalidRowError
from bide.pipelines.ledger import Ledger, LedgerPart
from bide.pipelines.schedule.progress import head_for
from bide.pipelines.schedule.rows import messages
from bide.pipelines.schedule.run import send, survey
from tests.broker.conftest import clock_url
from tests.spark.receiving import drain, new_queue, rest
from tests.spark.test_schedule import NOW, plan_for, reminders, schedule

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

__all__ = ["clock_url"]

NO_BROKER = "amqp://localhost:1"
NO_TEXT = "cast(x'636166e9' as string)"
"""What Spark takes for text, and is none: ``café`` in Latin-1."""


def test_a_ledger_started_by_another_run_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Both looked at it while it was new: what the one has sent is not what the other has."""
    plan, ledger = plan_for(NO_BROKER, "orders"), Ledger(str(tmp_path / "ledger"))
    rows = reminders(spark, 10, due="timestamp'2026-11-21 07:00:00'")
    others = rows.selectExpr("order_id", "shop + 1 as shop", "due")
    ours, theirs = (head_for(ledger, plan, survey(one, plan, now=NOW)) for one in (rows, others))
    ledger.begin(theirs)
    ledger.add(LedgerPart(part=0, sent=10, rejected=0))
    with pytest.raises(InvalidInputError, match=r"another run has begun the ledger .* in the meantime: start the same"):
        send(rows, plan, ledger, ours)
    assert send(others, plan, ledger, theirs).collect() == [], "all of it is done"


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("repeat('x', 256)", r"x{40}\.\.\. \(256 bytes, the limit is 255\)"),
        ("repeat('é', 128)", r"é{40}\.\.\. \(256 bytes, the limit is 255\)"),
        (NO_TEXT, r"caf\ufffd \(which is not UTF-8\)"),
    ],
)
def test_invalid_message_ids_are_refused(spark: SparkSession, column: str, expected: str) -> None:
    rows = spark.sql(f"select 'a' as id, now() as due union all select {column}, now()")
    with pytest.raises(InvalidRowError, match=rf"not unique, valid message ids: {expected}\. Correct"):
        survey(rows, plan_for(NO_BROKER, "orders", id_column="id"), now=NOW)


def test_message_ids_of_255_bytes_are_accepted(spark: SparkSession) -> None:
    rows = spark.sql("select repeat('é', 127) || 'x' as id, timestamp'2026-11-21 06:00:00' as due")
    found = survey(rows, plan_for(NO_BROKER, "orders", id_column="id"), now=NOW)
    assert (found.rows, found.invalid) == (1, 0)


def test_binary_columns_are_refused_as_message_ids_and_headers(spark: SparkSession) -> None:
    rows = spark.sql("select x'01' as code, now() as due")
    for values in ({"id_column": "code"}, {"header_columns": ("code",)}):
        with pytest.raises(InvalidColumnError, match="'code' is binary, which is not text: convert it to text"):
            messages(rows, plan_for(NO_BROKER, "orders", **values))


@pytest.fixture
def broken(spark: SparkSession) -> DataFrame:
    """Three rows, one of which has a header that is none."""
    return spark.range(0, 3, 1, 1).selectExpr(
        "id",
        f"if(id = 1, {NO_TEXT}, 'é') as city",
        f"if(id = 2, {NO_TEXT}, 'x') as note",
        "timestamp'2026-01-01' as due",
    )


def test_headers_that_are_not_utf_8_are_refused(
    spark: SparkSession, broken: DataFrame, clock_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are found before the first row is sent; what goes into a JSON body is made text."""
    queue, source = new_queue(clock_url), tmp_path / "rows.parquet"
    broken.write.parquet(str(source))
    where = (source, "--url", clock_url, "--to", queue, "--at-column", "due", "--header-columns", "city",
             "--ledger", tmp_path / "ledger", "--past", "send", "--json")  # fmt: skip
    assert schedule(*where) == 2
    assert "1 of 3 rows cannot be sent (1 with a header that is not UTF-8), and nothing was" in capsys.readouterr().err
    assert schedule(*where, "--rejects", tmp_path / "rejects") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["sent"], report["rejected"], report["bad_headers"]) == (2, 1, 1)
    (rejected,) = spark.read.parquet(str(tmp_path / "rejects")).collect()
    assert rejected["reject_reason"] == (
        "the column headers holds a value that cannot be sent: text that is not UTF-8: encode it as UTF-8"
    )
    found = drain(clock_url, queue, 2)
    assert sorted(json.loads(one.body)["note"] for one in found) == ["caf\ufffd", "x"]
    assert [one.headers["city"] for one in found] == ["é", "é"]
    assert rest(clock_url, queue) == []


def test_a_failed_task_is_not_bad_usage(spark: SparkSession, broken: DataFrame, clock_url: str, tmp_path: Path) -> None:
    """Other tasks may have sent their part, so this is not an error before sending (exit code 2)."""
    plan = replace(plan_for(clock_url, new_queue(clock_url)), header_columns=("city",))
    plan = replace(plan, settings=replace(plan.settings, past="send"))
    found, ledger = survey(broken.where("id <> 1"), plan, now=NOW), Ledger(str(tmp_path / "ledger"))
    with pytest.raises(
        BideError, match="the column headers holds a value that cannot be sent: text that is no"
    ) as caught:
        RowsOnSpark(broken, plan).send(ledger, head_for(ledger, plan, found, part_rows=10), {}, begun=NOW)
    assert not isinstance(caught.value, InvalidInputError)


def test_the_body_includes_the_message_id_by_default(spark: SparkSession) -> None:
    """It always had, so that a ledger that was begun goes on with equal ids and bodies."""
    rows = spark.sql("select 'o-1' as id, 'de' as language, 5 as total, now() as due")
    values = {"id_column": "id", "header_columns": ("language",)}
    for names, body in (((), {"id": "o-1", "total": 5}), (("total",), {"total": 5})):
        (row,) = messages(rows, plan_for(NO_BROKER, "orders", body_columns=names, **values)).collect()
        assert (row["message_id"], json.loads(row["value"])) == ("o-1", body)


def test_a_ledger_has_at_most_10_000_parts(spark: SparkSession, tmp_path: Path) -> None:
    """Each is a file, and a task."""
    plan, ledger = plan_for(NO_BROKER, "orders"), Ledger(str(tmp_path / "ledger"))
    found = survey(reminders(spark, 1), plan, now=NOW)
    for rows, part_rows, parts in ((95, 10, 10), (100_000, 10, 10_000), (1_000_000, 10, 10_000)):
        assert head_for(ledger, plan, replace(found, rows=rows), part_rows=part_rows).parts == parts
