"""The lock of a ledger folder: concurrent runs, and locks of dead processes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyarrow import fs

from bide.errors import FolderInUseError
from bide.pipelines.audit.folder import Folder
from bide.pipelines.audit.run import Sources, run
from bide.pipelines.folder_lock import LOCK_FILE, LockHolder, hold
from bide.pipelines.ledger import Ledger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOLDING = """
import sys
from bide.pipelines.ledger import Ledger

with Ledger(sys.argv[1]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder_of(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of a ledger until its standard input ends."""
    command = [sys.executable, "-c", HOLDING, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_run_is_refused_while_the_first_holds_the_lock(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "ledger"))
    who = re.escape(f"{ledger.folder} is in use by the process ")
    with holder_of(tmp_path / "ledger") as process:
        way_out = "wait until that process has ended, or stop it, or name another folder"
        with (
            pytest.raises(FolderInUseError, match=f"{who}{process.pid} on {socket.gethostname()}, since .*: {way_out}"),
            ledger.lock(),
        ):
            pytest.fail("two have the lock")
        process.communicate("")
        with ledger.lock():
            assert json.loads((tmp_path / "ledger" / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_a_killed_run_releases_the_lock(tmp_path: Path) -> None:
    with holder_of(tmp_path / "ledger") as process:
        process.kill()
        process.wait()
        with Ledger(str(tmp_path / "ledger")).lock():
            assert json.loads((tmp_path / "ledger" / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_a_second_audit_round_is_refused_while_the_first_holds_the_lock(spark: SparkSession, tmp_path: Path) -> None:
    """As a function too, which a caller who has the lock already may call again and again."""
    folder, nothing = Folder(str(tmp_path)), Sources(url="amqp://localhost")
    folder.begin()

    def take() -> None:
        with folder.lock():
            pytest.fail("two have the lock")

    with folder.lock():
        with pytest.raises(FolderInUseError, match=f"is in use by the process {os.getpid()} on "):
            run(spark, nothing, Folder(str(tmp_path)))
        assert run(spark, nothing, folder).pending == 0
        with ThreadPoolExecutor(1) as other, pytest.raises(FolderInUseError):
            other.submit(take).result()
        with pytest.raises(FolderInUseError), Folder(str(tmp_path)).lock():
            pytest.fail("the round has let go of it")
    assert run(spark, nothing, Folder(str(tmp_path))).pending == 0


class Store:
    """A store without locks: files in memory."""

    def __init__(self) -> None:
        self.files: Any = fs._MockFileSystem()
        self.files.create_dir("ledgers/one", recursive=True)

    def write(self, **of: Any) -> None:
        with self.files.open_output_stream(f"ledgers/one/{LOCK_FILE}") as file:
            file.write(json.dumps({"since": "2026-11-21T10:00:00+00:00", "token": "t", **of}).encode())

    def is_locked(self) -> bool:
        return bool(self.files.get_file_info(f"ledgers/one/{LOCK_FILE}").type == fs.FileType.File)

    def hold(self) -> Any:
        return hold(self.files, "ledgers/one", what="the ledger s3://ledgers/one")


def test_a_store_without_locks_uses_a_lock_file(tmp_path: Path) -> None:
    store = Store()
    with store.hold():
        assert store.is_locked()
        with pytest.raises(FolderInUseError, match=f"by the process {os.getpid()} on "), store.hold():
            pytest.fail("two have the lock")
        assert store.is_locked(), "it is still the first one's"
    assert not store.is_locked()

    store.write(host="elsewhere", pid=os.getpid())
    expected = (
        "on elsewhere, .*: wait until that process has ended; if it has, delete lock.json in that folder, or name"
    )
    with pytest.raises(FolderInUseError, match=expected), store.hold():
        pytest.fail("it is unknown whether that process has ended")

    with holder_of(tmp_path) as process:
        store.write(host=socket.gethostname(), pid=process.pid)
        with pytest.raises(FolderInUseError, match=f"by the process {process.pid} "), store.hold():
            pytest.fail("it lives")
    with store.hold():
        assert store.is_locked()


def test_one_of_two_simultaneous_lock_files_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    # What the other one writes, right after this one.
    other = LockHolder(host="elsewhere", pid=7, since="now", token="other").to_json()
    monkeypatch.setattr(LockHolder, "to_json", lambda _: other)
    with pytest.raises(FolderInUseError, match="by the process 7 on elsewhere"), store.hold():
        pytest.fail("another has written its name over this one's")
    assert store.is_locked(), "it is the other one's"
