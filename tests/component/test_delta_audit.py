"""Audits with Delta tables, without a broker."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, TableFeatures
from pyarrow import fs, parquet

from bide.cli import app as cli
from bide.errors import InvalidInputError
from bide.pipelines.audit import delta_storage, iceberg_storage, merging, small
from bide.pipelines.audit import run as audit_run
from bide.pipelines.audit.columns import (
    FACT_COLUMNS,
    FAILURES_COLUMNS,
    LATENESS_COLUMNS,
    MESSAGES_SCHEMA,
    PENDING_COLUMNS,
    TABLES_BY_SOURCE,
    UNDECODABLE,
    UNDECODABLE_COLUMNS,
    arrow_schema,
)
from bide.pipelines.audit.fact_rows import TABLE_COLUMN, fact_schema
from bide.pipelines.audit.folder import Folder, Note
from bide.pipelines.audit.positions import NewMessages
from bide.pipelines.audit.run import Sources, run
from bide.pipelines.audit.small import SmallAudit
from bide.pipelines.audit.storage import TableStorage, open_storage
from bide.pipelines.audit.table_format import TABLE_FORMATS, TableFormat
from bide.pipelines.replay.fact_tables import fact_tables
from bide.pipelines.report.duckdb_tables import small_tables
from bide.streams.range_reader import OffsetRange
from tests.killed_files import TRANSACTIONS, KillingFiles

TODAY = date(2026, 11, 21)
YESTERDAY = TODAY - timedelta(days=1)
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)

SCHEMAS = {
    **{name: arrow_schema(columns) for name, columns in FACT_COLUMNS.items()},
    "messages": MESSAGES_SCHEMA,
    "pending": arrow_schema(PENDING_COLUMNS),
    "lateness": arrow_schema(LATENESS_COLUMNS),
    "failures": arrow_schema(FAILURES_COLUMNS),
}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return new_folder(tmp_path / "audit")


def new_folder(place: Path, table_format: TableFormat = "delta") -> Folder:
    found = Folder(str(place), table_format=table_format)
    found.begin()
    return found


def facts(table: str, *ids: str, days: tuple[date, ...] = (TODAY,), **values: Any) -> pa.Table:
    """Facts of these messages, which were due in the morning of each of these days."""
    schema = arrow_schema({**FACT_COLUMNS, UNDECODABLE: UNDECODABLE_COLUMNS}[table])
    listed = []
    for day in days:
        due = datetime(day.year, day.month, day.day, 9, tzinfo=UTC)
        times = ("sent", "scheduled", "due", "first_due", "delivered", "started", "ended", "seen")
        known = {"target": "q:orders", "stream": "tap", "lateness_ms": 20.0, "day": day, **dict.fromkeys(times, due)}
        for one in ids:
            row = {**known, "message_id": one, "reason": one, **values}
            listed.append({name: row.get(name) for name in schema.names})
    return pa.Table.from_pylist(listed, schema=schema)


def append(folder: Folder, batch: int, **tables: pa.Table) -> Note:
    """Append a batch of facts, and return its note."""
    for name, rows in tables.items():
        open_storage(folder).append(rows, name, batch)
    days = {day for rows in tables.values() for day in rows.column("day").to_pylist()}
    counts = {name: rows.num_rows for name, rows in tables.items()}
    return Note(name=f"all-{batch}", rows=counts, days=tuple(sorted(days)))


def replace(storage: TableStorage, rows: pa.Table, table: str, batch: int) -> None:
    """Replace the last batch of a day with the next one."""
    numbered = rows.append_column("batch", pa.repeat(pa.scalar(batch, pa.int64()), rows.num_rows))
    storage.replace_batches(numbered, table, {(TODAY, max(batch - 1, 0)), (TODAY, batch)})


def ids_in(folder: Folder, table: str) -> list[str]:
    return sorted(open_storage(folder).read(table, SCHEMAS[table]).column("message_id").to_pylist())


def contents(folder: Folder) -> dict[str, list[str]]:
    storage = open_storage(folder)
    return {name: sorted(map(repr, storage.read(name, schema).to_pylist())) for name, schema in SCHEMAS.items()}


def audit_twice(folder: Folder) -> None:
    """Two rounds on two days, of which the second delivers messages of the first."""
    audit = SmallAudit(folder)
    first = append(folder, 0, scheduled=facts("scheduled", "a", "b", "c", days=(YESTERDAY, TODAY)))
    assert audit.refresh([first], now=NOON) == {YESTERDAY, TODAY}
    failed = facts("failed", "b", endpoint="shop", queue="orders", kind="parked", exception="ValueError", group="g")
    second = append(
        folder,
        1,
        delivered=facts("delivered", "a", "b"),
        processed=facts("processed", "a", endpoint="shop"),
        failed=failed,
    )
    assert audit.refresh([second], now=NOON) == {TODAY}
    audit.compact({TODAY})
    assert audit.pending() == (4, 4)
    assert not folder.unfinished_work()


def test_all_formats_have_the_same_tables(tmp_path: Path) -> None:
    folders = {one: new_folder(tmp_path / one, one) for one in TABLE_FORMATS}
    for folder in folders.values():
        audit_twice(folder)
    found = {one: contents(folder) for one, folder in folders.items()}
    # pyiceberg writes an empty list for null (apache/iceberg-python#3833).
    messages = found["iceberg"]["messages"]
    found["iceberg"]["messages"] = [row.replace("'waiting': []", "'waiting': None") for row in messages]
    assert found["delta"] == found["iceberg"] == found["parquet"]
    assert {name for name, rows in found["delta"].items() if not rows} == {"occurrences"}


@pytest.mark.parametrize("table_format", TABLE_FORMATS)
def test_the_last_minute_that_can_be_due_has_its_lateness(tmp_path: Path, table_format: TableFormat) -> None:
    folder, day = new_folder(tmp_path, table_format), date(9999, 12, 31)
    due = datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
    note = append(folder, 0, delivered=facts("delivered", "a", days=(day,), due=due, first_due=due))
    assert SmallAudit(folder).refresh([note], now=NOON) == {day}
    (row,) = open_storage(folder).read("lateness", SCHEMAS["lateness"]).to_pylist()
    assert (row["minute"], row["count"], row["max_ms"]) == (due.replace(second=0, microsecond=0), 1, 20.0)


def test_a_round_replaces_a_table_in_one_transaction(folder: Folder) -> None:
    days, names = (YESTERDAY, TODAY), ("scheduled", "messages", "_state/pending", "pending")
    versions = []
    for batch in range(2):
        note = append(folder, batch, scheduled=facts("scheduled", f"m-{batch}", days=days))
        SmallAudit(folder).refresh([note], now=NOON)
        versions.append({name: DeltaTable(folder.path(name)).version() for name in names})
    assert versions[1] == {name: version + 1 for name, version in versions[0].items()}
    assert DeltaTable(folder.path("messages"), version=versions[0]["messages"]).count() == 2
    assert DeltaTable(folder.path("messages")).count() == 4


def test_a_batch_that_was_begun_is_dropped(folder: Folder) -> None:
    storage = open_storage(folder)
    for batch, name in enumerate(("kept", "dropped")):
        append(folder, batch, scheduled=facts("scheduled", name))
        for source in ("events", "scheduled"):
            storage.append(facts(UNDECODABLE, name), f"{UNDECODABLE}/source={source}", batch)
    for table in ("scheduled", f"{UNDECODABLE}/source=events", "delivered"):
        storage.drop_batch(table, 1)
    assert ids_in(folder, "scheduled") == ["kept"]
    left = DeltaTable(folder.path(UNDECODABLE)).to_pyarrow_table().to_pylist()
    assert sorted((row["source"], row["reason"]) for row in left) == [
        ("events", "kept"),
        ("scheduled", "dropped"),
        ("scheduled", "kept"),
    ]


def test_a_write_without_its_commit_changes_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """``kill -9`` between the files of a transaction and its log entry leaves these files, which are deleted later."""
    monkeypatch.setattr(delta_storage, "RETENTION", timedelta(0))
    monkeypatch.setattr(delta_storage, "VACUUM_FILES", 1)
    append(folder, 0, scheduled=facts("scheduled", "a"))
    append(folder, 1, scheduled=facts("scheduled", "b"))
    Path(folder.path("scheduled", "_delta_log", f"{2:020}.json")).unlink()
    data = Path(folder.path("scheduled", f"day={TODAY}"))
    assert (ids_in(folder, "scheduled"), len(list(data.iterdir()))) == (["a"], 2)
    append(folder, 1, scheduled=facts("scheduled", "b", "c"))
    SmallAudit(folder).compact({TODAY})
    assert (ids_in(folder, "scheduled"), len(list(data.iterdir()))) == (["a", "b", "c"], 2)


def test_a_table_without_its_first_commit_is_created_again(folder: Folder) -> None:
    append(folder, 0, scheduled=facts("scheduled", "a"))
    log = Path(folder.path("scheduled", "_delta_log"))
    for one in log.iterdir():
        one.unlink()
    open_storage(folder).drop_batch("scheduled", 0)
    assert ids_in(folder, "scheduled") == []
    with fact_tables(folder) as replayed:
        assert replayed.failures() == []
    append(folder, 0, scheduled=facts("scheduled", "b"))
    assert ids_in(folder, "scheduled") == ["b"]


def test_staged_rows_are_appended_at_once(folder: Folder) -> None:
    storage = open_storage(folder)
    for part, day in enumerate((YESTERDAY, TODAY)):
        place = Path(folder.path(storage.staging("occurrences"), f"day={day}", "batch=3"))
        place.mkdir(parents=True)
        rows = facts("occurrences", f"m-{part}", days=(day,)).drop_columns(["day"])
        parquet.write_table(rows, place / f"part-{part}.parquet")
    assert ids_in(folder, "occurrences") == []
    storage.append_staged("occurrences", 3)
    storage.append_staged("occurrences", 3)
    found = DeltaTable(folder.path("occurrences")).to_pyarrow_table().to_pylist()
    assert sorted((one["message_id"], one["day"], one["batch"]) for one in found) == [
        ("m-0", YESTERDAY, 3),
        ("m-1", TODAY, 3),
    ]
    storage.drop_batch("occurrences", 3)
    assert ids_in(folder, "occurrences") == []


class Streams:
    """Streams in memory, in place of those of a broker: a message for each offset.

    Attributes:
        end: the offset after the last message of each stream.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end: int) -> None:
        self.end = end
        monkeypatch.setattr(audit_run, "StreamLogs", lambda _: nullcontext())
        monkeypatch.setattr(audit_run, "find_new_messages", self._find_new)
        monkeypatch.setattr(audit_run, "FactReader", StoredFacts)
        monkeypatch.setattr(audit_run, "read_schedule_log", lambda *_, **__: None)

    def _find_new(self, _: object, streams: Sequence[str], known: Mapping[str, int], **__: object) -> NewMessages:
        return NewMessages(begin={one: known.get(one, 0) for one in streams}, end=dict.fromkeys(streams, self.end))


class StoredFacts:
    """Facts of such a stream."""

    def __init__(self, *, source: str, **_: object) -> None:
        self.source = source

    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        schema, tables = fact_schema(self.source), TABLES_BY_SOURCE[self.source]
        for offset in range(wanted.start, wanted.end):
            name = f"m-{offset}" if self.source == "scheduled" else f"m-{offset // 2}"
            table = tables[offset % len(tables)]
            more = {"offset": offset, "endpoint": "shop", "kind": "parked", "exception": "E", "group": "g"}
            row = facts(table, name, days=((YESTERDAY, TODAY)[offset % 3 == 0],), **more).to_pylist()[0]
            full = {one: row.get(one) for one in schema.names} | {TABLE_COLUMN: table}
            yield from pa.Table.from_pylist([full], schema=schema).to_batches()


class InterruptingFiles(KillingFiles):
    """Interrupts the process instead of killing it."""

    def change(self) -> None:
        if self.left <= 0:
            raise KeyboardInterrupt
        self.left -= 1


@pytest.mark.parametrize("table_format", TABLE_FORMATS)
@pytest.mark.parametrize("interruptions", [4, pytest.param(60, marks=pytest.mark.long)])
def test_an_interrupted_round_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table_format: TableFormat, interruptions: int
) -> None:
    """Before a change of a file or a table, in a round that continues an interrupted one."""
    monkeypatch.setattr(merging, "MAX_BATCHES", 1)
    monkeypatch.setattr(iceberg_storage, "RETENTION", timedelta(0))
    monkeypatch.setattr(iceberg_storage, "EXPIRED_SNAPSHOTS", 1)
    streams = Streams(monkeypatch, end=8)
    sources = Sources(
        url="amqp://localhost", scheduled={"s": "clock"}, delivered={"d": "clock"}, events=("e",), batch_rows=10
    )

    def run_once(place: Path, left: int) -> int:
        """Run a round with this number of changes. Returns how many it made."""
        folder = Folder(str(place), table_format=table_format)
        files = InterruptingFiles(folder.files, left)
        folder.begin()
        # Locked before, because a lock in a file would outlast the interruption.
        with folder.lock(), monkeypatch.context() as patched:
            folder.files = fs.PyFileSystem(files)
            for owner, name in TRANSACTIONS:
                patched.setattr(owner, name, files.counted(getattr(owner, name)))
            run(None, sources, folder)
        return left - files.left

    for name in ("whole", "audit"):
        run_once(tmp_path / name, 1_000_000)
    streams.end = 20
    changes = run_once(tmp_path / "whole", 1_000_000)
    assert changes > 30
    chance = random.Random(interruptions)
    for left in sorted(chance.sample(range(changes), min(interruptions, changes))):
        with suppress(KeyboardInterrupt):
            run_once(tmp_path / "audit", left)
    run_once(tmp_path / "audit", 1_000_000)
    folder = Folder(str(tmp_path / "audit"))
    assert contents(folder) == contents(Folder(str(tmp_path / "whole")))
    assert (folder.notes(), bool(folder.unfinished_work())) == ([], False)
    assert len(ids_in(folder, "scheduled")) == 20


def test_many_rounds_leave_few_files(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of facts, of a computed table, and of the logs of both."""
    monkeypatch.setattr(delta_storage, "RETENTION", timedelta(0))
    for owner, name in (
        (delta_storage, "CHECKPOINT_INTERVAL"),
        (delta_storage, "VACUUM_FILES"),
        (merging, "MAX_BATCHES"),
    ):
        monkeypatch.setattr(owner, name, 3)
    storage, tables = open_storage(folder), ("scheduled", "delivered")
    counts = []
    for batch in range(24):
        rows = facts("scheduled", f"m-{batch:02}")
        storage.append(rows, "scheduled", batch)
        replace(storage, facts("delivered", f"m-{batch:02}"), "delivered", batch)
        storage.compact({TODAY})
        counts.append([len(list(Path(folder.path(name)).rglob("*"))) for name in tables])
    assert ids_in(folder, "scheduled") == [f"m-{batch:02}" for batch in range(24)]
    assert ids_in(folder, "delivered") == ["m-23"]
    for some in zip(*counts, strict=True):
        assert max(some[12:]) <= max(some[:12]) < 30


def number_of_calls(work: Callable[[], object]) -> int:
    """The number of calls in Python, and of Python's extensions: a measure of work that has no noise."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("table_format", TABLE_FORMATS)
def test_a_round_costs_the_same_after_a_longer_history(tmp_path: Path, table_format: TableFormat) -> None:
    """It has all tables of facts, of which the round adds to those of one day."""
    calls = {}
    for days in (2, 20):
        folder = new_folder(tmp_path / str(days), table_format)
        storage, audit = open_storage(folder), SmallAudit(folder)
        history = tuple(YESTERDAY - timedelta(days=one) for one in range(days))
        for table in FACT_COLUMNS:
            storage.append(facts(table, "a", "b", days=history), table, 0)

        def run_round(folder: Folder = folder, audit: SmallAudit = audit) -> None:
            tables = {name: facts(name, "c") for name in ("scheduled", "delivered")}
            assert audit.refresh([append(folder, 1, **tables)], now=NOON) == {TODAY}
            audit.compact({TODAY})

        calls[days] = number_of_calls(run_round)
        assert ids_in(folder, "messages") == ["c"]
    assert calls[20] < 1.1 * calls[2]


class WatchedStorage:
    """Counts the rows that are read of facts and messages."""

    def __init__(self, storage: TableStorage) -> None:
        self._storage = storage
        self.rows = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._storage, name)
        if name not in ("read", "read_files", "read_batches"):
            return attribute

        def read(table: str, schema: pa.Schema, *args: Any, **options: Any) -> pa.Table:
            found = attribute(table, schema, *args, **options)
            self.rows += found.num_rows if "message_id" in schema.names else 0
            return found

        return read


@pytest.mark.parametrize("table_format", TABLE_FORMATS)
def test_a_round_reads_as_much_after_a_longer_history_of_its_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table_format: TableFormat
) -> None:
    """Its new messages, and those of the batch before, of which it has new facts."""
    monkeypatch.setattr(merging, "MAX_BATCHES", 100)
    folder, rows = new_folder(tmp_path, table_format), []
    for batch in range(7):
        due = datetime(TODAY.year, TODAY.month, TODAY.day, 9, tzinfo=UTC) + timedelta(minutes=batch)
        ids = [f"m-{batch}-{one}" for one in range(50)]
        late = [f"m-{batch - 1}-0"] if batch else []
        tables = {
            "scheduled": facts("scheduled", *ids, due=due, first_due=due),
            "delivered": pa.concat_tables([
                facts("delivered", *ids[1:], due=due, first_due=due),
                facts("delivered", *late, due=due - timedelta(minutes=1), first_due=due - timedelta(minutes=1)),
            ]),
        }  # fmt: skip
        note = append(folder, batch, **tables)
        watched = WatchedStorage(open_storage(folder))
        with monkeypatch.context() as patched:
            patched.setattr(small, "open_storage", lambda _, watched=watched: watched)
            SmallAudit(folder).refresh([note], now=NOON)
        rows.append(watched.rows)
    outcomes = open_storage(folder).read("messages", MESSAGES_SCHEMA).column("outcome").to_pylist()
    assert Counter(outcomes) == {"delivered": 50 * 7 - 1, "overdue": 1}
    assert rows[6] == rows[3] > 0


def test_files_to_delete_are_looked_for_more_rarely_in_larger_tables(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because that lists all files of a table. A storage lives for one round."""
    monkeypatch.setattr(delta_storage, "RETENTION", timedelta(0))
    monkeypatch.setattr(delta_storage, "VACUUM_FILES", 2)
    monkeypatch.setattr(delta_storage, "FILES_PER_VERSION", 5)
    listed = []
    vacuum = DeltaTable.vacuum

    def counted(table: DeltaTable, *args: Any, **options: Any) -> list[str]:
        listed.append(Path(table.table_uri).name)
        return vacuum(table, *args, **options)

    monkeypatch.setattr(DeltaTable, "vacuum", counted)
    days = tuple(TODAY - timedelta(days=one) for one in range(30))
    open_storage(folder).append(facts("delivered", "old", days=days), "delivered", 0)
    for batch in range(24):
        storage = open_storage(folder)
        for table in ("scheduled", "delivered"):
            replace(storage, facts(table, f"m-{batch}"), table, batch)
        storage.compact({TODAY})
    # Each time twice: a look at what would be deleted, and the deletion.
    assert listed.count("delivered") <= 2 * 24 // (30 // 5)
    assert listed.count("scheduled") >= 24 // 2
    assert {len(list(Path(folder.path(name), f"day={TODAY}").iterdir())) <= 8 for name in set(listed)} == {True}
    listed.clear()
    open_storage(folder).compact(set())
    assert listed == []


def test_readers_take_the_newest_version_of_each_table(folder: Folder, tmp_path: Path) -> None:
    """The folder still has the files of earlier versions."""
    audit_twice(folder)
    assert len(list(Path(folder.path("messages")).rglob("*.parquet"))) > len(
        DeltaTable(folder.path("messages")).file_uris()
    )
    with small_tables(folder.place) as tables:
        messages = tables.rows(f"select count(*) as number from {tables.names['messages']}")
        assert messages == [{"number": 6}]
        assert tables.rows(f'select sum("count") as number from {tables.names["pending"]}') == [{"number": 4}]
    empty = new_folder(tmp_path / "empty")
    SmallAudit(empty).refresh([], now=NOON)
    with small_tables(empty.place) as tables:
        assert {name: tables.rows(f"select * from {tables.names[name]}") for name in tables.names} == {
            "pending": [],
            "failures": [],
        }
    with fact_tables(folder) as replayed:
        assert [one["message_id"] for one in replayed.failures()] == ["b"]


def test_another_format_than_that_of_the_folder_is_refused(tmp_path: Path) -> None:
    for own, other in (("parquet", "delta"), ("delta", "iceberg"), ("iceberg", "parquet")):
        place = tmp_path / own
        new_folder(place, own)  # type: ignore[arg-type]  # a literal
        with pytest.raises(InvalidInputError, match=f"has tables of the format {own}, not {other}: leave"):
            new_folder(place, other)  # type: ignore[arg-type]  # a literal
        again = Folder(str(place))
        again.begin()
        assert again.table_format == own
    assert json.loads((tmp_path / "parquet" / "_state" / "audit.json").read_bytes()) == {"version": 3}
    # Releases of bide without a format refuse its version.
    for own, version in (("delta", 5), ("iceberg", 6)):
        head = tmp_path / own / "_state" / "audit.json"
        assert json.loads(head.read_bytes()) == {"version": version, "format": own}
    (tmp_path / "delta" / "_state" / "audit.json").write_text('{"version": 7, "format": "lance"}')
    with pytest.raises(InvalidInputError, match="has an audit of version 7, but this bide writes version 3, or 5 with"):
        Folder(str(tmp_path / "delta")).begin()


def test_spark_and_uris_are_refused(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidInputError, match=r"Spark writes Parquet tables only, .* delta: run it"):
        run(object(), Sources(url="amqp://localhost"), folder)  # type: ignore[arg-type]  # it is not used
    with pytest.raises(InvalidInputError, match="Delta tables need a folder on this machine: give a path"):
        Folder("s3://audits/shop", table_format="delta")
    # deltalake panics at some characters of a path.
    for character in "[]^|\\%\t":
        with pytest.raises(InvalidInputError, match=r"^Delta tables cannot be in .*: name another folder$"):
            Folder(f"/audits/a{character}b", table_format="delta")


def test_a_table_that_another_program_has_changed_is_refused(folder: Folder) -> None:
    """With deletion vectors, its files have rows that are not in the table."""
    audit_twice(folder)
    table = DeltaTable(folder.path("failed"))
    table.alter.add_feature(TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)
    expected = (
        r"/failed needs readers of version 3, because another program has changed it, and bide supports version 1"
    )
    with pytest.raises(InvalidInputError, match=expected), fact_tables(folder):
        pytest.fail("it was read")
    note = append(folder, 2, scheduled=facts("scheduled", "d"))
    with pytest.raises(InvalidInputError, match=expected):
        SmallAudit(folder).refresh([note], now=NOON)


def test_a_missing_package_is_named(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    audit_twice(folder)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    check_advice(folder, tmp_path, capsys, table_format="delta", package="deltalake")


def check_advice(
    folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, table_format: str, package: str
) -> None:
    """Check that rounds and commands name the missing package of a format, and create nothing."""
    advice = f"{table_format.title()} tables need the package {package}: pip install 'bide[{table_format}]'"
    with pytest.raises(InvalidInputError, match=rf"pip install 'bide\[{table_format}\]'"):
        run(None, Sources(url="amqp://localhost"), folder)
    new = tmp_path / "new"
    for command in (
        ("audit", "--into", str(new), "--format", table_format),
        ("report", folder.place, "--out", str(tmp_path / "report.html")),
    ):
        assert cli.run(["pipeline", *command]) == 2
        assert advice in capsys.readouterr().err
    assert not new.exists()
