"""Reconnecting connections: opened when needed, and opened again when lost."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Final

from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.connection_watch import ConnectionWatch
from bide.client.failover import Failover, Trial
from bide.durations import format_delay
from bide.errors import (
    AuthenticationError,
    BideError,
    BrokerError,
    BrokerUnreachableError,
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
"""A connection that lasted this long is opened again without a pause."""

LONGEST_FLAPPING_PAUSE: Final = timedelta(milliseconds=250)
"""The longest pause before reconnecting if the broker accepts each connection and it breaks at once."""


class ReconnectingConnection:
    """One connection that is opened again when it is lost. If several tasks ask for it at once, it is opened once.

    Args:
        trials: the trials of another host if this one confirms nothing; see :class:`bide.client.failover.Failover`.

    Attributes:
        on_leave: called with the address of a host that was left as broken, for other connections to the same hosts.
        watch: is notified of each loss and return. A connection with a watch is opened again at once, and not at its
            next use.
    """

    def __init__(self, url: BrokerUrl, *, trials: Callable[[], Sequence[Trial]] = list) -> None:
        self.url = url
        self.on_leave: Callable[[str], None] | None = None
        self.watch: ConnectionWatch | None = None
        self._failover = Failover(trials, self._move_to)
        self._left_address = ""
        self._connection: Connection | None = None
        self._last_opened: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open_lock = asyncio.Lock()
        self._closed = asyncio.Event()
        self._pause_ended = asyncio.Event()
        self._callers = 0
        self._opened_at: float | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._backoff = Backoff(FIRST_PAUSE.total_seconds(), LONGEST_PAUSE.total_seconds())

    async def connection(self) -> Connection:
        """The open connection.

        The first failure to connect is raised at once. Later failures are retried with backoff, until the connection is
        back or the caller's timeout ends the wait.

        Raises:
            ClosedError: this connection was closed.
            InvalidInputError: it was opened in another event loop.
            BrokerError: the first connection could not be opened.
            TlsError: the broker's certificate is not trusted, the first time or later.
        """
        self.check_loop()
        connection = self._connection
        if connection is not None and connection.is_open and not self._closed.is_set():
            return connection
        if asyncio.current_task() is self._reopening:
            return await self._open_until_success()
        self._callers += 1
        if self._callers == 1:
            # The first caller after a while does not wait for the end of a pause in the background, nor for the pause
            # after an attempt that is under way.
            self._pause_ended.set()
        try:
            return await self._open_until_success()
        finally:
            self._callers -= 1

    async def _open_until_success(self) -> Connection:
        async with self._open_lock:
            while True:
                if self._closed.is_set():
                    raise ClosedError("the client was closed")
                if self._connection is not None and self._connection.is_open:
                    return self._connection
                await self._pause_if_flapping()
                await self._open()

    async def wait_for_broker(self, wait: timedelta) -> None:
        """Open the first connection to a broker that may not be running yet.

        Args:
            wait: how long to try again while the broker cannot be reached.

        Raises:
            BrokerUnreachableError: no broker could be reached in time.
            BrokerError: as :meth:`connection`; other errors than an unreachable broker are raised at once.
        """
        reason: BrokerError | None = None
        limit = asyncio.timeout(wait.total_seconds())
        try:
            async with limit:
                while True:
                    try:
                        await self.connection()
                    except (BrokerUnreachableError, ConnectionLostError) as error:
                        if _is_untrusted(error):
                            raise
                        # Without a set-up of logging, Python prints only warnings, and the program would seem to hang.
                        level = logging.WARNING if reason is None else logging.INFO
                        log.log(level, "waiting for the broker: %s", error)
                        reason = error
                        await self._pause()
                    else:
                        self._backoff.reset()
                        return
        except TimeoutError:
            if not limit.expired():
                raise
            raise BrokerUnreachableError(
                f"no broker was ready within {format_delay(wait)} (wait=): {reason or f'{self.url} did not answer'}"
            ) from reason

    def check_loop(self) -> None:
        """Bind to the running event loop at the first call, and check it at later calls.

        Raises:
            InvalidInputError: another event loop is running.
        """
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise InvalidInputError(
                "this client was connected in another event loop: use it there, connect another client in this one, or "
                "use bide.connect_sync(), whose client works in every thread and loop"
            )

    async def _pause_if_flapping(self) -> None:
        """Pause before reconnecting if connections repeatedly break at once."""
        if self._connection is None or self._opened_at is None:
            return
        self._connection = None
        if asyncio.get_running_loop().time() - self._opened_at >= STEADY.total_seconds():
            self._backoff.reset()
            return
        self._backoff.limit(LONGEST_FLAPPING_PAUSE.total_seconds())
        # The caller that is about to pause may have set it itself.
        self._pause_ended.clear()
        await self._pause()

    async def _open(self) -> None:
        if self._closed.is_set():
            return
        was_open = self._opened_at is not None
        self._pause_ended.clear()
        try:
            connection = await Connection.open(self.url, last=self._left_address)
        except InvalidUrlError:
            raise
        except BrokerError as error:
            # A broker that restarts may temporarily refuse a login, a virtual host, or TLS.
            if not was_open or _is_untrusted(error):
                raise
            level = logging.WARNING if isinstance(error, AuthenticationError) else logging.INFO
            log.log(level, "cannot reconnect yet: %s", error)
            await self._pause()
            return
        if self._closed.is_set():
            await connection.close()
            return
        if was_open:
            log.info("connected again to %s", connection.address)
        self._adopt(connection)

    def _adopt(self, connection: Connection) -> None:
        self._connection = self._last_opened = connection
        self._opened_at = connection.loop.time()
        self._failover.watch(connection)
        if self.watch is not None:
            connection.lost.add_done_callback(partial(self._on_lost, connection))
            self.watch.on_open(self)

    @property
    def is_open(self) -> bool:
        """Whether the connection is open now, and its event loop too."""
        if self._loop is None or self._loop.is_closed() or self._closed.is_set():
            return False
        return self._connection is not None and self._connection.is_open

    def _on_lost(self, connection: Connection, lost: asyncio.Future[BideError]) -> None:
        if self._last_opened is not connection or self._closed.is_set() or self.watch is None:
            # The client has moved to another host, or was closed.
            return
        self._reopening = connection.loop.create_task(self._reopen())
        self.watch.on_lost(self, lost.result())

    async def _reopen(self) -> None:
        try:
            await self.connection()
        except BideError as error:
            # The next use of the connection raises it.
            log.debug("the connection is not opened again in the background: %s", error)

    def _move_to(self, other: Connection) -> None:
        left = self._connection
        assert left is not None
        self._left_address = left.address
        self._adopt(other)
        self._give_up(left)
        if self.on_leave is not None:
            self.on_leave(left.address)

    def leave(self, address: str) -> None:
        """Leave this host, which another connection has found broken, and try it last in future."""
        self._left_address = address
        connection = self._connection
        if connection is not None and connection.is_open and connection.address == address:
            self._give_up(connection)

    def _give_up(self, connection: Connection) -> None:
        why = connection.trouble or "another connection found this host broken"
        connection.give_up(ConnectionLostError(f"this client left the host {connection.address}: {why}"))

    async def _pause(self) -> None:
        if self._closed.is_set():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._backoff.next()):
                await self._pause_ended.wait()

    async def close(self) -> None:
        """Close the connection for good.

        Raises:
            InvalidInputError: it was opened in another event loop.
        """
        self.check_loop()
        self._closed.set()
        self._pause_ended.set()
        connection, self._connection = self._connection, None
        try:
            await self._stop_reopening()
            await self._failover.stop()
        finally:
            # Even if this task is cancelled, the connection must not stay open.
            if connection is not None:
                await connection.close()

    async def _stop_reopening(self) -> None:
        task, self._reopening = self._reopening, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})


def _is_untrusted(error: BrokerError) -> bool:
    return isinstance(error, TlsError) and isinstance(error.__cause__, ssl.SSLCertVerificationError)
