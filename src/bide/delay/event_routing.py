"""Routing of NServiceBus events by message type, in both routing topologies."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

from bide.delay.message_type import MessageType
from bide.topology import Binding, Exchange, Topology

_EVERY_EVENT: Final = ("NServiceBus.IEvent", "System.Object")
"""The types whose subscribers receive all events."""

_MARKERS: Final = frozenset({"NServiceBus.IMessage", "NServiceBus.ICommand", "NServiceBus.IEvent"})
_OBJECT: Final = "System:Object"
_TOPIC_EXCHANGE: Final = "amq.topic"


class EventRouting(Protocol):
    """Routes events to the endpoints that subscribe to their type, or to a base class or interface of it."""

    def event_address(self, kind: MessageType) -> tuple[str, str]:
        """The exchange and the routing key that an event is published to."""

    def publication(self, kind: MessageType) -> Topology:
        """The topology that a publisher of this type declares before the first event."""

    def subscription(self, kind: MessageType, queue: str) -> Topology:
        """The topology that an endpoint declares to receive the events of this type, and of types derived from it."""


@dataclass(frozen=True, slots=True)
class ConventionalEvents:
    """A fanout exchange for each type, bound to the exchanges of its base classes and interfaces.

    Every class leads to the exchange of ``System.Object``. Endpoints that subscribe to all events are bound to it.
    """

    def event_address(self, kind: MessageType) -> tuple[str, str]:
        """The exchange of the type, with an empty routing key."""
        return _exchange_of(kind), ""

    def publication(self, kind: MessageType) -> Topology:
        """The exchanges of the type and of all types above it, and the bindings between them."""
        own = _exchange_of(kind)
        chain = [own, *map(_exchange_of, kind.bases)]
        if not kind.is_interface:
            chain.append(_OBJECT)
        interfaces = [_exchange_of(one) for one in kind.all_interfaces]
        bindings = [Binding(lower, higher, "", "exchange") for lower, higher in pairwise(chain)]
        bindings += [Binding(own, one, "", "exchange") for one in interfaces]
        return Topology([Exchange(name, "fanout") for name in dict.fromkeys(chain + interfaces)], bindings=bindings)

    def subscription(self, kind: MessageType, queue: str) -> Topology:
        """The publication of the type, and a binding to the existing exchange with the queue's name."""
        if kind.name in _EVERY_EVENT:
            return Topology([Exchange(_OBJECT, "fanout")], bindings=[Binding(_OBJECT, queue, "", "exchange")])
        return self.publication(kind) | Topology(bindings=[Binding(_exchange_of(kind), queue, "", "exchange")])


@dataclass(frozen=True, slots=True)
class DirectEvents:
    """Events go through ``amq.topic``, with a routing key that starts with the names of base classes and interfaces.

    As with NServiceBus, a type with several interfaces reaches the subscribers of one of them only.
    """

    def event_address(self, kind: MessageType) -> tuple[str, str]:
        """The topic exchange, and the routing key of the type."""
        return _TOPIC_EXCHANGE, _key_of(kind)

    def publication(self, kind: MessageType) -> Topology:
        """Nothing: the exchange always exists."""
        return Topology()

    def subscription(self, kind: MessageType, queue: str) -> Topology:
        """A binding of the queue to the keys of the type and of those derived from it."""
        key = "#" if kind.name in _EVERY_EVENT else f"{_key_of(kind)}.#"
        return Topology(bindings=[Binding(_TOPIC_EXCHANGE, queue, key)])


def _exchange_of(kind: MessageType) -> str:
    return f"{kind.namespace}:{kind.short_name}"


def _key_of(kind: MessageType, key: str = "") -> str:
    # The words of one type after another, in the order of NServiceBus, which can repeat an interface of a base class.
    if kind.base is not None and not kind.base.name.startswith("System."):
        key = _key_of(kind.base, key)
    interface = next((one for one in kind.all_interfaces if _is_relevant(one)), None)
    if interface is not None:
        key = _key_of(interface, key)
    word = kind.name.replace(".", "-")
    return f"{key}.{word}" if key else word


def _is_relevant(interface: MessageType) -> bool:
    return not interface.name.startswith("System.") and interface.name not in _MARKERS
