"""Declarations of a topology as calls of a channel, for the channels of any client library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from bide.admin.settling import settling_queue
from bide.topology import Topology


class Declaration(NamedTuple):
    """One call of a channel.

    Attributes:
        method: ``exchange_declare``, ``exchange_bind``, ``queue_declare``, ``queue_bind`` or ``queue_delete``.
        arguments: keyword arguments, with the names that pika and aiormq use. The channel of py-amqp has ``type``
            instead of ``exchange_type``, and no ``internal``.
    """

    method: str
    arguments: dict[str, Any]

    def call(self, channel: Any) -> Any:
        """Make the call on a channel of pika or aiormq, and return what it returns: for aiormq a coroutine."""
        return getattr(channel, self.method)(**self.arguments)


def declarations_of(topology: Topology, *, settle: str = "") -> Iterator[Declaration]:
    """The calls that declare a topology, in order.

    Args:
        settle: the start of the name of a temporary queue. It is declared and deleted after the other queues, so that
            new quorum queues survive a crash of their node (:mod:`bide.admin.settling`). Empty if no queue is new.
    """
    for exchange in topology.exchanges:
        yield Declaration(
            "exchange_declare",
            {
                "exchange": exchange.name,
                "exchange_type": exchange.type,
                "durable": exchange.durable,
                "auto_delete": exchange.auto_delete,
                "internal": exchange.internal,
                "arguments": dict(exchange.arguments),
            },
        )
    for queue in topology.queues:
        yield _queue(queue.name, dict(queue.arguments))
    if settle:
        queue = settling_queue(settle)
        yield _queue(queue.name, dict(queue.arguments))
        yield Declaration("queue_delete", {"queue": queue.name})
    for binding in topology.bindings:
        destination = "queue" if binding.destination_type == "queue" else "destination"
        source = "exchange" if binding.destination_type == "queue" else "source"
        yield Declaration(
            "queue_bind" if binding.destination_type == "queue" else "exchange_bind",
            {
                destination: binding.destination,
                source: binding.source,
                "routing_key": binding.routing_key,
                "arguments": dict(binding.arguments),
            },
        )


def _queue(name: str, arguments: dict[str, Any]) -> Declaration:
    return Declaration(
        "queue_declare",
        {"queue": name, "durable": True, "exclusive": False, "auto_delete": False, "arguments": arguments},
    )
