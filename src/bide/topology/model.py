"""Topologies as plain, immutable data: exchanges, queues and bindings.

:mod:`bide.topology.validation` checks topologies, :mod:`bide.topology.rendering` draws them, and
:mod:`bide.admin.apply` declares them on a broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from bide.errors import InvalidTopologyError

Argument = str | int | bool | float
"""The value of an argument of an exchange, queue or binding."""

DestinationType = Literal["queue", "exchange"]

DEFAULT_EXCHANGE: Final = ""
"""The exchange to which every queue is bound by its own name."""

PREDECLARED_EXCHANGES: Final = frozenset(
    {"", "amq.direct", "amq.fanout", "amq.topic", "amq.headers", "amq.match", "amq.rabbitmq.trace"}
)
"""Exchanges that exist in every virtual host from the start."""


class Arguments(Mapping[str, Argument]):
    """An immutable, hashable mapping of argument names to values."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Argument] | None = None) -> None:
        self._items: dict[str, Argument] = dict(sorted((items or {}).items()))

    def __getitem__(self, name: str) -> Argument:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Mapping):
            return self._items == dict(other)
        return NotImplemented

    def __repr__(self) -> str:
        return repr(self._items)


def _frozen(instance: object, arguments: Mapping[str, Argument]) -> None:
    object.__setattr__(instance, "arguments", Arguments(arguments))


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange.

    Attributes:
        name: at most 255 bytes of UTF-8.
        type: ``direct``, ``topic``, ``fanout``, ``headers``, or a type of a plugin, such as ``x-consistent-hash``.
        durable: whether it survives a restart of the broker.
        auto_delete: whether the broker deletes it with its last binding.
        internal: whether clients cannot publish to it.
        arguments: for example ``alternate-exchange``.
    """

    name: str
    type: str = "direct"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: Mapping[str, Argument] = field(default_factory=Arguments)

    def __post_init__(self) -> None:
        _frozen(self, self.arguments)


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue. Its type is the argument ``x-queue-type`` (``quorum``, ``classic``, ``stream``).

    Attributes:
        name: at most 255 bytes of UTF-8; if it is empty, the broker chooses a name.
        durable: whether it survives a restart of the broker.
        exclusive: whether only one connection can use it, and it is deleted with that connection.
        auto_delete: whether the broker deletes it with its last consumer.
        arguments: for example ``x-queue-type``.
    """

    name: str
    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    arguments: Mapping[str, Argument] = field(default_factory=Arguments)

    def __post_init__(self) -> None:
        _frozen(self, self.arguments)

    @classmethod
    def quorum(cls, name: str, arguments: Mapping[str, Argument] | None = None) -> Queue:
        """A durable quorum queue."""
        return cls(name, arguments={"x-queue-type": "quorum", **(arguments or {})})

    @property
    def type(self) -> str:
        """``quorum``, ``classic`` or ``stream``; ``classic`` if the arguments do not say."""
        return str(self.arguments.get("x-queue-type", "classic"))


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding from an exchange to a queue or to another exchange."""

    source: str
    destination: str
    routing_key: str = ""
    destination_type: DestinationType = "queue"
    arguments: Mapping[str, Argument] = field(default_factory=Arguments)

    def __post_init__(self) -> None:
        _frozen(self, self.arguments)


@dataclass(frozen=True, slots=True)
class Topology:
    """Exchanges, queues and bindings without duplicates, in the order given.

    Raises:
        InvalidTopologyError: two exchanges or two queues have the same name and different properties.
    """

    exchanges: tuple[Exchange, ...] = ()
    queues: tuple[Queue, ...] = ()
    bindings: tuple[Binding, ...] = ()

    def __init__(
        self,
        exchanges: Iterable[Exchange] = (),
        queues: Iterable[Queue] = (),
        bindings: Iterable[Binding] = (),
    ) -> None:
        object.__setattr__(self, "exchanges", tuple(dict.fromkeys(exchanges)))
        object.__setattr__(self, "queues", tuple(dict.fromkeys(queues)))
        object.__setattr__(self, "bindings", tuple(dict.fromkeys(bindings)))
        problems = [
            *_conflicts("exchange", [(one.name, one) for one in self.exchanges]),
            *_conflicts("queue", [(one.name, one) for one in self.queues if one.name]),
        ]
        if problems:
            raise InvalidTopologyError(problems)

    def __or__(self, other: Topology) -> Topology:
        """The union of two topologies."""
        return Topology(self.exchanges + other.exchanges, self.queues + other.queues, self.bindings + other.bindings)

    def __len__(self) -> int:
        return len(self.exchanges) + len(self.queues) + len(self.bindings)

    def exchange(self, name: str) -> Exchange | None:
        """The exchange with this name, or None."""
        return next((one for one in self.exchanges if one.name == name), None)

    def queue(self, name: str) -> Queue | None:
        """The queue with this name, or None."""
        return next((one for one in self.queues if one.name == name), None)

    def diff(self, other: Topology) -> TopologyDiff:
        """What has to be added, removed or redeclared to get from this topology to ``other``."""
        return TopologyDiff(
            added=Topology(
                (one for one in other.exchanges if self.exchange(one.name) is None),
                (one for one in other.queues if self.queue(one.name) is None),
                _without(other.bindings, self.bindings),
            ),
            removed=Topology(
                (one for one in self.exchanges if other.exchange(one.name) is None),
                (one for one in self.queues if other.queue(one.name) is None),
                _without(self.bindings, other.bindings),
            ),
            changed=tuple(
                Change(kind=kind, name=name, differences=differences)
                for kind, name, differences in _changes(self, other)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An exchange or queue that both topologies have, with different properties.

    Attributes:
        kind: ``"exchange"`` or ``"queue"``.
        name: the name of the exchange or queue.
        differences: property or argument name -> (value before, value after); None where it is absent.
    """

    kind: Literal["exchange", "queue"]
    name: str
    differences: Mapping[str, tuple[Argument | None, Argument | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyDiff:
    """The difference between two topologies; false if there is none."""

    added: Topology
    removed: Topology
    changed: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(len(self.added) or len(self.removed) or self.changed)


def _conflicts(kind: str, named: list[tuple[str, Exchange]] | list[tuple[str, Queue]]) -> list[str]:
    seen: set[str] = set()
    problems = []
    for name, _ in named:
        if name in seen:
            problems.append(f"{kind} {name!r} is defined twice with different properties: keep one definition")
        seen.add(name)
    return problems


def _without(left: tuple[Binding, ...], right: tuple[Binding, ...]) -> list[Binding]:
    known = frozenset(right)
    return [one for one in left if one not in known]


def _changes(
    before: Topology, after: Topology
) -> Iterator[tuple[Literal["exchange", "queue"], str, dict[str, tuple[Argument | None, Argument | None]]]]:
    for exchange in before.exchanges:
        other = after.exchange(exchange.name)
        if other is not None and other != exchange:
            yield "exchange", exchange.name, _differences(exchange, other)
    for queue in before.queues:
        twin = after.queue(queue.name)
        if twin is not None and twin != queue:
            yield "queue", queue.name, _differences(queue, twin)


def _differences(
    before: Exchange | Queue, after: Exchange | Queue
) -> dict[str, tuple[Argument | None, Argument | None]]:
    found: dict[str, tuple[Argument | None, Argument | None]] = {}
    for name in ("type", "durable", "exclusive", "auto_delete", "internal"):
        old, new = getattr(before, name, None), getattr(after, name, None)
        if old != new and not (name == "type" and isinstance(before, Queue)):
            found[name] = (old, new)
    for name in sorted({*before.arguments, *after.arguments}):
        old, new = before.arguments.get(name), after.arguments.get(name)
        if old != new:
            found[name] = (old, new)
    return found
