"""Patterns 6 and 7: a queue in partitions, by a consistent-hash exchange."""

from __future__ import annotations

from typing import Final

from bide.arguments import whole_number
from bide.delay.protocol import check_name
from bide.errors import InvalidInputError
from bide.patterns.building import finished, make_queue, one_of
from bide.topology import Argument, Binding, Exchange, Topology

HASH_PROPERTIES: Final = ("correlation_id", "message_id", "timestamp")
"""Properties of a message that can be hashed."""

MAX_PARTITIONS: Final = 1_000

_WEIGHT: Final = "1"
"""All partitions get the same share."""


def partition_queue(queue: str, number: int) -> str:
    """The name of a partition; they count from 1."""
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
    """Pattern 6, ordered processing: messages that belong together go to the same partition, and are handled in order.

    Each partition is a queue with a single active consumer: any number of processes may consume from all of them, the
    broker lets one at a time have each, and another takes over when that one goes. So consumers need not be assigned to
    queues. Order holds for a consumer with a prefetch of 1, or one that handles what it gets one by one; see
    :mod:`bide.messaging.partitions`.

    Caveat: few different values of what is hashed, or few partitions, make uneven shares; and a message without the
    header, or the property, goes where all the others without it go. A message that is requeued or retried later is
    out of order.

    Args:
        exchange: the consistent-hash exchange; it needs the plugin rabbitmq_consistent_hash_exchange.
        queue: the start of the partitions' names: queue.1, queue.2...
        partitions: how many, 1 to 1,000.
        header: hash this header instead of the routing key.
        property: hash this property instead: correlation_id, message_id or timestamp.
        queue_type: of the queues: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds: both a header and a property, or a number out of range.
    """
    check_name("queue", queue)
    whole_number("partitions", partitions, 1, MAX_PARTITIONS)
    hashed: dict[str, Argument] = {}
    if header is not None and property is not None:
        raise InvalidInputError(
            f"both header={header!r} and property={property!r} are to be hashed, and the exchange takes one: leave "
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
    """Pattern 7, data locality: all messages about one thing come to one consumer, which can keep its state in memory.

    It is pattern 6 with the header that names the thing.

    Caveat: with one partition more, or one less, some things move: about one in ``partitions + 1`` goes to the new
    partition, and its old consumer gets no notice, only no more of its messages. Have the consumers write down what
    they keep and stop, change the topology while no message is under way, and start them again.

    Args:
        exchange: the consistent-hash exchange; it needs the plugin rabbitmq_consistent_hash_exchange.
        queue: the start of the partitions' names: queue.1, queue.2...
        partitions: how many, 1 to 1,000.
        header: the header that names the thing, such as user-id.
        queue_type: of the queues: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds, as for :func:`ordered_partitions`.
    """
    return ordered_partitions(exchange, queue=queue, partitions=partitions, header=header, queue_type=queue_type)
