"""``bide pipeline schedule --key-column``."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import bide
from bide.cli.app import run
from bide.errors import InvalidColumnError, InvalidRowError
from bide.pipelines.ledger import Ledger
from bide.pipelines.schedule.plan import SchedulePlan
from bide.pipelines.schedule.progress import head_for
from bide.pipelines.schedule.rows import messages
from bide.pipelines.schedule.run import send, survey
from bide.spark.sink_settings import SinkSettings
from tests.broker.conftest import SMALL_CLOCK
from tests.spark.receiving import new_queue
from tests.spark.test_keyed_sink import DUE, versions, with_gate
from tests.support import Vhost

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOW = datetime(2026, 11, 21, 6, tzinfo=UTC)


def plan_for(url: str, queue: str, **values: Any) -> SchedulePlan:
    settings = SinkSettings.make(url, infrastructure=SMALL_CLOCK, constants={"to": queue})
    return SchedulePlan(**{"at_column": "due", "key_column": "customer", "settings": settings, **values})


def reminders(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count, 1, 3).selectExpr(
        "concat('c-', id) as customer", f"timestamp'{DUE.isoformat()}' as due"
    )


def run_pipeline(rows: DataFrame, plan: SchedulePlan, ledger: Ledger) -> int:
    found = survey(rows, plan, now=datetime.now(UTC))
    assert found.invalid == 0, "the small infrastructure does not limit how long a schedule waits"
    sent = send(rows, plan, ledger, head_for(ledger, plan, found, part_rows=500)).collect()
    return sum(one["sent"] for one in sent)


async def cancel_all(client: bide.Client) -> int:
    waiting = await client.count_scheduled()
    await client.cancel_scheduled(prefix="")
    return waiting


def test_a_part_that_is_sent_again_brings_back_nothing_that_was_cancelled(
    spark: SparkSession, vhost: Vhost, tmp_path: Path
) -> None:
    plan = plan_for(vhost.url, new_queue(vhost.url))
    ledger = Ledger(str(tmp_path / "ledger"))
    rows = reminders(spark, 4_000)
    assert run_pipeline(rows, plan, ledger) == 4_000
    assert with_gate(vhost.url, tmp_path / "gate", cancel_all) == 4_000
    # As if the run had been killed before it recorded these parts.
    lost = [one for one in ledger.parts() if one.part % 2]
    for one in lost:
        (tmp_path / "ledger" / f"part-{one.part:05}.json").unlink()
    # Another number of files and tasks reads the rows in another order.
    assert run_pipeline(rows.repartition(7), plan, ledger) == sum(one.sent for one in lost) > 0
    assert with_gate(vhost.url, tmp_path / "gate", versions) == {}
    assert run_pipeline(rows, plan, Ledger(str(tmp_path / "another"))) == 4_000
    assert with_gate(vhost.url, tmp_path / "gate", cancel_all) == 4_000, "another ledger begins a new run"


def test_the_command_schedules_by_key(
    spark: SparkSession, vhost: Vhost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = new_queue(vhost.url)
    source = tmp_path / "reminders.parquet"
    reminders(spark, 20).write.parquet(str(source))
    arguments = [str(source), "--to", queue, "--at-column", "due", "--key-column", "customer", "--url", vhost.url]
    assert run(["pipeline", "schedule", *arguments, "--ledger", str(tmp_path / "ledger"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sent"] == 20

    async def look(client: bide.Client) -> Any:
        return await client.scheduled("c-7"), await client.count_scheduled()

    one, count = with_gate(vhost.url, tmp_path / "gate", look)
    assert count == 20
    assert (one.due_time, one.to, json.loads(one.body)) == (DUE, queue, {"customer": "c-7"})


def test_the_key_changes_the_message_id(spark: SparkSession) -> None:
    rows = spark.createDataFrame([("a", "x", NOW), ("b", "x", NOW)], "customer string, body string, due timestamp")
    plan = plan_for("amqp://localhost:1", "orders", body_column="body")
    found = messages(rows, plan)
    assert found.columns == ["value", "deliver_at", "message_id", "key"]
    assert len({one["message_id"] for one in found.collect()}) == 2


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("'a'", r"a \(2 times\)"),
        ("cast(null as string)", "null"),
        ("''", "an empty text"),
        ("repeat('é', 128)", r"é{40}\.\.\. \(256 bytes, the limit is 255\)"),
        ("'a\\tb'", r"'a\\tb' \(which has control characters\)"),
    ],
)
def test_invalid_and_repeated_keys_are_refused(spark: SparkSession, column: str, expected: str) -> None:
    rows = spark.sql(f"select 'a' as customer, now() as due union all select {column}, now()")
    with pytest.raises(InvalidRowError, match=rf"values that are not unique, valid keys: {expected}\. Correct"):
        survey(rows, plan_for("amqp://localhost:1", "orders"), now=NOW)


def test_a_missing_or_binary_key_column_is_refused(spark: SparkSession) -> None:
    rows = spark.sql("select cast('a' as binary) as customer, now() as due")
    with pytest.raises(InvalidColumnError, match="'customer' is binary, which is not text"):
        messages(rows, plan_for("amqp://localhost:1", "orders"))
    with pytest.raises(InvalidColumnError, match="there is no column 'client'"):
        messages(rows, plan_for("amqp://localhost:1", "orders", key_column="client"))


def test_rows_without_a_due_time_are_counted_before_anything_is_sent(spark: SparkSession) -> None:
    rows = spark.sql("select 'a' as customer, now() + interval 90 days as due union all select 'b', null")
    found = survey(rows, plan_for("amqp://localhost:1", "orders"), now=datetime.now(UTC) - timedelta(minutes=1))
    assert (found.without_time, found.too_late, found.invalid) == (1, 0, 1)
