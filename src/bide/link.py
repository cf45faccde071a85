"""A connection that is opened when it is needed, and opened again when it broke."""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import timedelta
from typing import Final

from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import AuthenticationError, BrokerError, ClosedError, InvalidUrlError, TlsError

log = logging.getLogger(__name__)

FIRST_PAUSE: Final = timedelta(milliseconds=50)
LONGEST_PAUSE: Final = timedelta(seconds=5)


class Link:
    """Keeps one connection. Several tasks may ask for it at once: it is opened once."""

    def __init__(self, url: BrokerUrl) -> None:
        self.url = url
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._was_open = False

    async def connection(self) -> Connection:
        """The open connection.

        The first time, a failure is raised at once. Later ones are tried again, with growing and randomised pauses,
        until the connection is back or the caller's own time limit ends the wait.

        Raises:
            ClosedError: the link was closed.
            BrokerError: the first connection could not be opened.
        """
        async with self._opening:
            pause = FIRST_PAUSE
            while True:
                if self._closed:
                    raise ClosedError("the client was closed")
                if self._connection is not None and self._connection.is_open:
                    return self._connection
                try:
                    self._connection = await Connection.open(self.url)
                except (InvalidUrlError, TlsError):
                    raise
                except BrokerError as error:
                    # A broker that starts again may refuse a login or a virtual host for a moment.
                    if not self._was_open:
                        raise
                    level = logging.WARNING if isinstance(error, AuthenticationError) else logging.INFO
                    log.log(level, "cannot reconnect yet: %s", error)
                else:
                    if self._was_open:
                        log.info("connected again to %s", self._connection.address)
                    self._was_open = True
                    continue
                await asyncio.sleep(pause.total_seconds() * random.uniform(0.5, 1.0))  # noqa: S311 (no secret)
                pause = min(pause * 2, LONGEST_PAUSE)

    async def close(self) -> None:
        """Close the connection and open no other."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
