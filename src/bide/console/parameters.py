"""The parameters of a request, with checks of their types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bide.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of a request.

    Attributes:
        values: the parameters: strings from the query of the URL, or JSON values from the body.
        operator: the name of the operator in the operator log.
        advise: rewrites the texts of errors and findings, to name commands and options instead of Python calls.

    Raises:
        InvalidInputError: raised by the methods if a value is missing, of another type, or outside of its limits.
    """

    values: Mapping[str, Any]
    operator: str = ""
    advise: Callable[[str], str] = str

    def text(self, name: str) -> str | None:
        """A string; None if it is absent or empty."""
        value = self.values.get(name)
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            raise InvalidInputError(f"{name} is {value!r}: give a string")
        return value

    def required(self, name: str) -> str:
        """A string that is not empty."""
        value = self.text(name)
        if value is None:
            raise InvalidInputError(f"{name} is missing")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings in a body; empty if it is absent."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise InvalidInputError(f"{name} is {value!r}: give a list of strings")
        return tuple(value)

    def number(self, name: str, *, lowest: int, highest: int) -> int | None:
        """An integer within limits; None if it is absent."""
        value = self.values.get(name)
        if value is None or value == "":
            return None
        try:
            found = int(value)
        except (TypeError, ValueError):
            raise InvalidInputError(f"{name} is {value!r}: give a whole number") from None
        if not lowest <= found <= highest:
            raise InvalidInputError(f"{name} is {found}: give a number from {lowest} to {highest}")
        return found

    def flag(self, name: str) -> bool:
        """Whether a flag is set: ``true`` in a body, ``1`` in a query."""
        return self.values.get(name) in (True, "1")
