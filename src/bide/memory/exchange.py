"""An exchange and its bindings, which come and go."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from bide.errors import UnsupportedTargetError
from bide.exchange_types import BindingTable, Destination, binding_table
from bide.memory.message import StoredMessage
from bide.memory.refusal import not_modelled, precondition_failed
from bide.topology import Binding, Exchange

TYPES: Final = frozenset({"direct", "fanout", "topic", "headers", "x-consistent-hash"})

_HASH: Final = "x-consistent-hash"
_MATCHES: Final = ("all", "any", "all-with-x", "any-with-x")


class BrokerExchange:
    """An exchange.

    Attributes:
        definition: as it was declared.
        alternate: the exchange that is asked where no binding matches, or None.
    """

    def __init__(self, definition: Exchange) -> None:
        self.definition = definition
        alternate = definition.arguments.get("alternate-exchange")
        self.alternate = alternate if isinstance(alternate, str) else None
        # In the order in which they came, which matters to consistent hashing.
        self._bindings: dict[Binding, None] = {}
        self._table: BindingTable | None = None
        self.had_any = False

    @property
    def bindings(self) -> Collection[Binding]:
        """From it, the oldest first."""
        return self._bindings.keys()

    def bind(self, binding: Binding) -> None:
        """Make a binding; one that there is already is no other.

        Raises:
            BrokerError: its arguments or its key are none for this type of exchange.
        """
        kind = self.definition.type
        match = binding.arguments.get("x-match", "all")
        if kind == "headers" and match not in _MATCHES:
            raise precondition_failed(f"Invalid x-match field value {match!r}; expected all, any, and so on")
        if kind == _HASH and not (binding.routing_key.isascii() and binding.routing_key.isdigit()):
            raise precondition_failed(f"The binding key must be an integer: {binding.routing_key!r}")
        if kind == _HASH and int(binding.routing_key) < 1:
            raise precondition_failed("The binding key must be greater than 0")
        self._bindings[binding] = None
        self._table = None
        self.had_any = True

    def unbind(self, binding: Binding) -> None:
        """Remove a binding, if there is one.

        Raises:
            BrokerError: what becomes of the buckets of a consistent hash exchange is not modelled in this case.
        """
        if binding not in self._bindings:
            return
        if self.definition.type == _HASH:
            there = (binding.destination_type, binding.destination)
            if sum((one.destination_type, one.destination) == there for one in self._bindings) > 1:
                not_modelled(
                    f"the removal of one of several bindings of {binding.destination!r} to the consistent hash "
                    f"exchange {self.definition.name!r}"
                )
        self.forget(binding)

    def forget(self, binding: Binding) -> None:
        """Remove a binding that there is; its destination is gone, and no other stays behind."""
        del self._bindings[binding]
        self._table = None

    def matches(self, message: StoredMessage) -> Collection[Destination]:
        """The destinations of the bindings that match.

        Raises:
            BrokerError: a rule that is not modelled would decide.
        """
        if self._table is None:
            self._table = binding_table(self.definition, self._bindings)
        try:
            return self._table.matches(message.routed)
        except UnsupportedTargetError as error:
            not_modelled(f"this: {error}")
