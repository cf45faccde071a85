"""What is on the broker of a delay infrastructure, and of what surrounds it, at one moment."""

from __future__ import annotations

import asyncio
import os.path
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from bide.admin.management import FoundExchange, FoundQueue, ManagementApi
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.delay.cascade import Policy
from bide.delay.infrastructure import DelayInfrastructure
from bide.errors import BrokerError
from bide.topology import Argument, Binding, DestinationType

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

RELEASE: Final = ".release."
"""Part of the names of the release queues of ``Clock``."""

_CALLS_AT_ONCE: Final = 8
_IN_FLIGHT: Final = 256

_APPLIES_TO: Final[Mapping[str, frozenset[str]]] = {
    "quorum": frozenset({"all", "queues", "quorum_queues"}),
    "classic": frozenset({"all", "queues", "classic_queues"}),
    "stream": frozenset({"all", "queues", "streams"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The infrastructure's exchanges and queues, by name, with those that its bindings lead to.

    Attributes:
        bindings: those whose source is an exchange of the infrastructure, or one that it leads to.
    """

    exchanges: Mapping[str, FoundExchange] = field(default_factory=dict)
    queues: Mapping[str, FoundQueue] = field(default_factory=dict)
    bindings: tuple[Binding, ...] = ()
    policies: Mapping[str, Policy] = field(default_factory=dict)
    operator_policies: Mapping[str, Policy] = field(default_factory=dict)

    def bindings_from(self, exchange: str) -> list[Binding]:
        """The bindings of one source."""
        return [one for one in self.bindings if one.source == exchange]

    def alternate_of(self, exchange: str) -> str | None:
        """Where an exchange sends what it cannot route, by argument or policy; None for nowhere."""
        found = self.exchanges[exchange]
        alternate = found.exchange.arguments.get("alternate-exchange")
        if alternate is None and found.policy is not None and found.policy in self.policies:
            alternate = self.policies[found.policy].definition.get("alternate-exchange")
        return None if alternate is None else str(alternate)

    def policy_of(self, queue: FoundQueue) -> dict[str, Argument]:
        """What policies say about a queue: its policy's definition under its operator policy's.

        Where both give a number the smaller one holds; else the operator's does (rule of RabbitMQ).
        """
        own = self.policies.get(queue.policy) if queue.policy is not None else None
        effective: dict[str, Argument] = dict(own.definition) if own is not None else {}
        # Only 4.3 tells which operator policy applies; the others leave it to us to match them.
        matching = [one for one in self.operator_policies.values() if matches(one, queue)]
        if matching:
            for name, value in max(matching, key=lambda one: one.priority).definition.items():
                other = effective.get(name)
                effective[name] = _smaller(other, value)
        return effective


def matches(policy: Policy, queue: FoundQueue) -> bool:
    """Whether a policy applies to a queue, if no other of its kind has a higher priority."""
    if policy.apply_to not in _APPLIES_TO.get(queue.type, frozenset({"all", "queues"})):
        return False
    try:
        return re.search(policy.pattern, queue.queue.name) is not None
    except re.error:
        # Written for the broker's own regular expressions, which know a little more.
        return False


def _smaller(other: Argument | None, value: Argument) -> Argument:
    if isinstance(other, int | float) and isinstance(value, int | float):
        return min(other, value)
    return value


async def take_snapshot(api: ManagementApi, vhost: str, infrastructure: DelayInfrastructure) -> Snapshot:
    """Look at an infrastructure through the management API.

    Raises:
        ManagementApiError: the API does not answer as it should.
    """
    exchanges, queues = await find_owned(api, vhost, infrastructure)
    policies = await api.policies(vhost)
    bindings = await _bindings_from(api, vhost, exchanges)
    snapshot = Snapshot(exchanges=exchanges, queues=queues, bindings=tuple(bindings), policies=policies)

    # What messages go on to without a binding of ours. Where they go from there is their owner's business.
    beyond = {snapshot.alternate_of(name) for name in exchanges} | {release_exchange(one) for one in queues.values()}
    beyond_exchanges = sorted(name for name in beyond if name and name not in exchanges)
    found = await _at_once(lambda name: api.exchange(vhost, name), beyond_exchanges)
    exchanges |= {one.exchange.name: one for one in found if one}
    bindings += await _bindings_from(api, vhost, beyond_exchanges)
    waiting = {release_target(one) for one in queues}
    follow: set[tuple[DestinationType, str]] = {(one.destination_type, one.destination) for one in snapshot.bindings}
    follow |= {("queue", name) for name in waiting if name}

    # An endpoint's exchange leads on to its queue, and may do so over other exchanges.
    seen: set[tuple[DestinationType, str]] = {("queue", name) for name in queues}
    seen |= {("exchange", name) for name in exchanges}
    while follow := follow - seen:
        seen |= follow
        names = {kind: sorted(name for one, name in follow if one == kind) for kind in ("queue", "exchange")}
        found_queues = await _at_once(lambda name: api.queue(vhost, name), names["queue"])
        queues |= {one.queue.name: one for one in found_queues if one}
        found = await _at_once(lambda name: api.exchange(vhost, name), names["exchange"])
        exchanges |= {one.exchange.name: one for one in found if one}
        onward = await _bindings_from(api, vhost, names["exchange"])
        bindings += onward
        follow = {(one.destination_type, one.destination) for one in onward}
    return Snapshot(
        exchanges=exchanges,
        queues=queues,
        bindings=tuple(bindings),
        policies=policies,
        operator_policies=await api.policies(vhost, operator=True),
    )


async def find_owned(
    api: ManagementApi, vhost: str, infrastructure: DelayInfrastructure
) -> tuple[dict[str, FoundExchange], dict[str, FoundQueue]]:
    """The exchanges and queues that belong to an infrastructure, by name.

    Raises:
        ManagementApiError: the API does not answer as it should.
    """
    topology = infrastructure.topology()
    names = [*(one.name for one in topology.exchanges), *(one.name for one in topology.queues)]
    fragments = {os.path.commonprefix(names), infrastructure.undeliverable}  # noqa: RUF071 (of names, not of paths)
    fragments = {one for one in fragments if not any(other != one and other in one for other in fragments)}
    exchanges: dict[str, FoundExchange] = {}
    queues: dict[str, FoundQueue] = {}
    for fragment in sorted(fragments):
        exchanges |= {one.exchange.name: one for one in await api.exchanges(vhost, fragment)}
        queues |= {one.queue.name: one for one in await api.queues(vhost, fragment)}
    return (
        {name: one for name, one in exchanges.items() if infrastructure.owns(name)},
        {name: one for name, one in queues.items() if infrastructure.owns(name)},
    )


def release_exchange(found: FoundQueue) -> str | None:
    """The exchange that a release queue of ``Clock`` sends its messages on to; None for any other queue."""
    if RELEASE not in found.queue.name:
        return None
    return str(found.queue.arguments.get("x-dead-letter-exchange") or "") or None


def release_target(name: str) -> str | None:
    """The queue that a release queue of ``Clock`` stands before; None where it does not tell, and for any other."""
    return name.partition(f"{RELEASE}q:")[2] or None


async def _bindings_from(api: ManagementApi, vhost: str, exchanges: Iterable[str]) -> list[Binding]:
    groups = await _at_once(lambda name: api.bindings_from(vhost, name), exchanges)
    return [binding for group in groups for binding in group]


async def _at_once(call: Callable[[str], Awaitable[_Answer]], names: Iterable[str]) -> list[_Answer]:
    """Call for every name, a few at a time."""
    permits = asyncio.Semaphore(_CALLS_AT_ONCE)

    async def one(name: str) -> _Answer:
        async with permits:
            return await call(name)

    return await asyncio.gather(*(one(name) for name in names))


async def ask_each(
    connection: Connection, items: Sequence[_Item], ask: Callable[[Channel, _Item], asyncio.Future[Any]]
) -> list[Any | BrokerError]:
    """The broker's reply to one call for each item, or its refusal.

    A refusal closes the channel, and takes the calls behind it along: those are sent again on another.

    Raises:
        BideError: the connection broke.
    """
    answers: list[Any | BrokerError] = []
    size = _IN_FLIGHT
    while len(answers) < len(items):
        channel = await connection.channel()
        batch = items[len(answers) : len(answers) + size]
        size = min(size * 4, _IN_FLIGHT)
        results = await asyncio.gather(*(ask(channel, item) for item in batch), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and (connection.lost.done() or not isinstance(result, BrokerError)):
                raise result
            answers.append(result)
            if isinstance(result, BrokerError):
                # Others may be refused too, as many queues of a Clock that do not exist yet.
                size = 1
                break
        if channel.is_open:
            await channel.close()
    return answers
