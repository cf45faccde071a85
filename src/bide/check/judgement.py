"""The judgement of a history: kept and broken promises, examples, and figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from bide.check import availability
from bide.check.history import TABLES, CheckHistory, schema_of
from bide.check.rules import BROKER_TICK, BY_CLOCK, DUE_ERROR, FAULTS, RULES, SUMMARY, UNDELIVERABLE, VIEWS
from bide.durations import MICROSECOND
from bide.errors import InvalidInputError

if TYPE_CHECKING:
    import duckdb
    from pyspark.sql import SparkSession

Engine = Literal["duckdb", "spark"]

MAX_LATENESS: Final = timedelta(seconds=5)

_SHOWN: Final = 5
"""The most examples of a broken promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenPromise:
    """A message that breaks a promise.

    Attributes:
        off: the microseconds by which the message was early or late, or the number of its copies.
    """

    run: str
    id: str
    place: str
    workload: str
    off: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPromise:
    """A promise, and whether it was kept.

    Attributes:
        violations: the number of messages that break it.
        examples: the first of them.
    """

    rule: str
    promise: str
    violations: int
    examples: tuple[BrokenPromise, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFigures:
    """The figures of a workload. A message to three queues counts three times.

    Attributes:
        sent: messages that were sent.
        confirmed: messages that had to arrive.
        refused: messages that must not arrive.
        delivered: messages that arrived.
        twice: messages that arrived more than once.
        latest: the largest lateness, during faults too, in microseconds.
    """

    workload: str
    sent: int
    confirmed: int
    refused: int
    delivered: int
    twice: int
    latest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestWaits:
    """The longest waits during faults of a kind, in microseconds; 0 for up to a tenth of a second.

    Attributes:
        during: the kind of fault; an empty string for waits that overlap no fault.
        unconfirmed: the longest time in which no publish to a queue was confirmed, although one was under way.
        slowest: the longest time from a publish to its confirm or error.
        undelivered: the longest time in which nothing came from a queue, although a message was due.
    """

    during: str
    unconfirmed: int
    slowest: int
    undelivered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of judging the runs in a folder.

    Attributes:
        seconds: how long messages were sent, in all runs together.
        max_lateness: the lateness that was allowed outside faults, in seconds.
        faults: the number of faults of each kind.
        waits: the longest waits during each kind of fault, and at other times.
        undeliverable: the number of messages in undeliverable queues.
        early_by_clock: the number of messages that were early because the clock of a node was wrong.
        earliest_by_clock: the most by which one of these messages was early, in microseconds.
        clock_error: the largest error of a due time, in microseconds.
        digest: the SHA-256 of the history; see :meth:`CheckHistory.digest`.
    """

    folder: str
    runs: int
    unfinished: tuple[str, ...]
    seeds: tuple[int, ...]
    releases: tuple[str, ...]
    seconds: float
    max_lateness: float
    workloads: tuple[WorkloadFigures, ...]
    faults: dict[str, int]
    waits: tuple[LongestWaits, ...]
    undeliverable: int
    early_by_clock: int
    earliest_by_clock: int
    clock_error: int
    findings: tuple[JudgedPromise, ...]
    digest: str

    @property
    def violations(self) -> int:
        """The number of violations of all promises."""
        return sum(one.violations for one in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The content of ``--json``."""
        return {**asdict(self), "violations": self.violations}


class _Database(Protocol):
    def create_tables(self, history: CheckHistory) -> None: ...

    def run(self, query: str) -> None: ...

    def rows(self, query: str) -> list[tuple[Any, ...]]: ...


def judge(
    folder: Path, *, engine: Engine = "duckdb", max_lateness: timedelta = MAX_LATENESS, master: str | None = None
) -> Verdict:
    """Judge all finished runs in a folder.

    Args:
        engine: ``duckdb`` in this process, or ``spark`` for histories that are too large for one process.
        max_lateness: the lateness that is allowed outside faults.
        master: the URL of the Spark master; see :func:`bide.pipelines.session.session`.

    Raises:
        InvalidInputError: the folder has no finished run, or the engine is not installed.
    """
    history = CheckHistory.open(folder)
    with _duckdb() if engine == "duckdb" else _spark(master) as database:
        database.create_tables(history)
        for view in (*VIEWS, *availability.VIEWS):
            database.run(_filled(view, max_lateness))
        findings = tuple(_finding(database, rule.name, rule.promise, rule.query) for rule in RULES)
        [(undeliverable,)] = database.rows(UNDELIVERABLE)
        [(early, earliest)] = database.rows(BY_CLOCK)
        [(due_error,)] = database.rows(DUE_ERROR)
        workloads = [WorkloadFigures(**_named(WorkloadFigures, row)) for row in database.rows(SUMMARY)]
        waits = [LongestWaits(**_named(LongestWaits, row)) for row in database.rows(availability.LONGEST_WAITS)]
        return Verdict(
            folder=str(folder),
            runs=len(history.runs),
            unfinished=history.unfinished,
            seeds=tuple(one.seed for one in history.runs),
            releases=tuple(sorted({one.release for one in history.runs})),
            seconds=sum(one.seconds for one in history.runs),
            max_lateness=max_lateness.total_seconds(),
            workloads=tuple(workloads),
            faults=dict(database.rows(FAULTS)),
            waits=tuple(waits),
            undeliverable=undeliverable,
            early_by_clock=early,
            earliest_by_clock=earliest,
            clock_error=due_error + BROKER_TICK,
            findings=findings,
            digest=history.digest(),
        )


def _named(kind: type[object], row: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(kind.__annotations__, row, strict=True))


def _filled(view: str, max_lateness: timedelta) -> str:
    return view.replace("{lateness}", str(max_lateness // MICROSECOND))


def _finding(database: _Database, name: str, promise: str, query: str) -> JudgedPromise:
    [(count,)] = database.rows(f"SELECT count(*) AS number FROM ({query}) AS violation")  # noqa: S608 (our own text)
    examples: Sequence[BrokenPromise] = ()
    if count:
        first = f"SELECT * FROM ({query}) AS violation ORDER BY run, id, place LIMIT {_SHOWN}"  # noqa: S608 (our own text)
        examples = [BrokenPromise(**_named(BrokenPromise, row)) for row in database.rows(first)]
    return JudgedPromise(rule=name, promise=promise, violations=count, examples=tuple(examples))


class _Duckdb:
    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def create_tables(self, history: CheckHistory) -> None:
        types = {"string": "VARCHAR", "int64": "BIGINT", "bool": "BOOLEAN", "binary": "BLOB"}
        for name, kind in TABLES.items():
            columns = ", ".join(f'"{one.name}" {types[str(one.type)]}' for one in schema_of(kind))
            files = ", ".join(f"'{one.replace(chr(39), 2 * chr(39))}'" for one in history.files(name))
            if not files:
                self.run(f"CREATE OR REPLACE TEMPORARY TABLE {name} ({columns})")
                continue
            # Files of older releases lack a column.
            self.run(f"CREATE OR REPLACE TEMPORARY TABLE no_{name} ({columns})")
            self.run(
                f"CREATE OR REPLACE TEMPORARY VIEW {name} AS SELECT * FROM no_{name} "  # noqa: S608 (quoted)
                f"UNION ALL BY NAME SELECT * FROM read_parquet([{files}], union_by_name = true)"
            )

    def run(self, query: str) -> None:
        self._connection.execute(query)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(query).fetchall()


class _Spark:
    def __init__(self, session: SparkSession) -> None:
        self._session = session

    def create_tables(self, history: CheckHistory) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema

        for name, kind in TABLES.items():
            files, columns = history.files(name), from_arrow_schema(schema_of(kind))
            frame = self._session.read.schema(columns).parquet(*files) if files else None
            (self._session.createDataFrame([], columns) if frame is None else frame).createOrReplaceTempView(name)

    def run(self, query: str) -> None:
        self._session.sql(query)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._session.sql(query).collect()]


@contextmanager
def _duckdb() -> Iterator[_Database]:
    try:
        from bide.pipelines.memory_database import memory_database
    except ImportError as error:
        raise InvalidInputError("the engine duckdb is missing: install bide[check]") from error
    with memory_database() as connection:
        yield _Duckdb(connection)


@contextmanager
def _spark(master: str | None) -> Iterator[_Database]:
    from bide.pipelines.session import session

    with session(master, name="bide check", configuration={}, time_zone="UTC") as one:
        yield _Spark(one)
