"""Applying, guarding and deleting a delay infrastructure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from bide.admin.apply import Applied, apply, check_release, check_streams, exists
from bide.admin.destroy import Removed, check_empty, destroy
from bide.admin.protection import protection_name
from bide.admin.settling import settle
from bide.admin.snapshot import find_owned
from bide.admin.taps import find_tap_bindings
from bide.amqp.connection import Connection
from bide.delay.cascade import Policy
from bide.delay.protocol import DelayInfrastructure
from bide.errors import InvalidInputError, ManagementApiError, NotEmptyError, QueueBusyError
from bide.management.api import ManagementApi
from bide.topology import Binding, Topology


@runtime_checkable
class Guarded(Protocol):
    """An infrastructure that needs a policy to route undeliverable messages to its undeliverable queue."""

    def guard_topology(self) -> Topology:
        """The undeliverable exchange and queue."""

    def guard_policy(self) -> Policy:
        """The policy that routes undeliverable messages to that queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedInfrastructure:
    """The result of :func:`remove`.

    Attributes:
        complete: whether everything was found, including release queues and policies, which needs the management API.
        kept: the streams of the taps, which stay with their messages.
    """

    removed: Removed
    complete: bool
    kept: tuple[str, ...] = ()


async def install(connection: Connection, infrastructure: DelayInfrastructure) -> Applied:
    """Declare the infrastructure, after checking that the broker supports it.

    If clients declare queues of the infrastructure at first use, an exchange that marks it as complete is declared
    last. Clients without the permission to declare look for this exchange.

    Raises:
        UnsupportedBrokerError: the broker is too old, or streams are disabled.
        DeclarationMismatchError: an exchange or queue exists with other properties.
    """
    check_release(connection)
    await check_streams(connection)
    applied = await apply(connection, infrastructure.topology())
    await settle(connection, prefix=infrastructure.delivery_exchange)
    if len(mark := _mark_topology(infrastructure)):
        await apply(connection, mark)
    return applied


async def install_guard(connection: Connection, api: ManagementApi, infrastructure: DelayInfrastructure) -> Policy:
    """Set a policy that routes undeliverable messages to the guard's queue.

    An argument instead of a policy would make the declarations of NServiceBus and Celery fail.

    Returns:
        The policy in effect. This can be an existing policy, if its alternate exchange is the right one.

    Raises:
        InvalidInputError: the infrastructure needs no guard, or another policy already applies to its exchanges.
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
    # RabbitMQ applies one policy to an exchange, so this policy would displace another one, or have no effect.
    for exchange in exchanges:
        found = await api.exchange(vhost, exchange.name)
        if found is None or found.policy in (None, policy.name):
            continue
        other = policies.get(found.policy)
        if other is None or other.definition.get("alternate-exchange") != infrastructure.undeliverable:
            raise InvalidInputError(
                f"the policy {found.policy!r} applies to the exchange {exchange.name!r} already, and RabbitMQ applies "
                f'only one: add "alternate-exchange": "{infrastructure.undeliverable}" to its definition, and run this '
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
    """Delete the infrastructure, its guard, its protection and the release queues of its targets, and nothing else.

    The streams of its taps stay, because they are a record; see :func:`bide.admin.taps.turn_off`.

    Args:
        connection: a connection to the virtual host.
        infrastructure: the infrastructure to delete.
        api: the management API, which finds items that the topology does not name, and messages that AMQP does not
            count; None deletes without it.
        force: also delete messages that still wait.

    Raises:
        NotEmptyError: messages wait in the infrastructure and ``force`` is false; nothing was deleted.
        QueueBusyError: a queue was too busy to count, and ``force`` is false; nothing was deleted.
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
            if not force:
                check_empty({name: one.messages for name, one in queues.items()})
            found = Topology([one.exchange for one in exchanges.values()], [one.queue for one in queues.values()])
            topology |= _missing_from(topology, found)
    topology |= _missing_from(topology, guard)
    if api is None:
        taps = await find_tap_bindings(connection, infrastructure, None)
    # These bindings let destroy() bind the taps again if it has to declare the entry exchanges again.
    ways_in = {one.source for one in topology.bindings}
    topology |= Topology(bindings=[one for group in taps.values() for one in group if one.source in ways_in])
    arguments = ("x-dead-letter-exchange", "x-dead-letter-routing-key")
    external = {str(one.arguments.get(name, "")) for one in topology.queues for name in arguments} | set(taps)
    mark = _mark_topology(infrastructure)
    is_marked = await exists(connection, mark)
    async with await connection.channel() as channel:
        for one in mark.exchanges:
            # The mark is deleted first, so that it never exists without the queues.
            await channel.delete_exchange(one.name)
    try:
        removed = await destroy(connection, topology, force=force, external=external)
    except (NotEmptyError, QueueBusyError):
        # destroy() has restored everything but the mark.
        if is_marked:
            await apply(connection, mark)
        raise
    if api is not None:
        await api.delete_policy(vhost, protection_name(infrastructure))
        if isinstance(infrastructure, Guarded):
            await api.delete_policy(vhost, infrastructure.guard_policy().name)
    return RemovedInfrastructure(removed=removed, complete=complete, kept=tuple(taps))


def _mark_topology(infrastructure: DelayInfrastructure) -> Topology:
    growing = infrastructure.growing()
    return Topology([growing.complete_mark] if growing is not None else ())


def _missing_from(topology: Topology, extra: Topology) -> Topology:
    """The items of ``extra`` that are not part of the topology."""
    return Topology(
        (one for one in extra.exchanges if topology.exchange(one.name) is None),
        (one for one in extra.queues if topology.queue(one.name) is None),
        extra.bindings,
    )
