"""The recorded history of a race: one JSON object per line."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

What = Literal["schedule", "cancel", "replace", "replace-if"]
"""``replace`` is unconditional; ``replace-if`` names the version to replace, and has an answer.

``schedule`` made a schedule, or is in doubt, and no change of that schedule was requested.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The beginning of a race."""

    seed: int
    operations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The last request for a key, with its result.

    Attributes:
        first: the id of the schedule that it is aimed at, or that ``schedule`` made; None if that schedule is in doubt.
        second: the id of the schedule that a replace made; None if it made none, or is in doubt.
        outcome: the value of the ``ScheduleOutcome``, or ``error``: no answer. Only the log says what the request did.
        error: of a request that raised one; None if it was answered, or if the client was killed before it was.
        seconds: until the answer.
    """

    what: What
    key: str
    first: str | None = None
    second: str | None = None
    outcome: str = "error"
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A message that the consumer received.

    Attributes:
        at: milliseconds since the Unix epoch.
        is_redelivered: whether the queue delivered it to the consumer before.
    """

    id: str
    body: str
    at: int
    is_redelivered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A process that was killed with SIGKILL, or that ended by itself.

    Attributes:
        process: its name: ``broker``, or ``gate`` or ``client`` and a number.
        code: the exit code of a process that ended by itself; None for one that was killed.
    """

    process: str
    code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The end of an occurrence by the log, as ``tests/schedule_model/judge.py`` reads it.

    Attributes:
        due: milliseconds since the Unix epoch.
    """

    id: str
    key: str
    body: str
    due: int
    fate: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSummary:
    """Records in the log at the end.

    Attributes:
        claims: claimed occurrences.
        void_claims: claimed occurrences that the claim did not get, because another record stands before it.
    """

    records: int
    claims: int
    void_claims: int


Event = Start | Change | Receipt | Kill | Fate | LogSummary

_KINDS: Final[dict[str, type[Event]]] = {one.__name__: one for one in (Start, Change, Receipt, Kill, Fate, LogSummary)}


def to_line(event: Event) -> str:
    """An event as a line of a history."""
    return json.dumps([type(event).__name__, asdict(event)])


def from_line(line: str | bytes) -> Event:
    """The event in a line of a history."""
    kind, values = json.loads(line)
    return _KINDS[kind](**values)


class HistoryWriter:
    """Writes a history, so that it need not be kept in memory."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def add(self, event: Event) -> None:
        """Write an event."""
        self._file.write(to_line(event) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_history(path: Path) -> Iterator[Event]:
    """The events of a history, which may be compressed with xz."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        for line in file:
            yield from_line(line)
