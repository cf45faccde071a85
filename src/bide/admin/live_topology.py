"""The topology that is on a broker now, read through its management API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from bide.admin.snapshot import Snapshot
from bide.management.api import ManagementApi
from bide.topology import Argument, Binding, Exchange, Queue, Topology, TopologyDiff

_OF_QUEUES: Final = frozenset(
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
"""What a policy may say of a queue that its arguments may say too, with ``x-`` in front."""

_Thing = TypeVar("_Thing", Exchange, Queue)


async def read_topology(api: ManagementApi, vhost: str, *, policies: bool = False) -> Topology:
    """All exchanges, queues and bindings of a virtual host.

    Args:
        policies: take what policies say for arguments, so that the topology is what the broker goes by.

    Raises:
        ManagementApiError: the API does not answer as it should.
    """
    exchanges = {one.exchange.name: one for one in await api.exchanges(vhost, "") if one.exchange.name}
    queues = {one.queue.name: replace(one, queue=_untyped(one.queue)) for one in await api.queues(vhost, "")}
    bindings = await api.bindings(vhost)
    if not policies:
        return Topology((one.exchange for one in exchanges.values()), (one.queue for one in queues.values()), bindings)
    snapshot = Snapshot(
        exchanges=exchanges,
        queues=queues,
        policies=await api.policies(vhost),
        operator_policies=await api.policies(vhost, operator=True),
    )
    alternates = {name: snapshot.alternate_of(name) for name in exchanges}
    return Topology(
        (
            _with(one.exchange, {} if (alternate := alternates[name]) is None else {"alternate-exchange": alternate})
            for name, one in exchanges.items()
        ),
        (_with(one.queue, _arguments(snapshot.policy_of(one))) for one in queues.values()),
        bindings,
    )


def _untyped(queue: Queue) -> Queue:
    """RabbitMQ 4.0 writes down that a queue is a classic one, whoever declared it without a word about that."""
    if queue.arguments.get("x-queue-type") != "classic":
        return queue
    return replace(queue, arguments={name: value for name, value in queue.arguments.items() if name != "x-queue-type"})


def _with(thing: _Thing, arguments: Mapping[str, Argument]) -> _Thing:
    """Its own arguments win over a policy's, save that of two numbers the smaller one holds (rule of RabbitMQ)."""
    own = thing.arguments
    merged = {name: _stronger(value, own.get(name)) for name, value in arguments.items()}
    return replace(thing, arguments={**own, **merged})


def _stronger(policy: Argument, own: Argument | None) -> Argument:
    if own is None:
        return policy
    return min(policy, own) if isinstance(policy, int | float) and isinstance(own, int | float) else own


def _arguments(policy: Mapping[str, Argument]) -> dict[str, Argument]:
    return {f"x-{name}": value for name, value in policy.items() if name in _OF_QUEUES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a broker lacks of a topology, and what it has beside it.

    Attributes:
        diff: from the broker to the topology: what would be added, and what is there with other properties.
        beside: bindings of the topology's exchanges that others made; no difference.
    """

    diff: TopologyDiff
    beside: tuple[Binding, ...]

    def __bool__(self) -> bool:
        return bool(self.diff)


def compare(live: Topology, wanted: Topology) -> Comparison:
    """Compare what is on a broker with a topology. What others have there is none of its business."""
    wanted = Topology(wanted.exchanges, map(_untyped, wanted.queues), wanted.bindings)
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
