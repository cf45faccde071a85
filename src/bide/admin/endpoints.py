"""Queues and exchanges of endpoints, declared before the endpoints start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from bide.admin.apply import Applied, apply, check_release, exists
from bide.amqp.connection import Connection
from bide.delay.event_routing import EventRouting
from bide.delay.message_type import MessageType
from bide.delay.protocol import DelayInfrastructure, QueueTarget, check_name
from bide.errors import InvalidInputError, NotAppliedError, UnsupportedTargetError
from bide.topology import Exchange, Queue, Topology

QueueType = Literal["quorum", "classic"]


def endpoint_topology(
    infrastructure: DelayInfrastructure,
    name: str,
    *,
    instances: Iterable[str] = (),
    sent_to: Iterable[str] = (),
    subscriptions: Iterable[MessageType] = (),
    publications: Iterable[MessageType] = (),
    queue_type: QueueType = "quorum",
) -> Topology:
    """The queues, exchanges and bindings of an endpoint, through which it receives messages, delayed or not.

    Args:
        name: the queue of the endpoint.
        instances: names of instances that have a queue of their own, ``<name>-<instance>``.
        sent_to: queues that the endpoint only sends to, such as those for errors and audits. They get no delayed
            messages.
        subscriptions: types of events that the endpoint receives.
        publications: types of events that the endpoint publishes.
        queue_type: the type of all these queues.

    Raises:
        InvalidInputError: a name is invalid, or is given twice.
        UnsupportedTargetError: there are subscriptions or publications, and the layout has no rule for events.
    """
    receiving = [name, *(f"{name}-{one}" for one in instances)]
    names = [*receiving, *sent_to]
    for queue in names:
        check_name("queue", queue)
        if names.count(queue) > 1:
            raise InvalidInputError(f"the queue {queue!r} is given twice: give each queue once")
    topology = Topology()
    for queue in names:
        topology |= Topology(queues=[Queue.quorum(queue) if queue_type == "quorum" else Queue(queue)])
        topology |= infrastructure.address_topology(queue)
    for queue in receiving:
        topology |= infrastructure.route(infrastructure.resolution, QueueTarget(queue)).requires
    for kind in subscriptions:
        topology |= subscription_topology(infrastructure, name, kind)
    for kind in publications:
        topology |= _event_routing(infrastructure, kind).publication(kind)
    return topology


def subscription_topology(infrastructure: DelayInfrastructure, queue: str, kind: MessageType) -> Topology:
    """The exchanges and bindings that route the events of a type to the queue of an endpoint.

    Raises:
        UnsupportedTargetError: the layout has no rule for events.
    """
    return _event_routing(infrastructure, kind).subscription(kind, queue)


def _event_routing(infrastructure: DelayInfrastructure, kind: MessageType) -> EventRouting:
    routing = infrastructure.event_routing()
    if routing is None:
        raise UnsupportedTargetError(
            f"the layout {infrastructure.name!r} has no rule for routing events of the type {kind.name!r} to queues: "
            "use the layout 'nservicebus', or declare the bindings yourself"
        )
    return routing


async def create_endpoint(connection: Connection, infrastructure: DelayInfrastructure, topology: Topology) -> Applied:
    """Declare a topology of :func:`endpoint_topology`. Existing items stay unchanged.

    Raises:
        NotAppliedError: the delay infrastructure is missing.
        DeclarationMismatchError: a queue or exchange exists with other properties.
        BrokerError: the broker refuses.
    """
    check_release(connection)
    delivery = infrastructure.delivery_exchange
    if not await exists(connection, Topology([Exchange(delivery)])):
        raise NotAppliedError(
            f"the exchange {delivery!r} does not exist on the virtual host {connection.url.vhost!r} of "
            f"{connection.address}: call bide.admin.infrastructure.install(...) for the layout "
            f"{infrastructure.name!r} first"
        )
    return await apply(connection, topology, external={delivery})
