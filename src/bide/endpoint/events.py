"""The events stream: what endpoints did, for whoever reads it later."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from bide.durations import DelayLike, parse_delay
from bide.endpoint.observer import Observer
from bide.errors import InvalidDelayError
from bide.messages.outgoing import OutgoingMessage
from bide.messages.prepared import check_message
from bide.topology import Queue, Topology

if TYPE_CHECKING:
    from bide.client.client import Client
    from bide.endpoint.event import Event

EVENTS: Final = "bide.events"
"""The stream that endpoints write to where no other is named."""


class EventStream(Observer):
    """Writes every event as one message of JSON to a stream, confirmed before the message itself is settled.

    So no event is lost with a process or a connection; one is written twice when the process dies between the two. What
    the stream refuses is told in the log: messages do not wait for it.

    Args:
        name: of the stream.
        keep: the broker drops what is older, in whole segments; only used where the stream does not exist yet.

    Raises:
        InvalidInputError: in one of its kinds.
    """

    def __init__(self, name: str = EVENTS, *, keep: DelayLike = timedelta(days=30)) -> None:
        self.name = name
        self._keep = parse_delay(keep)
        if self._keep < timedelta(seconds=1):
            raise InvalidDelayError(f"keep={keep!s}: a stream keeps at least the last second")
        self._client: Client | None = None

    def queue(self) -> Queue:
        """The stream as it is declared."""
        seconds = int(self._keep.total_seconds())
        return Queue(self.name, arguments={"x-queue-type": "stream", "x-max-age": f"{seconds}s"})

    async def started(self, client: Client) -> None:
        """Declare the stream where it is missing.

        Raises:
            BrokerError: it cannot be declared.
        """
        if not await client.exists(self.name):
            await client.declare(Topology(queues=[self.queue()]))
        self._client = client

    async def happened(self, event: Event) -> None:
        """Write it down.

        Raises:
            BrokerError: the stream did not take it.
        """
        assert self._client is not None
        # Forwarded, not published: a trace of every event would be noise, so the client's stamp is not for it.
        await self._client.forward(
            check_message(
                OutgoingMessage(
                    event.to_json(), to=self.name, type=f"bide.{event.kind}", content_type="application/json"
                )
            )
        )
