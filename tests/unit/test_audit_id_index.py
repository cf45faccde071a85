"""The index of the message ids in the files of an audit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from bide.pipelines.audit.folder import Folder
from bide.pipelines.audit.id_index import IDS_SCHEMA, Digests, IdIndex
from bide.pipelines.audit.table_files import TableFile
from bide.pipelines.memory_database import memory_database

TODAY = date(2026, 11, 21)
IDS: dict[str, list[str | None]] = {
    "day=2026-11-21/batch=0/part-0.parquet": ["a", "b", None],
    "day=2026-11-21/batch=1/part-1.parquet": ["c"],
}
FIRST, SECOND = FILES = [TableFile(path=name, size=1, first=0, last=0) for name in IDS]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    found = Folder(str(tmp_path))
    found.begin()
    for name, ids in IDS.items():
        write(found, name, ids)
    return found


@pytest.fixture
def index(folder: Folder) -> Iterator[IdIndex]:
    with memory_database() as database:
        yield IdIndex(folder, database)


def write(folder: Folder, name: str, ids: list[str | None]) -> None:
    path = Path(folder.path("messages", name))
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table({"message_id": pa.array(ids, pa.string()), "size": range(len(ids))}), path)


def digests_of(index: IdIndex, *ids: str | None) -> Digests:
    return index.digests_of_ids([pa.record_batch([pa.array(ids, pa.string())], schema=IDS_SCHEMA)])


def names(folder: Folder) -> set[str]:
    root = Path(folder.path("_state", "ids", "messages"))
    return {str(one.relative_to(root)) for one in root.rglob("*.arrow")}


def test_files_with_any_of_the_messages_are_found(index: IdIndex) -> None:
    for ids, expected in (
        (["a"], [FIRST]),
        (["c", "d", "b"], [FIRST, SECOND]),
        (["d"], []),
        ([None], []),
        ([], []),
        ([*map(str, range(1_000)), "c"], [SECOND]),
    ):
        assert index.files_with(digests_of(index, *ids), "messages", FILES) == expected, ids
    assert index.files_with(index.digests_of_files("messages", [SECOND]), "messages", FILES) == [SECOND]
    assert list(index.digests_of_files("messages", FILES)) == list(digests_of(index, "c", "b", "a"))


def test_a_file_of_null_ids_is_never_found(folder: Folder, index: IdIndex) -> None:
    other = replace(SECOND, path="day=2026-11-21/batch=2/part-2.parquet")
    write(folder, other.path, [None, None])
    assert index.files_with(digests_of(index, "a", None), "messages", [other]) == []


def test_an_index_that_is_lost_is_made_again(folder: Folder, index: IdIndex) -> None:
    wanted = digests_of(index, "b")
    assert index.files_with(wanted, "messages", FILES) == [FIRST]
    before = names(folder)
    for name in before:
        Path(folder.path("_state", "ids", "messages", name)).unlink()
    assert index.files_with(wanted, "messages", FILES) == [FIRST]
    assert names(folder) == before == {f"{name.replace('/part', '-part')}.arrow" for name in IDS}


def test_an_index_that_is_cut_off_is_made_again(folder: Folder, index: IdIndex) -> None:
    index.digests_of_files("messages", FILES)
    for content in (b"", b"ARROW1"):
        for name in names(folder):
            Path(folder.path("_state", "ids", "messages", name)).write_bytes(content)
        assert index.files_with(digests_of(index, "c"), "messages", FILES) == [SECOND]
        assert index.files_with(digests_of(index, "a"), "messages", FILES) == [FIRST]


def test_a_file_is_read_once(folder: Folder, index: IdIndex) -> None:
    index.digests_of_files("messages", FILES)
    for name in IDS:
        Path(folder.path("messages", name)).unlink()
    assert index.files_with(digests_of(index, "c"), "messages", FILES) == [SECOND]


def test_the_index_of_files_that_are_gone_is_deleted(folder: Folder, index: IdIndex) -> None:
    other_day = replace(SECOND, path="day=2026-11-22/batch=0/part-0.parquet")
    write(folder, other_day.path, ["a"])
    index.digests_of_files("messages", [*FILES, other_day])
    index.prune("messages", TODAY, [SECOND])
    assert names(folder) == {
        "day=2026-11-21/batch=1-part-1.parquet.arrow",
        "day=2026-11-22/batch=0-part-0.parquet.arrow",
    }
    index.prune("delivered", TODAY, [])
