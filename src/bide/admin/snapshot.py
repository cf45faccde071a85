"""Snapshots of a delay infrastructure, with the exchanges and queues that it leads to."""

from __future__ import annotations

import asyncio
import os.path
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.queue_counts import queue_counts
from bide.delay.cascade import Policy
from bide.delay.protocol import DelayInfrastructure
from bide.errors import BrokerError
from bide.management.api import FoundExchange, FoundQueue, ManagementApi
from bide.schedules.names import ScheduleNames
from bide.topology import Argument, Binding, DestinationType

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

RELEASE: Final = ".release."
"""Part of the names of release queues."""

_MAX_CALLS: Final = 8
_MAX_IN_FLIGHT: Final = 256

_APPLIES_TO: Final[Mapping[str, frozenset[str]]] = {
    "quorum": frozenset({"all", "queues", "quorum_queues"}),
    "classic": frozenset({"all", "queues", "classic_queues"}),
    "stream": frozenset({"all", "queues", "streams"}),
}

_QUORUM_QUEUE_KEYS: Final = frozenset({"delivery-limit", "dead-letter-strategy", "target-group-size"})
_STREAM_KEYS: Final = frozenset({"max-age", "stream-max-segment-size-bytes", "initial-cluster-size"})
_CLASSIC_QUEUE_KEYS: Final = frozenset(
    {
        "ha-mode",
        "ha-params",
        "ha-promote-on-failure",
        "ha-promote-on-shutdown",
        "ha-sync-mode",
        "max-priority",
        "queue-master-locator",
        "queue-mode",
    }
)
_OTHER_KEYS: Final = frozenset(
    {
        "dead-letter-exchange",
        "dead-letter-routing-key",
        "expires",
        "max-in-memory-bytes",
        "max-in-memory-length",
        "max-length",
        "message-ttl",
        "overflow",
    }
)

_UNSUPPORTED_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "quorum": _CLASSIC_QUEUE_KEYS | _STREAM_KEYS,
    "classic": _QUORUM_QUEUE_KEYS | _STREAM_KEYS,
    "stream": _CLASSIC_QUEUE_KEYS | _QUORUM_QUEUE_KEYS | _OTHER_KEYS,
}
"""Keys that keep RabbitMQ from applying a policy to a queue of a type (rabbit_queue_type:is_policy_applicable)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The exchanges and queues of an infrastructure, and those behind its bindings, by name.

    Attributes:
        bindings: the bindings whose source is one of these exchanges.
        policies: the policies of the virtual host, by name.
        operator_policies: the operator policies of the virtual host, by name.
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
        """The alternate exchange of an exchange, by argument or policy; None if it has none."""
        found = self.exchanges[exchange]
        alternate = found.exchange.arguments.get("alternate-exchange")
        if alternate is None and found.policy is not None and found.policy in self.policies:
            alternate = self.policies[found.policy].definition.get("alternate-exchange")
        return None if alternate is None else str(alternate)

    def policy_of(self, queue: FoundQueue) -> dict[str, Argument]:
        """The definition in effect for a queue: its policy merged with its operator policy.

        By RabbitMQ's rules, the smaller of two numbers is in effect, and otherwise the value of the operator policy.
        """
        own = self.own_policy_of(queue)
        effective: dict[str, Argument] = dict(own.definition) if own is not None else {}
        operator = self.operator_policy_of(queue)
        if operator is not None:
            for name, value in operator.definition.items():
                effective[name] = _merge_value(name, effective.get(name), value)
        return effective

    def own_policy_of(self, queue: FoundQueue) -> Policy | None:
        """The policy that applies to a queue."""
        if queue.policy is not None:
            return self.policies.get(queue.policy)
        # RabbitMQ 3.10 does not report the policy of a single queue that is queried by name.
        return applying(self.policies.values(), queue)

    def operator_policy_of(self, queue: FoundQueue) -> Policy | None:
        """The operator policy that applies to a queue. It is computed, because only RabbitMQ 4.3 lists it per queue."""
        return applying(self.operator_policies.values(), queue)


def applying(policies: Iterable[Policy], queue: FoundQueue) -> Policy | None:
    """The policy that applies to a queue: of those that match, the one with the highest priority."""
    return max((one for one in policies if matches(one, queue)), key=lambda one: one.priority, default=None)


def matches(policy: Policy, queue: FoundQueue) -> bool:
    """Whether a policy matches a queue. It applies if no matching policy has a higher priority."""
    if policy.apply_to not in _APPLIES_TO.get(queue.type, frozenset({"all", "queues"})):
        return False
    if not _UNSUPPORTED_KEYS.get(queue.type, frozenset()).isdisjoint(policy.definition):
        return False
    return is_readable(policy) and re.search(policy.pattern, queue.queue.name) is not None


def is_readable(policy: Policy) -> bool:
    """Whether Python can evaluate the policy's pattern. The broker's regular expressions have more features."""
    if "[:" in policy.pattern:
        return False
    try:
        re.compile(policy.pattern)
    except re.error:
        return False
    return True


def _merge_value(name: str, other: Argument | None, value: Argument) -> Argument:
    """The value in effect of a policy and an operator policy (rabbit_policies:merge_policy_value, 3.10 to 4.3)."""
    if isinstance(other, int | float) and isinstance(value, int | float):
        # A negative delivery limit means no limit, so the other value is in effect.
        return max(other, value) if name == "delivery-limit" and min(other, value) < 0 else min(other, value)
    return value


async def take_snapshot(api: ManagementApi, vhost: str, infrastructure: DelayInfrastructure) -> Snapshot:
    """Read an infrastructure from the management API.

    Raises:
        ManagementApiError: the API gives an unexpected answer.
    """
    exchanges, queues = await find_owned(api, vhost, infrastructure)
    policies = await api.policies(vhost)
    bindings = await _bindings_of_each(api, vhost, exchanges)
    snapshot = Snapshot(exchanges=exchanges, queues=queues, bindings=tuple(bindings), policies=policies)

    # Exchanges that messages reach without a binding of bide. Exchanges and queues behind them are not read.
    beyond = {snapshot.alternate_of(name) for name in exchanges} | {release_exchange(one) for one in queues.values()}
    beyond_exchanges = sorted(name for name in beyond if name and name not in exchanges)
    found = await _call_concurrently(lambda name: api.exchange(vhost, name), beyond_exchanges)
    exchanges |= {one.exchange.name: one for one in found if one}
    bindings += await _bindings_of_each(api, vhost, beyond_exchanges)
    waiting = {release_target(one) for one in queues.values()}
    follow: set[tuple[DestinationType, str]] = {(one.destination_type, one.destination) for one in snapshot.bindings}
    follow |= {("queue", name) for name in waiting if name}
    taps = infrastructure.taps()
    # A tap that is off leaves its streams, without bindings.
    follow |= {("queue", name) for name in (taps.names if taps else ())}

    # The exchange of an endpoint may lead to the queue through other exchanges.
    seen: set[tuple[DestinationType, str]] = {("queue", name) for name in queues}
    seen |= {("exchange", name) for name in exchanges}
    while follow := follow - seen:
        seen |= follow
        names = {kind: sorted(name for one, name in follow if one == kind) for kind in ("queue", "exchange")}
        found_queues = await _call_concurrently(lambda name: api.queue(vhost, name), names["queue"])
        queues |= {one.queue.name: one for one in found_queues if one}
        found = await _call_concurrently(lambda name: api.exchange(vhost, name), names["exchange"])
        exchanges |= {one.exchange.name: one for one in found if one}
        onward = await _bindings_of_each(api, vhost, names["exchange"])
        bindings += onward
        follow = {(one.destination_type, one.destination) for one in onward}
    return Snapshot(
        exchanges=exchanges,
        queues=queues,
        bindings=tuple(bindings),
        policies=policies,
        operator_policies=await api.policies(vhost, operator=True),
    )


async def take_schedule_snapshot(api: ManagementApi, vhost: str, names: ScheduleNames) -> Snapshot:
    """Read the queues of the schedule log, its bindings and the policies from the management API.

    Raises:
        ManagementApiError: the API gives an unexpected answer.
    """
    queues = {one.queue.name: one for one in await api.queues(vhost, names.operations) if names.owns(one.queue.name)}
    return Snapshot(
        queues=queues,
        bindings=tuple(await _bindings_of_each(api, vhost, (names.operations, names.gates))),
        policies=await api.policies(vhost),
        operator_policies=await api.policies(vhost, operator=True),
    )


async def find_owned(
    api: ManagementApi, vhost: str, infrastructure: DelayInfrastructure
) -> tuple[dict[str, FoundExchange], dict[str, FoundQueue]]:
    """The exchanges and queues that belong to an infrastructure, by name.

    Raises:
        ManagementApiError: the API gives an unexpected answer.
    """
    topology = infrastructure.topology()
    names = [*(one.name for one in topology.exchanges), *(one.name for one in topology.queues)]
    fragments = {os.path.commonprefix(names), infrastructure.undeliverable}  # noqa: RUF071 (of names, not of paths)
    if infrastructure.release_prefix:
        fragments.add(infrastructure.release_prefix)
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
    """The exchange that a release queue dead-letters to; None for any other queue."""
    if RELEASE not in found.queue.name:
        return None
    return str(found.queue.arguments.get("x-dead-letter-exchange") or "") or None


def release_target(found: FoundQueue) -> str | None:
    """The target queue of a release queue; None if its target is an exchange, and for any other queue."""
    if RELEASE not in found.queue.name or release_exchange(found) is not None:
        return None
    return str(found.queue.arguments.get("x-dead-letter-routing-key") or "") or None


async def _bindings_of_each(api: ManagementApi, vhost: str, exchanges: Iterable[str]) -> list[Binding]:
    groups = await _call_concurrently(lambda name: api.bindings_from(vhost, name), exchanges)
    return [binding for group in groups for binding in group]


async def _call_concurrently(call: Callable[[str], Awaitable[_Answer]], names: Iterable[str]) -> list[_Answer]:
    """Call a function with each name, a few at a time."""
    permits = asyncio.Semaphore(_MAX_CALLS)

    async def one(name: str) -> _Answer:
        async with permits:
            return await call(name)

    return await asyncio.gather(*(one(name) for name in names))


async def ask_each(
    connection: Connection, items: Sequence[_Item], ask: Callable[[Channel, _Item], asyncio.Future[Any]]
) -> list[Any | BrokerError]:
    """The broker's reply to a call for each item, or the error.

    A refusal closes the channel and with it the later calls, which are sent again on another channel.

    Raises:
        BideError: the connection was lost.
    """
    answers: list[Any | BrokerError] = []
    size = _MAX_IN_FLIGHT
    while len(answers) < len(items):
        channel = await connection.channel()
        batch = items[len(answers) : len(answers) + size]
        size = min(size * 4, _MAX_IN_FLIGHT)
        results = await asyncio.gather(*(ask(channel, item) for item in batch), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and (connection.lost.done() or not isinstance(result, BrokerError)):
                raise result
            answers.append(result)
            if isinstance(result, BrokerError):
                # More calls may be refused, for example if many queues of a Clock do not exist yet.
                size = 1
                break
        if channel.is_open:
            await channel.close()
    return answers


async def count_each(connection: Connection, queues: Sequence[str]) -> list[Any | BrokerError]:
    """The counts of a few queues, see :func:`bide.amqp.queue_counts.queue_counts`, or the broker's errors.

    Each queue is asked over a channel of its own, so one that is busy does not make the replies of others late.
    :func:`bide.admin.apply.message_counts` is for many queues.

    Raises:
        BideError: the connection was lost.
    """

    async def count(queue: str) -> Any | BrokerError:
        try:
            async with await connection.channel() as channel:
                return await queue_counts(channel, queue)
        except BrokerError as error:
            if connection.lost.done():
                raise
            return error

    return await _call_concurrently(count, queues)
