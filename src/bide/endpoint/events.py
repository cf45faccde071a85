"""The events stream: a record of what endpoints did, as JSON messages."""

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
"""The default name of the stream that endpoints write events to."""


class EventStream(Observer):
    """Writes every event as a JSON message to a stream, confirmed before the message itself is settled.

    No event is lost with a process or a connection. If a process dies between the confirm and the ack, the event is
    written twice. If the stream refuses an event, the error is logged, and the message is settled.

    Gates write no events: the schedule log is a stream of what happens to schedules.

    Args:
        name: the name of the stream.
        keep: the broker deletes segments older than this; only used if the stream does not exist yet.

    Raises:
        InvalidInputError: an argument is invalid.
    """

    def __init__(self, name: str = EVENTS, *, keep: DelayLike = timedelta(days=30)) -> None:
        self.name = name
        self._keep = parse_delay(keep)
        if self._keep < timedelta(seconds=1):
            raise InvalidDelayError(f"keep={keep!s} is shorter than 1 s: give 1 s or more")
        self._client: Client | None = None

    def queue(self) -> Queue:
        """The stream, as it is declared."""
        seconds = int(self._keep.total_seconds())
        return Queue(self.name, arguments={"x-queue-type": "stream", "x-max-age": f"{seconds}s"})

    async def started(self, client: Client) -> None:
        """Declare the stream if it is missing.

        Raises:
            BrokerError: the stream cannot be declared.
        """
        if not await client.exists(self.name):
            await client.declare(Topology(queues=[self.queue()]))
        self._client = client

    async def happened(self, event: Event) -> None:
        """Write an event to the stream.

        Raises:
            BrokerError: the stream did not confirm the event.
        """
        assert self._client is not None
        # Sent with forward instead of publish, because a trace of every event would be noise.
        await self._client.forward(
            check_message(
                OutgoingMessage(
                    event.to_json(), to=self.name, type=f"bide.{event.kind}", content_type="application/json"
                )
            )
        )
