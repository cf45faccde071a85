"""Headers that are stored as a JSON object of text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bide.errors import InvalidInputError


def headers_from_json(stored: Any) -> dict[str, str]:
    """The headers of a stored message; null values are left out.

    Args:
        stored: JSON, or what a database driver has made of it; None or an empty text for no headers.

    Raises:
        InvalidInputError: the headers are not a JSON object of text.
    """
    if stored is None or stored == "":
        return {}
    if not isinstance(stored, Mapping):
        try:
            stored = json.loads(stored)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidInputError("the headers are not JSON") from error
    if not isinstance(stored, Mapping):
        raise InvalidInputError("the headers are JSON, but not an object")
    for name, value in stored.items():
        if not isinstance(value, str | None):
            raise InvalidInputError(f"the header {name!r} is of type {type(value).__name__} and not text")
    return {name: value for name, value in stored.items() if value is not None}
