"""Checks of message ids and keys, which have to be valid and unique."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bide.delay.protocol import MAX_NAME_BYTES
from bide.errors import InvalidRowError
from bide.schedules.names import CONTROL

MAX_SHOWN_CHARACTERS: Final = 40
"""Characters of a message id or key that an error shows."""

MAX_NAMED_IDS: Final = 3
"""The largest number of message ids or keys that an error names."""


def describe_invalid_id(text: str | None, count: int, *, is_key: bool) -> str | None:
    """Describe a message id or key that is invalid or repeated; None if it is valid and unique."""
    size = None if text is None else len(text.encode())
    has_control = is_key and text is not None and CONTROL.search(text) is not None
    if count == 1 and size and size <= MAX_NAME_BYTES and not has_control:
        return None
    shown = None if text is None else text[:MAX_SHOWN_CHARACTERS]
    return describe_row({"shown": shown, "size": size, "count": count, "is_text": True, "has_control": has_control})


def describe_row(row: Any) -> str:
    """The invalid message id or key of a row, with the reason."""
    if row["size"] and not row["is_text"]:
        return f"{row['shown']} (which is not UTF-8)"
    if row["size"] and row["size"] > MAX_NAME_BYTES:
        return f"{row['shown']}... ({row['size']:,} bytes, the limit is {MAX_NAME_BYTES})"
    if row["has_control"]:
        return f"{row['shown']!r} (which has control characters)"
    shown = row["shown"] or ("null" if row["size"] is None else "an empty text")
    return f"{shown} ({row['count']} times)" if row["count"] > 1 else shown


def invalid_ids_error(column: str, what: str, described: Sequence[str]) -> InvalidRowError:
    """The error for invalid message ids or keys."""
    return InvalidRowError(
        f"the column {column!r} has values that are not unique, valid {what}: {', '.join(described)}. Correct these "
        "rows, or leave them out"
    )
