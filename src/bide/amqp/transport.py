"""Transport and clock of a connection: TCP, or the in-memory broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

if TYPE_CHECKING:
    import ssl

    AnyProtocol = TypeVar("AnyProtocol", bound=asyncio.Protocol)


class Transport(Protocol):
    """Connects to brokers. The transport of an in-memory broker has that broker's clock."""

    async def connect(
        self,
        factory: Callable[[], AnyProtocol],
        host: str,
        port: int,
        *,
        loop: asyncio.AbstractEventLoop,
        context: ssl.SSLContext | None,
    ) -> AnyProtocol:
        """Connect a new protocol to a host.

        Args:
            factory: makes the protocol.
            context: the TLS settings; None for a plain connection.

        Raises:
            OSError: nothing answers at this address.
        """

    def now(self) -> datetime:
        """The time in UTC, by the clock for due times, which can be set."""

    def monotonic(self) -> float:
        """Seconds of a monotonic clock, which cannot be set."""

    async def wait(self, event: asyncio.Event, seconds: float, *, due: float | None = None) -> None:
        """Wait until an event is set, at most for a time by this clock.

        Args:
            seconds: the longest wait. Callers mostly find nothing to do after it, so a broker in memory does not stop
                its clock there.
            due: seconds after which there will be something to do; None if that is not known.
        """


_BOOT_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)
"""A clock of Linux: unlike ``time.monotonic`` it counts while the machine is suspended, as the broker's clock does."""


class Tcp:
    """TCP, and this machine's clock."""

    def __repr__(self) -> str:
        return "TCP"

    async def connect(
        self,
        factory: Callable[[], AnyProtocol],
        host: str,
        port: int,
        *,
        loop: asyncio.AbstractEventLoop,
        context: ssl.SSLContext | None,
    ) -> AnyProtocol:
        """See :class:`Transport`."""
        options: dict[str, Any] = {} if context is None else {"ssl": context, "server_hostname": host}
        _, protocol = await loop.create_connection(factory, host, port, **options)
        return protocol

    def now(self) -> datetime:
        """See :class:`Transport`."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """See :class:`Transport`. On Linux this includes the time that the machine was suspended."""
        return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)

    async def wait(self, event: asyncio.Event, seconds: float, *, due: float | None = None) -> None:
        """See :class:`Transport`."""
        try:
            async with asyncio.timeout(seconds if due is None else min(seconds, due)):
                await event.wait()
        except TimeoutError:
            return


TCP: Final = Tcp()
"""The default transport."""
