"""Lock of a folder, which allows one run at a time.

On a local file system, or a network file system with locks, the kernel holds the lock and releases it when the process
ends, even if it is killed. In an object store, a file names the process that holds the lock. If that process ran on
this machine and has ended, the next run takes the lock over; otherwise you have to delete the file.
"""

from __future__ import annotations

import fcntl
import json
import os
import posixpath
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

from pyarrow import fs

from bide.errors import FolderInUseError, InvalidInputError

LOCK_FILE: Final = "lock.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """The process that holds a lock.

    Attributes:
        host: the host name of the machine of the process.
        pid: the process id.
        since: when the process took the lock, in ISO 8601.
        token: a random text that is unique to this lock.
    """

    host: str
    pid: int
    since: str
    token: str

    @classmethod
    def here(cls) -> LockHolder:
        """Create a holder for this process."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(host=socket.gethostname(), pid=os.getpid(), since=now, token=uuid4().hex)

    @classmethod
    def read(cls, text: bytes) -> LockHolder | None:
        """Parse the contents of a lock file; None if the contents do not name a process."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    @property
    def has_ended(self) -> bool:
        """Whether the process ran on this machine and has ended."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def __str__(self) -> str:
        return f"the process {self.pid} on {self.host}, since {self.since}"

    def to_json(self) -> bytes:
        """The contents of the lock file."""
        return json.dumps(asdict(self)).encode()


@contextmanager
def hold(files: Any, root: str, *, what: str) -> Iterator[None]:
    """Hold the lock of a folder, which is created if it is missing.

    The lock of a process that has ended is taken over. In an object store, that process must have run on this machine.

    Args:
        files: the Arrow file system of the folder.
        root: the path of the folder in that file system.
        what: the words for the folder in errors, such as ``the ledger s3://data/november``.

    Raises:
        FolderInUseError: another process holds the lock.
        InvalidInputError: the folder or the lock file cannot be created.
    """
    path = posixpath.join(root, LOCK_FILE)
    try:
        files.create_dir(root, recursive=True)
    except OSError as error:
        raise _unusable_error(what, error) from error
    if isinstance(files, fs.LocalFileSystem):
        with _kernel_lock(path, what):
            yield
    else:
        with _file_lock(files, path, what):
            yield


@contextmanager
def _kernel_lock(path: str, what: str) -> Iterator[None]:
    # The file is never deleted: otherwise a waiting process could lock the deleted file, and a third one a new file.
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unusable_error(what, error) from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            other = LockHolder.read(os.pread(file, 10_000, 0))
            raise _in_use_error(what, other, "wait until that process has ended, or stop it") from error
        os.ftruncate(file, 0)
        os.pwrite(file, LockHolder.here().to_json(), 0)
        yield
    finally:
        os.close(file)


@contextmanager
def _file_lock(files: Any, path: str, what: str) -> Iterator[None]:
    own = LockHolder.here()
    way_out = f"wait until that process has ended; if it has, delete {LOCK_FILE} in that folder"
    other = _holder(files, path)
    if other is not None and not other.has_ended:
        raise _in_use_error(what, other, way_out)
    with files.open_output_stream(path) as file:
        file.write(own.to_json())
    try:
        # If two processes write at the same time, the second one to write has the lock.
        if (other := _holder(files, path)) != own:
            raise _in_use_error(what, other, way_out)
        yield
    finally:
        if _holder(files, path) == own:
            with suppress(FileNotFoundError):
                files.delete_file(path)


def _holder(files: Any, path: str) -> LockHolder | None:
    try:
        with files.open_input_stream(path) as file:
            return LockHolder.read(file.read())
    except FileNotFoundError:
        return None


def _unusable_error(what: str, error: OSError) -> InvalidInputError:
    return InvalidInputError(f"{what} cannot be used: {error}; name another folder")


def _in_use_error(what: str, other: LockHolder | None, way_out: str) -> FolderInUseError:
    holder = "another process" if other is None else str(other)
    return FolderInUseError(f"{what} is in use by {holder}: {way_out}, or name another folder")
