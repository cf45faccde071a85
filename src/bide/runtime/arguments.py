"""Range checks of numeric arguments."""

from __future__ import annotations

from bide.errors import InvalidInputError


def whole_number(what: str, value: object, lowest: int, highest: int) -> int:
    """Return the value if it is a whole number in this range.

    Raises:
        InvalidInputError: the value is not a whole number, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise InvalidInputError(f"the {what} {value!r} is not a whole number from {lowest} to {highest}")
    return value


def real_number(what: str, value: object, lowest: float, highest: float) -> float:
    """Return the value if it is a number in this range.

    Raises:
        InvalidInputError: the value is not a number, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
        raise InvalidInputError(f"the {what} {value!r} is not a number from {lowest:g} to {highest:g}")
    return value
