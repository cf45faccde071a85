"""Tables of NServiceBus SQL persistence with timeouts, and the queues of their endpoints."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import bide
from bide.delay.protocol import DelayInfrastructure
from bide.topology import Queue, Topology
from tests.databases import DatabaseServer
from tests.support import Vhost

SCHEMAS = {
    "postgresql": """
        CREATE TABLE "{0}TimeoutData" ("Id" uuid PRIMARY KEY, "Destination" varchar(200), "SagaId" uuid, "State" bytea,
            "Time" timestamp, "Headers" text, "PersistenceVersion" varchar(23));
        CREATE INDEX "{0}_TimeIdx" ON "{0}TimeoutData" ("Time");
        CREATE INDEX "{0}_SagaIdx" ON "{0}TimeoutData" ("SagaId")
        """,
    "mysql": """
        CREATE TABLE `{0}TimeoutData` (Id varchar(38) PRIMARY KEY, Destination nvarchar(200), SagaId varchar(38),
            State longblob, Time datetime, Headers json NOT NULL, PersistenceVersion varchar(23) NOT NULL,
            KEY Index_Time (Time), KEY Index_SagaId (SagaId)) CHARACTER SET ascii
        """,
}
"""The tables of NServiceBus SQL persistence."""


@dataclass
class Store:
    """A database with the timeouts of NServiceBus endpoints."""

    server: DatabaseServer
    url: str

    def create(self, endpoint: str) -> None:
        """Create the table of an endpoint."""
        self.server.execute(self.url, SCHEMAS[self.server.scheme].format(endpoint))

    def add(self, endpoint: str, *rows: tuple[Any, ...]) -> list[str]:
        """Store timeouts of (destination, due, headers, body), and return their ids."""
        found, values = [], []
        for destination, due, headers, body in rows:
            found.append(str(uuid.uuid4()))
            text = headers if isinstance(headers, str) else json.dumps(headers)
            values.append((found[-1], destination, body, due.astimezone(UTC).replace(tzinfo=None), text, "6.0"))
        quote = '"' if self.server.scheme == "postgresql" else "`"
        names = ("Id", "Destination", "State", "Time", "Headers", "PersistenceVersion")
        columns = ", ".join(f"{quote}{name}{quote}" for name in names)
        self.server.execute(
            self.url,
            f"INSERT INTO {quote}{endpoint}TimeoutData{quote} ({columns}) VALUES (%s, %s, %s, %s, %s, %s)",
            values,
        )
        return found

    def statement(self, text: str) -> str:
        """A statement with double quotes around names, as this server wants it."""
        return text if self.server.scheme == "postgresql" else text.replace('"', "`")

    def count(self, endpoint: str) -> int:
        """The number of rows in the table of an endpoint."""
        with self.counting(endpoint) as count:
            return count()

    @contextmanager
    def counting(self, endpoint: str) -> Iterator[Callable[[], int]]:
        """A function that returns the present number of rows in the table of an endpoint, over one connection."""
        statement = self.statement(f'SELECT COUNT(*) FROM "{endpoint}TimeoutData"')
        with closing(self.server.connect(self.url)) as connection:

            def count() -> int:
                cursor = connection.cursor()
                cursor.execute(statement)
                ((number,),) = cursor.fetchall()
                # Otherwise MariaDB would give the same number until the end of the transaction.
                connection.commit()
                return int(number)

            yield count

    def stored(self, endpoint: str) -> set[str]:
        """The ids in the table of an endpoint."""
        quote = '"' if self.server.scheme == "postgresql" else "`"
        rows = self.server.execute(self.url, f"SELECT {quote}Id{quote} FROM {quote}{endpoint}TimeoutData{quote}")
        return {str(row[0]) for row in rows}

    def contents(self) -> dict[str, list[str]]:
        """All rows of the database by table, sorted."""
        schema = "current_schema()" if self.server.scheme == "postgresql" else "DATABASE()"
        tables = self.server.execute(
            self.url, f"SELECT table_name FROM information_schema.tables WHERE table_schema = {schema}"
        )
        return {
            name: sorted(map(repr, self.server.execute(self.url, self.statement(f'SELECT * FROM "{name}"'))))
            for (name,) in tables
        }


def later(**span: float) -> datetime:
    return (datetime.now(UTC) + timedelta(**span)).replace(microsecond=0)


@asynccontextmanager
async def endpoints(vhost: Vhost, infrastructure: DelayInfrastructure, *names: str) -> AsyncIterator[bide.Client]:
    """A client on a virtual host that has these endpoints."""
    async with bide.connect(vhost.url, infrastructure=infrastructure) as client:
        for name in names:
            topology = Topology(queues=[Queue.quorum(name)])
            if isinstance(infrastructure, bide.NServiceBus):
                topology |= infrastructure.endpoint_topology(name)
            await client.declare(infrastructure.topology() | topology)
        yield client
