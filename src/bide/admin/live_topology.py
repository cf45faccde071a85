"""The current topology of a broker, read through its management API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from bide.admin.policies import policy_problems, prevailing
from bide.admin.snapshot import Snapshot
from bide.errors import ManagementApiError
from bide.local_broker.installation import numbers
from bide.management.api import FoundExchange, FoundQueue, ManagementApi
from bide.runtime.logs import logger
from bide.topology import Argument, Binding, Exchange, Queue, Topology, TopologyDiff

log = logger(__name__)

_QUEUE_POLICY_KEYS: Final = frozenset(
    {
        "dead-letter-exchange",
        "dead-letter-routing-key",
        "dead-letter-strategy",
        "expires",
        "max-length",
        "max-length-bytes",
        "message-ttl",
        "overflow",
    }
)
"""Keys of policies for queues that are also queue arguments, with the prefix ``x-``."""


async def read_topology(
    api: ManagementApi, vhost: str, *, policies: bool = False, exchanges: Iterable[FoundExchange] | None = None
) -> Topology:
    """All exchanges, queues and bindings of a virtual host.

    Args:
        policies: replace arguments by the values in effect under the policies.
        exchanges: all exchanges of the virtual host, if they were read already.

    Raises:
        ManagementApiError: the API gives an unexpected answer.
    """
    snapshot = await _read(api, vhost, exchanges)
    if not policies:
        return _declared(snapshot)
    snapshot = await _with_policies(api, vhost, snapshot)
    return Topology(
        (_effective_exchange(one.exchange, snapshot.alternate_of(name)) for name, one in snapshot.exchanges.items()),
        (_effective_queue(one, snapshot.policy_of(one)) for one in snapshot.queues.values()),
        snapshot.bindings,
    )


async def _read(api: ManagementApi, vhost: str, exchanges: Iterable[FoundExchange] | None = None) -> Snapshot:
    found = await api.all_exchanges(vhost) if exchanges is None else exchanges
    return Snapshot(
        exchanges={one.exchange.name: one for one in found if one.exchange.name},
        queues={
            one.queue.name: replace(one, queue=_without_default_type(one.queue)) for one in await api.queues(vhost, "")
        },
        bindings=tuple(await api.bindings(vhost)),
    )


async def _with_policies(api: ManagementApi, vhost: str, snapshot: Snapshot) -> Snapshot:
    policies, operator_policies = await api.policies(vhost), await api.policies(vhost, operator=True)
    return replace(snapshot, policies=policies, operator_policies=operator_policies)


def _declared(snapshot: Snapshot) -> Topology:
    return Topology(
        (one.exchange for one in snapshot.exchanges.values()),
        (one.queue for one in snapshot.queues.values()),
        snapshot.bindings,
    )


def _without_default_type(queue: Queue) -> Queue:
    """The queue without the type that RabbitMQ 4.0 adds to classic queues declared without one."""
    if queue.arguments.get("x-queue-type") != "classic":
        return queue
    return replace(queue, arguments={name: value for name, value in queue.arguments.items() if name != "x-queue-type"})


def _effective_exchange(exchange: Exchange, alternate: str | None) -> Exchange:
    if alternate is None:
        return exchange
    return replace(exchange, arguments={**exchange.arguments, "alternate-exchange": alternate})


def _effective_queue(found: FoundQueue, policy: Mapping[str, Argument]) -> Queue:
    """A queue with the values in effect as its arguments."""
    held = {f"x-{key}": prevailing(found, key, value) for key, value in policy.items() if key in _QUEUE_POLICY_KEYS}
    known = {name: value for name, value in held.items() if value is not None}
    return replace(found.queue, arguments={**found.queue.arguments, **known})


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The differences between a topology and a broker.

    Attributes:
        diff: the difference from the broker to the topology: items that are missing, or exist with other properties.
        beside: bindings of the topology's exchanges that other programs made. They do not count as a difference.
        policies: harmful effects of policies on the queues of the topology.
    """

    diff: TopologyDiff
    beside: tuple[Binding, ...]
    policies: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.diff or self.policies)


_FIXES: Final = dict.fromkeys(("policy", "operator policy"), "change its pattern to leave these queues out")


async def compare_live(api: ManagementApi, vhost: str, wanted: Topology) -> Comparison:
    """Compare a broker with a topology, including policies if this user may see them.

    Raises:
        ManagementApiError: the API gives an unexpected answer.
    """
    snapshot = await _read(api, vhost)
    comparison = compare(_declared(snapshot), wanted)
    try:
        snapshot = await _with_policies(api, vhost, snapshot)
    except ManagementApiError as error:
        log.warning("policies are not compared: %s", error)
        return comparison
    queues = {one.name: snapshot.queues[one.name] for one in wanted.queues if one.name in snapshot.queues}
    release = numbers(str((await api.overview())["rabbitmq_version"]))
    policies = policy_problems(snapshot, queues, release, ways_out=_FIXES)
    return replace(comparison, policies=tuple(policies))


def compare(live: Topology, wanted: Topology) -> Comparison:
    """Compare a broker's topology with the wanted one. Items of other programs are ignored."""
    wanted = Topology(wanted.exchanges, map(_without_default_type, wanted.queues), wanted.bindings)
    own_exchanges = {one.name for one in wanted.exchanges}
    own_queues = {one.name for one in wanted.queues}
    own_bindings = frozenset(wanted.bindings)
    found = Topology(
        (one for one in live.exchanges if one.name in own_exchanges),
        (one for one in live.queues if one.name in own_queues),
        (one for one in live.bindings if one in own_bindings),
    )
    beside = tuple(one for one in live.bindings if one.source in own_exchanges and one not in own_bindings)
    return Comparison(diff=found.diff(wanted), beside=beside)
