"""The event bus: a topic exchange, and for each queue a retry queue and a delay queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from bide.delay.protocol import check_name
from bide.durations import DelayLike, format_delay, parse_delay
from bide.errors import InvalidDelayError, InvalidInputError, InvalidNameError
from bide.topology import Argument, Arguments, Binding, Exchange, Queue, Topology
from bide.topology.validation import validate

EXCHANGE_TYPES: Final = ("topic", "direct")
"""Types of exchange that route by a queue's name."""

QUEUE_TYPES: Final = ("quorum", "classic")

DELIVERY_LIMIT: Final = 20
"""Deliveries of a quorum queue before it gives a message up. It is RabbitMQ's own default, but from 4.0 on only."""

_LONGEST: Final = timedelta(days=3650)
"""The broker's limit for ``x-message-ttl``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBusQueue:
    """One subscriber of an event bus: its names, and the topology that they stand in.

    A message that the consumer rejects without requeue is dead-lettered into the retry queue. There a worker counts:
    it sends the message through the delay queue, whose TTL brings it back to the queue, or parks it for good. The retry
    queue has no TTL of its own, because then the broker would bring messages back for ever, uncounted.

    Args:
        exchange: the exchange that events are published to.
        queue: the subscriber's queue; it gets what is published with its name as routing key.
        delay: the wait in the delay queue, 1 ms to 3,650 days.
        keys: more binding keys of the queue.
        type: the exchange's: ``topic`` or ``direct``.
        queue_type: of all its queues: ``quorum`` or ``classic``.
        retry_arguments: more arguments of the retry queue, such as ``x-max-length``; not ``x-message-ttl``.

    Raises:
        InvalidTopologyError: the broker would refuse it, or the retry queue would send messages back for ever.
        InvalidInputError: in one of its other kinds.
    """

    exchange: str
    queue: str
    delay: DelayLike
    keys: Sequence[str] = ()
    type: str = "topic"
    queue_type: str = "quorum"
    retry_arguments: Mapping[str, Argument] = field(default_factory=Arguments)
    _wait: timedelta = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_name("exchange", self.exchange)
        check_name("queue", self.queue)
        for derived in (self.retry_exchange, self.retry_queue, self.delay_queue, self.parking_queue):
            check_name("name", derived)
        if isinstance(self.keys, str):
            raise InvalidInputError(f"keys={self.keys!r} is a single text: give a list of keys")
        for key in self.keys:
            check_name("binding key", key, empty=True)
        if self.type not in EXCHANGE_TYPES:
            raise InvalidInputError(
                f"the exchange type {self.type!r} does not route by a name: use {' or '.join(EXCHANGE_TYPES)}"
            )
        if self.queue_type not in QUEUE_TYPES:
            raise InvalidInputError(f"the queue type {self.queue_type!r} is unknown: use {' or '.join(QUEUE_TYPES)}")
        if self.type == "topic" and {"*", "#"} & set(self.queue.split(".")):
            raise InvalidNameError(
                f"the queue {self.queue!r} would be bound by its name, in which a topic exchange takes '*' and '#' for "
                "wildcards: choose another name, and give the wildcards as keys"
            )
        wait = parse_delay(self.delay)
        if not timedelta(milliseconds=1) <= wait <= _LONGEST:
            raise InvalidDelayError(
                f"the delay {format_delay(wait)} is not between 1 ms and {format_delay(_LONGEST)}: give another"
            )
        object.__setattr__(self, "keys", tuple(self.keys))
        object.__setattr__(self, "retry_arguments", Arguments(self.retry_arguments))
        object.__setattr__(self, "_wait", wait)
        topology = self.topology()
        made = next(one for one in topology.queues if one.name == self.retry_queue)
        for name, value in self.retry_arguments.items():
            if name == "x-queue-type" or made.arguments[name] != value:
                raise InvalidInputError(
                    f"{name}={value!r} cannot be given for the retry queue of an event bus, which sets it: leave it out"
                )
        validate(topology)

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
        out = {"x-dead-letter-exchange": self.retry_exchange, "x-dead-letter-routing-key": self.retry_queue}
        back = {"x-dead-letter-exchange": self.exchange, "x-dead-letter-routing-key": self.queue}
        ttl = -(-self._wait // timedelta(milliseconds=1))
        return Topology(
            [Exchange(self.exchange, self.type), Exchange(self.retry_exchange, self.type)],
            [
                # A message that kills its consumers must not come back for ever on brokers below 4.0 either.
                self._queue(self.queue, out, {"x-delivery-limit": DELIVERY_LIMIT}),
                self._queue(self.retry_queue, {**self.retry_arguments, **back}),
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

    def _queue(
        self, name: str, arguments: Mapping[str, Argument], quorum_only: Mapping[str, Argument] | None = None
    ) -> Queue:
        if self.queue_type == "classic":
            return Queue(name, arguments=arguments)
        if "x-dead-letter-exchange" in arguments:
            # Without these two a quorum queue drops a message whose dead-lettering fails.
            arguments = {**arguments, "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
        return Queue.quorum(name, {**arguments, **(quorum_only or {})})


def event_bus(
    exchange: str,
    *queues: str,
    delay: DelayLike,
    keys: Sequence[str] = (),
    type: str = "topic",
    queue_type: str = "quorum",
    retry_arguments: Mapping[str, Argument] | None = None,
) -> Topology:
    """An event bus with these subscribers: see :class:`EventBusQueue`, whose arguments these are.

    Args:
        exchange: the exchange that events are published to.
        queues: the subscribers' queues, at least one.
        delay: the wait before each retry, 1 ms to 3,650 days.
        keys: more binding keys, the same for every queue; join several topologies by ``|`` where they differ.

    Raises:
        InvalidTopologyError: the broker would refuse it, two of its queues would have the same name, or a retry queue
            would send messages back for ever.
        InvalidInputError: in one of its other kinds, also where no queue is named.
    """
    if not queues:
        raise InvalidInputError(f"the event bus {exchange!r} has no queue: name one at least")
    topology = Topology()
    for queue in queues:
        topology |= EventBusQueue(
            exchange=exchange,
            queue=queue,
            delay=delay,
            keys=keys,
            type=type,
            queue_type=queue_type,
            retry_arguments=retry_arguments or {},
        ).topology()
    validate(topology)
    return topology
