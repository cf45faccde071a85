"""The history of checked runs: what was sent, delivered and broken, as Parquet files."""

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
"""The place of messages that were found in an undeliverable queue."""

_ROWS: Final = 50_000
"""Rows of a file, at most."""

_RUN_FILE: Final = "run.json"
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRow:
    """A message that has to arrive, may arrive or must not arrive in a queue.

    A message with several queues has a row for each. If a message and queue have several rows, the earliest due time
    counts. All times are microseconds on the clock of the run.

    Attributes:
        place: the queue.
        role: ``message``; ``neighbour`` of a message to a bad target; ``blocked`` for that message, which may be late.
        outcome: the result of the call, for people.
        expected: ``delivered``, ``nothing`` or ``unknown``; ``impossible`` after an answer that cannot be.
        sent_at: when the call began.
        due: the due time.
        due_error: how far the due time may be off.
        attempts: how often the message was sent.
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
        number: counts the faults of a run from 1 on.
        kind: the name of the fault.
        what: the node and the like.
        began: before the fault.
        ended: after its repair.
        settled: when its effects have to be over.
        late: whether messages may be late until then.
        twice: whether messages may arrive twice.
        clock_step: by how many microseconds the clock of a node was wrong.
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

_TYPES: Final = {"str": pa.string(), "int": pa.int64(), "bool": pa.bool_(), "bytes": pa.binary()}

TABLES: Final[dict[str, type[Row]]] = {"sent": SentRow, "delivered": DeliveredRow, "faults": InjectedFault}


def schema_of(kind: type[Row]) -> pa.Schema:
    """The columns of a table."""
    return pa.schema([(name, _TYPES[str(one)]) for name, one in kind.__annotations__.items()])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run was, in ``run.json``.

    Attributes:
        seconds: how long messages were sent.
        finished: whether it came to its end. Only such a run can be judged: others did not wait for their messages.
        clock_drift: by how many microseconds the system clock of the checker has moved against the clock of the run.
        clock_change: by how many of them at most during one publish: the bound of the error of due times.
        settings: the arguments.
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
        """Write it into the folder of the run."""
        path = folder / _RUN_FILE
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        part.replace(path)


class HistoryWriter:
    """Writes the tables of a run. Files appear under their names when they are complete."""

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
        """The SHA-256 of all files of the finished runs, in the order of their names."""
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
        InvalidInputError: the folder has other files, or runs that were not expected.
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    runs = [name for name in names if (folder / name / _RUN_FILE).exists()]
    if others := sorted(set(names) - set(runs)):
        raise InvalidInputError(f"{folder} has other files than a history's, such as {others[0]}: give a new folder")
    if runs and not again:
        raise InvalidInputError(
            f"{folder} has {quantity(len(runs), 'run')} already: add another run with --continue, or give a new folder"
        )
    return f"run-{len(runs) + 1:04}"


def digest_of(content: bytes) -> bytes:
    """The digest of a body."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def digest_of_headers(headers: Iterable[tuple[str, Any]]) -> bytes:
    """The digest of headers, whatever their order. Text, numbers, booleans and bytes of the same value are equal."""
    return digest_of(repr(sorted(headers)).encode())
