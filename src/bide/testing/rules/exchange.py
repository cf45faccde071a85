"""An exchange on the broker's side, with its bindings."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from bide.errors import UnsupportedTargetError
from bide.testing.rules.errors import not_modelled, precondition_failed
from bide.testing.rules.message import StoredMessage
from bide.topology import Binding, Exchange
from bide.topology.exchange_types import BindingTable, Destination, binding_table

TYPES: Final = frozenset({"direct", "fanout", "topic", "headers", "x-consistent-hash"})

_HASH: Final = "x-consistent-hash"
_MATCHES: Final = ("all", "any", "all-with-x", "any-with-x")


class BrokerExchange:
    """An exchange.

    Attributes:
        definition: the exchange as declared.
        alternate: the name of its alternate exchange, or None.
        was_bound: whether it ever had a binding.
    """

    def __init__(self, definition: Exchange) -> None:
        self.definition = definition
        alternate = definition.arguments.get("alternate-exchange")
        self.alternate = alternate if isinstance(alternate, str) else None
        # In order of creation, which matters for consistent hashing.
        self._bindings: dict[Binding, None] = {}
        # Of several bindings to one destination, only the first counts, and removing any of them removes the buckets.
        self._with_buckets: dict[tuple[str, str], Binding] = {}
        self._table: BindingTable | None = None
        self.was_bound = False

    @property
    def bindings(self) -> Collection[Binding]:
        """Its bindings, the oldest first."""
        return self._bindings.keys()

    def bind(self, binding: Binding) -> None:
        """Add a binding; an existing one stays.

        Raises:
            BrokerError: the arguments or the key are invalid for this type of exchange.
        """
        kind = self.definition.type
        match = binding.arguments.get("x-match", "all")
        if kind == "headers" and match not in _MATCHES:
            raise precondition_failed(f"Invalid x-match field value {match!r}; expected all, any, and so on")
        if kind == _HASH and not (binding.routing_key.isascii() and binding.routing_key.isdigit()):
            raise precondition_failed(f"The binding key must be an integer: {binding.routing_key!r}")
        if kind == _HASH and int(binding.routing_key) < 1:
            raise precondition_failed("The binding key must be greater than 0")
        if binding not in self._bindings:
            self._bindings[binding] = None
            self._with_buckets.setdefault(_destination(binding), binding)
        self._table = None
        self.was_bound = True

    def unbind(self, binding: Binding) -> None:
        """Remove a binding, if it exists."""
        if binding in self._bindings:
            del self._bindings[binding]
            self._with_buckets.pop(_destination(binding), None)
            self._table = None

    def matches(self, message: StoredMessage) -> Collection[Destination]:
        """The destinations of the matching bindings.

        Raises:
            BrokerError: the matching rule is not modelled.
        """
        if self._table is None:
            found = self._with_buckets.values() if self.definition.type == _HASH else self._bindings
            self._table = binding_table(self.definition, found)
        try:
            return self._table.matches(message.routed)
        except UnsupportedTargetError as error:
            not_modelled(f"this: {error}")


def _destination(binding: Binding) -> tuple[str, str]:
    return binding.destination_type, binding.destination
