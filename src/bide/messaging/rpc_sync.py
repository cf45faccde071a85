"""The blocking caller of RPC, for programs without asyncio.

``with SyncCaller(client) as prices: reply = prices.call("apples", to="prices", timeout="2s")``
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from bide.client.message import Message
from bide.client.sync import SyncClient
from bide.durations import DelayLike
from bide.messaging.rpc_caller import Caller, Replies


class SyncCaller:
    """A :class:`bide.messaging.rpc.Caller` with blocking calls. Any number of threads can call at the same time.

    Args:
        client, replies, timeout: as for :class:`bide.messaging.rpc.Caller`.

    Raises:
        InvalidInputError: an argument is invalid.
    """

    def __init__(self, client: SyncClient, *, replies: Replies = "direct", timeout: DelayLike = "30s") -> None:
        self._client = client
        self._caller = Caller(client.client, replies=replies, timeout=timeout)

    @property
    def late(self) -> int:
        """See :attr:`bide.messaging.rpc.Caller.late`."""
        return self._caller.late

    def __enter__(self) -> Self:
        self._client.wait_for(self._caller.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Pending calls fail."""
        self._client.wait_for(self._caller.close())

    def call(
        self,
        body: bytes | str | None = None,
        *,
        json: Any = None,
        to: str | None = None,
        exchange: str | None = None,
        routing_key: str = "",
        timeout: DelayLike | None = None,
        headers: Mapping[str, Any] | None = None,
        type: str | None = None,
    ) -> Message:
        """See :meth:`bide.messaging.rpc.Caller.call`."""
        return self._client.wait_for(
            self._caller.call(
                body,
                json=json,
                to=to,
                exchange=exchange,
                routing_key=routing_key,
                timeout=timeout,
                headers=headers,
                type=type,
            )
        )
