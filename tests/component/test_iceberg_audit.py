"""Audits with Iceberg tables, without a broker."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from datetime import date, timedelta
from pathlib import Path

import pytest
from pyarrow import parquet
from pyiceberg.table import Table, TableProperties, Transaction

from bide.errors import InvalidInputError
from bide.pipelines.audit import iceberg_storage, merging
from bide.pipelines.audit.columns import UNDECODABLE
from bide.pipelines.audit.folder import Folder
from bide.pipelines.audit.run import Sources, run
from bide.pipelines.audit.small import SmallAudit
from bide.pipelines.audit.storage import open_storage
from bide.pipelines.iceberg import identifier, open_catalog
from bide.pipelines.replay.fact_tables import fact_tables
from bide.pipelines.report.duckdb_tables import small_tables
from tests.component.test_delta_audit import (
    NOON,
    TODAY,
    YESTERDAY,
    append,
    audit_twice,
    check_advice,
    contents,
    facts,
    ids_in,
    new_folder,
    replace,
)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return new_folder(tmp_path / "with a space, #1", "iceberg")


@pytest.fixture
def _short_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expired snapshots and files are deleted in each round."""
    monkeypatch.setattr(iceberg_storage, "RETENTION", timedelta(0))
    monkeypatch.setattr(iceberg_storage, "EXPIRED_SNAPSHOTS", 1)


def table_of(folder: Folder, name: str) -> Table:
    with open_catalog(folder.path()) as catalog:
        found: Table = catalog.load_table(identifier(name))
        return found


def files_in(folder: Folder, *parts: str) -> list[Path]:
    return [one for one in Path(folder.path(*parts)).rglob("*") if one.is_file()]


def test_a_round_replaces_a_table_in_one_transaction(folder: Folder) -> None:
    names = ("scheduled", "messages", "_state/pending", "pending")
    versions = []
    for batch in range(2):
        note = append(folder, batch, scheduled=facts("scheduled", f"m-{batch}", days=(YESTERDAY, TODAY)))
        SmallAudit(folder).refresh([note], now=NOON)
        versions.append({name: len(table_of(folder, name).metadata.metadata_log) for name in names})
    assert versions[1] == {name: version + 1 for name, version in versions[0].items()}
    assert table_of(folder, "messages").scan().count() == 4


def test_a_batch_that_was_begun_is_dropped(folder: Folder) -> None:
    storage = open_storage(folder)
    for batch, name in enumerate(("kept", "dropped")):
        append(folder, batch, scheduled=facts("scheduled", name))
        for source in ("events", "scheduled"):
            storage.append(facts(UNDECODABLE, name), f"{UNDECODABLE}/source={source}", batch)
    for table in ("scheduled", f"{UNDECODABLE}/source=events", "delivered"):
        for _ in range(2):
            storage.drop_batch(table, 1)
    assert ids_in(folder, "scheduled") == ["kept"]
    left = table_of(folder, UNDECODABLE).scan().to_arrow().to_pylist()
    assert sorted((row["source"], row["reason"]) for row in left) == [
        ("events", "kept"),
        ("scheduled", "dropped"),
        ("scheduled", "kept"),
    ]


def test_batches_that_were_not_begun_cost_no_look_for_their_files(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(folder, 4, scheduled=facts("scheduled", "a"))
    monkeypatch.setattr(Table, "scan", None)
    open_storage(folder).drop_batch("scheduled", 5)


@pytest.mark.usefixtures("_short_retention")
def test_a_write_without_its_commit_changes_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed before a commit leaves files, which a later round deletes."""
    append(folder, 0, scheduled=facts("scheduled", "a"))

    def interrupt(_: Transaction) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(Transaction, "commit_transaction", interrupt)
        append(folder, 1, scheduled=facts("scheduled", "b"))
    data = Path(folder.path("scheduled", f"day={TODAY}"))
    assert (ids_in(folder, "scheduled"), len(list(data.iterdir()))) == (["a"], 2)
    append(folder, 1, scheduled=facts("scheduled", "b", "c"))
    SmallAudit(folder).compact({TODAY})
    assert (ids_in(folder, "scheduled"), len(list(data.iterdir()))) == (["a", "b", "c"], 2)


def test_a_table_that_was_not_created_has_no_rows(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    append(folder, 0, failed=facts("failed", "a", endpoint="shop", queue="orders", kind="parked"))
    Path(folder.path("scheduled", "metadata")).mkdir(parents=True)
    (Path(folder.path("scheduled", "metadata")) / "00000-1.metadata.json").write_text("{")
    open_storage(folder).drop_batch("scheduled", 0)
    assert ids_in(folder, "scheduled") == []
    with fact_tables(folder) as replayed:
        assert len(replayed.failures()) == 1
    append(folder, 0, scheduled=facts("scheduled", "b"))
    assert ids_in(folder, "scheduled") == ["b"]


def test_staged_rows_are_appended_at_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iceberg_storage, "STAGED_BYTES", 1)
    storage = open_storage(folder)
    for part, day in enumerate((YESTERDAY, TODAY)):
        place = Path(folder.path(storage.staging("occurrences"), f"day={day}", "batch=3"))
        place.mkdir(parents=True)
        rows = facts("occurrences", f"m-{part}", days=(day,)).drop_columns(["day"])
        parquet.write_table(rows, place / f"part-{part}.parquet")
    assert ids_in(folder, "occurrences") == []
    storage.append_staged("occurrences", 3)
    storage.append_staged("occurrences", 3)
    table = table_of(folder, "occurrences")
    assert len(table.metadata.metadata_log) == 1
    found = sorted((one["message_id"], one["day"], one["batch"]) for one in table.scan().to_arrow().to_pylist())
    assert found == [("m-0", YESTERDAY, 3), ("m-1", TODAY, 3)]
    storage.drop_batch("occurrences", 3)
    assert ids_in(folder, "occurrences") == []


@pytest.mark.usefixtures("_short_retention")
def test_many_rounds_leave_few_files(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of facts, of a table whose batches are replaced, and of the metadata of both."""
    monkeypatch.setattr(iceberg_storage, "EXPIRED_SNAPSHOTS", 2)
    monkeypatch.setattr(iceberg_storage, "METADATA_VERSIONS", 1)
    monkeypatch.setattr(merging, "MAX_BATCHES", 2)
    storage, tables = open_storage(folder), ("scheduled", "messages")
    counts = []
    for batch in range(8):
        storage.append(facts("scheduled", f"m-{batch:02}"), "scheduled", batch)
        replace(storage, facts("scheduled", f"m-{batch:02}"), "messages", batch)
        storage.compact({TODAY})
        counts.append([len(list(Path(folder.path(name)).rglob("*"))) for name in tables])
    assert ids_in(folder, "scheduled") == [f"m-{batch:02}" for batch in range(8)]
    assert table_of(folder, "messages").scan().to_arrow()["message_id"].to_pylist() == ["m-07"]
    for some in zip(*counts, strict=True):
        assert max(some[4:]) <= max(some[:4]) < 30, counts


@pytest.mark.usefixtures("_short_retention")
def test_files_to_delete_are_looked_for_more_rarely_in_larger_tables(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because that reads the names of all files of a table."""
    monkeypatch.setattr(iceberg_storage, "FILES_PER_SNAPSHOT", 5)
    looks, look = [], iceberg_storage._needed_files

    def counted(opened: Table) -> set[str]:
        looks.append(opened.name())
        return look(opened)

    monkeypatch.setattr(iceberg_storage, "_needed_files", counted)
    days = tuple(TODAY - timedelta(days=one) for one in range(10))
    append(folder, 0, scheduled=facts("scheduled", "old", days=days))
    for batch in range(1, 5):
        append(folder, batch, scheduled=facts("scheduled", f"m-{batch}"))
        open_storage(folder).compact({TODAY})
    assert len(looks) == 4 // (10 // 5)


def test_merged_files_have_all_rows_of_their_partition(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of other days and sources are left as they are, and so are those of partitions with few files.

    The rows are in one file, although pyiceberg would divide them.
    """
    monkeypatch.setattr(merging, "MAX_BATCHES", 2)
    monkeypatch.setattr(TableProperties, "WRITE_TARGET_FILE_SIZE_BYTES_DEFAULT", 1)
    storage = open_storage(folder)
    for batch in range(3):
        for source in ("events", "delivered")[: 2 if batch == 0 else 1]:
            rows = facts(UNDECODABLE, f"m-{batch}", days=(YESTERDAY, TODAY))
            storage.append(rows, f"{UNDECODABLE}/source={source}", batch)
    before = rows_of(folder, UNDECODABLE)
    others = files_in(folder, UNDECODABLE, "source=events", f"day={YESTERDAY}")
    others += files_in(folder, UNDECODABLE, "source=delivered")
    storage.compact({TODAY})
    assert rows_of(folder, UNDECODABLE) == before
    with open_catalog(folder.path()) as catalog:
        named = [one.file.file_path for one in catalog.load_table(identifier(UNDECODABLE)).scan().plan_files()]
    merged = set(named) - set(map(str, others))
    assert (len(named), len(merged)) == (len(others) + 1, 1)


def test_a_merge_is_no_larger_than_with_other_formats(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all its rows in memory."""
    monkeypatch.setattr(merging, "MAX_BATCHES", 2)
    storage = open_storage(folder)
    for batch in range(3):
        storage.append(facts("scheduled", f"m-{batch}"), "scheduled", batch)
    sizes = [one.size for one in storage.files("scheduled", TODAY)]
    monkeypatch.setattr(merging, "MERGED_BYTES", sum(sizes) - 1)
    storage.compact({TODAY})
    assert len(storage.files("scheduled", TODAY)) == 2
    assert ids_in(folder, "scheduled") == ["m-0", "m-1", "m-2"]


def rows_of(folder: Folder, name: str) -> Collection[str]:
    return sorted(map(repr, table_of(folder, name).scan().to_arrow().to_pylist()))


def test_readers_take_the_newest_version_of_each_table(folder: Folder, tmp_path: Path) -> None:
    """The folder still has the files of earlier versions."""
    audit_twice(folder)
    named = list(table_of(folder, "messages").scan().plan_files())
    assert len(list(Path(folder.path("messages")).rglob("*.parquet"))) > len(named)
    with small_tables(folder.place) as tables:
        messages = tables.rows(f"select count(*) as number from {tables.names['messages']}")
        assert messages == [{"number": 6}]
        assert tables.rows(f'select sum("count") as number from {tables.names["pending"]}') == [{"number": 4}]
    empty = new_folder(tmp_path / "empty", "iceberg")
    SmallAudit(empty).refresh([], now=NOON)
    with small_tables(empty.place) as tables:
        assert {name: tables.rows(f"select * from {tables.names[name]}") for name in tables.names} == {
            "pending": [],
            "failures": [],
        }
    with fact_tables(folder) as replayed:
        assert [one["message_id"] for one in replayed.failures()] == ["b"]


def test_a_moved_folder_is_refused_until_it_is_moved_back(folder: Folder, tmp_path: Path) -> None:
    """A copy too, whose files name those of the original."""
    append(folder, 0, scheduled=facts("scheduled", "a"))
    link = tmp_path / "link"
    link.symlink_to(folder.place)
    assert ids_in(Folder(str(link)), "scheduled") == ["a"]
    moved = tmp_path / "moved"
    shutil.copytree(folder.place, moved)
    with pytest.raises(InvalidInputError, match=r"/moved/scheduled was written as .*/with a space, #1/scheduled, and"):
        ids_in(Folder(str(moved)), "scheduled")
    shutil.rmtree(folder.place)
    for read in (lambda: ids_in(Folder(str(moved)), "scheduled"), lambda: fact_tables(Folder(str(moved))).__enter__()):
        with pytest.raises(InvalidInputError, match=r"/moved/scheduled cannot be read: .* has to be moved back"):
            read()
    moved.rename(folder.place)
    assert ids_in(folder, "scheduled") == ["a"]


def test_a_table_that_another_program_has_changed_is_refused(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that would delete its files, too."""
    append(folder, 0, failed=facts("failed", "a"))
    other = tmp_path / "other.parquet"
    parquet.write_table(facts("failed", "c").append_column("batch", [[7]]), other)
    table_of(folder, "failed").add_files([str(other)])
    with pytest.raises(InvalidInputError, match="because another program has changed it"), fact_tables(folder):
        pytest.fail("it was read")
    with pytest.raises(InvalidInputError, match="because another program has changed it"):
        contents(folder)
    monkeypatch.setattr(iceberg_storage, "EXPIRED_SNAPSHOTS", 0)
    with pytest.raises(InvalidInputError, match="because another program has changed it"):
        open_storage(folder).compact({date(2020, 1, 1)})


def test_spark_and_some_paths_are_refused(folder: Folder) -> None:
    with pytest.raises(InvalidInputError, match=r"Spark writes Parquet tables only, .* iceberg: run it"):
        run(object(), Sources(url="amqp://localhost"), folder)  # type: ignore[arg-type]  # it is not used
    with pytest.raises(InvalidInputError, match="Iceberg tables need a folder on this machine: give a path"):
        Folder("s3://audits/shop", table_format="iceberg")
    for character in "?%\t":
        with pytest.raises(InvalidInputError, match=r"^Iceberg tables cannot be in .*: name another folder$"):
            Folder(f"/audits/a{character}b", table_format="iceberg")


def test_a_missing_package_is_named(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append(folder, 0, failed=facts("failed", "a"))
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog.sql", None)
    check_advice(folder, tmp_path, capsys, table_format="iceberg", package="pyiceberg")


def test_a_day_is_found_by_its_files(folder: Folder) -> None:
    """Also among more days than pyiceberg compares one by one."""
    days = tuple(TODAY - timedelta(days=one) for one in range(3))
    append(folder, 0, scheduled=facts("scheduled", "a", days=days))
    storage = open_storage(folder)
    assert [len(storage.files("scheduled", day)) for day in (*days, date(2020, 1, 1))] == [1, 1, 1, 0]
    assert storage.read("scheduled", facts("scheduled").schema, {days[0], days[2]}).num_rows == 2
    many = {TODAY + timedelta(days=one) for one in range(300)}
    assert storage.read("scheduled", facts("scheduled").schema, many).num_rows == 1


def test_only_files_that_no_kept_snapshot_has_are_deleted(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tag, and a replacement just now, keep a snapshot, although its files are old. The folder is named by a link."""
    monkeypatch.setattr(iceberg_storage, "EXPIRED_SNAPSHOTS", 3)
    storage, now = open_storage(folder), time.time
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: now() - 3600)
        for batch in range(3):
            replace(storage, facts("scheduled", f"m-{batch}"), "messages", batch)
    replace(storage, facts("scheduled", "m-3"), "messages", 3)
    table = table_of(folder, "messages")
    table.manage_snapshots().create_tag(table.snapshots()[0].snapshot_id, "kept").commit()
    left_over = Path(folder.path("messages", "metadata", "snap-1.avro"))
    left_over.write_bytes(b"")
    for one in files_in(folder, "messages"):
        os.utime(one, (0, 0))
    link = tmp_path / "link"
    link.symlink_to(folder.place)
    open_storage(Folder(str(link))).compact({TODAY})
    table = table_of(folder, "messages")
    found = [table.scan(snapshot_id=one.snapshot_id).to_arrow()["message_id"].to_pylist() for one in table.snapshots()]
    assert found == [["m-0"], ["m-2"], [], ["m-3"]]
    assert len(files_in(folder, "messages", f"day={TODAY}")) == 3
    assert not left_over.exists()
