"""The event bus: a topic exchange, and for each queue a retry queue and a delay queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from bide.delay.infrastructure import check_name
from bide.duration import DelayLike, format_delay, parse_delay
from bide.errors import InvalidDelayError, InvalidInputError
from bide.topology import Binding, Exchange, Queue, Topology

QUEUE_TYPES: Final = ("quorum", "classic")

_LONGEST: Final = timedelta(days=3650)
"""The broker's limit for ``x-message-ttl``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBusQueue:
    """One subscriber of an event bus: its names, and the topology that they stand in.

    A message that the consumer rejects without requeue is dead-lettered into the retry queue. There a worker counts:
    it sends the message through the delay queue, whose TTL brings it back to the queue, or parks it for good. The retry
    queue has no TTL of its own, because then the broker would bring messages back without anybody counting, for ever.

    Args:
        exchange: the exchange that events are published to.
        queue: the subscriber's queue; it gets what is published with its name as routing key.
        delay: the wait in the delay queue, at least 1 ms.
        keys: more binding keys of the queue.
        type: the exchange's: ``topic`` or ``direct``.
        queue_type: of all its queues: ``quorum`` or ``classic``.

    Raises:
        InvalidInputError: in one of its kinds.
    """

    exchange: str
    queue: str
    delay: DelayLike
    keys: Sequence[str] = ()
    type: str = "topic"
    queue_type: str = "quorum"
    _wait: timedelta = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_name("exchange", self.exchange)
        for name in (self.retry_exchange, self.retry_queue, self.delay_queue, self.parking_queue):
            check_name("name", name)
        check_name("queue", self.queue)
        if not self.exchange or not self.queue:
            raise InvalidInputError("an event bus needs a name for its exchange and one for its queue")
        if self.type not in ("topic", "direct"):
            raise InvalidInputError(f"the exchange type {self.type!r} does not route by name: use topic or direct")
        if self.queue_type not in QUEUE_TYPES:
            raise InvalidInputError(f"the queue type {self.queue_type!r} is unknown: use {' or '.join(QUEUE_TYPES)}")
        wait = parse_delay(self.delay)
        if not timedelta(milliseconds=1) <= wait <= _LONGEST:
            raise InvalidDelayError(
                f"the delay {format_delay(wait)} is not between 1 ms and {format_delay(_LONGEST)}: give another"
            )
        object.__setattr__(self, "_wait", wait)

    @property
    def retry_exchange(self) -> str:
        """The exchange that rejected messages go to."""
        return f"{self.exchange}.retry"

    @property
    def retry_queue(self) -> str:
        """Where rejected messages wait for a decision."""
        return f"{self.queue}.retry"

    @property
    def delay_queue(self) -> str:
        """Where messages wait for their next attempt."""
        return f"{self.queue}.delay"

    @property
    def parking_queue(self) -> str:
        """Where messages stay for good."""
        return f"{self.queue}.parked"

    def topology(self) -> Topology:
        """Its exchanges, queues and bindings."""
        back = {"x-dead-letter-exchange": self.exchange, "x-dead-letter-routing-key": self.queue}
        ttl = -(-self._wait // timedelta(milliseconds=1))
        return Topology(
            [Exchange(self.exchange, self.type), Exchange(self.retry_exchange, self.type)],
            [
                self._queue(
                    self.queue,
                    {
                        "x-dead-letter-exchange": self.retry_exchange,
                        "x-dead-letter-routing-key": self.retry_queue,
                    },
                ),
                self._queue(self.retry_queue, back),
                self._queue(self.delay_queue, {**back, "x-message-ttl": ttl}),
                self._queue(self.parking_queue, {}),
            ],
            [
                Binding(self.exchange, self.queue, self.queue),
                *(Binding(self.exchange, self.queue, key) for key in self.keys),
                Binding(self.retry_exchange, self.retry_queue, self.retry_queue),
                Binding(self.exchange, self.delay_queue, self.delay_queue),
            ],
        )

    def _queue(self, name: str, arguments: dict[str, Any]) -> Queue:
        if self.queue_type == "classic":
            return Queue(name, arguments=arguments)
        if "x-dead-letter-exchange" in arguments:
            # Without these two a quorum queue drops a message whose dead-lettering fails.
            arguments = {**arguments, "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
        return Queue.quorum(name, arguments)


def event_bus(exchange: str, *queues: str, delay: DelayLike, **options: Any) -> Topology:
    """An event bus with these subscribers; the options are those of :class:`EventBusQueue`.

    Raises:
        InvalidInputError: in one of its kinds, also where no queue is named.
    """
    if not queues:
        raise InvalidInputError(f"the event bus {exchange!r} has no queue: name one at least")
    topology = Topology()
    for queue in queues:
        topology |= EventBusQueue(exchange=exchange, queue=queue, delay=delay, **options).topology()
    return topology
