"""Check for NServiceBus endpoints that receive messages with the CC header of ``Clock``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bide.admin.management import ManagementApi
from bide.admin.neighbours import DELIVERY_EXCHANGES
from bide.admin.report import Finding, judged
from bide.admin.snapshot import Snapshot, release_exchange
from bide.delay.clock import Clock, carrier_for
from bide.delay.infrastructure import DelayInfrastructure
from bide.topology import Binding


async def nservicebus_targets(
    snapshot: Snapshot,
    api: ManagementApi,
    vhost: str,
    infrastructure: DelayInfrastructure,
    release: tuple[int, ...],
) -> list[Finding]:
    """Name the targets whose messages .NET cannot copy: those of ``Clock``, on a broker where it uses the CC header.

    No finding where NServiceBus does not use the virtual host, and none where the header does not get to receivers.

    Raises:
        ManagementApiError: the API does not answer as it should.
    """
    if not isinstance(infrastructure, Clock) or carrier_for(release) != "CC":
        return []
    endpoints = await _endpoint_queues(api, vhost)
    if not endpoints:
        return []
    problems = []
    bound = 0
    for binding in snapshot.bindings_from(infrastructure.delivery_exchange):
        if binding.destination_type != "queue":
            continue
        bound += 1
        kind, name, queues = _target(snapshot, infrastructure, binding)
        if endpoints.intersection(queues):
            problems.append(
                f"the {kind} {name!r} leads to endpoints of NServiceBus, and the messages that wait for it carry a CC "
                "header, which .NET cannot copy on RabbitMQ below 4.0. New messages go through a release queue that "
                f"takes the header off. For those that wait, unbind {binding.destination!r} from {binding.source!r} "
                f"(key {binding.routing_key!r}), and send them on with 'bide delay resend' once they are due"
            )
    return judged("NServiceBus targets", problems, f"none of {bound} targets brings a CC header to an endpoint")


def _target(snapshot: Snapshot, clock: Clock, binding: Binding) -> tuple[str, str, Iterable[str]]:
    """The kind and name of a target, and the queues that its messages reach with a CC header."""
    found = snapshot.queues.get(binding.destination)
    if found is None or not clock.owns(binding.destination):
        return "queue", binding.destination, [binding.destination]
    if "x-dead-letter-routing-key" in found.queue.arguments:
        return "queue", binding.destination, []
    exchange = release_exchange(found) or ""
    return "exchange", exchange, _queues_behind(exchange, snapshot.bindings)


def _queues_behind(exchange: str, bindings: Iterable[Binding]) -> Iterator[str]:
    follow, seen = [exchange], set[str]()
    while follow:
        source = follow.pop()
        if source in seen:
            continue
        seen.add(source)
        for one in bindings:
            if one.source == source and one.destination_type == "queue":
                yield one.destination
            elif one.source == source:
                follow.append(one.destination)


async def _endpoint_queues(api: ManagementApi, vhost: str) -> set[str]:
    """The queues that the delivery exchanges of NServiceBus lead to."""
    bindings: list[Binding] = []
    follow, seen = list(DELIVERY_EXCHANGES), set[str]()
    while follow:
        source = follow.pop()
        if source in seen:
            continue
        seen.add(source)
        found = await api.bindings_from(vhost, source)
        bindings += found
        follow += [one.destination for one in found if one.destination_type == "exchange"]
    return {one.destination for one in bindings if one.destination_type == "queue"}
