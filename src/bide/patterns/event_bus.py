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
"""Exchange types that can route by the name of a queue."""

QUEUE_TYPES: Final = ("quorum", "classic")

DELIVERY_LIMIT: Final = 20
"""Delivery limit of a quorum queue on every release; RabbitMQ has the same default from 4.0 on."""

_MAX_TTL: Final = timedelta(days=3650)
"""The broker's limit for ``x-message-ttl``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBusQueue:
    """A subscriber of an event bus: its names and its topology.

    A message that the consumer rejects without requeue is dead-lettered into the retry queue. A worker counts its
    retries there: it sends the message through the delay queue, whose TTL returns it to the subscriber's queue, or
    parks it. The retry queue has no TTL itself, because then the broker would return messages forever, uncounted.

    Args:
        exchange: the exchange that events are published to.
        queue: the subscriber's queue; its name is one of its binding keys.
        delay: how long a message waits in the delay queue, 1 ms to 3,650 days.
        keys: more binding keys of the queue.
        type: type of the exchange: ``topic`` or ``direct``.
        queue_type: type of all queues: ``quorum`` or ``classic``.
        retry_arguments: more arguments of the retry queue, such as ``x-max-length``; not ``x-message-ttl``.

    Raises:
        InvalidTopologyError: the broker would refuse the topology, or the retry queue would return messages forever.
        InvalidInputError: another argument is invalid.
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
                f"the queue {self.queue!r} is bound by its name, in which a topic exchange treats '*' and '#' as "
                "wildcards: choose another name, and give the wildcards as keys"
            )
        wait = parse_delay(self.delay)
        if not timedelta(milliseconds=1) <= wait <= _MAX_TTL:
            raise InvalidDelayError(
                f"the delay {format_delay(wait)} is not between 1 ms and {format_delay(_MAX_TTL)}: give another"
            )
        object.__setattr__(self, "keys", tuple(self.keys))
        object.__setattr__(self, "retry_arguments", Arguments(self.retry_arguments))
        object.__setattr__(self, "_wait", wait)
        topology = self.topology()
        made = next(one for one in topology.queues if one.name == self.retry_queue)
        for name, value in self.retry_arguments.items():
            if name == "x-queue-type" or made.arguments[name] != value:
                raise InvalidInputError(
                    f"{name}={value!r} cannot be set, because an event bus sets it for its retry queue: leave it out"
                )
        validate(topology)

    @property
    def retry_exchange(self) -> str:
        """The exchange that rejected messages go to."""
        return f"{self.exchange}.retry"

    @property
    def retry_queue(self) -> str:
        """The queue in which rejected messages wait for the worker."""
        return f"{self.queue}.retry"

    @property
    def delay_queue(self) -> str:
        """The queue in which messages wait for their next attempt."""
        return f"{self.queue}.delay"

    @property
    def parking_queue(self) -> str:
        """The queue for messages that failed for good."""
        return f"{self.queue}.parked"

    def topology(self) -> Topology:
        """The exchanges, queues and bindings of this subscriber."""
        out = {"x-dead-letter-exchange": self.retry_exchange, "x-dead-letter-routing-key": self.retry_queue}
        back = {"x-dead-letter-exchange": self.exchange, "x-dead-letter-routing-key": self.queue}
        ttl = -(-self._wait // timedelta(milliseconds=1))
        return Topology(
            [Exchange(self.exchange, self.type), Exchange(self.retry_exchange, self.type)],
            [
                # Below RabbitMQ 4.0 there is no default limit, and a message that kills consumers would return forever.
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
            # Without these two arguments, a quorum queue drops a message whose dead-lettering fails.
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
    """An event bus with several subscribers; see :class:`EventBusQueue` for the arguments.

    Args:
        exchange: the exchange that events are published to.
        queues: the subscribers' queues, at least one.
        delay: time to wait before each retry, 1 ms to 3,650 days.
        keys: more binding keys, the same for every queue. Join topologies with ``|`` if the keys differ.

    Raises:
        InvalidTopologyError: the broker would refuse the topology, two queues would have the same name, or a retry
            queue would return messages forever.
        InvalidInputError: another argument is invalid, or no queue is given.
    """
    if not queues:
        raise InvalidInputError(f"the event bus {exchange!r} has no queue: give at least one in queues=[...]")
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
