"""A worker process that continues on a new connection when one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.reconnecting import ReconnectingConnection
from bide.errors import BrokerError
from bide.runtime.logs import logger

log = logger(__name__)

_RETRY_PAUSE: Final = 1.0
"""Seconds until a worker that the broker refused tries again."""


class ReconnectingWorker:
    """Does the work of a process on one connection after another. Lost connections are opened again.

    Args:
        url: the broker's URL; None uses ``BIDE_URL``, or RabbitMQ's default URL on this machine.
        role: the name of the process in its connection's name and in logs, such as "relay".
        prepare: checks or declares what the work needs. Called until it succeeds once; its errors end the worker.
        work: works on a connection until the event is set, and then finishes the messages in flight. It raises a
            ``BrokerError`` if the connection or a channel fails.
        check: raises if an error of *work* on an open connection is permanent. Otherwise the work begins again.

    Raises:
        InvalidInputError: the URL is invalid.
    """

    def __init__(
        self,
        url: str | BrokerUrl | None,
        *,
        role: str,
        prepare: Callable[[Connection], Awaitable[None]],
        work: Callable[[Connection, asyncio.Event], Awaitable[None]],
        check: Callable[[BrokerError], None],
    ) -> None:
        address = (
            url if isinstance(url, BrokerUrl) else BrokerUrl.from_environment() if url is None else BrokerUrl.parse(url)
        )
        self._role = role
        self._prepare = prepare
        self._work = work
        self._check = check
        self._reconnecting = ReconnectingConnection(replace(address, name=f"{address.name} ({role})"))
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End the work when its messages in flight are finished."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until :meth:`stop`.

        Raises:
            BideError: an error of the preparation, or a permanent one.
            BrokerError: the broker cannot be reached at the start.
        """
        is_prepared = False
        try:
            while (connection := await self._connection()) is not None:
                try:
                    if not is_prepared:
                        await self._prepare(connection)
                        is_prepared = True
                    await self._work(connection, self._stopping)
                except BrokerError as error:
                    if not is_prepared:
                        raise
                    if connection.is_open:
                        self._check(error)
                    if not self._stopping.is_set():
                        log.warning("the %s pauses until the broker is back: %s", self._role, error)
                    if connection.is_open:
                        await self._pause()
        finally:
            await self._reconnecting.close()

    async def _connection(self) -> Connection | None:
        """The open connection, or None when the worker is stopping."""
        connecting = asyncio.create_task(self._reconnecting.connection())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return None if self._stopping.is_set() else await connecting
        finally:
            for task in (connecting, stopping):
                task.cancel()
            await asyncio.gather(connecting, stopping, return_exceptions=True)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_RETRY_PAUSE):
                await self._stopping.wait()
        except TimeoutError:
            return
