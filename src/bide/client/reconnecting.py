"""A connection that is opened when it is needed, and opened again when it broke."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.failover import Failover, Trial
from bide.errors import (
    AuthenticationError,
    BrokerError,
    ClosedError,
    ConnectionLostError,
    InvalidInputError,
    InvalidUrlError,
    TlsError,
)
from bide.runtime.backoff import Backoff
from bide.runtime.logs import logger

log = logger(__name__)

FIRST_PAUSE: Final = timedelta(milliseconds=50)
LONGEST_PAUSE: Final = timedelta(seconds=5)

STEADY: Final = timedelta(seconds=1)
"""A connection that lasted this long is opened again without a pause when it breaks."""

LONGEST_FLAPPING_PAUSE: Final = timedelta(milliseconds=250)
"""Between connections that the broker accepts, but that break at once."""


class ReconnectingConnection:
    """Keeps one connection. Several tasks may ask for it at once: it is opened once.

    Args:
        trials: how to find out that another host confirms what this one does not; see
            :class:`bide.client.failover.Failover`.

    Attributes:
        on_leave: called with the address of a host that was left as broken, for other connections to the same hosts.
    """

    def __init__(self, url: BrokerUrl, *, trials: Callable[[], Sequence[Trial]] = list) -> None:
        self.url = url
        self.on_leave: Callable[[str], None] | None = None
        self._failover = Failover(trials, self._move)
        self._left = ""
        self._connection: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()
        self._closed = asyncio.Event()
        self._opened_at: float | None = None
        self._backoff = Backoff(FIRST_PAUSE.total_seconds(), LONGEST_PAUSE.total_seconds())

    async def connection(self) -> Connection:
        """The open connection.

        The first time, a failure is raised at once. Later ones are tried again, with growing and randomised pauses,
        until the connection is back or the caller's own time limit ends the wait.

        Raises:
            ClosedError: this was closed.
            InvalidInputError: it was opened in another event loop.
            BrokerError: the first connection could not be opened.
            TlsError: the broker's certificate is not to be trusted, the first time or later.
        """
        self.check_loop()
        connection = self._connection
        if connection is not None and connection.is_open and not self._closed.is_set():
            return connection
        async with self._opening:
            while True:
                if self._closed.is_set():
                    raise ClosedError("the client was closed")
                if self._connection is not None and self._connection.is_open:
                    return self._connection
                await self._spare_the_broker()
                await self._open()

    def check_loop(self) -> None:
        """Belong to the event loop that asks first.

        Raises:
            InvalidInputError: another one did.
        """
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise InvalidInputError(
                "this client was connected in another event loop: use it there, or connect another client in this one"
            )

    async def _spare_the_broker(self) -> None:
        """Pause before a connection is opened that breaks at once again and again."""
        if self._connection is None or self._opened_at is None:
            return
        self._connection = None
        if asyncio.get_running_loop().time() - self._opened_at >= STEADY.total_seconds():
            self._backoff.reset()
            return
        self._backoff.limit(LONGEST_FLAPPING_PAUSE.total_seconds())
        await self._rest()

    async def _open(self) -> None:
        if self._closed.is_set():
            return
        was_open = self._opened_at is not None
        try:
            connection = await Connection.open(self.url, last=self._left)
        except InvalidUrlError:
            raise
        except BrokerError as error:
            # A broker that starts again may refuse a login, a virtual host, or TLS, for a moment.
            if not was_open or _is_untrusted(error):
                raise
            level = logging.WARNING if isinstance(error, AuthenticationError) else logging.INFO
            log.log(level, "cannot reconnect yet: %s", error)
            await self._rest()
            return
        if self._closed.is_set():
            await connection.close()
            return
        if was_open:
            log.info("connected again to %s", connection.address)
        self._take(connection)

    def _take(self, connection: Connection) -> None:
        self._connection = connection
        self._opened_at = connection.loop.time()
        self._failover.watch(connection)

    def _move(self, other: Connection) -> None:
        left = self._connection
        assert left is not None
        self._left = left.address
        self._take(other)
        self._give_up(left)
        if self.on_leave is not None:
            self.on_leave(left.address)

    def leave(self, address: str) -> None:
        """Leave this host, which another connection has found broken, and try it last from now on."""
        self._left = address
        connection = self._connection
        if connection is not None and connection.is_open and connection.address == address:
            self._give_up(connection)

    def _give_up(self, connection: Connection) -> None:
        why = connection.trouble or "it was found broken"
        connection.give_up(ConnectionLostError(f"the connection to {connection.address} was left: {why}"))

    async def _rest(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._backoff.next()):
                await self._closed.wait()

    async def close(self) -> None:
        """Close the connection and open no other.

        Raises:
            InvalidInputError: it was opened in another event loop.
        """
        self.check_loop()
        self._closed.set()
        connection, self._connection = self._connection, None
        try:
            await self._failover.stop()
        finally:
            # Also where this is cancelled: the connection must not stay open.
            if connection is not None:
                await connection.close()


def _is_untrusted(error: BrokerError) -> bool:
    return isinstance(error, TlsError) and isinstance(error.__cause__, ssl.SSLCertVerificationError)
