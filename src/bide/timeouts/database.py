"""A connection to a database with timeouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from bide.errors import TimeoutStoreError
from bide.timeouts.dialects import Cursor, Dialect, dialect_of

_Result = TypeVar("_Result")

_ATTEMPTS: Final = 10


class Database:
    """One connection. Use it in one thread at a time.

    Args:
        url: ``postgresql://user:password@host:port/database`` or ``mysql://user:password@host:port/database``.

    Attributes:
        dialect: the SQL of this server.
        schema: the connection's current schema, in which the tables of timeouts are.

    Raises:
        InvalidInputError: the URL cannot be read, or the driver is not installed.
        TimeoutStoreError: the database cannot be reached, or refuses.
    """

    def __init__(self, url: str) -> None:
        self.dialect: Dialect = dialect_of(url)
        self._errors = self.dialect.errors()
        with self._translated():
            self._connection = self.dialect.connect(url)
        try:
            self.dialect.warn_about_readable_password(self._connection)
            with self.transaction() as cursor:
                for statement in self.dialect.session:
                    cursor.execute(statement)
                cursor.execute(self.dialect.current_schema)
                (schema,) = cursor.fetchall()[0]
            if schema is None:
                raise TimeoutStoreError("the URL of the database names no database or schema that exists: name one")
            self.schema = str(schema)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. This ends its transaction and releases its lock."""
        try:
            self._connection.close()
        except self._errors:
            # The server has closed the connection already.
            pass

    @contextmanager
    def transaction(self) -> Iterator[Cursor]:
        """A transaction: committed at the end of the block, rolled back after an exception.

        Raises:
            TimeoutStoreError: the database refused a statement, or the connection was lost.
        """
        with self._translated():
            cursor = self._connection.cursor()
            try:
                yield cursor
            except BaseException:
                try:
                    self._connection.rollback()
                except self._errors:
                    # The connection was lost, so the server rolls back. The first error is raised below.
                    pass
                raise
            else:
                self._connection.commit()
            finally:
                cursor.close()

    def repeat_after_deadlocks(self, work: Callable[[], _Result]) -> _Result:
        """The result of a function that runs one transaction, which is repeated if the server ends a deadlock with it.

        Raises:
            TimeoutStoreError: there were ten deadlocks, or another error.
        """
        for _ in range(_ATTEMPTS - 1):
            try:
                return work()
            except TimeoutStoreError as error:
                if not self.is_deadlock(error):
                    raise
        return work()

    def is_deadlock(self, error: TimeoutStoreError) -> bool:
        """Whether the server rolled the transaction back to end a deadlock."""
        return self.dialect.is_deadlock(error.__cause__)

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of a statement, in a transaction of its own."""
        with self.transaction() as cursor:
            cursor.execute(statement, values)
            return list(cursor.fetchall())

    def stream(self, statement: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a statement, read from the server a few at a time."""
        with self._translated():
            cursor = self.dialect.streaming_cursor(self._connection)
            try:
                cursor.execute(statement, values)
                while rows := cursor.fetchmany(1000):
                    yield from rows
            finally:
                cursor.close()
                self._connection.rollback()

    def table(self, name: str) -> str:
        """The quoted name of a table with its schema."""
        quote = self.dialect.quote
        return f"{quote(self.schema)}.{quote(name)}"

    def has_table(self, name: str) -> bool:
        """Whether the schema has a table of this name."""
        return bool(
            self.query(
                "SELECT 1 FROM information_schema.tables WHERE table_schema = %s AND table_name = %s",
                (self.schema, name),
            )
        )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TimeoutStoreError(f"the database: {' '.join(str(error).split())}") from error
