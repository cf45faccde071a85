"""The tables of stored timeouts, and their rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bide.errors import InvalidInputError, TimeoutStoreError
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from bide.timeouts.database import Database

_SUFFIX: Final = "TimeoutData"

EARLIEST: Final = datetime(1, 1, 2, tzinfo=UTC)
LATEST: Final = datetime(9999, 12, 30, tzinfo=UTC)
"""Bounds of the due times that Python can read. PostgreSQL also has ``infinity``, and years before 1."""


class Condition(NamedTuple):
    """A condition of a WHERE clause.

    Attributes:
        sql: the condition, in parentheses if it has several parts.
        values: the values of its parameters.
    """

    sql: str = "TRUE"
    values: tuple[Any, ...] = ()


class StoredTimeout(NamedTuple):
    """One stored timeout.

    Attributes:
        id: its id, of the type that the driver reads.
        headers: the headers as stored: JSON.
        state: the body.
        due: the due time.
    """

    id: Any
    destination: Any
    headers: Any
    state: Any
    due: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutTable:
    """A table of stored timeouts. The defaults are the columns of NServiceBus SQL persistence.

    Attributes:
        name: its name.
        endpoint: the name of the endpoint that owns it, as in the table's name: with ``_`` instead of dots. For a
            table of any other form, the name of the table.
        id: the column of ids. Rows whose id is missing or not unique are not moved.
        destination: the column with the names of the target queues.
        headers: the column with the headers as JSON; None if there are no headers.
        state: the column with the bodies: bytes or text.
        time: the column with the due times, which are in UTC if they have no zone.
    """

    name: str
    endpoint: str
    id: str = "Id"
    destination: str = "Destination"
    headers: str | None = "Headers"
    state: str = "State"
    time: str = "Time"

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns."""
        headers = () if self.headers is None else (self.headers,)
        return (self.id, self.destination, *headers, self.state, self.time)

    def selection(self, quote: Callable[[str], str]) -> str:
        """The columns of a SELECT, in the order of :class:`StoredTimeout`."""
        headers = "NULL" if self.headers is None else quote(self.headers)
        return f"{quote(self.id)}, {quote(self.destination)}, {headers}, {quote(self.state)}, {quote(self.time)}"


_COLUMNS: Final = frozenset(one.lower() for one in TimeoutTable(name="", endpoint="").columns)

_BYTES_OR_TEXT: Final = frozenset(
    {
        *("bytea", "character varying", "character", "text"),
        *("char", "varchar", "tinytext", "mediumtext", "longtext"),
        *("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"),
    }
)
"""Types of columns in PostgreSQL and MySQL whose values the drivers return as bytes or text."""

_TIMESTAMPS: Final = ("timestamp", "datetime")
"""Starts of the types of columns whose values the drivers return as points in time."""

_MAX_SHARED_IDS: Final = 1_000
"""If more ids belong to several rows, the wrong column was named. Each of them is a parameter of every claim."""

MAPPED: Final = {"id": "id", "destination": "destination", "headers": "headers", "body": "state", "due": "time"}
"""The names that :func:`mapped_table` takes, with the attributes of :class:`TimeoutTable` that they stand for."""


def find_tables(database: Database) -> list[TimeoutTable]:
    """The tables of NServiceBus SQL persistence in the schema of the connection, by name."""
    found = defaultdict[str, set[str]](set)
    for table, column in database.query(
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = %s", (database.schema,)
    ):
        # MySQL names these columns in capitals, and may store table names in lower case.
        if table.lower().endswith(_SUFFIX.lower()):
            found[table].add(column.lower())
    return [
        TimeoutTable(name=name, endpoint=name[: -len(_SUFFIX)].rstrip("_") or name)
        for name, columns in sorted(found.items())
        if columns >= _COLUMNS
    ]


def mapped_table(name: str, columns: Mapping[str, str]) -> TimeoutTable:
    """Describe any table as a table of stored timeouts.

    Args:
        name: the name of the table.
        columns: the names of its columns by ``id``, ``destination``, ``body``, ``due``, and ``headers`` if it has any.

    Raises:
        InvalidInputError: ``id``, ``destination``, ``body`` or ``due`` is missing, or another name is given.
    """
    if unknown := sorted(columns.keys() - MAPPED.keys()):
        raise InvalidInputError(f"a column cannot be used as {unknown[0]!r}: give one of {', '.join(MAPPED)}")
    if missing := [one for one in MAPPED if one not in columns and one != "headers"]:
        raise InvalidInputError(f"no column is named for {missing[0]}: give id, destination, body and due")
    names: dict[str, Any] = {attribute: columns.get(use) for use, attribute in MAPPED.items()}
    return TimeoutTable(name=name, endpoint=name, **names)


def check_table(database: Database, table: TimeoutTable) -> None:
    """Check that a table has its columns, and that its due times are timestamps.

    Raises:
        TimeoutStoreError: the table or a column does not exist, or a column cannot be used.
    """
    found = dict(
        database.query(
            "SELECT column_name, data_type FROM information_schema.columns WHERE table_schema = %s AND table_name = %s",
            (database.schema, table.name),
        )
    )
    for column in table.columns:
        if column not in found:
            raise TimeoutStoreError(
                f"the table {table.name!r} of the schema {database.schema!r} has no column {column!r}: it has "
                + (", ".join(sorted(found)) or "none, or it does not exist")
            )
    if not found[table.time].lower().startswith(_TIMESTAMPS):
        raise TimeoutStoreError(
            f"the column {table.time!r} of the table {table.name!r} is of type {found[table.time]}: change it to a "
            "timestamp, or export the rows to a file for 'bide pipeline schedule'"
        )


def usable_id_condition(database: Database, table: TimeoutTable) -> Condition:
    """A condition that excludes rows whose id is missing or not unique now.

    Such rows cannot be moved, because rows are claimed, deleted and put back by their ids. The ids are compared as the
    column does it, for example without regard to case.

    Raises:
        TimeoutStoreError: more than 1,000 ids belong to several rows each.
    """
    identity, name = database.dialect.quote(table.id), database.table(table.name)
    shared = database.query(
        f"SELECT {identity} FROM {name} WHERE {identity} IS NOT NULL GROUP BY {identity} HAVING COUNT(*) > 1 "
        f"LIMIT {_MAX_SHARED_IDS + 1}"
    )
    if len(shared) > _MAX_SHARED_IDS:
        raise TimeoutStoreError(
            f"the column {table.id!r} of the table {table.name!r} is not unique: more than "
            f"{quantity(_MAX_SHARED_IDS, 'value')} are in several rows each; name another column as id"
        )
    parts = []
    if database.query(f"SELECT 1 FROM {name} WHERE {identity} IS NULL LIMIT 1"):
        parts.append(f"{identity} IS NOT NULL")
    if shared:
        parts.append(f"{identity} NOT IN ({', '.join(['%s'] * len(shared))})")
    if not parts:
        return Condition()
    return Condition(f"({' AND '.join(parts)})", tuple(one for (one,) in shared))


def has_bytes_or_text(database: Database, table: TimeoutTable) -> bool:
    """Whether the column of the bodies has a type whose values are bytes or text, so that every body can be sent."""
    types = database.query(
        "SELECT data_type FROM information_schema.columns "
        "WHERE table_schema = %s AND table_name = %s AND LOWER(column_name) = LOWER(%s)",
        (database.schema, table.name, table.state),
    )
    return bool(types) and all(one.lower() in _BYTES_OR_TEXT for (one,) in types)


def check_transactions(database: Database, table: TimeoutTable) -> None:
    """Check that a table takes part in transactions. Without them, a kill could lose rows.

    Raises:
        TimeoutStoreError: its storage engine has no transactions.
    """
    if database.dialect.engine is None:
        return
    for (engine,) in database.query(database.dialect.engine, (database.schema, table.name)):
        if engine != "InnoDB":
            raise TimeoutStoreError(
                f"the table {table.name!r} has the storage engine {engine}: change it with ALTER TABLE ... "
                "ENGINE=InnoDB, because rows could be lost without transactions"
            )


def choose_tables(found: list[TimeoutTable], endpoints: Iterable[str]) -> list[TimeoutTable]:
    """The tables of the named endpoints; all tables if no endpoint is named.

    Raises:
        TimeoutStoreError: an endpoint has no table, or there is no table of timeouts.
    """
    if not found:
        raise TimeoutStoreError(
            "the schema of the connection has no table whose name ends in TimeoutData, with the columns of NServiceBus "
            "SQL persistence: give the URL of the database and schema with the timeouts"
        )
    chosen = []
    for endpoint in endpoints:
        wanted = endpoint.replace(".", "_").lower()
        matching = [one for one in found if one.endpoint.lower() == wanted or one.name == endpoint]
        if not matching:
            known = ", ".join(one.endpoint for one in found)
            raise TimeoutStoreError(f"the endpoint {endpoint!r} has no table of timeouts: give one of {known}")
        chosen += [one for one in matching if one not in chosen]
    return chosen or found


def stored_timeout(row: tuple[Any, ...]) -> StoredTimeout:
    """The timeout in a row of :meth:`TimeoutTable.selection`. Times without a zone are UTC.

    Raises:
        InvalidInputError: the column of the due time has another type.
    """
    identity, destination, headers, state, time = row
    if not isinstance(time, datetime):
        raise InvalidInputError(f"the due time {time!r} of the timeout {identity} is of type {type(time).__name__}")
    due = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    return StoredTimeout(identity, destination, headers, state, due)


def count_unreadable(database: Database, table: TimeoutTable) -> int:
    """The number of stored timeouts without a due time, or with one that Python cannot read."""
    time = database.dialect.quote(table.time)
    is_time = database.dialect.is_time.format(time)
    ((number,),) = database.query(
        f"SELECT COUNT(*) FROM {database.table(table.name)} WHERE ({is_time}) IS NOT TRUE OR {time} < %s "
        f"OR {time} > %s",
        (database_time(EARLIEST), database_time(LATEST)),
    )
    return int(number)


def database_time(moment: datetime) -> datetime:
    """A time as the databases store it: in UTC, without a zone."""
    return moment.astimezone(UTC).replace(tzinfo=None)
