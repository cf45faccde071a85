"""Taps: two streams that record each delayed message when it is scheduled and when due.

They are bound and unbound while the system runs. No publisher, no key and no consumer changes, and no message goes
another way for it.

``Clock`` has places for them: the fanout exchange that publishers enter a level by, and the one that every message
passes at its due time. A binding there is never the only match of an exchange that has an alternate, so what has no
target goes to the undeliverable queue as before.

The cascades of NServiceBus and of Celery have no such places, and must not get any: their exchanges are declared by
others. There the keys tell. Whatever level a message is published to (NServiceBus and bide: the first that has
something to do; Celery: always the highest), it passes the exchange of its highest ``1`` once, with zeros alone before
that digit, and before it has waited anywhere::

    level 02 of 28    0.0. ... .0.1.#      twenty-five zeros, a one, and whatever follows

Every message passes the delivery exchange once, at its due time. A tap there matches everything, so for RabbitMQ no
message is without a route any more: what belongs to a deleted endpoint exists in the stream only.

Classic delay queues (version 1 of NServiceBus, and Celery by setting) hand their messages over without a confirm, and
on RabbitMQ 3.10.8 a stream gets none of these (on 4.0.5 and 4.3.6 it does). Behind such a cascade a quorum queue stands
before the stream, which sends on at once what it gets, and at least once.

A waiting hall has no taps: every round passes its check-in again, and what is overdue goes from there to its target by
the relay, past everything that could be tapped.
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
"""Seconds in each unit that RabbitMQ takes for ``x-max-age``; ``Y`` and ``M`` have no fixed length."""

_SEGMENTS: Final = 20
_LARGEST_SEGMENT: Final = 100_000_000
_SMALLEST_BYTES: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How much a tap's stream keeps. Whichever limit is reached first, the oldest messages go.

    RabbitMQ deletes whole segments, and never the one that it writes to. So a stream holds up to one segment more, and
    a quiet one keeps messages longer than ``max_age``.

    Args:
        max_age: whole seconds, one at least.
        max_bytes: on disk, per stream and replica; a million at least.

    Raises:
        InvalidInputError: one of them is out of range.
    """

    max_age: timedelta = timedelta(days=7)
    max_bytes: int = 10_000_000_000

    def __post_init__(self) -> None:
        if self.max_age < _SECOND or self.max_age % _SECOND:
            raise InvalidInputError(
                f"the age {format_delay(self.max_age)} must be a whole number of seconds, one at least: 7d or 12h for "
                "example"
            )
        if not _SMALLEST_BYTES <= self.max_bytes < 1 << 63:
            raise InvalidInputError(
                f"{self.max_bytes} bytes are no size for a stream: give {_SMALLEST_BYTES:,} at least"
            )

    @property
    def segment_bytes(self) -> int:
        """The size of the files that the stream is cut into: a twentieth of the whole, 100 MB at most."""
        return min(self.max_bytes // _SEGMENTS, _LARGEST_SEGMENT)

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
        scheduled: name of the stream with what was scheduled.
        delivered: name of the stream with what was released at its due time.
        to_scheduled: the bindings that lead to the first; the tap is off without them.
        to_delivered: the same for the second.
        passage: what stands before the second, where the delay queues cannot reach a stream by themselves.
        defeats: the exchange whose messages without a target only the tap receives, or None.
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
        """Both, in the order to make them in: a message recorded as scheduled is also recorded as delivered."""
        return self.to_delivered + self.to_scheduled

    @property
    def sources(self) -> tuple[str, ...]:
        """The exchanges of the infrastructure that the taps are bound to."""
        return tuple(dict.fromkeys(one.source for one in self.bindings))

    def topology(self, retention: Retention) -> Topology:
        """The streams, what stands before them, and the bindings."""
        arguments = retention.arguments()
        streams = Topology(queues=[Queue(name, arguments=arguments) for name in self.names])
        return streams | self.passage | Topology(bindings=self.bindings)

    def owns(self, name: str) -> bool:
        """Whether a queue of this name belongs to the taps."""
        return name in self.names or self.passage.queue(name) is not None


class Tapped(Protocol):
    """An infrastructure, as far as taps go."""

    @property
    def name(self) -> str:
        """The layout's name on the command line."""

    def taps(self) -> Taps | None:
        """The taps; None where it can have none."""


def taps_of(infrastructure: Tapped) -> Taps:
    """The taps of an infrastructure.

    Raises:
        InvalidInputError: it can have none.
    """
    taps = infrastructure.taps()
    if taps is None:
        raise InvalidInputError(
            f"the layout {infrastructure.name!r} has no taps: none of its exchanges sees each message once, when it is "
            "scheduled or when it is due; use the clock layout (a waiting hall is counted with 'bide relay --json')"
        )
    return taps


def passage_to(stream: str) -> Topology:
    """A queue that sends on at once what it gets, with its own routing key, and the fanout exchange behind it."""
    queue = waiting_queue(f"{stream}.passage", timedelta(0), stream)
    return Topology([Exchange(stream, "fanout")], [queue], [Binding(stream, stream)])
