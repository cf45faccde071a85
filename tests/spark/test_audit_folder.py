"""The folder of an audit, without a broker."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Collection
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyarrow import parquet
from pyspark.sql import functions as F  # noqa: N812 (the usual name)

from bide.errors import FolderInUseError, InvalidInputError
from bide.pipelines.audit import facts, merging, tables
from bide.pipelines.audit.columns import TIMESTAMP
from bide.pipelines.audit.folder import Folder, Note
from bide.pipelines.audit.refresh import compact, refresh
from bide.pipelines.audit.table_files import files_of_day, sizes_of_batches
from bide.pipelines.audit.unfinished_work import BatchKey
from tests.support import SOAK

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
        return self._note(super().read(spark, table, schema, days))

    def read_batches(
        self, spark: SparkSession, table: str, schema: StructType, batches: Collection[BatchKey]
    ) -> DataFrame:
        return self._note(super().read_batches(spark, table, schema, batches))

    def _note(self, found: DataFrame) -> DataFrame:
        self.was_read |= {one.partition(f"{self.place}/")[2] for one in found.inputFiles()}
        return found


def batches_of(folder: Folder, table: str) -> list[int]:
    """The numbers of the batches of today."""
    return sorted(sizes_of_batches(files_of_day(folder, table, TODAY)))


def stories(
    spark: SparkSession, folder: Folder, days: Collection[date], batch: int, *, number: int = 20, hour: int = 10
) -> Note:
    """Facts of messages that were due on each of these days, and were delivered and processed; one failed first."""
    listed = ", ".join(f"date'{day}'" for day in sorted(days))
    made = spark.range(number).selectExpr("id", f"explode(array({listed})) as day")
    due = f"(timestamp_seconds(unix_date(day) * 86400 + {hour * 3600} + id))"
    made = made.selectExpr(
        f"concat(day, '-{batch}-', id) as message_id", "'q:orders' as target", f"{due} - interval 1 hour as sent",
        f"{due} - interval 1 hour as scheduled", f"{due} as due", f"{due} as first_due", "0 as retries",
        f"{due} + interval 20 milliseconds as delivered", "20d as lateness_ms", "'' as exchange",
        "'orders' as routing_key", "'t' as type", "5 as size", "'clock' as layout", "concat('tap', day) as stream",
        f"id + {batch * number} as offset", "day", "'shop' as endpoint", "'orders' as queue", "1 as attempt",
        f"{due} as started", f"{due} + interval 1 second as ended", "'failed' as kind", "'ValueError' as exception",
        "'no' as text", "'g' as group", "0d as delay_ms", "'o' as occurrence", "'s' as schedule_id", "'k' as key",
        "'v' as version", f"{due} as nominal", f"{due} as claimed", "'delivered' as outcome",
    )  # fmt: skip
    for table, schema in facts.SCHEMAS.items():
        rows = made.where("message_id like '%-7'") if table == "failed" else made
        typed = [f"cast(`{one.name}` as {one.dataType.simpleString()})" for one in schema]
        folder.append(rows.selectExpr(*typed).coalesce(1), table, batch)
    return Note(name=f"all-{batch}", rows=dict.fromkeys(facts.SCHEMAS, number), days=tuple(sorted(days)))


def written(place: Path) -> dict[str, int]:
    files = (one for one in place.rglob("*") if one.suffix in (".parquet", ".arrow"))
    return {str(one.relative_to(place)): one.stat().st_ino for one in files}


def touched_by(folder: Watched, increment: Callable[[], None]) -> tuple[set[str], set[str]]:
    """Where files were written meanwhile, and where all of a row was read."""
    place = Path(folder.place)
    before = written(place)
    folder.was_read.clear()
    increment()
    after = written(place)
    assert {name for name in before if name not in after} <= {one for one in before if one.startswith(_ANEW)}
    return (
        {_place(name) for name, inode in after.items() if before.get(name) != inode},
        {_place(name) for name in folder.was_read if not name.startswith("_state/failures")},
    )


@pytest.mark.parametrize("chosen", [None, "TIMESTAMP_MILLIS"])
def test_a_write_leaves_the_setting_of_the_session(spark: SparkSession, tmp_path: Path, chosen: str | None) -> None:
    name = "spark.sql.parquet.outputTimestampType"
    folder = Folder(str(tmp_path))
    folder.begin()
    if chosen is not None:
        spark.conf.set(name, chosen)
    try:
        folder.write_whole(spark.sql("select timestamp'2026-11-21 09:00:00' as due"), "pending", "due")
        assert spark.conf.get(name, None) == chosen
    finally:
        spark.conf.unset(name)
    (file,) = tmp_path.glob("pending/*.parquet")
    assert parquet.read_schema(file).field("due").type == TIMESTAMP


@pytest.mark.long
@pytest.mark.slow
def test_a_round_reads_only_new_facts_and_their_messages(spark: SparkSession, tmp_path: Path) -> None:
    """After one round and after two, on the same day and on others: only messages with new facts are read.

    The increment has facts of new messages, and of half the messages of the round before.
    """
    folder = Watched(tmp_path)
    folder.begin()
    days = {TODAY - timedelta(days=ago) for ago in range(3)}
    refresh(spark, folder, [stories(spark, folder, days, 0, hour=0)], now=NOON)
    last = 0
    for length in (1, 2):
        new, more = 100 * length, 100 * length + 1

        def increment(last: int = last, new: int = new, more: int = more) -> None:
            again = stories(spark, folder, {TODAY}, new, hour=new // 100)
            rows = folder.read_batches(spark, "delivered", facts.SCHEMAS["delivered"], {(TODAY, last)})
            folder.append(rows.limit(10), "delivered", more)
            note = Note(name=f"delivered-{more}", rows={"delivered": 10}, days=(TODAY,))
            assert refresh(spark, folder, [again, note], now=NOON) == {TODAY}

        changed, looked_at = touched_by(folder, increment)
        assert changed == {
            *(f"{table}/day={TODAY}/batch={new}" for table in facts.SCHEMAS),
            f"delivered/day={TODAY}/batch={more}",
            *(f"messages/day={TODAY}/batch={number}" for number in (length - 1, length)),
            *(f"{table}/day={TODAY}" for table in ("lateness", "_state/failures")),
            # The index of the new facts, and of the messages that the round before has written.
            *(f"_state/ids/{table}/day={TODAY}/batch={new}" for table in facts.SCHEMAS),
            f"_state/ids/delivered/day={TODAY}/batch={more}",
            *(f"_state/ids/messages/day={TODAY}/batch={number}" for number in range(length)),
            *_SMALL,
        }
        of_messages = ("scheduled", "processed", "messages")
        assert {one for one in looked_at if one.startswith(of_messages)} == {
            *(f"{table}/day={TODAY}/batch={batch}" for table in of_messages[:2] for batch in (last, new)),
            *(f"messages/day={TODAY}/batch={number}" for number in (length - 1, length)),
        }
        outcomes = spark.read.parquet(folder.location("messages")).groupBy("outcome", "attempts").count()
        assert {tuple(row) for row in outcomes.collect()} == {
            ("processed", 1, 19 * (len(days) + length)),
            ("processed", 2, len(days) + length),
        }
        last = new


_SMALL = ("pending", "failures")
_ANEW = (
    *_SMALL,
    *(f"{table}/day={TODAY}" for table in ("lateness", "_state/failures", "messages", "_state/ids/messages")),
)


def _place(name: str) -> str:
    # An index names the batch in the name of its file.
    return name.partition("-part-")[0] if name.startswith("_state/ids/") else name.rpartition("/")[0]


@pytest.mark.long
def test_many_batches_are_merged_into_one(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is counted twice, wherever that was interrupted."""
    monkeypatch.setattr(merging, "MAX_BATCHES", 2)
    folder = Folder(str(tmp_path))
    folder.begin()
    for batch in range(3):
        stories(spark, folder, {TODAY}, batch, number=1)

    def rows(table: str) -> list[Any]:
        return folder.read(spark, table, facts.SCHEMAS[table]).orderBy("offset").collect()

    before = {table: rows(table) for table in facts.SCHEMAS}
    compact(spark, folder, {TODAY})
    assert batches_of(folder, "scheduled") == [2]
    assert {table: rows(table) for table in facts.SCHEMAS} == before

    stories(spark, folder, {TODAY}, 3, number=1)
    stories(spark, folder, {TODAY}, 4, number=1)
    before = {table: rows(table) for table in facts.SCHEMAS}
    delete, left = folder.files.delete_dir, [1]

    class Interrupted:
        """A file system that ends the process after a deletion."""

        def delete_dir(self, path: str) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            delete(path)

        def __getattr__(self, name: str) -> Any:
            return getattr(usual, name)

    usual = folder.files
    folder.files = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        compact(spark, folder, {TODAY})
    again = Folder(str(tmp_path))
    assert len(batches_of(again, "scheduled")) == 2, "one of the three is gone"
    merging.finish_replacing(again)
    merging.finish_replacing(again)
    assert batches_of(again, "scheduled") == [4]
    assert {table: rows(table) for table in facts.SCHEMAS} == before


def test_messages_become_overdue_without_new_facts(spark: SparkSession, tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.begin()
    stories(spark, folder, {TODAY}, 0)
    for table in ("delivered", "processed", "failed", "occurrences"):
        shutil.rmtree(tmp_path / table)
    note = Note(name="scheduled-0", rows={"scheduled": 20}, days=(TODAY,))
    ten = datetime(2026, 11, 21, 10, tzinfo=UTC)

    def counted() -> list[tuple[int, int]]:
        return [
            (row["count"], row["overdue"]) for row in folder.read(spark, "pending", tables.PENDING_SCHEMA).collect()
        ]

    refresh(spark, folder, [note], now=ten)
    assert counted() == [(20, 0)]
    assert refresh(spark, folder, [], now=ten + timedelta(seconds=15)) == set()
    assert refresh(spark, folder, [], now=ten + timedelta(seconds=20)) == {TODAY}
    assert counted() == [(20, 11)]
    outcomes = spark.read.parquet(str(tmp_path / "messages")).groupBy("outcome").count().collect()
    assert {tuple(row) for row in outcomes} == {("overdue", 11), ("scheduled", 9)}


class Lives:
    """Facts of made-up messages, in whatever order and division they come."""

    def __init__(self, chance: random.Random, number: int) -> None:
        self.facts: list[tuple[str, dict[str, Any]]] = []
        for one in range(number):
            self._live(chance, f"m-{one}" if chance.random() > 0.05 else None)
        chance.shuffle(self.facts)

    def _live(self, chance: random.Random, message_id: str | None) -> None:
        # Far from the time at which they are looked at, since overdue ones are counted by slices of ten seconds.
        due = NOON + timedelta(minutes=chance.choice([*range(-30, -5), 20, 600, 780]), seconds=chance.random() * 50)
        same = {"message_id": message_id, "sent": due - timedelta(hours=1), "due": due, "retries": 0,
                "day": due.date(), "type": "t", "size": 5, "layout": "clock", "stream": "tap"}  # fmt: skip
        for target in chance.sample(["q:orders", "q:mail", "x:shop"], chance.choice([0, 1, 1, 1, 2])):
            tapped = {**same, "target": target, "first_due": due}
            delivered = {**tapped, "delivered": due + timedelta(milliseconds=9), "lateness_ms": chance.randint(0, 99)}
            copies = chance.choice([1, 1, 1, 2])
            self._add("scheduled", {**tapped, "scheduled": same["sent"]}, copies)
            if due < NOON:
                self._add("delivered", delivered, chance.choice([0, *[copies] * 3]))
        outcome = chance.choice(["delivered", "cancelled", "superseded"])
        occurrence = {**same, "target": "q:orders", "occurrence": message_id, "ended": due, "outcome": outcome}
        self._add("occurrences", occurrence, chance.choice([0, 0, 1]))
        if due < NOON and chance.random() < 0.5:
            processed = {**same, "endpoint": "shop", "queue": "orders", "attempt": 1, "delivered": due, "started": due}
            failed = {
                **processed,
                "kind": "failed",
                "ended": due + timedelta(seconds=1),
                "exception": "E",
                "group": "g",
            }
            self._add("failed", failed, chance.choice([0, 0, 1, 2]))
            self._add(
                "processed", {**processed, "attempt": 2, "ended": due + timedelta(seconds=2)}, chance.choice([0, 1])
            )

    def _add(self, table: str, row: dict[str, Any], copies: int) -> None:
        self.facts += [(table, {**row, "offset": len(self.facts)})] * copies


def append(spark: SparkSession, folder: Folder, rows_by_table: list[tuple[str, dict[str, Any]]], batch: int) -> Note:
    rows: dict[str, list[dict[str, Any]]] = {table: [] for table in facts.SCHEMAS}
    for table, row in rows_by_table:
        rows[table].append(row)
    for table, some in rows.items():
        names = facts.SCHEMAS[table].names
        values = [tuple(float(v) if n == "lateness_ms" and v is not None else v for n in names for v in [row.get(n)])
                  for row in some]  # fmt: skip
        folder.append(spark.createDataFrame(values, facts.SCHEMAS[table]).coalesce(1), table, batch)
    days = {row["day"] for _, row in rows_by_table}
    counts = {table: len(some) for table, some in rows.items()}
    return Note(name=f"all-{batch}", rows=counts, days=tuple(sorted(days)))


def tables_of(spark: SparkSession, folder: Folder) -> dict[str, list[Any]]:
    found = {}
    for table in ("messages", "pending", "lateness", "failures", "_state/pending"):
        rows = spark.read.parquet(folder.location(table))
        if table == "messages":
            rows = rows.withColumn("waiting", F.array_sort("waiting"))
        if table == "_state/pending":
            rows = rows.groupBy("target", "due", "day").agg(F.sum("count"), F.sum("overdue"))
        found[table] = sorted((tuple(row) for row in rows.drop("batch").collect()), key=repr)
    return found


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20 if SOAK else 1))
def test_several_rounds_and_one_round_give_the_same_tables(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """However the facts are divided, with interruptions, and with small batches being put together."""
    monkeypatch.setattr(merging, "MAX_BATCHES", 1)
    chance = random.Random(seed)
    lives = Lives(chance, 60).facts
    whole = Folder(str(tmp_path / "whole"))
    whole.begin()
    refresh(spark, whole, [append(spark, whole, lives, 0)], now=NOON)

    class Interrupted(Folder):
        """Is interrupted before or after it writes the table."""

        at: tuple[str, bool] | None = None

        def write(self, rows: DataFrame, table: str, *, by: tuple[str, ...] = ("day",)) -> None:
            if self.at == (table, False):
                raise KeyboardInterrupt
            super().write(rows, table, by=by)
            if self.at == (table, True):
                raise KeyboardInterrupt

    folder = Interrupted(str(tmp_path / "rounds"))
    folder.begin()
    cuts = sorted(chance.sample(range(len(lives)), 2))
    for batch, (first, last) in enumerate(zip([0, *cuts], [*cuts, len(lives)], strict=True)):
        note = append(spark, folder, lives[first:last], batch)
        now = NOON - timedelta(minutes=40 * (2 - batch))
        if batch:
            folder.at = chance.choice(["messages", "_state/pending", "lateness"]), chance.random() < 0.5
            with pytest.raises(KeyboardInterrupt):
                refresh(spark, folder, [note], now=now)
            folder.at = None
        refresh(spark, folder, [note], now=now)
        compact(spark, folder, note.days)
    assert tables_of(spark, folder) == tables_of(spark, whole)


@pytest.mark.long
def test_an_interrupted_commit_is_repaired(spark: SparkSession, tmp_path: Path) -> None:
    """Spark deletes each folder before it puts the new one in its place, and bide deletes batches that were joined.

    The states in between are made by hand.
    """
    folder, yesterday = Folder(str(tmp_path)), TODAY - timedelta(days=1)
    folder.begin()
    refresh(spark, folder, [stories(spark, folder, {yesterday, TODAY}, 0, number=2)], now=NOON)
    folder.begin_work({(yesterday, 0), (yesterday, 1), (TODAY, 0)})
    assert folder.unfinished_work().days == set(), "nothing was changed yet"
    for table in ("messages", "lateness"):
        shutil.rmtree(tmp_path / table / f"day={TODAY}")
    joined = tmp_path / "messages" / f"day={yesterday}"
    shutil.copytree(joined / "batch=0", joined / "batch=1")
    new = stories(spark, folder, {TODAY}, 1, number=2, hour=13)
    for table in ("delivered", "processed"):
        shutil.rmtree(tmp_path / table / f"day={TODAY}" / "batch=1")
    # The next round is killed too, before it changes anything.
    folder.begin_work({*folder.unfinished_work().batches, (TODAY, 1)})
    assert folder.unfinished_work().days == {yesterday, TODAY}
    refresh(spark, folder, [new], now=NOON)
    assert not folder.unfinished_work()
    messages = folder.read(spark, "messages", tables.MESSAGES_SCHEMA).collect()
    assert Counter((row["day"], row["outcome"]) for row in messages) == {
        (yesterday, "processed"): 2,
        (TODAY, "processed"): 2,
        (TODAY, "scheduled"): 2,
    }
    assert sum(row["count"] for row in folder.read(spark, "lateness", tables.LATENESS_SCHEMA).collect()) == 4


def test_notes_can_be_counted_while_they_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As progress counts them, in a thread of its own, at the end of a round."""
    folder = Folder(str(tmp_path))
    folder.begin()
    notes = [Note(name=f"events-{number}", rows={"processed": 2}, days=(TODAY,)) for number in range(3)]
    for note in notes:
        folder.add_note(note)
    assert (folder.noted_rows(), folder.notes()) == (6, notes)
    listed = Folder.entries

    def delete_notes(self: Folder, path: str) -> list[str]:
        found = listed(self, path)
        self.delete_notes(notes[:1])
        return found

    monkeypatch.setattr(Folder, "entries", delete_notes)
    assert folder.noted_rows() == 4


def test_a_path_means_the_local_file_system(spark: SparkSession, tmp_path: Path) -> None:
    """Spark and Arrow look into the same folder, where Spark's default file system is a cluster's."""
    elsewhere = spark.newSession()
    elsewhere.conf.set("spark.sql.shuffle.partitions", "2")
    elsewhere.conf.set("fs.defaultFS", "hdfs://127.0.0.1:9")
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        elsewhere.read.parquet(str(tmp_path))
    folder = Folder(str(tmp_path / "with a space, [and] a {pattern}?"))
    folder.begin()
    note = stories(elsewhere, folder, {TODAY}, 0)
    refresh(elsewhere, folder, [note], now=NOON)
    assert folder.read(elsewhere, "messages", tables.MESSAGES_SCHEMA).count() == 20
    assert {"messages", "scheduled"} <= {one.name for one in Path(folder.place).iterdir()}


def test_foreign_folders_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    with pytest.raises(InvalidInputError, match="contains other files than an audit: name another folder"):
        Folder(str(tmp_path)).begin()
    with pytest.raises(InvalidInputError, match="cannot be used"):
        Folder("nothing://here")
    own = Folder(str(tmp_path / "own"))
    own.begin()
    own.begin()
    head = tmp_path / "own" / "_state" / "audit.json"
    head.write_text('{"version": 1}')
    with pytest.raises(InvalidInputError, match="an audit of version 1, but this bide writes version 3"):
        own.begin()


def test_an_incomplete_new_folder_can_be_started_again(tmp_path: Path) -> None:
    """A kill then leaves an incomplete folder that no other run uses."""
    folder = Folder(str(tmp_path))
    with folder.lock():
        (tmp_path / "_state" / "audit.json.new").write_text('{"ver')
        with pytest.raises(FolderInUseError, match="is in use by the process "):
            Folder(str(tmp_path)).begin()
    with pytest.raises(InvalidInputError, match="has no audit: name"):
        folder.check()
    folder.begin()
    folder.check()
    others = tmp_path / "others" / "_state"
    others.mkdir(parents=True)
    (others / "mine.txt").touch()
    with pytest.raises(InvalidInputError, match="contains other files than an audit"):
        Folder(str(others.parent)).begin()
    assert [one.name for one in others.iterdir()] == ["mine.txt"], "nothing is written there"
