"""Headers of the rows of a table: their conversion and their checks."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

from bide.amqp.codec import field_value
from bide.errors import InvalidInputError, InvalidRowError
from bide.messages.json_headers import headers_from_json
from bide.messages.prepared import checked_headers


def headers_from_entries(pairs: list[Any]) -> dict[str, Any] | InvalidInputError:
    """The headers from the entries of a map, or from an array of structs with key and value."""
    if None in pairs:
        return InvalidRowError("an entry is null: leave it out")
    if not pairs or not isinstance(pairs[0], dict):
        return dict(pairs)
    found = {pair["key"]: pair["value"] for pair in pairs}
    if len(found) < len(pairs):
        repeated = next(name for name, count in Counter(pair["key"] for pair in pairs).items() if count > 1)
        return InvalidRowError(f"the header {repeated!r} is there more than once: give it one value")
    return found


def stored_headers(stored: Any) -> dict[str, Any] | InvalidInputError:
    """The headers from a JSON object."""
    try:
        return stored if isinstance(stored, InvalidInputError) else headers_from_json(stored)
    except InvalidInputError as error:
        return InvalidRowError(str(error))


def are_headers(found: dict[str, Any] | InvalidInputError) -> bool:
    """Whether headers from JSON can be sent. JSON can hold text that is not UTF-8."""
    if isinstance(found, InvalidInputError):
        return False
    try:
        for name, value in found.items():
            field_value(value, name)
    except InvalidInputError:
        return False
    return all(map(is_header_name, found))


@lru_cache(maxsize=4096)
def is_header_name(name: str | None) -> bool:
    """Whether a header of this name is allowed in any message, delayed or not."""
    try:
        checked_headers({name: ""}, delayed=True)  # type: ignore[dict-item]  # None is refused, too
    except InvalidInputError:
        return False
    return True
