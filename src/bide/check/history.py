"""The history of checked runs: sent messages, deliveries and faults, as Parquet files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from bide.errors import InvalidInputError
from bide.runtime.wording import quantity

UNDELIVERABLE: Final = "undeliverable"
"""The ``place`` of messages that were found in an undeliverable queue."""

_ROWS: Final = 50_000
"""Rows of a file, at most."""

_RUN_FILE: Final = "run.json"
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRow:
    """A message that has to arrive, may arrive or must not arrive in a queue.

    A message to several queues has a row for each queue. If a message has several rows for one queue, it must not
    arrive before the earliest due time, and is late only after the last one. All times are microseconds on the clock
    of the run.

    Attributes:
        place: the queue.
        role: ``blocked`` for a message that may be late, such as one to a full queue; ``neighbour`` for a message that
            a full queue must not delay; otherwise ``message``.
        outcome: the result of the call, as text.
        expected: ``delivered``, ``nothing`` or ``unknown``; ``impossible`` if the gate gave an answer that it must not
            give.
        sent_at: when the call began.
        due: the due time.
        due_error: the largest error of the due time.
        attempts: how often the message was published.
        ended_at: when the publish was confirmed or failed; None if the message had no publish of its own, and in
            histories of older releases.
        body: the digest of the body.
        headers: the digest of the headers.
    """

    run: str
    id: str
    place: str
    workload: str
    role: str
    outcome: str
    expected: str
    sent_at: int
    due: int
    due_error: int
    attempts: int
    routing_key: str
    body: bytes
    headers: bytes
    ended_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredRow:
    """A message that was received from a queue."""

    run: str
    id: str
    place: str
    received_at: int
    redelivered: bool
    routing_key: str
    body: bytes
    headers: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault, and what it may do to messages.

    Attributes:
        number: the number of the fault in its run, from 1.
        kind: the name of the fault.
        what: the target of the fault as text, such as the name of a node.
        began: the time just before the fault, in microseconds on the clock of the run, like the next two.
        ended: the time just after the repair.
        settled: the time at which the effects of the fault have to be over.
        late: whether messages may be late until then.
        twice: whether messages may arrive twice until then.
        clock_step: the largest error of a node's clock, in microseconds.
    """

    run: str
    number: int
    kind: str
    what: str
    began: int
    ended: int
    settled: int
    late: bool
    twice: bool
    clock_step: int


Row = SentRow | DeliveredRow | InjectedFault

_TYPES: Final = {
    "str": pa.string(),
    "int": pa.int64(),
    "int | None": pa.int64(),
    "bool": pa.bool_(),
    "bytes": pa.binary(),
}

TABLES: Final[dict[str, type[Row]]] = {"sent": SentRow, "delivered": DeliveredRow, "faults": InjectedFault}


def schema_of(kind: type[Row]) -> pa.Schema:
    """The Arrow schema of a table whose rows have this class."""
    return pa.schema([(name, _TYPES[str(one)]) for name, one in kind.__annotations__.items()])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The description of a run, stored as ``run.json``.

    Attributes:
        seconds: how long messages were sent.
        finished: whether the run came to its end. Other runs cannot be judged: they did not wait for their messages.
        clock_drift: how far the system clock of the checker moved against the clock of the run, in microseconds.
        clock_change: the most by which it moved during one publish, in microseconds: the largest error of a due time.
        settings: the fields of the plan.
    """

    run: str
    seed: int
    release: str
    nodes: int
    seconds: float
    finished: bool = False
    clock_drift: int = 0
    clock_change: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the record into the folder of its run."""
        path = folder / _RUN_FILE
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        part.replace(path)


class HistoryWriter:
    """Writes the tables of a run. A file gets its final name when it is complete."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
        self._files = 0
        folder.mkdir(parents=True)

    def add(self, row: Row) -> None:
        """Add a row."""
        name = next(name for name, kind in TABLES.items() if type(row) is kind)
        rows = self._rows[name]
        rows.append(astuple(row))
        if len(rows) >= _ROWS:
            self._write(name)

    def _write(self, name: str) -> None:
        rows = self._rows[name]
        if not rows:
            return
        schema = schema_of(TABLES[name])
        columns = [pa.array(column, one.type) for column, one in zip(zip(*rows, strict=True), schema, strict=True)]
        self._files += 1
        path = self._folder / f"{name}-{self._files:05}.parquet"
        part = path.with_suffix(".part")
        pq.write_table(pa.Table.from_arrays(columns, schema=schema), part, compression="zstd")
        part.replace(path)
        rows.clear()

    def close(self) -> None:
        """Write the remaining rows."""
        for name in TABLES:
            self._write(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckHistory:
    """The finished runs in a folder.

    Attributes:
        unfinished: the names of runs that were interrupted. They are not judged.
    """

    folder: Path
    runs: tuple[RunRecord, ...]
    unfinished: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the list of runs.

        Raises:
            InvalidInputError: the folder has no finished run.
        """
        found = [RunRecord(**json.loads(path.read_text())) for path in sorted(folder.glob(f"*/{_RUN_FILE}"))]
        runs = tuple(one for one in found if one.finished)
        if not runs:
            raise InvalidInputError(f"{folder} has no finished run: 'bide check run' writes one")
        return cls(folder=folder, runs=runs, unfinished=tuple(one.run for one in found if not one.finished))

    def files(self, table: str) -> list[str]:
        """The files of a table in all finished runs."""
        return [str(path) for one in self.runs for path in sorted((self.folder / one.run).glob(f"{table}-*.parquet"))]

    def digest(self) -> str:
        """The SHA-256 of the lines that ``sha256sum`` prints for the files of the finished runs, sorted by name."""
        whole = hashlib.sha256()
        for path in self._all_files():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            whole.update(f"{digest}  {path.relative_to(self.folder).as_posix()}\n".encode())
        return whole.hexdigest()

    def _all_files(self) -> Iterator[Path]:
        for one in self.runs:
            yield from sorted(path for path in (self.folder / one.run).iterdir() if path.suffix != ".part")


def next_run(folder: Path, *, again: bool) -> str:
    """The name of a new run in a folder.

    Args:
        again: whether the folder may have runs already.

    Raises:
        InvalidInputError: the folder has other files, or has runs although *again* is false.
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    runs = [name for name in names if (folder / name / _RUN_FILE).exists()]
    if others := sorted(set(names) - set(runs)):
        raise InvalidInputError(
            f"{folder} has files that are not part of a history, such as {others[0]}: give a new folder"
        )
    if runs and not again:
        raise InvalidInputError(
            f"{folder} has {quantity(len(runs), 'run')} already: add another run with --continue, or give a new folder"
        )
    return f"run-{len(runs) + 1:04}"


def digest_of(content: bytes) -> bytes:
    """The digest of a body or of other bytes."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def digest_of_headers(headers: Iterable[tuple[str, Any]]) -> bytes:
    """The digest of headers in any order, with values that are text, numbers, booleans or bytes."""
    return digest_of(repr(sorted(headers)).encode())
