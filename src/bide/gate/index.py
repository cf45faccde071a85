"""The index of a gate: the state of a partition in a file, with the position in the log."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from bide.errors import FolderInUseError, InvalidInputError
from bide.gate.index_schema import SCHEMA, SCHEMA_VERSION
from bide.gate.sqlite_state import SqliteState
from bide.runtime.logs import logger

log = logger(__name__)

_CACHE_KIB: Final = 32_768
_SUFFIXES: Final = ("", "-wal", "-shm")

_CHECKPOINT_PAGES: Final = 8000
"""Pages of the write-ahead log at which a commit does a checkpoint itself, if the background does not keep up."""


class ScheduleIndex:
    """The state of a partition in an SQLite file. It is a cache: a gate builds it from the log if it is missing.

    A lock on a file beside it ensures that one gate at a time uses it. Use it from one thread at a time.

    Args:
        path: the file; its folder exists. A file that is damaged, or of another release, is replaced by an empty index.

    Attributes:
        state: the entries and the position; change them within :meth:`batch` only.

    Raises:
        FolderInUseError: another process uses the index.
        InvalidInputError: the file cannot be read or created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._lock = _lock(path)
        except OSError as error:
            raise unusable_index(path, error) from error
        try:
            self._sql = _open_or_replace(path)
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, sqlite3.OperationalError | OSError):
                raise unusable_index(path, error) from error
            raise
        self.state = SqliteState(self._sql)
        self._checkpoints = _Checkpoints(path)

    @contextmanager
    def batch(self, *, is_last: bool = True) -> Iterator[SqliteState]:
        """Keep all changes of a block, including the position, or none of them if the block raises.

        Args:
            is_last: whether to commit. Otherwise a later batch commits, or :meth:`commit`. Until then an error, or the
                end of the process, undoes all batches since the last commit.
        """
        if not self._sql.in_transaction:
            self._sql.execute("BEGIN IMMEDIATE")
        try:
            yield self.state
            if is_last:
                self.commit()
        except BaseException:
            if self._sql.in_transaction:
                self._sql.execute("ROLLBACK")
            self.state.reload()
            raise

    @property
    def is_checkpointing(self) -> bool:
        """Whether a checkpoint is under way."""
        return self._checkpoints.is_running

    def commit(self) -> None:
        """Keep the changes of all batches."""
        if self._sql.in_transaction:
            self.state.flush()
            self._sql.execute("COMMIT")
            self._checkpoints.begin()

    @contextmanager
    def snapshot(self) -> Iterator[SqliteState]:
        """The state of the last commit, for reading in another thread. Later batches do not change it."""
        with closing(_connect(self._path)) as connection:
            connection.execute("PRAGMA query_only = ON")
            connection.execute("BEGIN")
            yield SqliteState(connection)

    def recreate(self) -> None:
        """Replace the file by an empty one."""
        self._checkpoints.wait()
        self._sql.close()
        _remove(self._path)
        self._sql = _prepared(self._path)
        self.state = SqliteState(self._sql)

    def close(self) -> None:
        """Keep the changes of all batches, if that is possible, and close the file."""
        try:
            self.commit()
        except sqlite3.Error as error:
            log.warning("the gate reads its last records again when it starts: %s: %s", self._path, error)
        finally:
            self._checkpoints.wait()
            self._sql.close()
            os.close(self._lock)


class _Checkpoints:
    """Moves pages of the write-ahead log into the file, in a thread of its own.

    A checkpoint waits for the disk. With SQLite's default, 1 of 70 small batches waited for it, for 5 to 50 ms.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether a checkpoint was begun and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self) -> None:
        """Begin a checkpoint, unless one is under way."""
        if not self.is_running:
            self._thread = threading.Thread(target=self._run, name="bide-gate-checkpoint")
            self._thread.start()

    def wait(self) -> None:
        """Wait for the checkpoint that was begun."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with closing(_connect(self._path)) as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            # Batches do not depend on it. They raise the same error if the disk is full.
            log.debug("no checkpoint of %s: %s", self._path, error)


def _lock(path: Path) -> int:
    # The file is never deleted: otherwise a waiting process could lock the deleted file, and a third one a new file.
    file = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise FolderInUseError(f"the index {path} is in use by another gate: give each gate its own folder") from error
    return file


def unusable_index(path: Path, error: Exception) -> InvalidInputError:
    """The error of an index that cannot be opened, read or written."""
    return InvalidInputError(f"the index {path} cannot be used: {error}; name another folder")


def _open_or_replace(path: Path) -> sqlite3.Connection:
    try:
        return _prepared(path)
    except sqlite3.OperationalError:
        # It is locked, or the disk is full, for example: the file itself may be sound.
        raise
    except sqlite3.DatabaseError as error:
        log.warning("the index %s is built anew: %s", path, error)
        _remove(path)
        return _prepared(path)


def _remove(path: Path) -> None:
    for suffix in _SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _prepared(path: Path) -> sqlite3.Connection:
    connection = _connect(path)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"another release of bide wrote it (schema {version})")
        connection.execute("SELECT * FROM position").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    # The gate calls from the threads of an executor, one at a time.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    # A commit may be lost with the machine, and is then read from the log again. It is not lost with the process.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    return connection
