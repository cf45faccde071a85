"""One run at a time in a folder.

On a file system of this machine, or one that knows its locks, the kernel holds the lock, and lets go of it when the
process ends, however it does. In a store of another kind there is a file that names the process: one of this machine
that is gone is known to be gone; of others a human has to know.
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

LOCK: Final = "lock.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lock.

    Attributes:
        host: the name of the machine.
        pid: of the process there.
        since: when it began.
        token: of this one time.
    """

    host: str
    pid: int
    since: str
    token: str

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(host=socket.gethostname(), pid=os.getpid(), since=now, token=uuid4().hex)

    @classmethod
    def read(cls, text: bytes) -> Holder | None:
        """Who is written there, None if nobody is yet."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    @property
    def is_gone(self) -> bool:
        """Whether it is known that the process has ended."""
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
        """As it is written into the file."""
        return json.dumps(asdict(self)).encode()


@contextmanager
def hold(files: Any, root: str, *, what: str) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it is missing. One that a dead process has left is taken over.

    Args:
        files: Arrow's file system.
        root: the folder's path there.
        what: is there, and where, as the user knows it.

    Raises:
        FolderInUseError: another holds it.
        InvalidInputError: the folder cannot be made, or no file in it.
    """
    path = posixpath.join(root, LOCK)
    try:
        files.create_dir(root, recursive=True)
    except OSError as error:
        raise _unusable(what, error) from error
    if isinstance(files, fs.LocalFileSystem):
        with _locked(path, what):
            yield
    else:
        with _marked(files, path, what):
            yield


@contextmanager
def _locked(path: str, what: str) -> Iterator[None]:
    # Never deleted: who waits for a file that is gone would hold nothing.
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unusable(what, error) from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            other = Holder.read(os.pread(file, 10_000, 0))
            raise _in_use(what, other, "wait until that has ended, or end it") from error
        os.ftruncate(file, 0)
        os.pwrite(file, Holder.here().to_json(), 0)
        yield
    finally:
        os.close(file)


@contextmanager
def _marked(files: Any, path: str, what: str) -> Iterator[None]:
    own = Holder.here()
    way_out = f"wait until that has ended; if it has, delete {LOCK} there"
    other = _holder(files, path)
    if other is not None and not other.is_gone:
        raise _in_use(what, other, way_out)
    with files.open_output_stream(path) as file:
        file.write(own.to_json())
    try:
        # Of two that begin in the same moment the second one to write has it.
        if (other := _holder(files, path)) != own:
            raise _in_use(what, other, way_out)
        yield
    finally:
        if _holder(files, path) == own:
            with suppress(FileNotFoundError):
                files.delete_file(path)


def _holder(files: Any, path: str) -> Holder | None:
    try:
        with files.open_input_stream(path) as file:
            return Holder.read(file.read())
    except FileNotFoundError:
        return None


def _unusable(what: str, error: OSError) -> InvalidInputError:
    return InvalidInputError(f"{what} cannot be used: {error}; name another folder")


def _in_use(what: str, other: Holder | None, way_out: str) -> FolderInUseError:
    who = "another process" if other is None else str(other)
    return FolderInUseError(f"{what} is in use by {who}: {way_out}, or name another folder")
