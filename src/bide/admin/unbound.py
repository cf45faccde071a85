"""Queues of a delay infrastructure that exist without a binding."""

from __future__ import annotations

import asyncio
from typing import Final

from bide.admin.report import listed
from bide.admin.snapshot import Snapshot, take_snapshot
from bide.delay.protocol import DelayInfrastructure
from bide.management.api import ManagementApi

_RECHECK_AFTER: Final = 3.0
"""Seconds between two checks: a client that declares a queue binds it a moment later."""


async def unbound_problem(
    snapshot: Snapshot, api: ManagementApi, vhost: str, infrastructure: DelayInfrastructure
) -> str | None:
    """The problem text for digit queues without a binding; None if every digit queue has one.

    Raises:
        ManagementApiError: the API gives an unexpected answer.
    """
    unbound = _unbound_queues(snapshot, infrastructure)
    if unbound:
        await asyncio.sleep(_RECHECK_AFTER)  # a client that has just declared a queue binds it meanwhile
        unbound &= _unbound_queues(await take_snapshot(api, vhost, infrastructure), infrastructure)
    if not unbound:
        return None
    return (
        f"{len(unbound)} of the queues have no binding, {listed(sorted(unbound))}: messages that should wait in them "
        f"go to {infrastructure.undeliverable!r} until their clients bind them again: call "
        "bide.admin.infrastructure.install(...) with the same settings"
    )


def _unbound_queues(snapshot: Snapshot, infrastructure: DelayInfrastructure) -> set[str]:
    names = {one.name for one in infrastructure.topology().queues if one.name in snapshot.queues}
    bound = {one.destination for one in snapshot.bindings if one.destination_type == "queue"}
    return names - bound - {infrastructure.undeliverable}
