"""What a pipeline has done so far, in a folder: one small file for each part of its input that is done.

A file appears under its name with all its contents or not at all, so that a process that is killed leaves a part
either done or not done.
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
    """Tells apart what ledgers are about: 32 hexadecimal digits, of values by their names.

    What is None or empty counts as not there. So options that come with a later bide leave the digests, and with them
    the ledgers, of those alone who do not use them.
    """
    told = {name: value for name, value in named.items() if value}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What the ledger is about. It does not change from the first run to the last.

    Attributes:
        plan: digest of what is to be done with each row, see :func:`digest_of`.
        broker: where to.
        rows: of the input.
        checksum: over all rows, in whatever order.
        parts: into how many the input is divided, by what the rows hold.
        past: what becomes of rows that were due before.
    """

    plan: str
    broker: str
    rows: int
    checksum: int
    parts: int
    past: str = "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part that is done.

    Attributes:
        part: its number, from 0 on.
        sent: messages that the broker has confirmed.
        rejected: rows in the folder for rejects.
        dropped: rows that were left out, because they were due before.
    """

    part: int
    sent: int
    rejected: int
    dropped: int = 0

    @property
    def rows(self) -> int:
        """All of its rows."""
        return self.sent + self.rejected + self.dropped


class Ledger:
    """A ledger in a folder, which is made when the first thing is written to it.

    Args:
        folder: a path, or a URI that Arrow knows, which the driver and all tasks reach.

    Attributes:
        folder: the same, absolute.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder if "://" in folder else os.path.abspath(folder)  # noqa: PTH100 (no link is followed)
        try:
            self._files, self._root = fs.FileSystem.from_uri(self.folder)
        except (pa.ArrowInvalid, OSError) as error:
            raise InvalidInputError(f"the ledger {folder!r} is no folder that can be used: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)

    def lock(self) -> AbstractContextManager[None]:
        """Keep other runs from going on with this ledger meanwhile. A lock that a dead process has left does not count.

        Raises:
            FolderInUseError: entering it, another run has it.
            InvalidInputError: entering it, the folder cannot be made or written.
        """
        return hold(self._files, self._root, what=f"the ledger {self.folder}")

    def head(self) -> Head | None:
        """What the ledger is about, or None for a new one.

        Raises:
            InvalidInputError: it is of another version, or no ledger, or cannot be read.
        """
        found = self._read(_HEAD)
        if found is None:
            return None
        if found.pop("version", None) != VERSION:
            raise InvalidInputError(f"the ledger {self.folder} is not of version {VERSION}: name another folder")
        found.pop("begun", None)
        try:
            return Head(**found)
        except TypeError as error:
            raise InvalidInputError(f"the folder {self.folder} holds no ledger: name another one ({error})") from error

    def begin(self, head: Head, at: datetime | None = None) -> None:
        """Write down what it is about.

        Args:
            at: when the first run began; now, if None.
        """
        begun = (at or datetime.now(UTC)).isoformat(timespec="microseconds")
        self._write(_HEAD, {"version": VERSION, "begun": begun, **asdict(head)})

    def begun(self) -> datetime | None:
        """When the first run began, or None for a new ledger.

        Raises:
            InvalidInputError: it cannot be read.
        """
        found = self._read(_HEAD)
        if found is None:
            return None
        try:
            return datetime.fromisoformat(found["begun"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInputError(
                f"the ledger {self.folder} does not say when it was begun: name another folder ({error})"
            ) from error

    def get(self, part: int) -> Part | None:
        """What was written down of a part, or None if it is not done."""
        found = self._read(_name(part))
        return None if found is None else Part(**found)

    def add(self, part: Part) -> None:
        """Write down that a part is done."""
        self._write(_name(part.part), asdict(part))

    def numbers(self) -> set[int]:
        """The parts that are done."""
        selector = fs.FileSelector(self._root, allow_not_found=True)
        matches = (_PART.fullmatch(one.base_name) for one in self._files.get_file_info(selector))
        return {int(match[1]) for match in matches if match}

    def parts(self) -> list[Part]:
        """What was written down of all parts that are done."""
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
            raise InvalidInputError(f"{name} in {self.folder} is not of a ledger: name another folder")
        return found

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        self._files.create_dir(self._root, recursive=True)
        temporary = posixpath.join(self._root, f"_{name}.{uuid4().hex[:8]}.tmp")
        with self._files.open_output_stream(temporary) as file:
            file.write(json.dumps(value).encode())
        self._files.move(temporary, posixpath.join(self._root, name))


def _name(part: int) -> str:
    return f"part-{part:05}.json"
