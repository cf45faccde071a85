"""Message types of NServiceBus, with base class and interfaces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from bide.errors import InvalidInputError

_FORBIDDEN: Final = frozenset(";,")
"""Separators of the header with the types of a message."""

_SYSTEM: Final = ("System.", "NServiceBus.")
"""Namespaces whose types are not types of messages."""


@dataclass(frozen=True, slots=True)
class MessageType:
    """A type of messages, as .NET programs declare it.

    ::

        ORDER_EVENT = bide.MessageType("Shop.IOrderEvent", is_interface=True)
        ORDER_PLACED = bide.MessageType("Shop.OrderPlaced", interfaces=[ORDER_EVENT])

    Args:
        name: the full name: namespace and name. Nested types have a plus sign: ``Shop.Orders+Placed``.
        base: the base class; None for a class that has none but ``System.Object``, and for interfaces.
        interfaces: the interfaces that it declares itself, without those of its base class. NServiceBus's marker
            interfaces (``IMessage``, ``ICommand``, ``IEvent``) belong to them if the .NET type has them.
        is_interface: whether it is an interface.

    Raises:
        InvalidInputError: the name cannot be the full name of a type, or an interface has a base class.
    """

    name: str
    base: MessageType | None = None
    interfaces: Iterable[MessageType] = ()
    is_interface: bool = False
    _own: tuple[MessageType, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.name.strip() or not _FORBIDDEN.isdisjoint(self.name):
            raise InvalidInputError(
                f"{self.name!r} is not the full name of a type: give its namespace and name, without the assembly"
            )
        object.__setattr__(self, "interfaces", tuple(self.interfaces))
        object.__setattr__(self, "_own", self.interfaces)
        if any(not one.is_interface for one in self._own):
            wrong = next(one.name for one in self._own if not one.is_interface)
            raise InvalidInputError(
                f"{self.name!r} lists {wrong!r} as an interface, but {wrong!r} is a class: declare it with "
                "MessageType(..., is_interface=True)"
            )
        if self.base is not None and self.is_interface:
            raise InvalidInputError(
                f"{self.name!r} is an interface, which has no base class: list {self.base.name!r} in "
                "MessageType(..., interfaces=[...]) if it is an interface"
            )
        if self.base is not None and self.base.is_interface:
            raise InvalidInputError(
                f"the base class {self.base.name!r} of {self.name!r} is an interface: list it in "
                "MessageType(..., interfaces=[...])"
            )

    @property
    def namespace(self) -> str:
        """The namespace; empty if it has none."""
        return self.name.partition("`")[0].rpartition(".")[0]

    @property
    def short_name(self) -> str:
        """The name without the namespace, type arguments and, for a nested type, the type around it."""
        return self.name.removeprefix(f"{self.namespace}.").partition("[")[0].rpartition("+")[2]

    @property
    def is_system(self) -> bool:
        """Whether it belongs to .NET or NServiceBus, and not to the messages of an application."""
        return self.name.startswith(_SYSTEM)

    @property
    def bases(self) -> tuple[MessageType, ...]:
        """The base classes, nearest first, without ``System.Object``."""
        return () if self.base is None else (self.base, *self.base.bases)

    @property
    def all_interfaces(self) -> tuple[MessageType, ...]:
        """The interfaces of the base class, then its own and those that they extend."""
        inherited = () if self.base is None else self.base.all_interfaces
        found = (*inherited, *(one for own in self._own for one in (own, *own.all_interfaces)))
        return tuple(dict.fromkeys(found))

    @property
    def enclosed(self) -> str:
        """The value of ``NServiceBus.EnclosedMessageTypes``: the type, its bases and its interfaces, derived first."""
        return ";".join(one.name for one in self._hierarchy() if not one.is_system)

    def _hierarchy(self) -> Iterator[MessageType]:
        yield self
        yield from self.bases
        yield from self.all_interfaces


def message_type_of(given: MessageType | str) -> MessageType:
    """The given type, or a class with the given name.

    Raises:
        InvalidInputError: the name cannot be the full name of a type.
    """
    return given if isinstance(given, MessageType) else MessageType(given)
