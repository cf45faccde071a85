"""What connections run over, and the time that is told there."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

if TYPE_CHECKING:
    import asyncio
    import ssl

    AnyProtocol = TypeVar("AnyProtocol", bound=asyncio.Protocol)


class Network(Protocol):
    """A way to reach brokers. Where it leads to a broker in memory, it has that broker's clock."""

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
            OSError: nothing answers there.
        """

    def now(self) -> datetime:
        """The time in UTC, by which delays are counted."""


class Tcp:
    """TCP, and the time of this machine."""

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
        """See :class:`Network`."""
        options: dict[str, Any] = {} if context is None else {"ssl": context, "server_hostname": host}
        _, protocol = await loop.create_connection(factory, host, port, **options)
        return protocol

    def now(self) -> datetime:
        """See :class:`Network`."""
        return datetime.now(UTC)


TCP: Final = Tcp()
"""What is used unless a URL says otherwise."""
