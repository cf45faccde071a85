"""What an audit reads and writes of its folder, without a broker."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bide.errors import InvalidInputError
from bide.pipelines import audit
from bide.pipelines import audit_facts as facts
from bide.pipelines import audit_tables as tables
from bide.pipelines.audit import compact, refresh
from bide.pipelines.audit_folder import Folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

TODAY = date(2026, 11, 21)
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


class Watched(Folder):
    """Notes which files were read."""

    def __init__(self, place: Path) -> None:
        super().__init__(str(place))
        self.was_read: set[str] = set()

    def read(
        self, spark: SparkSession, table: str, schema: StructType, days: Collection[date] | None = None
    ) -> DataFrame:
        found = super().read(spark, table, schema, days)
        self.was_read |= {one.partition(f"{self.place}/")[2] for one in found.inputFiles()}
        return found


def stories(spark: SparkSession, folder: Folder, days: Collection[date], batch: int, number: int = 20) -> None:
    """Facts of messages that were due on each of these days, and were delivered and processed; one failed first."""
    listed = ", ".join(f"date'{day}'" for day in sorted(days))
    made = spark.range(number).selectExpr("id", f"explode(array({listed})) as day")
    due = "(timestamp_seconds(unix_date(day) * 86400 + 36000 + id))"
    made = made.selectExpr(
        f"concat(day, '-{batch}-', id) as message_id", "'q:orders' as target", f"{due} - interval 1 hour as sent",
        f"{due} - interval 1 hour as scheduled", f"{due} as due", f"{due} as first_due", "0 as retries",
        f"{due} + interval 20 milliseconds as delivered", "20d as lateness_ms", "'' as exchange",
        "'orders' as routing_key", "'t' as type", "5 as size", "'clock' as layout", "concat('tap', day) as stream",
        f"id + {batch * number} as offset", "day", "'shop' as endpoint", "'orders' as queue", "1 as attempt",
        f"{due} as started", f"{due} + interval 1 second as ended", "'failed' as kind", "'ValueError' as exception",
        "'no' as text", "'g' as group", "0d as delay_ms",
    )  # fmt: skip
    for table, schema in facts.SCHEMAS.items():
        rows = made.where("message_id like '%-7'") if table == "failed" else made
        typed = [f"cast(`{one.name}` as {one.dataType.simpleString()})" for one in schema]
        folder.append(rows.selectExpr(*typed).coalesce(1), table, batch)


def written(place: Path) -> dict[str, int]:
    return {str(one.relative_to(place)): one.stat().st_ino for one in place.rglob("*.parquet")}


@pytest.mark.slow
def test_a_round_touches_what_is_new_whatever_the_history(spark: SparkSession, tmp_path: Path) -> None:
    """The same increment after a history of two days, and of four: the same files are read and written."""
    touched = []
    for length in (2, 4):
        place = tmp_path / f"after-{length}"
        folder = Watched(place)
        folder.begin()
        history = {TODAY - timedelta(days=back) for back in range(1, length + 1)}
        stories(spark, folder, history, 0)
        refresh(spark, folder, history, now=NOON)
        before = written(place)
        folder.was_read.clear()

        stories(spark, folder, {TODAY}, 100)
        assert refresh(spark, folder, {TODAY}, now=NOON) == {TODAY}
        after = written(place)
        assert {name for name in before if name not in after} <= {one for one in before if one.startswith(_SMALL)}
        touched.append(
            (
                {_place(name) for name, inode in after.items() if before.get(name) != inode},
                {_place(name) for name in folder.was_read if not name.startswith("_state/failures")},
            )
        )
        messages = spark.read.parquet(str(place / "messages")).groupBy("outcome", "attempts").count()
        assert {tuple(row) for row in messages.collect()} == {
            ("processed", 1, 19 * (length + 1)),
            ("processed", 2, length + 1),
        }
    assert touched[0] == touched[1]
    changed, looked_at = touched[0]
    assert changed == {
        *(f"{table}/day={TODAY}/batch=100" for table in facts.SCHEMAS),
        *(f"{table}/day={TODAY}" for table in ("messages", "lateness", "_state/failures")),
        *_SMALL,
    }
    assert looked_at == {f"{table}/day={TODAY}/batch=100" for table in facts.SCHEMAS}


_SMALL = ("pending", "failures")


def _place(name: str) -> str:
    return name.rpartition("/")[0]


def test_many_batches_become_one(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is counted twice, wherever that was interrupted."""
    monkeypatch.setattr(audit, "MOST_BATCHES", 2)
    folder = Folder(str(tmp_path))
    folder.begin()
    for batch in range(3):
        stories(spark, folder, {TODAY}, batch, number=1)

    def rows(table: str) -> list[Any]:
        return folder.read(spark, table, facts.SCHEMAS[table]).orderBy("offset").collect()

    before = {table: rows(table) for table in facts.SCHEMAS}
    compact(spark, folder, {TODAY})
    assert folder.batches("scheduled", TODAY) == [2]
    assert {table: rows(table) for table in facts.SCHEMAS} == before

    stories(spark, folder, {TODAY}, 3, number=1)
    stories(spark, folder, {TODAY}, 4, number=1)
    before = {table: rows(table) for table in facts.SCHEMAS}
    delete, left = folder._files.delete_dir, [1]

    class Interrupted:
        """A file system that ends the process after a deletion."""

        def delete_dir(self, path: str) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            delete(path)

        def __getattr__(self, name: str) -> Any:
            return getattr(usual, name)

    usual = folder._files
    folder._files = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        compact(spark, folder, {TODAY})
    again = Folder(str(tmp_path))
    assert len(again.batches("scheduled", TODAY)) == 2, "one of the three is gone"
    again.finish_merges()
    again.finish_merges()
    assert again.batches("scheduled", TODAY) == [4]
    assert {table: rows(table) for table in facts.SCHEMAS} == before


def test_time_alone_makes_messages_overdue(spark: SparkSession, tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.begin()
    stories(spark, folder, {TODAY}, 0)
    shutil.rmtree(tmp_path / "delivered")
    for table in ("processed", "failed"):
        shutil.rmtree(tmp_path / table)
    ten = datetime(2026, 11, 21, 10, tzinfo=UTC)

    def counted() -> list[tuple[int, int]]:
        return [(row["count"], row["overdue"]) for row in folder.read(spark, "pending", tables.PENDING).collect()]

    refresh(spark, folder, {TODAY}, now=ten)
    assert counted() == [(20, 0)]
    assert refresh(spark, folder, set(), now=ten + timedelta(seconds=15)) == set()
    assert refresh(spark, folder, set(), now=ten + timedelta(seconds=20)) == {TODAY}
    assert counted() == [(20, 11)]
    outcomes = spark.read.parquet(str(tmp_path / "messages")).groupBy("outcome").count().collect()
    assert {tuple(row) for row in outcomes} == {("overdue", 11), ("scheduled", 9)}


def test_folders_of_others(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    with pytest.raises(InvalidInputError, match="has things that are no audit: name another folder"):
        Folder(str(tmp_path)).begin()
    with pytest.raises(InvalidInputError, match="cannot be used"):
        Folder("nothing://here")
    own = Folder(str(tmp_path / "own"))
    own.begin()
    own.begin()
    head = tmp_path / "own" / "_state" / "audit.json"
    head.write_text('{"version": 2}')
    with pytest.raises(InvalidInputError, match="an audit of version 2, and this bide writes 1"):
        own.begin()
