"""Positions of an audit: batches that were begun, and checkpoints of earlier releases."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from bide.errors import InvalidInputError
from bide.pipelines.audit.folder import Folder, Note
from bide.pipelines.audit.positions import NewMessages, PositionFile, Positions, import_checkpoints

TODAY = date(2026, 11, 21)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    found = Folder(str(tmp_path / "audit"))
    found.begin()
    return found


def facts(folder: Folder, table: str, batch: int, *, day: date = TODAY) -> Path:
    """A file of a batch."""
    file = Path(folder.place, table, f"day={day}", f"batch={batch}", "part-0.parquet")
    file.parent.mkdir(parents=True)
    file.touch()
    return file


def checkpoint(folder: Folder, source: str, *, begun: list[dict[str, int]], ended: int) -> None:
    """The checkpoint of a query that has begun these batches, and ended some of them."""
    place = Path(folder.place, "_checkpoint", source)
    for name in ("offsets", "commits"):
        (place / name).mkdir(parents=True)
    for number, streams in enumerate(begun):
        document = {"v": 1, "streams": streams}
        (place / "offsets" / str(number)).write_text(f'v1\n{{"conf": {{}}}}\n{json.dumps(document)}')
        (place / "offsets" / f".{number}.crc").touch()
    for number in range(ended):
        (place / "commits" / str(number)).write_text("v1\n{}")


def test_what_a_killed_batch_has_left_is_removed(folder: Folder) -> None:
    file = PositionFile(folder, "events")
    assert file.read() == Positions()
    kept = [facts(folder, table, 4) for table in ("processed", "failed")]
    kept.append(facts(folder, "scheduled", 5))
    left = [facts(folder, table, 5) for table in ("processed", "failed", "undecodable/source=events")]
    left.append(facts(folder, "processed", 5, day=date(2026, 11, 22)))
    for name in ("events-4", "events-5", "scheduled-5"):
        folder.add_note(Note(name=name, rows={}, days=()))
    known = Positions(batch=4, offsets={"events": 20})
    file.write(known)
    assert file.clear() == known
    assert all(one.exists() for one in left), "no batch was begun"
    file.write(Positions(batch=4, offsets={"events": 20}, is_begun=True))
    assert file.clear() == known == file.read()
    assert [one.exists() for one in kept] == [True] * 3
    assert [one.exists() for one in left] == [False] * 4
    assert [one.name for one in folder.notes()] == ["events-4", "scheduled-5"]


def test_positions_are_taken_over_from_checkpoints_of_spark(folder: Folder) -> None:
    """Those of the last batch that Spark has ended; the next one is read again."""
    checkpoint(folder, "scheduled", begun=[{"a": 3, "b": 1}, {"a": 7, "b": 1}], ended=2)
    checkpoint(folder, "delivered", begun=[{"c": 3}, {"c": 9}], ended=1)
    checkpoint(folder, "events", begun=[{"events": 5}], ended=0)
    for _ in range(2):
        # A kill may come before the version is written, and then it is done again.
        import_checkpoints(folder)
        found = {source: PositionFile(folder, source).read() for source in ("scheduled", "delivered", "events")}
        assert found == {
            "scheduled": Positions(batch=1, offsets={"a": 7, "b": 1}),
            "delivered": Positions(batch=0, offsets={"c": 3}, is_begun=True),
            "events": Positions(batch=-1, offsets={}, is_begun=True),
        }


def test_positions_of_another_source_are_refused(folder: Folder) -> None:
    checkpoint(folder, "events", begun=[{}], ended=1)
    Path(folder.place, "_checkpoint", "events", "offsets", "0").write_text('v1\n{}\n{"v": 2}')
    with pytest.raises(InvalidInputError, match="offsets of version 2"):
        import_checkpoints(folder)


def test_batches_end_at_the_end_of_each_stream() -> None:
    new = NewMessages(begin={"a": 0, "b": 5}, end={"a": 25, "b": 6})
    batches = list(new.batches(10))
    assert [sum(one.end - one.start for one in ranges) for ranges, _ in batches] == [10, 10, 6]
    assert batches[-1][1] == {"a": 25, "b": 6}
    read = {
        stream: [(one.start, one.end) for some, _ in batches for one in some if one.stream == stream] for stream in "ab"
    }
    for stream, ranges in read.items():
        assert [start for start, _ in ranges[1:]] == [end for _, end in ranges[:-1]], "without gaps"
        assert (ranges[0][0], ranges[-1][1]) == (new.begin[stream], new.end[stream])
    assert list(NewMessages(begin={"a": 3}, end={"a": 3}).batches(10)) == []
