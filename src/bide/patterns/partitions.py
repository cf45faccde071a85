"""Patterns 6 and 7: partitioned queues behind a consistent-hash exchange."""

from __future__ import annotations

from typing import Final

from bide.delay.protocol import check_name
from bide.errors import InvalidInputError
from bide.patterns.building import finished, make_queue, one_of
from bide.runtime.arguments import whole_number
from bide.topology import Argument, Binding, Exchange, Topology

HASH_PROPERTIES: Final = ("correlation_id", "message_id", "timestamp")
"""Properties of a message that the exchange can hash."""

MAX_PARTITIONS: Final = 1_000

_WEIGHT: Final = "1"
"""The weight of a partition; all have the same share."""


def partition_queue(queue: str, number: int) -> str:
    """The name of a partition, counted from 1."""
    return f"{queue}.{number}"


def partition_queues(queue: str, partitions: int) -> tuple[str, ...]:
    """The names of all partitions."""
    return tuple(partition_queue(queue, number) for number in range(1, partitions + 1))


def ordered_partitions(
    exchange: str,
    *,
    queue: str,
    partitions: int,
    header: str | None = None,
    property: str | None = None,
    queue_type: str = "quorum",
) -> Topology:
    """Pattern 6, ordered processing: related messages go to the same partition, and are handled in order.

    Each partition is a queue with a single active consumer: any number of processes can consume from all partitions,
    and the broker activates one consumer for each partition. When the active consumer ends, another one takes over. So
    consumers need not be assigned to queues. The order holds if a consumer has a prefetch of 1, or handles its messages
    one by one; see :mod:`bide.messaging.partitions`.

    Caveat: with few distinct values to hash, or few partitions, the shares are uneven. All messages without the header
    or property go to the same partition. A message that is requeued or retried later is out of order.

    Args:
        exchange: the consistent-hash exchange; it needs the plugin rabbitmq_consistent_hash_exchange.
        queue: start of the names: queue.1, queue.2...
        partitions: number of partitions, 1 to 1,000.
        header: hash this header instead of the routing key.
        property: property to hash: correlation_id, message_id or timestamp.
        queue_type: type of the queues: quorum or classic.

    Raises:
        InvalidInputError: both a header and a property are given, or a number is out of range.
    """
    check_name("queue", queue)
    whole_number("partitions", partitions, 1, MAX_PARTITIONS)
    hashed: dict[str, Argument] = {}
    if header is not None and property is not None:
        raise InvalidInputError(
            f"both header={header!r} and property={property!r} are given, and the exchange can hash only one: leave "
            "one out"
        )
    if header is not None:
        check_name("header", header)
        hashed["hash-header"] = header
    if property is not None:
        hashed["hash-property"] = one_of("property", property, HASH_PROPERTIES)
    names = partition_queues(queue, partitions)
    return finished(
        Topology(
            [Exchange(exchange, "x-consistent-hash", arguments=hashed)],
            [make_queue(name, queue_type, {"x-single-active-consumer": True}) for name in names],
            [Binding(exchange, name, _WEIGHT) for name in names],
        )
    )


def data_locality(exchange: str, *, queue: str, partitions: int, header: str, queue_type: str = "quorum") -> Topology:
    """Pattern 7, data locality: all messages about one entity go to one consumer, which can keep its state in memory.

    It is pattern 6 with the header that identifies the entity.

    Caveat: when you add or remove a partition, some entities move: about one in ``partitions + 1`` goes to the new
    partition. The old consumer gets no more messages about these entities, and no notification. Stop the consumers and
    let them save their state, change the topology while no messages are waiting, and start the consumers again.

    Args:
        exchange: the consistent-hash exchange; it needs the plugin rabbitmq_consistent_hash_exchange.
        queue: start of the names: queue.1, queue.2...
        partitions: number of partitions, 1 to 1,000.
        header: header with the entity, such as user-id.
        queue_type: type of the queues: quorum or classic.

    Raises:
        InvalidInputError: see :func:`ordered_partitions`.
    """
    return ordered_partitions(exchange, queue=queue, partitions=partitions, header=header, queue_type=queue_type)
