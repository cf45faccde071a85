"""Check for NServiceBus endpoints that receive messages with a CC header."""

from __future__ import annotations

from bide.admin.report import Finding, judged
from bide.admin.snapshot import Snapshot, release_exchange
from bide.delay.nservicebus import DELIVERY_EXCHANGES
from bide.delay.protocol import DelayInfrastructure
from bide.management.api import ManagementApi


async def nservicebus_targets(
    snapshot: Snapshot,
    api: ManagementApi,
    vhost: str,
    infrastructure: DelayInfrastructure,
    release: tuple[int, ...],
) -> list[Finding]:
    """Find targets whose messages .NET cannot copy, because they have a CC header.

    The list is empty if NServiceBus does not use the virtual host, or if the CC header does not reach receivers.

    Raises:
        ManagementApiError: the API gives an unexpected answer.
    """
    used = infrastructure.for_release(release)
    if used.beside_nservicebus(release) == used:
        return []
    endpoints = await _queues_behind(api, vhost, *DELIVERY_EXCHANGES)
    if not endpoints:
        return []
    problems = []
    bound = 0
    for binding in snapshot.bindings_from(infrastructure.delivery_exchange):
        if binding.destination_type != "queue":
            continue
        bound += 1
        found = snapshot.queues.get(binding.destination)
        exchange = release_exchange(found) if found is not None else None
        if found is None or "x-dead-letter-routing-key" in found.queue.arguments:
            continue
        if exchange is None:
            target, reached = f"queue {binding.destination!r}", {binding.destination}
        else:
            target, reached = f"exchange {exchange!r}", await _queues_behind(api, vhost, exchange)
        if endpoints & reached:
            problems.append(
                f"the {target} leads to endpoints of NServiceBus, and the messages that wait for it have a CC header, "
                "which .NET cannot copy. New messages go through a release queue that removes the "
                f"header. For those that wait, unbind {binding.destination!r} from {binding.source!r} (key "
                f"{binding.routing_key!r}), and once they are due, send them on with "
                "bide.error_queues.undeliverable.resend(allow=[...])"
            )
    return judged("NServiceBus targets", problems, f"none of {bound} targets passes a CC header to an endpoint")


async def _queues_behind(api: ManagementApi, vhost: str, *exchanges: str) -> set[str]:
    """The queues that exchanges lead to, directly or through other exchanges."""
    queues, seen, follow = set[str](), set[str](), list(exchanges)
    while follow:
        source = follow.pop()
        if source in seen:
            continue
        seen.add(source)
        for one in await api.bindings_from(vhost, source):
            (queues.add if one.destination_type == "queue" else follow.append)(one.destination)
    return queues
