"""Checks of what callers pass in."""

from __future__ import annotations

from bide.errors import InvalidInputError


def whole_number(what: str, value: object, lowest: int, highest: int) -> int:
    """The value, if it is a whole number in this range.

    Raises:
        InvalidInputError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise InvalidInputError(f"the {what} {value!r} is not a whole number from {lowest} to {highest}")
    return value
