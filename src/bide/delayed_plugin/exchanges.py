"""Exchanges of the delayed-message plugin, and the exchanges and bindings that replace them.

A delayed exchange ``orders`` of the routing type ``topic`` is replaced in one of two ways. Both keep its name for
publishers and its bindings for consumers.

``hall``, for publishers in any language, which keep their ``x-delay`` header::

    [orders]  --x-delay-->  [check-in of the waiting hall] ... relay  ->  [orders.delivery]  ->  its queues
       `--alternate exchange, without x-delay-->  [orders.delivery]

``plain``, for Python publishers, which use :class:`bide.messaging.delayed_message.DelayedMessagePublisher`, or
``delay=``::

    [orders]  ->  its queues
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from bide.delay.waiting_hall import WaitingHall, delivery_exchange_of
from bide.errors import InvalidInputError
from bide.topology import Argument, Binding, Exchange, Topology

TYPE: Final = "x-delayed-message"

Way = Literal["hall", "plain"]
"""What replaces a delayed exchange."""

ENTRY_ARGUMENT: Final = "bide-entry"
WAY_ARGUMENT: Final = "bide-way"
"""Arguments of a delivery exchange, from which an interrupted replacement continues. The broker ignores them."""

_MAX_NAME_BYTES: Final = 255
_ROUTING_TYPE: Final = "x-delayed-type"
_ALTERNATE: Final = "alternate-exchange"
_HAS_DELAY: Final[Mapping[str, Any]] = {"x-match": "all-with-x", "x-delay": None}
"""Arguments of a binding that matches any value of the header. The management API shows None as ``undefined``."""

_RESTORED: Final[Mapping[str, Argument]] = {"x-match": "all-with-x", "x-delay": "undefined"}
"""These arguments in definitions that RabbitMQ exports: they match no delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedExchange:
    """An exchange of the plugin.

    Attributes:
        exchange: its properties.
        bindings: the bindings from the exchange to queues and other exchanges.
        incoming: the names of the source exchanges of bindings to this exchange.
        waiting: the number of messages that wait; None if it is unknown, because the exchange was read from a file or
            the plugin is not enabled.
    """

    exchange: Exchange
    bindings: tuple[Binding, ...]
    incoming: tuple[str, ...] = ()
    waiting: int | None = None

    @property
    def name(self) -> str:
        """The name."""
        return self.exchange.name

    @property
    def routing_type(self) -> str:
        """The exchange type by which it routes messages that are due."""
        return str(self.exchange.arguments.get(_ROUTING_TYPE, ""))

    @property
    def delivery(self) -> str:
        """The name of its delivery exchange."""
        return delivery_exchange_of(self.name)

    def problems(self, way: Way) -> list[str]:
        """The reasons why it cannot be replaced in this way; empty if it can."""
        found = []
        if len(self.delivery.encode()) > _MAX_NAME_BYTES:
            found.append(f"its name is too long for the exchange {self.delivery!r}")
        if way == "hall" and self.incoming:
            found.append(
                f"messages come to it through {', '.join(map(repr, self.incoming))}, and would return there after "
                "their delay: replace it as 'plain', or let the publishers use it directly"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "name": self.name,
            "routing_type": self.routing_type,
            "bindings": len(self.bindings),
            "incoming": list(self.incoming),
            "waiting": self.waiting,
        }


def delayed_exchanges(topology: Topology, waiting: Mapping[str, int] | None = None) -> list[DelayedExchange]:
    """The exchanges of the plugin in a topology, by name.

    Args:
        topology: the whole virtual host.
        waiting: the numbers of messages that wait, by exchange.
    """
    return [
        DelayedExchange(
            exchange=one,
            bindings=tuple(each for each in topology.bindings if each.source == one.name),
            incoming=tuple(
                sorted({each.source for each in topology.bindings if _leads_to(each, one.name)}),
            ),
            waiting=None if waiting is None else waiting.get(one.name),
        )
        for one in sorted(topology.exchanges, key=lambda one: one.name)
        if one.type == TYPE
    ]


def _leads_to(binding: Binding, exchange: str) -> bool:
    return binding.destination_type == "exchange" and binding.destination == exchange


def holding_topology(one: DelayedExchange, way: Way) -> Topology:
    """The delivery exchange with the bindings. It is declared before the delayed exchange is deleted.

    Raises:
        InvalidInputError: the exchange cannot be replaced in this way.
    """
    if problems := one.problems(way):
        raise InvalidInputError(f"the exchange {one.name!r} cannot be replaced: {'; '.join(problems)}")
    arguments: dict[str, Argument] = {
        name: value for name, value in one.exchange.arguments.items() if name != _ROUTING_TYPE
    }
    marks: dict[str, Argument] = {ENTRY_ARGUMENT: one.name, WAY_ARGUMENT: way}
    return Topology(
        [Exchange(one.delivery, one.routing_type, arguments={**arguments, **marks})],
        bindings=_bindings_from(one.delivery, one.bindings),
    )


def entry_topology(delivery: Exchange, bindings: Iterable[Binding], hall: WaitingHall) -> Topology:
    """The exchange that takes the name of a delayed exchange, with its bindings.

    Args:
        delivery: the delivery exchange, with its marks.
        bindings: the bindings of the delivery exchange.
        hall: the waiting hall.
    """
    name = str(delivery.arguments[ENTRY_ARGUMENT])
    if delivery.arguments[WAY_ARGUMENT] == "plain":
        arguments = {
            key: value for key, value in delivery.arguments.items() if key not in (ENTRY_ARGUMENT, WAY_ARGUMENT)
        }
        return Topology([Exchange(name, delivery.type, arguments=arguments)], bindings=_bindings_from(name, bindings))
    return Topology(
        [Exchange(name, "headers", arguments={_ALTERNATE: delivery.name})],
        bindings=[_check_in_binding(name, hall.check_in)],
    )


def check_in_bindings(topology: Topology) -> list[tuple[Binding, Binding]]:
    """The bindings to waiting halls of exchanges that were replaced, each with what imported definitions make of it."""
    entries = {
        one.arguments.get(ENTRY_ARGUMENT) for one in topology.exchanges if one.arguments.get(WAY_ARGUMENT) == "hall"
    }
    return [
        (
            _check_in_binding(one.source, one.destination),
            Binding(one.source, one.destination, "", "exchange", _RESTORED),
        )
        for one in topology.bindings
        if one.source in entries and "x-delay" in one.arguments
    ]


def _check_in_binding(source: str, check_in: str) -> Binding:
    return Binding(source, check_in, "", "exchange", _HAS_DELAY)


def interrupted(topology: Topology) -> list[Exchange]:
    """The delivery exchanges whose delayed exchange was deleted, and is not completely replaced yet."""
    return [
        one
        for one in topology.exchanges
        if (name := one.arguments.get(ENTRY_ARGUMENT)) is not None
        and ((there := topology.exchange(str(name))) is None or _is_unfinished(one, there, topology))
    ]


def _is_unfinished(delivery: Exchange, entry: Exchange, topology: Topology) -> bool:
    if entry.type == TYPE:
        return False
    # A plain exchange is complete when its delivery exchange is deleted.
    return delivery.arguments[WAY_ARGUMENT] == "plain" or not any(one.source == entry.name for one in topology.bindings)


def _bindings_from(source: str, bindings: Iterable[Binding]) -> list[Binding]:
    return [Binding(source, one.destination, one.routing_key, one.destination_type, one.arguments) for one in bindings]
