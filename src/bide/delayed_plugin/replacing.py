"""Replacing the exchanges of the delayed-message plugin on a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from bide.admin.declaring import Declaring
from bide.admin.infrastructure import install
from bide.admin.live_topology import read_topology
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.delay.waiting_hall import WaitingHall
from bide.delayed_plugin.exchanges import (
    ENTRY_ARGUMENT,
    TYPE,
    WAY_ARGUMENT,
    DelayedExchange,
    Way,
    check_in_bindings,
    delayed_exchanges,
    entry_topology,
    holding_topology,
    interrupted,
)
from bide.errors import InvalidInputError, NotEmptyError, TargetNotFoundError
from bide.management.api import ManagementApi
from bide.management.endpoint import Patience
from bide.runtime.logs import logger
from bide.topology import Binding, Exchange, Topology

log = logger(__name__)

COUNTING_TIMEOUT: Final = timedelta(minutes=10)
"""How long the plugin may count its waiting messages."""

_COUNTING: Final = (
    "the delayed-message plugin reads all its waiting messages for this call, which can take a minute or more for "
    "a million, and RabbitMQ closes the connection after 60 s by default. Set management.tcp.idle_timeout and "
    "management.tcp.inactivity_timeout (with https: management.ssl...) to 600000 in rabbitmq.conf and restart the "
    "node, or change them without a restart, as in docs/from-delayed-plugin.md. Then run this again, best when the "
    "broker has little else to do"
)

_SCALARS: Final = (str, int, float, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """The result of :func:`replace_exchanges`.

    Attributes:
        exchanges: the names of the exchanges that were replaced.
        finished: the names of the exchanges whose interrupted replacement was finished.
        repaired: the names of the exchanges that were replaced before, and whose binding to the waiting hall is correct
            again. RabbitMQ exports the binding incorrectly, so definitions that are imported deliver at once.
        since: a time just before the first exchange was deleted. The plugin has delivered all messages that were due
            before this time. None if the plugin is not enabled: then it has delivered nothing.
    """

    exchanges: tuple[str, ...]
    finished: tuple[str, ...]
    repaired: tuple[str, ...]
    since: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDelayed:
    """The exchanges of the plugin on a virtual host.

    Attributes:
        exchanges: these exchanges, with the numbers of waiting messages.
        topology: the whole topology of the virtual host.
        is_enabled: whether the broker has the exchange type of the plugin. Exchanges of this type can outlive the
            plugin.
    """

    exchanges: list[DelayedExchange]
    topology: Topology
    is_enabled: bool


async def find_delayed(api: ManagementApi, vhost: str, *, within: timedelta = COUNTING_TIMEOUT) -> FoundDelayed:
    """Find the exchanges of the plugin on a virtual host.

    Args:
        api: the management API.
        vhost: the name of the virtual host.
        within: how long to wait while the plugin counts its messages.

    Raises:
        ManagementApiError: the management API does not answer in time, or gives an unexpected answer.
        InvalidInputError: an exchange or a binding has an argument that the management API does not report exactly.
    """
    is_enabled = any(one["name"] == TYPE for one in (await api.overview()).get("exchange_types", []))
    # The plugin reads all its messages in each call about exchanges, so there is only one.
    patience = Patience(timeout=within, advice=_COUNTING) if is_enabled else None
    exchanges = await api.all_exchanges(vhost, patience=patience)
    topology = await read_topology(api, vhost, exchanges=exchanges)
    for found in exchanges:
        if (one := found.exchange).type == TYPE:
            for entry in await api.call("GET", "exchanges", vhost, one.name, "bindings", "source") or []:
                _check_arguments(one.name, entry.get("arguments") or {})
    # If the plugin is not enabled, the API does not count the waiting messages, which may still be in its tables.
    waiting = {one.exchange.name: one.delayed for one in exchanges if one.delayed is not None}
    return FoundDelayed(exchanges=delayed_exchanges(topology, waiting), topology=topology, is_enabled=is_enabled)


def _check_arguments(exchange: str, arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if not isinstance(value, _SCALARS):
            raise InvalidInputError(
                f"a binding of the exchange {exchange!r} has the argument {name!r}, a value that the management API "
                "does not report exactly: replace that binding first"
            )


async def replace_exchanges(
    connection: Connection,
    api: ManagementApi,
    hall: WaitingHall,
    *,
    way: Way,
    names: Collection[str] = (),
    missing: Iterable[DelayedExchange] = (),
    exported: Mapping[str, int] | None = None,
    force: bool = False,
) -> Replaced:
    """Replace the exchanges of the plugin. Finish interrupted replacements, and repair those from imported definitions.

    Publishers should pause: each exchange is missing for some milliseconds, and the broker closes channels that publish
    to it then. Messages that wait in the plugin are lost with their exchange, so export them first.

    Args:
        connection: a connection to the virtual host.
        api: the management API.
        hall: the waiting hall that takes delayed messages.
        way: what replaces the exchanges.
        names: the exchanges; by default all.
        missing: exchanges that existed before the plugin was removed. Those that exist now stay unchanged.
        exported: how many waiting messages of each exchange are exported and not yet due.
        force: replace exchanges whose waiting messages are not exported, and lose these messages.

    Raises:
        TargetNotFoundError: an exchange of ``names`` does not exist, or is not of the plugin; or the destination of a
            binding does not exist.
        NotEmptyError: messages wait that are not exported.
        InvalidInputError: an exchange cannot be replaced.
        BrokerError: the broker refuses, or the connection was lost. Call the function again.
    """
    vhost = connection.url.vhost
    found = await find_delayed(api, vhost)
    topology = found.topology
    unfinished = interrupted(topology)
    begun = {one.arguments[ENTRY_ARGUMENT] for one in unfinished}
    gone = [one for one in missing if topology.exchange(one.name) is None and one.name not in begun]
    chosen = [one for one in (*found.exchanges, *gone) if not names or one.name in names]
    known = {one.name for one in chosen} | {str(one.arguments[ENTRY_ARGUMENT]) for one in unfinished}
    check_ins = check_in_bindings(topology)
    if unknown := sorted(set(names) - known - {one.source for one, _ in check_ins}):
        raise TargetNotFoundError(f"the virtual host {vhost!r} has no exchange {unknown[0]!r} of the type {TYPE}")
    _check_destinations(chosen, topology)
    if not force:
        _check_exported(chosen, exported or {})
    holding = [holding_topology(one, way) for one in chosen]
    ways = {way} | {str(one.arguments[WAY_ARGUMENT]) for one in unfinished}
    if known and "hall" in ways:
        await install(connection, hall)
    since = connection.now() if found.is_enabled else None
    for one, held in zip(chosen, holding, strict=True):
        await _declare(connection, held)
        (delivery,) = held.exchanges
        await _switch(connection, delivery, held.bindings, hall, delete=True)
        log.info("replaced the exchange %s", one.name)
    for delivery in unfinished:
        bindings = [one for one in topology.bindings if one.source == delivery.name]
        await _switch(connection, delivery, bindings, hall, delete=False)
        log.info("finished the replacement of %s", delivery.arguments[ENTRY_ARGUMENT])
    repaired = await _repair(connection, api, check_ins)
    return Replaced(
        exchanges=tuple(one.name for one in chosen),
        finished=tuple(str(one.arguments[ENTRY_ARGUMENT]) for one in unfinished),
        repaired=repaired,
        since=since,
    )


def _check_destinations(exchanges: Iterable[DelayedExchange], topology: Topology) -> None:
    # A binding that fails halfway would look like an interrupted replacement with fewer bindings.
    queues = {one.name for one in topology.queues}
    for binding in (each for one in exchanges for each in one.bindings):
        is_queue = binding.destination_type == "queue"
        if binding.destination not in queues if is_queue else topology.exchange(binding.destination) is None:
            raise TargetNotFoundError(
                f"the exchange {binding.source!r} was bound to the {binding.destination_type} {binding.destination!r}, "
                "which does not exist: declare it first"
            )


def _check_exported(exchanges: Iterable[DelayedExchange], exported: Mapping[str, int]) -> None:
    counts = {one.name: one.waiting - exported.get(one.name, 0) for one in exchanges if one.waiting is not None}
    held = {name: count for name, count in counts.items() if count > 0}
    if held:
        shown = ", ".join(f"{name} ({count})" for name, count in list(held.items())[:5])
        raise NotEmptyError(
            f"{sum(held.values())} messages that are not exported wait in the plugin: {shown}; stop the publishers, "
            "call bide.delayed_plugin.export.export(...), and give the file with exported=...",
            counts=held,
        )


async def _repair(
    connection: Connection, api: ManagementApi, check_ins: Iterable[tuple[Binding, Binding]]
) -> tuple[str, ...]:
    """Repair bindings of :func:`check_in_bindings`, and return the names of their exchanges."""
    repaired = []
    async with await connection.channel() as channel:
        for binding, restored in check_ins:
            await channel.bind(binding)
            # The API shows both bindings alike.
            if (await api.bindings_from(connection.url.vhost, binding.source)).count(restored) > 1:
                await channel.unbind(restored)
                repaired.append(binding.source)
    return tuple(repaired)


async def _declare(connection: Connection, topology: Topology) -> None:
    async with Declaring(connection) as declaring:
        await declaring.all(Channel.declare_exchange, topology.exchanges)
        await declaring.all(Channel.bind, topology.bindings)


async def _switch(
    connection: Connection, delivery: Exchange, bindings: Iterable[Binding], hall: WaitingHall, *, delete: bool
) -> None:
    """Let another exchange take the name of the delayed one. All calls are sent without waiting for answers."""
    entry = entry_topology(delivery, bindings, hall)
    async with await connection.channel() as channel:
        calls: list[asyncio.Future[Any]] = [channel.delete_exchange(entry.exchanges[0].name)] if delete else []
        calls += [channel.declare_exchange(entry.exchanges[0])]
        calls += [channel.bind(one) for one in entry.bindings]
        if delivery.arguments[WAY_ARGUMENT] == "plain":
            calls.append(channel.delete_exchange(delivery.name))
        await asyncio.gather(*calls)
