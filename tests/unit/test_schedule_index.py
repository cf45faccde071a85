"""The index of a gate survives kills, and is replaced when its file is damaged."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from bide.errors import FolderInUseError, InvalidInputError
from bide.gate.index import ScheduleIndex
from bide.schedules.encoding import encode
from bide.schedules.fold import ScheduleFold
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import partition_of
from bide.schedules.records import (
    AddSchedule,
    ChangeSchedule,
    Claim,
    ClaimedOccurrence,
    ScheduleFilter,
    ScheduleRecord,
)
from bide.schedules.requests import RequestId
from bide.schedules.state import ScheduleMemory
from bide.schedules.timeline import TimeGrid
from tests.timeouts import TIMEOUT

PARTITION = 5
KEYS = [key for key in map(str, range(400)) if partition_of(key) == PARTITION]


def record(offset: int) -> ScheduleRecord:
    """The record of a log that is always the same."""
    key, request = KEYS[offset * 7 % len(KEYS)], RequestId("s", offset + 1)
    match offset % 5:
        case 0 | 1 | 2:
            message = ScheduledMessage(b"\0\0", b"%d" % offset * 50)
            return AddSchedule(request=request, key=key, target="q:x", nominal=offset, due=offset, message=message)
        case 3:
            return ChangeSchedule(request=request, action="cancel", key=key)
        case _:
            before = offset - 4
            item = ClaimedOccurrence(
                key=KEYS[before * 7 % len(KEYS)], version=f"s-{before + 1}", nominal=before, due=before
            )
            return Claim(gate="g", items=(item,))


def follow(index: ScheduleIndex, end: int, batch: int, *, commit_every: int = 1) -> None:
    """Read the log from the position of the index on."""
    fold = ScheduleFold(index.state, PARTITION)
    while (start := index.state.position.offset + 1) < end:
        with index.batch(is_last=start // batch % commit_every == 0) as state:
            for offset in range(start, min(start + batch, end)):
                found = record(offset)
                fold.apply(offset, found, by_gate=isinstance(found, Claim))
                state.position.checksum = zlib.crc32(encode(found))


def expected(end: int) -> ScheduleMemory:
    fold = ScheduleFold(ScheduleMemory(), PARTITION)
    for offset in range(end):
        found = record(offset)
        fold.apply(offset, found, by_gate=isinstance(found, Claim))
        fold.state.position.checksum = zlib.crc32(encode(found))
    assert isinstance(fold.state, ScheduleMemory)
    return fold.state


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.long)])
def test_a_killed_gate_goes_on_where_its_index_is(tmp_path: Path, kills: int) -> None:
    path, rng = tmp_path / "5.sqlite", random.Random(kills)
    for _ in range(kills):
        child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(path), str(rng.choice([1, 3, 40])), str(rng.choice([1, 4]))],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        for _ in range(rng.randint(1, 30)):
            if not child.stdout.readline():
                break
        child.send_signal(signal.SIGKILL)
        assert child.wait(TIMEOUT) == -signal.SIGKILL
        child.stdout.close()
        index = ScheduleIndex(path)
        position = index.state.position
        assert position.offset >= 0
        wanted = expected(position.offset + 1)
        assert position == wanted.position
        assert list(index.state.entries()) == list(wanted.entries())
        check_counts(index, wanted)
        index.close()


def check_counts(index: ScheduleIndex, wanted: ScheduleMemory) -> None:
    """The numbers by due time, and of all that waits, are those of the state."""
    dues = sorted(one.due for one in wanted.select(ScheduleFilter()))
    grid = TimeGrid(start=0, width=1, number=index.state.position.offset + 1)
    assert index.state.waiting_count == len(dues)
    assert [one.first for one in index.state.timeline(ScheduleFilter(), grid) for _ in range(one.count)] == dues


def test_a_batch_that_fails_changes_nothing(tmp_path: Path) -> None:
    index = ScheduleIndex(tmp_path / "index")
    follow(index, 50, 20)
    before, waiting = list(index.state.entries()), index.state.waiting_count

    def fail() -> None:
        with index.batch() as state:
            ScheduleFold(state, PARTITION).apply(50, record(50), by_gate=False)
            assert state.waiting_count == waiting + 1
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert index.state.position == expected(50).position
    assert index.state.waiting_count == waiting
    follow(index, 60, 20)
    assert before != list(index.state.entries()) == list(expected(60).entries())
    index.close()


def test_an_error_undoes_the_batches_since_the_last_commit(tmp_path: Path) -> None:
    index = ScheduleIndex(tmp_path / "index")
    follow(index, 50, 20)
    with index.batch(is_last=False) as state:
        ScheduleFold(state, PARTITION).apply(50, record(50), by_gate=False)
    assert index.state.position.offset == 50
    with pytest.raises(MemoryError), index.batch():
        raise MemoryError
    assert index.state.position == expected(50).position
    follow(index, 60, 20)
    assert list(index.state.entries()) == list(expected(60).entries())
    index.close()


def test_batches_are_lost_if_the_process_ends_before_the_commit(tmp_path: Path) -> None:
    index = ScheduleIndex(tmp_path / "index")
    follow(index, 50, 20)
    with index.batch(is_last=False) as state:
        ScheduleFold(state, PARTITION).apply(50, record(50), by_gate=False)
    # What a killed process leaves. close() would commit.
    shutil.copytree(tmp_path, tmp_path / "left", ignore=shutil.ignore_patterns("left"))
    index.close()
    index = ScheduleIndex(tmp_path / "left" / "index")
    assert index.state.position == expected(50).position
    assert list(index.state.entries()) == list(expected(50).entries())
    index.close()


def test_a_snapshot_is_not_changed_by_later_batches(tmp_path: Path) -> None:
    index = ScheduleIndex(tmp_path / "index")
    follow(index, 50, 20)
    with index.snapshot() as frozen:
        follow(index, 90, 20)
        assert frozen.position == expected(50).position
        assert list(frozen.entries()) == list(expected(50).entries())
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            frozen.clear()
    assert list(index.state.entries()) == list(expected(90).entries())
    index.close()


def test_an_index_that_is_cleared_begins_before_the_first_record(tmp_path: Path) -> None:
    index = ScheduleIndex(tmp_path / "index")
    follow(index, 50, 20)
    assert index.state.waiting_count
    with index.batch() as state:
        state.clear()
    assert index.state.position.offset == -1
    assert not list(index.state.entries())
    assert not index.state.waiting_count
    index.close()


def test_an_index_is_used_by_one_gate_at_a_time(tmp_path: Path) -> None:
    index = ScheduleIndex(tmp_path / "index")
    with pytest.raises(FolderInUseError, match="another gate"):
        ScheduleIndex(tmp_path / "index")
    index.close()
    ScheduleIndex(tmp_path / "index").close()


@pytest.mark.parametrize("damage", [b"not a database at all", bytes(5000), b"SQLite format 3\0" + b"x" * 5000])
def test_a_damaged_index_is_replaced_by_an_empty_one(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "index"
    path.write_bytes(damage)
    index = ScheduleIndex(path)
    assert index.state.position.offset == -1
    follow(index, 10, 5)
    index.close()


@pytest.mark.parametrize("version", [1, 99])
def test_an_index_of_another_release_is_built_from_the_log(tmp_path: Path, version: int) -> None:
    index = ScheduleIndex(tmp_path / "index")
    follow(index, 10, 5)
    index.close()
    connection = sqlite3.connect(tmp_path / "index")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    index = ScheduleIndex(tmp_path / "index")
    assert index.state.position.offset == -1
    follow(index, 90, 20)
    check_counts(index, expected(90))
    index.close()


def test_an_index_in_a_missing_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="another folder"):
        ScheduleIndex(tmp_path / "missing" / "index")


if __name__ == "__main__":
    # A gate that writes a line after each batch, until it is killed.
    index, batch = ScheduleIndex(Path(sys.argv[1])), int(sys.argv[2])
    while True:
        follow(index, index.state.position.offset + 1 + batch, batch, commit_every=int(sys.argv[3]))
        print(flush=True)  # noqa: T201 (a program)


def test_what_small_batches_have_written_is_moved_into_the_file_in_the_background(tmp_path: Path) -> None:
    """Otherwise a batch waits for the disk once in a while."""
    path = tmp_path / "index.db"
    index = ScheduleIndex(path)
    before, end, until = path.stat().st_size, 0, time.monotonic() + TIMEOUT
    while path.stat().st_size == before and time.monotonic() < until:
        time.sleep(0.1)  # the checkpoint is made in another thread
        # SQLite itself would do that after some hundred batches, however long the disk takes.
        if end < 50:
            end += 1
            follow(index, end, 1)
    assert path.stat().st_size > before
    index.close()
