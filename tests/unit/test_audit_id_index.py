"""The index of the message ids in the files of an audit."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from bide.pipelines.audit.folder import Folder
from bide.pipelines.audit.id_index import IDS_SCHEMA, Digests, IdIndex
from bide.pipelines.memory_database import memory_database

TODAY = date(2026, 11, 21)
FILES: dict[str, list[str | None]] = {
    "day=2026-11-21/batch=0/part-0.parquet": ["a", "b", None],
    "day=2026-11-21/batch=1/part-1.parquet": ["c"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    found = Folder(str(tmp_path))
    found.begin()
    for name, ids in FILES.items():
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
    return index.digests_of([pa.record_batch([pa.array(ids, pa.string())], schema=IDS_SCHEMA)])


def names(folder: Folder) -> set[str]:
    root = Path(folder.path("_state", "ids", "messages"))
    return {str(one.relative_to(root)) for one in root.rglob("*.arrow")}


def test_files_with_any_of_the_messages_are_found(index: IdIndex) -> None:
    first, second = FILES
    for ids, expected in (
        (["a"], [first]),
        (["c", "d", "b"], [first, second]),
        (["d"], []),
        ([None], []),
        ([], []),
        ([*map(str, range(1_000)), "c"], [second]),
    ):
        assert index.files_with(digests_of(index, *ids), "messages", [*FILES]) == expected, ids
    assert index.files_with(index.digests("messages", [second]), "messages", [*FILES]) == [second]
    assert list(index.digests("messages", [*FILES])) == list(digests_of(index, "c", "b", "a"))


def test_a_file_of_null_ids_is_never_found(folder: Folder, index: IdIndex) -> None:
    other = "day=2026-11-21/batch=2/part-2.parquet"
    write(folder, other, [None, None])
    assert index.files_with(digests_of(index, "a", None), "messages", [other]) == []


def test_an_index_that_is_lost_is_made_again(folder: Folder, index: IdIndex) -> None:
    wanted = digests_of(index, "b")
    assert index.files_with(wanted, "messages", [*FILES]) == [next(iter(FILES))]
    before = names(folder)
    for name in before:
        Path(folder.path("_state", "ids", "messages", name)).unlink()
    assert index.files_with(wanted, "messages", [*FILES]) == [next(iter(FILES))]
    assert names(folder) == before == {f"{name}.arrow" for name in FILES}


def test_a_file_is_read_once(folder: Folder, index: IdIndex) -> None:
    index.digests("messages", FILES)
    for name in FILES:
        Path(folder.path("messages", name)).unlink()
    assert index.files_with(digests_of(index, "c"), "messages", [*FILES]) == ["day=2026-11-21/batch=1/part-1.parquet"]


def test_the_index_of_files_that_are_gone_is_deleted(folder: Folder, index: IdIndex) -> None:
    other_day = "day=2026-11-22/batch=0/part-0.parquet"
    write(folder, other_day, ["a"])
    index.digests("messages", [*FILES, other_day])
    kept = [*FILES][1]
    index.prune("messages", TODAY, [kept])
    assert names(folder) == {f"{kept}.arrow", f"{other_day}.arrow"}
    index.prune("delivered", TODAY, [])
