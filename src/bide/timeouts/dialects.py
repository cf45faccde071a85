"""The SQL and the drivers of the database servers."""

from __future__ import annotations

import os
import re
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, ClassVar, Final, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

from bide.amqp.tls_warnings import warn_about_database
from bide.errors import InvalidInputError, TimeoutStoreError

LOCK: Final = "bide.timeouts"
"""The start of the name of the lock that a running migration holds."""

_CONNECT_SECONDS: Final = 30

_MYSQL_OPTIONS: Final = ("ssl_ca", "ssl_verify_identity", "unix_socket")

_STRAY_PERCENT: Final = re.compile("%(?![0-9A-Fa-f]{2})")


class Cursor(Protocol):
    """A cursor of Python's database API (PEP 249)."""

    @property
    def rowcount(self) -> int:
        """The number of rows of the last statement."""

    @property
    def description(self) -> Any:
        """The columns of the result."""

    def execute(self, statement: Any, values: Any = None, /) -> Any:
        """Run a statement."""

    def fetchall(self) -> Sequence[tuple[Any, ...]]:
        """All rows that are left."""

    def fetchmany(self, size: int, /) -> Sequence[tuple[Any, ...]]:
        """The next rows."""

    def close(self) -> None:
        """Free the cursor."""


class Dialect(ABC):
    """The differences between database servers.

    Attributes:
        session: statements to run on a new connection.
        current_schema: a query for the schema of the connection.
        overriding: the clause of INSERT that lets it set generated ids.
        text: the type of a text of any length.
        moment: the type of a time in UTC, with microseconds.
        engine: a query for the storage engine of a table, if there are engines without transactions.
        is_time: a condition that a time column holds a valid time; ``{0}`` is the column's quoted name.
        lock_table: the statement that locks a table against other connections, at least until the transaction ends;
            ``{}`` is the table's quoted name.
    """

    session: ClassVar[tuple[str, ...]]
    current_schema: ClassVar[str]
    overriding: ClassVar[str]
    text: ClassVar[str]
    moment: ClassVar[str]
    engine: ClassVar[str | None]
    is_time: ClassVar[str]
    lock_table: ClassVar[str]

    @abstractmethod
    def connect(self, url: str) -> Any:
        """A new connection that does not commit by itself."""

    @abstractmethod
    def warn_about_readable_password(self, connection: Any) -> None:
        """Warn if a password was sent to another machine without TLS, or over TLS whose certificate is not checked."""

    @abstractmethod
    def errors(self) -> tuple[type[Exception], ...]:
        """The exceptions of the driver.

        Raises:
            InvalidInputError: the driver is not installed.
        """

    @abstractmethod
    def is_deadlock(self, error: BaseException | None) -> bool:
        """Whether the server rolled a transaction back to end a deadlock. The transaction can then be repeated."""

    @abstractmethod
    def streaming_cursor(self, connection: Any) -> Cursor:
        """A cursor that does not read the whole result into memory."""

    @abstractmethod
    def quote(self, name: str) -> str:
        """The quoted name of a table or column."""

    @abstractmethod
    def lock(self, cursor: Cursor, schema: str) -> bool:
        """Take the lock of a migration until the connection ends. False if another connection holds the lock."""

    @abstractmethod
    def claim_table(self, table: str, source: str, columns: str, id_column: str) -> tuple[str, ...]:
        """Statements that create the table of claimed rows, if it does not exist, with the columns of a source.

        It has a primary key of its own, ``bide_number``, because some servers require one.

        Args:
            table: the quoted name of the new table.
            source: the quoted name of the source.
            columns: the quoted names of all columns of the source.
            id_column: the quoted name of the id column.
        """


class PostgreSql(Dialect):
    """PostgreSQL 12 or newer, with psycopg."""

    session = ("SET TIME ZONE 'UTC'",)
    current_schema = "SELECT current_schema()"
    overriding = "OVERRIDING SYSTEM VALUE"
    text = "text"
    moment = "timestamp"
    engine = None
    is_time = "{0} IS NOT NULL"
    lock_table = "LOCK TABLE {} IN ACCESS EXCLUSIVE MODE"

    def connect(self, url: str) -> Any:
        """See :meth:`Dialect.connect`. libpq reads the URL, and variables such as ``PGPASSWORD``."""
        import psycopg

        if _STRAY_PERCENT.search(url):
            # In its error, libpq would quote the text around the percent sign, which may be the password.
            raise InvalidInputError("the URL of the database has a stray percent sign: write it as %25")
        return psycopg.connect(url, connect_timeout=_CONNECT_SECONDS)

    def warn_about_readable_password(self, connection: Any) -> None:
        """See :meth:`Dialect.warn_about_readable_password`."""
        if connection.info.password and not connection.pgconn.ssl_in_use:
            # A duplicate of the socket, because the end of the block closes it, and the driver still needs its own.
            with socket.socket(fileno=os.dup(connection.pgconn.socket)) as copy:
                warn_about_database(connection.info.user, copy, "add sslmode=verify-full to the URL")

    def errors(self) -> tuple[type[Exception], ...]:
        """See :meth:`Dialect.errors`."""
        try:
            import psycopg
        except ImportError as error:
            raise _no_driver("psycopg", "postgresql") from error
        return (psycopg.Error,)

    def is_deadlock(self, error: BaseException | None) -> bool:
        """See :meth:`Dialect.is_deadlock`."""
        import psycopg

        return isinstance(error, psycopg.errors.DeadlockDetected)

    def streaming_cursor(self, connection: Any) -> Cursor:
        """See :meth:`Dialect.streaming_cursor`."""
        cursor: Cursor = connection.cursor(name="bide_timeouts")
        return cursor

    def quote(self, name: str) -> str:
        """See :meth:`Dialect.quote`."""
        return '"' + name.replace('"', '""').replace("%", "%%") + '"'

    def lock(self, cursor: Cursor, schema: str) -> bool:
        """See :meth:`Dialect.lock`."""
        cursor.execute("SELECT pg_try_advisory_lock(hashtext(%s), hashtext(%s))", (LOCK, schema))
        return bool(cursor.fetchall()[0][0])

    def claim_table(self, table: str, source: str, columns: str, id_column: str) -> tuple[str, ...]:
        """See :meth:`Dialect.claim_table`. Updates of a published table without a primary key are refused."""
        added = "0 AS bide_batch, 0 AS bide_status, CAST(NULL AS text) AS bide_reason"
        return (
            f"CREATE TABLE IF NOT EXISTS {table} AS SELECT {columns}, {added} FROM {source} WHERE 1 = 0",
            f"ALTER TABLE {table} ADD bide_number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
            f"CREATE INDEX ON {table} (bide_status, bide_batch)",
            f"CREATE INDEX ON {table} ({id_column})",
        )


class MySql(Dialect):
    """MariaDB 10.6 or newer and MySQL 8 or newer, with PyMySQL."""

    session = (
        "SET time_zone = '+00:00'",
        # Rows are copied as they are, also if the mode of the server refuses their dates or replaces a number of 0.
        "SET sql_mode = 'STRICT_ALL_TABLES,NO_AUTO_VALUE_ON_ZERO,ALLOW_INVALID_DATES'",
        # The claim of a batch must not lock the gaps between rows, where the endpoints insert new ones.
        "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    )
    current_schema = "SELECT DATABASE()"
    overriding = ""
    text = "longtext CHARACTER SET utf8mb4"
    moment = "datetime(6)"
    engine = "SELECT engine FROM information_schema.tables WHERE table_schema = %s AND table_name = %s"
    # Some SQL modes allow dates such as 2026-00-10 and 2026-02-31, which the server refuses in date arithmetic.
    is_time = "{0} = {0} + INTERVAL 0 SECOND"
    lock_table = "LOCK TABLES {} WRITE"

    def connect(self, url: str) -> Any:
        """See :meth:`Dialect.connect`. The name of the host is checked too, unless ``ssl_verify_identity=false``."""
        import pymysql

        parts = urlsplit(url)
        options = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if unknown := sorted(options.keys() - set(_MYSQL_OPTIONS)):
            raise InvalidInputError(
                f"the URL of the database has the option {unknown[0]!r}: give {', '.join(_MYSQL_OPTIONS)}"
            )
        if empty := [name for name, value in options.items() if not value]:
            raise InvalidInputError(f"the database's URL has {empty[0]}= without a value: give one, or leave it out")
        has_authority, verify_identity = "ssl_ca" in options, options.get("ssl_verify_identity")
        if verify_identity not in ((None, "true", "false") if has_authority else (None,)):
            raise InvalidInputError(
                f"the database's URL has ssl_verify_identity={verify_identity}: give true or false, and ssl_ca=FILE"
            )
        try:
            return pymysql.connect(
                host=parts.hostname or "localhost",
                port=parts.port or 3306,
                user=unquote(parts.username or ""),
                password=unquote(parts.password or "").encode(),  # PyMySQL would encode it as Latin-1
                database=unquote(parts.path.removeprefix("/")) or None,
                unix_socket=options.get("unix_socket"),
                ssl_ca=options.get("ssl_ca"),
                # PyMySQL does not check the certificate unless these are given.
                ssl_verify_cert=has_authority,
                # The certificate of a server has the name of a host, which the file of a socket does not.
                ssl_verify_identity=has_authority and verify_identity != "false" and "unix_socket" not in options,
                charset="utf8mb4",
                connect_timeout=_CONNECT_SECONDS,
            )
        except pymysql.OperationalError as error:
            refused = getattr(error, "original_exception", None)
            if not isinstance(refused, ssl.SSLCertVerificationError):
                raise
            raise TimeoutStoreError(
                f"the certificate of the database is not accepted ({refused.verify_message}): give the file of its "
                "authority as ssl_ca, and add ssl_verify_identity=false if it does not have the name of the host"
            ) from error
        except OSError as error:
            # The file, and not the network: PyMySQL raises an exception of its own if it cannot reach the server.
            raise InvalidInputError(
                f"the file ssl_ca={options.get('ssl_ca')!r} of the database's URL cannot be used: {error}"
            ) from error
        except RuntimeError as error:
            # PyMySQL raises it if it cannot encrypt the password.
            raise InvalidInputError(
                f"the Python driver PyMySQL cannot log in: {error}. Install this package, or use TLS: add ssl_ca=FILE "
                "to the URL"
            ) from error

    def warn_about_readable_password(self, connection: Any) -> None:
        """See :meth:`Dialect.warn_about_readable_password`."""
        used = connection._sock  # noqa: SLF001 (no public one)
        # By default, PyMySQL uses TLS if the server has it, without checking the certificate.
        if connection.password and not (isinstance(used, ssl.SSLSocket) and used.context.verify_mode):
            warn_about_database(connection.user.decode(), used, "add ssl_ca=FILE to the URL")

    def errors(self) -> tuple[type[Exception], ...]:
        """See :meth:`Dialect.errors`."""
        try:
            import pymysql
        except ImportError as error:
            raise _no_driver("PyMySQL", "mysql") from error
        return (pymysql.MySQLError,)

    def is_deadlock(self, error: BaseException | None) -> bool:
        """See :meth:`Dialect.is_deadlock`."""
        import pymysql
        from pymysql.constants.ER import LOCK_DEADLOCK

        return isinstance(error, pymysql.OperationalError) and error.args[0] == LOCK_DEADLOCK

    def streaming_cursor(self, connection: Any) -> Cursor:
        """See :meth:`Dialect.streaming_cursor`."""
        from pymysql.cursors import SSCursor

        cursor: Cursor = connection.cursor(SSCursor)
        return cursor

    def quote(self, name: str) -> str:
        """See :meth:`Dialect.quote`."""
        return "`" + name.replace("`", "``").replace("%", "%%") + "`"

    def lock(self, cursor: Cursor, schema: str) -> bool:
        """See :meth:`Dialect.lock`."""
        # MySQL allows at most 64 characters in the name of a lock. MySQL 9.6 has no MD5().
        cursor.execute("SELECT GET_LOCK(%s, 0)", (f"{LOCK}.{sha256(schema.encode()).hexdigest()[:32]}",))
        return bool(cursor.fetchall()[0][0])

    def claim_table(self, table: str, source: str, columns: str, id_column: str) -> tuple[str, ...]:
        """See :meth:`Dialect.claim_table`. One statement, because each statement commits."""
        statement = (
            f"CREATE TABLE IF NOT EXISTS {table} (bide_number bigint NOT NULL AUTO_INCREMENT PRIMARY KEY, "
            f"bide_batch int NOT NULL DEFAULT 0, bide_status int NOT NULL DEFAULT 0, bide_reason {self.text}, "
            f"KEY (bide_status, bide_batch), KEY ({id_column})) ENGINE=InnoDB "
            f"SELECT {columns} FROM {source} WHERE 1 = 0"
        )
        return (statement,)


_DIALECTS: Final[dict[str, type[Dialect]]] = {
    "postgresql": PostgreSql,
    "postgres": PostgreSql,
    "mysql": MySql,
    "mariadb": MySql,
}


_UNTESTED: Final = frozenset({"mssql", "sqlserver", "oracle"})
"""URL schemes of servers that NServiceBus SQL persistence supports and this package is not tested with."""


def dialect_of(url: str) -> Dialect:
    """The dialect of the server that a URL names.

    Raises:
        InvalidInputError: the URL cannot be read, or names a server that is not supported. The error does not show the
            URL, which may have a password.
    """
    try:
        parts = urlsplit(url)
        is_read = parts.port != 0 and not parts.fragment and "@" not in parts.path
    except ValueError:
        parts, is_read = urlsplit(""), False
    if not is_read:
        # Without the original error, which may quote a part of the password.
        raise InvalidInputError(
            "the URL of the database cannot be read: write '/', '?', '#' and '@' in user name and password as %2F, "
            "%3F, %23 and %40, and a port as a number from 1 to 65535"
        ) from None
    if parts.scheme not in _DIALECTS:
        start = f"starts with {parts.scheme + ':'!r}" if parts.scheme else "has no scheme"
        way_out = "give postgresql://user:password@host/database or mysql://user:password@host/database"
        if parts.scheme.partition("+")[0] in _UNTESTED:
            way_out = (
                "SQL Server and Oracle are not supported. Use NServiceBus's tool migrate-timeouts (for Oracle, only "
                "with NHibernate), or export the table to a CSV or Parquet file, and send it with "
                "'bide pipeline schedule FILE --to-column Destination'"
            )
        raise InvalidInputError(f"the URL of the database {start}: {way_out}")
    return _DIALECTS[parts.scheme]()


def _no_driver(package: str, extra: str) -> InvalidInputError:
    return InvalidInputError(f"the Python driver {package} is not installed: pip install 'bide[{extra}]'")
