"""Headers of the rows of a table: their conversion and their checks."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any, Final, Literal, get_args

from bide.amqp.codec import field_value
from bide.delay.received import OWN_PREFIX
from bide.errors import InvalidInputError, InvalidRowError
from bide.messages.json_headers import headers_from_json
from bide.messages.prepared import checked_headers
from bide.spark import typed_headers

BideHeaders = Literal["fail", "drop", "keep"]

BIDE_HEADERS: Final[tuple[BideHeaders, ...]] = get_args(BideHeaders)
"""What to do with headers that bide has set itself, in the rows of a write."""


def headers_from_entries(pairs: list[Any]) -> dict[str, Any] | InvalidInputError:
    """The headers from the entries of a map, or from an array of structs with key and value."""
    if None in pairs:
        return InvalidRowError("an entry is null: leave it out")
    if not pairs or not isinstance(pairs[0], dict):
        return dict(pairs)
    found = {pair["key"]: pair["value"] for pair in pairs}
    if len(found) < len(pairs):
        repeated = next(name for name, count in Counter(pair["key"] for pair in pairs).items() if count > 1)
        return InvalidRowError(f"the header {repeated!r} occurs more than once: give it one value")
    return found


def stored_headers(stored: Any) -> dict[str, Any] | InvalidInputError:
    """The headers from a JSON object."""
    try:
        return stored if isinstance(stored, InvalidInputError) else headers_from_json(stored)
    except InvalidInputError as error:
        return InvalidRowError(str(error))


def headers_with_types(stored: Any) -> dict[str, Any] | InvalidInputError | None:
    """The headers from a JSON object that keeps types, see :mod:`bide.spark.typed_headers`."""
    try:
        return stored if stored is None or not isinstance(stored, str) else typed_headers.headers_from_json(stored)
    except InvalidInputError as error:
        return InvalidRowError(str(error))


def without_bide_headers(found: Any) -> Any:
    """Headers without those that bide has set itself; an error is returned unchanged."""
    if not isinstance(found, dict):
        return found
    return {name: value for name, value in found.items() if name is None or not name.startswith(OWN_PREFIX)}


def are_headers(found: dict[str, Any] | InvalidInputError | None, *, is_copy: bool = False) -> bool:
    """Whether headers from JSON can be sent. JSON escapes can denote text that UTF-8 cannot encode.

    Args:
        is_copy: whether bide's own headers are allowed.
    """
    if found is None:
        return True
    if isinstance(found, InvalidInputError):
        return False
    try:
        for name, value in found.items():
            field_value(value, name)
    except InvalidInputError:
        return False
    return all(is_header_name(name, is_copy=is_copy) for name in found)


@lru_cache(maxsize=4096)
def is_header_name(name: str | None, *, is_copy: bool = False) -> bool:
    """Whether a header of this name is allowed in any message, delayed or not.

    Args:
        is_copy: whether bide's own headers are allowed.
    """
    try:
        checked_headers({name: ""}, delayed=True, is_copy=is_copy)  # type: ignore[dict-item]  # None is refused, too
    except InvalidInputError:
        return False
    return True
