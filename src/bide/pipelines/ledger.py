"""Ledger of a pipeline: a folder with a small file for each finished part of the input.

Each file is written under a temporary name and renamed when it is complete. So after a crash, each part is either
finished or not.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
from pyarrow import fs

from bide.errors import InvalidInputError
from bide.pipelines.folder_lock import hold

VERSION: Final = 1

_HEAD: Final = "ledger.json"
_PART: Final = re.compile(r"part-([0-9]{5,})\.json")


def digest_of(named: Mapping[str, Any]) -> str:
    """A digest of named values, as 32 hexadecimal digits: a ledger is continued only if its digest is the same.

    Values that are None or empty are left out. So if a later release of bide has a new option, the digests of runs
    without this option do not change, and their ledgers stay valid.
    """
    values = {name: value for name, value in named.items() if value}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerHead:
    """The head of a ledger, which all runs share.

    Attributes:
        plan: the digest of the plan, see :func:`digest_of`.
        broker: hosts, ports and virtual host of the broker.
        rows: the number of rows of the input.
        checksum: a checksum over all rows, which does not depend on their order.
        parts: the number of parts; the contents of a row decide to which part the row belongs.
        past: what the runs do with overdue rows: ``send``, ``drop`` or ``reject``.
    """

    plan: str
    broker: str
    rows: int
    checksum: int
    parts: int
    past: str = "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPart:
    """A finished part.

    Attributes:
        part: the number of the part, from 0.
        sent: messages that the broker has confirmed.
        rejected: rows in the folder for rejects.
        dropped: rows that were dropped because they were overdue.
    """

    part: int
    sent: int
    rejected: int
    dropped: int = 0

    @property
    def rows(self) -> int:
        """The number of rows in the part."""
        return self.sent + self.rejected + self.dropped


class Ledger:
    """A ledger in a folder. The first write or lock creates the folder.

    Args:
        folder: a path, or a URI that Arrow supports, which the driver and all tasks can access.

    Attributes:
        folder: the absolute path, or the URI.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder if "://" in folder else os.path.abspath(folder)  # noqa: PTH100 (no link is followed)
        try:
            self._files, self._root = fs.FileSystem.from_uri(self.folder)
        except (pa.ArrowInvalid, OSError) as error:
            raise InvalidInputError(f"the ledger {folder!r} is not a usable folder: {error}; name another") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)

    def lock(self) -> AbstractContextManager[None]:
        """Lock the ledger against other runs, with :func:`bide.pipelines.folder_lock.hold`.

        Raises:
            FolderInUseError: on entering the context, if another run holds the lock.
            InvalidInputError: on entering the context, if the folder cannot be created or written to.
        """
        return hold(self._files, self._root, what=f"the ledger {self.folder}")

    def head(self) -> LedgerHead | None:
        """Read the head of the ledger; None for a new ledger.

        Raises:
            InvalidInputError: the ledger has another version or cannot be read, or the folder is not a ledger.
        """
        found = self._read(_HEAD)
        if found is None:
            return None
        if (version := found.pop("version", None)) != VERSION:
            raise InvalidInputError(
                f"the ledger {self.folder} has version {version!r}, but this bide reads version {VERSION}: name "
                "another folder"
            )
        found.pop("begun", None)
        try:
            return LedgerHead(**found)
        except TypeError as error:
            raise InvalidInputError(
                f"the folder {self.folder} is not a ledger ({error}): name another folder"
            ) from error

    def begin(self, head: LedgerHead, at: datetime | None = None) -> None:
        """Write the head.

        Args:
            at: the time when the first run began; None for the current time.
        """
        begun = (at or datetime.now(UTC)).isoformat(timespec="microseconds")
        self._write(_HEAD, {"version": VERSION, "begun": begun, **asdict(head)})

    def begun_at(self) -> datetime | None:
        """Read when the first run began; None for a new ledger.

        Raises:
            InvalidInputError: the ledger cannot be read.
        """
        found = self._read(_HEAD)
        if found is None:
            return None
        try:
            return datetime.fromisoformat(found["begun"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInputError(
                f"the ledger {self.folder} does not have the time of its first run ({error}): name another folder"
            ) from error

    def get(self, part: int) -> LedgerPart | None:
        """Read a finished part; None if the part is not finished."""
        found = self._read(_name(part))
        return None if found is None else LedgerPart(**found)

    def add(self, part: LedgerPart) -> None:
        """Record a finished part."""
        self._write(_name(part.part), asdict(part))

    def numbers(self) -> set[int]:
        """The numbers of the finished parts."""
        selector = fs.FileSelector(self._root, allow_not_found=True)
        matches = (_PART.fullmatch(one.base_name) for one in self._files.get_file_info(selector))
        return {int(match[1]) for match in matches if match}

    def parts(self) -> list[LedgerPart]:
        """Read all finished parts."""
        found = (self.get(number) for number in sorted(self.numbers()))
        return [one for one in found if one is not None]

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            with self._files.open_input_stream(posixpath.join(self._root, name)) as file:
                found = json.loads(file.read())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InvalidInputError(f"the ledger {self.folder} cannot be read: {error}; name another folder") from error
        except ValueError as error:
            raise InvalidInputError(f"{name} in {self.folder} cannot be read: {error}; name another ledger") from error
        if not isinstance(found, dict):
            raise InvalidInputError(f"{name} in {self.folder} is not a file of a ledger: name another folder")
        return found

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        self._files.create_dir(self._root, recursive=True)
        temporary = posixpath.join(self._root, f"_{name}.{uuid4().hex[:8]}.tmp")
        with self._files.open_output_stream(temporary) as file:
            file.write(json.dumps(value).encode())
        self._files.move(temporary, posixpath.join(self._root, name))


def _name(part: int) -> str:
    return f"part-{part:05}.json"
