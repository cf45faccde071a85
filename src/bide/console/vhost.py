"""Connections of the console to one virtual host of a broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import Final, Self
from weakref import WeakValueDictionary

from bide.admin.locate import management_api
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.client import Client, connect
from bide.client.schedule_methods import schedules_of
from bide.client.schedules import Schedules
from bide.console.operations import BackgroundOperations
from bide.console.tap_index import TapIndex
from bide.delay.protocol import DelayInfrastructure
from bide.error_queues import ErrorQueue
from bide.error_queues.operator_log import OperatorLogWriter, new_run
from bide.management.api import ManagementApi

_TIMEOUT: Final = timedelta(seconds=30)
"""The timeout of publishes, and of questions to gates."""


@dataclass(slots=True, kw_only=True)
class ConsoleVhost:
    """A virtual host. Use it with ``async with``.

    Attributes:
        url: the URL of the broker with the virtual host.
        infrastructure: the delay infrastructure.
        management_url: the URL of the management API; None for the default.
        stream_port: the port of the stream protocol; None for that of the environment, or the default.
        client: publishes, and asks the gates.
        api: the management API.
        operations: the operations on failed messages that are running or have ended.
        tap_indexes: the indexes of the taps, by stream.
    """

    url: BrokerUrl
    infrastructure: DelayInfrastructure
    management_url: str | None = None
    stream_port: int | None = None
    client: Client = field(init=False)
    api: ManagementApi = field(init=False)
    operations: BackgroundOperations = field(init=False, default_factory=BackgroundOperations)
    tap_indexes: dict[str, TapIndex] = field(init=False, default_factory=dict)
    _stack: AsyncExitStack = field(init=False, default_factory=AsyncExitStack)
    _connection: Connection | None = field(init=False, default=None)
    _opening: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _reading: WeakValueDictionary[str, asyncio.Lock] = field(init=False, default_factory=WeakValueDictionary)

    @property
    def name(self) -> str:
        """The name of the virtual host."""
        return self.url.vhost

    @property
    def schedules(self) -> Schedules:
        """The operations on the schedule log."""
        return schedules_of(self.client)

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            BrokerError: the broker cannot be reached.
        """
        async with AsyncExitStack() as stack:
            url = replace(self.url, name=f"{self.url.name} (console)")
            self.client = await stack.enter_async_context(
                connect(url, infrastructure=self.infrastructure, declare=False, timeout=_TIMEOUT)
            )
            # The client knows which variant this broker needs: headers depend on the release, and on .NET receivers.
            self.infrastructure = await self.client.infrastructure()
            self.api = await stack.enter_async_context(management_api(self.url, self.management_url))
            stack.push_async_callback(self._close_connection)
            stack.push_async_callback(self.operations.close)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def connection(self) -> Connection:
        """The connection for counts and checks. It is opened again if it was lost.

        Raises:
            BrokerError: the broker cannot be reached.
        """
        async with self._opening:
            if self._connection is None or not self._connection.is_open:
                await self._close_connection()
                self._connection = await Connection.open(replace(self.url, name=f"{self.url.name} (console)"))
            return self._connection

    async def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def error_queue(self, queue: str, operator: str) -> ErrorQueue:
        """An error queue whose operations are recorded with the name of the operator."""
        return ErrorQueue(self.client, queue, management_url=self.management_url, operator=operator)

    @asynccontextmanager
    async def reading(self, queue: str) -> AsyncIterator[None]:
        """Read a queue in the block while no view or operation reads it: a reader holds the messages until it ends."""
        lock = self._reading.setdefault(queue, asyncio.Lock())
        async with lock:
            yield

    @asynccontextmanager
    async def recorded(
        self, operation: str, queue: str, operator: str, details: Mapping[str, object]
    ) -> AsyncIterator[dict[str, object]]:
        """Record an operation before it begins, and its result afterwards.

        The block puts the result into the dictionary that it gets. If the block raises an error, the record says that
        the operation was interrupted.

        Raises:
            UnsupportedBrokerError: the operation cannot be recorded, and the block does not run.
            BrokerError: the broker did not confirm a record. If it is the first one, the block does not run.
        """
        record = OperatorLogWriter(self.client, operation=operation, queue=queue, run=new_run(), operator=operator)
        await record.begin({name: value for name, value in details.items() if value is not None})
        result: dict[str, object] = {}
        try:
            yield result
        except BaseException as error:
            await record.interrupt({"error": str(error) or type(error).__name__})
            raise
        await record.end(result)
