"""Bindings of a cascade that also match delayed messages of other targets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from bide.delay.cascade_keys import LEVELS, WILDCARDS
from bide.topology import Binding, Exchange
from bide.topology.exchange_types import RoutedMessage, binding_table


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossDelivery:
    """A binding of a delivery exchange that also matches messages for other addresses.

    Attributes:
        binding: the binding, of the form ``#.<address>``.
        addresses: the other addresses whose delayed messages it matches, sorted.
    """

    binding: Binding
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"the {self.binding.destination_type} {self.binding.destination!r} also receives the delayed messages for "
            f"{', '.join(map(repr, self.addresses))}, by its binding {self.binding.routing_key!r} on "
            f"{self.binding.source!r}"
        )


def foreign_suffix_bindings(bindings: Iterable[Binding], addresses: Iterable[str] = ()) -> list[CrossDelivery]:
    """The ``#.`` bindings whose destinations also get delayed messages of other addresses.

    Two bindings for the same address are assumed to be intended.

    Args:
        bindings: the bindings of one delivery exchange.
        addresses: further existing addresses, such as the names of endpoints that are not bound now.
    """
    bindings = list(bindings)
    takers: dict[str, set[str]] = {address: {address} for address in addresses}
    for binding in bindings:
        address = _address_of(binding.routing_key)
        if address is not None:
            takers.setdefault(address, set()).add(binding.destination)
    suffixed = [binding for binding in bindings if binding.routing_key.startswith("#.")]
    # Each binding leads to its number, so that a match identifies the binding and not only its destination.
    numbered = [Binding(one.source, str(number), one.routing_key) for number, one in enumerate(suffixed)]
    table = binding_table(Exchange("", "topic"), numbered)
    stolen: defaultdict[int, list[str]] = defaultdict(list)
    for address, own in sorted(takers.items()):
        for _, number in table.matches(RoutedMessage(("0." * LEVELS + address,), {})):
            if suffixed[int(number)].destination not in own:
                stolen[int(number)].append(address)
    return [
        CrossDelivery(binding=suffixed[number], addresses=tuple(addresses))
        for number, addresses in sorted(stolen.items())
    ]


def _address_of(binding_key: str) -> str | None:
    """The address of a binding of a delivery exchange, or None if the binding matches several addresses."""
    for start in ("#.", "*." * LEVELS):
        if binding_key.startswith(start):
            address = binding_key.removeprefix(start)
            return None if WILDCARDS.intersection(address.split(".")) else address
    return None
