"""Taps: two streams that record each delayed message when it is scheduled and when due.

Taps are bound and unbound while the system runs. Publishers, keys and consumers do not change, and the routes of
messages stay the same.

``Clock`` has exchanges for taps: the fanout exchanges that publishers use to enter a level, and the fanout exchange
that every message passes at its due time. A binding there is never the only match of an exchange with an alternate
exchange, so a message without a target still goes to the undeliverable queue.

The cascades of NServiceBus and Celery have no such exchanges, and none can be added, because other programs declare the
cascade. Taps of a cascade select messages by their routing keys. NServiceBus and bide publish a message to the first
level at which it waits, Celery always to level 27, the highest. In both cases the message passes the exchange of its
highest ``1`` once, with only zeros before that digit, and before it has waited anywhere::

    level 02 of 28    0.0. ... .0.1.#      twenty-five zeros, a one, and any further words

Every message passes the delivery exchange once, at its due time. A tap there matches all messages, so RabbitMQ no
longer treats any message as unroutable: a message for a deleted endpoint is then only in the stream.

Classic delay queues (version 1 of NServiceBus, and Celery if so configured) dead-letter without a confirm. On RabbitMQ
3.10.8 a stream gets none of these messages (on 4.0.5 and 4.3.6 it does). A tap of such a cascade therefore has a quorum
queue before the stream, the passage, which dead-letters the messages to the stream immediately and at least once.

A waiting hall has no taps. Messages pass its check-in exchange again in each round, and the relay publishes overdue
messages from the receiving queue directly to their targets, past any exchange that could be tapped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Protocol

from bide.delay.queues import waiting_queue
from bide.durations import format_delay
from bide.errors import InvalidInputError
from bide.topology import Argument, Binding, Exchange, Queue, Topology

SCHEDULED: Final = "scheduled"
DELIVERED: Final = "delivered"

_SECOND: Final = timedelta(seconds=1)
_UNITS: Final = ((86_400, "D"), (3_600, "h"), (60, "m"), (1, "s"))
"""Seconds in each unit of ``x-max-age``. ``Y`` and ``M`` are not used, because their length varies."""

_SEGMENTS_PER_STREAM: Final = 20
_MAX_SEGMENT_BYTES: Final = 100_000_000
_MIN_BYTES: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The retention of a tap's stream. The oldest messages are deleted when either limit is reached.

    RabbitMQ deletes whole segments, and never the current one. A stream can therefore hold up to one segment more, and
    a stream with little traffic keeps messages longer than ``max_age``.

    Args:
        max_age: the age limit, in whole seconds; at least one second.
        max_bytes: the size limit on disk, per stream and replica; at least a million bytes.

    Raises:
        InvalidInputError: one of them is out of range.
    """

    max_age: timedelta = timedelta(days=7)
    max_bytes: int = 10_000_000_000

    def __post_init__(self) -> None:
        if self.max_age < _SECOND or self.max_age % _SECOND:
            raise InvalidInputError(
                f"the age {format_delay(self.max_age)} must be a whole number of seconds, at least one: 7d or 12h for "
                "example"
            )
        if not _MIN_BYTES <= self.max_bytes < 1 << 63:
            raise InvalidInputError(
                f"{self.max_bytes} bytes is not a valid size of a stream: give at least {_MIN_BYTES:,}"
            )

    @property
    def segment_bytes(self) -> int:
        """The size of the stream's segment files: a twentieth of the whole, at most 100 MB."""
        return min(self.max_bytes // _SEGMENTS_PER_STREAM, _MAX_SEGMENT_BYTES)

    def arguments(self) -> dict[str, Argument]:
        """The arguments of the stream."""
        seconds = self.max_age // _SECOND
        length, unit = next((length, unit) for length, unit in _UNITS if not seconds % length)
        return {
            "x-queue-type": "stream",
            "x-max-age": f"{seconds // length}{unit}",
            "x-max-length-bytes": self.max_bytes,
            "x-stream-max-segment-size-bytes": self.segment_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Taps:
    """The taps of one delay infrastructure.

    Attributes:
        scheduled: the name of the stream with scheduled messages.
        delivered: the name of the stream with messages released at their due time.
        to_scheduled: the bindings to the first stream; without them the tap is off.
        to_delivered: the bindings to the second stream.
        passage: the queue and exchange before the second stream, if the delay queues cannot dead-letter to a stream.
        defeats: the exchange whose unroutable messages only the tap receives, or None.
    """

    scheduled: str
    delivered: str
    to_scheduled: tuple[Binding, ...]
    to_delivered: tuple[Binding, ...]
    passage: Topology = field(default_factory=Topology)
    defeats: str | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The two streams."""
        return self.scheduled, self.delivered

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """The bindings of both streams, in the order to create them: ``delivered`` first, so that a message recorded as
        scheduled is also recorded as delivered."""
        return self.to_delivered + self.to_scheduled

    @property
    def sources(self) -> tuple[str, ...]:
        """The exchanges of the infrastructure that the taps are bound to."""
        return tuple(dict.fromkeys(one.source for one in self.bindings))

    def topology(self, retention: Retention) -> Topology:
        """The streams, the passage, and the bindings."""
        arguments = retention.arguments()
        streams = Topology(queues=[Queue(name, arguments=arguments) for name in self.names])
        return streams | self.passage | Topology(bindings=self.bindings)

    def owns(self, name: str) -> bool:
        """Whether a queue of this name belongs to the taps."""
        return name in self.names or self.passage.queue(name) is not None


class Tapped(Protocol):
    """The members of an infrastructure that taps need."""

    @property
    def name(self) -> str:
        """The layout's name on the command line."""

    def taps(self) -> Taps | None:
        """The taps; None if taps are not possible."""


def taps_of(infrastructure: Tapped) -> Taps:
    """The taps of an infrastructure.

    Raises:
        InvalidInputError: taps are not possible.
    """
    taps = infrastructure.taps()
    if taps is None:
        raise InvalidInputError(
            f"the layout {infrastructure.name!r} has no taps: none of its exchanges sees each message once, when it is "
            "scheduled or when it is due; use the clock layout (the relay of a waiting hall counts its messages)"
        )
    return taps


def passage_to(stream: str) -> Topology:
    """A queue that dead-letters messages at once, with their routing keys, and the fanout exchange after it."""
    queue = waiting_queue(f"{stream}.passage", timedelta(0), stream)
    return Topology([Exchange(stream, "fanout")], [queue], [Binding(stream, stream)])
