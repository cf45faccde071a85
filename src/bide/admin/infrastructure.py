"""Applying, guarding and deleting a delay infrastructure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from bide.admin.apply import Applied, Removed, apply, check_release, check_streams, destroy, exists
from bide.admin.protection import protection_name
from bide.admin.settling import settle
from bide.admin.snapshot import find_owned
from bide.admin.taps import find_tap_bindings
from bide.amqp.connection import Connection
from bide.delay.cascade import Policy
from bide.delay.protocol import DelayInfrastructure
from bide.errors import InvalidInputError, ManagementApiError, NotEmptyError
from bide.management.api import ManagementApi
from bide.topology import Binding, Topology


@runtime_checkable
class Guarded(Protocol):
    """An infrastructure whose undeliverable messages need a policy to be set aside."""

    def guard_topology(self) -> Topology:
        """The undeliverable exchange and queue."""

    def guard_policy(self) -> Policy:
        """The policy that leads there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedInfrastructure:
    """What :func:`remove` deleted.

    Attributes:
        complete: whether the management API was there to find everything, release queues and policies included.
        kept: the streams of the taps, which stay with what they hold.
    """

    removed: Removed
    complete: bool
    kept: tuple[str, ...] = ()


async def install(connection: Connection, infrastructure: DelayInfrastructure) -> Applied:
    """Declare the infrastructure, after checking that the broker is up to it.

    One that grows gets its mark last, by which clients that may not declare know that everything is there.

    Raises:
        UnsupportedBrokerError: it is too old, or streams are off.
        DeclarationMismatchError: something exists with other properties.
    """
    check_release(connection)
    await check_streams(connection)
    applied = await apply(connection, infrastructure.topology())
    await settle(connection, prefix=infrastructure.delivery_exchange)
    if len(mark := _mark(infrastructure)):
        await apply(connection, mark)
    return applied


async def install_guard(connection: Connection, api: ManagementApi, infrastructure: DelayInfrastructure) -> Policy:
    """Set aside what has no target, by a policy: an argument would be refused to the owner's own declare.

    Returns:
        The policy that applies: one of others, if its alternate exchange is the right one.

    Raises:
        InvalidInputError: the infrastructure needs none, or another policy already applies to its exchanges.
        ManagementApiError: the policy cannot be set.
    """
    if not isinstance(infrastructure, Guarded):
        raise InvalidInputError(
            f"the layout {infrastructure.name!r} needs no guard: its exchanges have an alternate exchange already"
        )
    policy = infrastructure.guard_policy()
    vhost = connection.url.vhost
    exchanges = infrastructure.topology().exchanges
    policies = await api.policies(vhost)
    others: list[Policy] = []
    # RabbitMQ applies one policy to an exchange, so that ours would take the place of another, or give way to it.
    for exchange in exchanges:
        found = await api.exchange(vhost, exchange.name)
        if found is None or found.policy in (None, policy.name):
            continue
        other = policies.get(found.policy)
        if other is None or other.definition.get("alternate-exchange") != infrastructure.undeliverable:
            raise InvalidInputError(
                f"the policy {found.policy!r} applies to the exchange {exchange.name!r} already, and RabbitMQ applies "
                f'one only: add "alternate-exchange": "{infrastructure.undeliverable}" to its definition, and run this '
                "again"
            )
        others.append(other)
    await apply(connection, infrastructure.guard_topology())
    if len(others) == len(exchanges):
        return others[0]
    await api.set_policy(vhost, policy)
    return policy


async def remove(
    connection: Connection,
    infrastructure: DelayInfrastructure,
    api: ManagementApi | None,
    *,
    force: bool = False,
) -> RemovedInfrastructure:
    """Delete the infrastructure, with its guard, its protection and the release queues of its targets; nothing else.

    The streams of its taps are the record of what it did: they stay, see :func:`bide.admin.taps.turn_off`.

    Args:
        connection: to the virtual host.
        infrastructure: what to delete.
        api: finds what the topology does not name, and messages that AMQP does not count; None to do without.
        force: delete messages that still wait, too.

    Raises:
        NotEmptyError: messages wait in it and ``force`` is off; nothing was deleted.
    """
    topology = infrastructure.topology()
    guard = infrastructure.guard_topology() if isinstance(infrastructure, Guarded) else Topology()
    taps: dict[str, list[Binding]] = {}
    complete = False
    vhost = connection.url.vhost
    if api is not None:
        try:
            exchanges, queues = await find_owned(api, vhost, infrastructure)
            taps = await find_tap_bindings(connection, infrastructure, api)
        except ManagementApiError:
            api = None
        else:
            complete = True
            queues = {name: one for name, one in queues.items() if name not in taps}
            held = {name: one.messages for name, one in queues.items() if one.messages}
            if held and not force:
                name, count = next(iter(held.items()))
                raise NotEmptyError(
                    f"{sum(held.values())} messages wait in {len(held)} queues, {name!r} ({count}) among them: let "
                    "them be delivered, or delete them with --force",
                    counts=held,
                )
            found = Topology([one.exchange for one in exchanges.values()], [one.queue for one in queues.values()])
            topology |= _beyond(topology, found)
    topology |= _beyond(topology, guard)
    if api is None:
        taps = await find_tap_bindings(connection, infrastructure, None)
    # Should the ways in have to be made again, the taps are to be bound to them again.
    ways_in = {one.source for one in topology.bindings}
    topology |= Topology(bindings=[one for group in taps.values() for one in group if one.source in ways_in])
    arguments = ("x-dead-letter-exchange", "x-dead-letter-routing-key")
    external = {str(one.arguments.get(name, "")) for one in topology.queues for name in arguments} | set(taps)
    mark = _mark(infrastructure)
    is_marked = await exists(connection, mark)
    async with await connection.channel() as channel:
        for one in mark.exchanges:
            # First, so that it never stands for what is not there.
            await channel.delete_exchange(one.name)
    try:
        removed = await destroy(connection, topology, force=force, external=external)
    except NotEmptyError:
        # Then everything is as it was.
        if is_marked:
            await apply(connection, mark)
        raise
    if api is not None:
        await api.delete_policy(vhost, protection_name(infrastructure))
        if isinstance(infrastructure, Guarded):
            await api.delete_policy(vhost, infrastructure.guard_policy().name)
    return RemovedInfrastructure(removed=removed, complete=complete, kept=tuple(taps))


def _mark(infrastructure: DelayInfrastructure) -> Topology:
    growing = infrastructure.growing()
    return Topology([growing.complete_mark] if growing is not None else ())


def _beyond(topology: Topology, extra: Topology) -> Topology:
    """What of ``extra`` the topology does not name yet."""
    return Topology(
        (one for one in extra.exchanges if topology.exchange(one.name) is None),
        (one for one in extra.queues if topology.queue(one.name) is None),
        extra.bindings,
    )
