"""Values of messages as JSON values."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from math import isfinite
from typing import Any, Final

MAX_BODY: Final = 64_000
"""The maximum number of bytes of a body that the page shows."""

_MAX_SAFE: Final = 2**53
"""Integers from this one on are not exact in a browser."""


def iso(moment: datetime) -> str:
    """A time as ISO 8601, with milliseconds."""
    return moment.isoformat(timespec="milliseconds")


def json_value(value: Any) -> Any:
    """An AMQP value as a JSON value. Times become ISO 8601; bytes become their text, or base64."""
    match value:
        case Mapping():
            return {str(name): json_value(one) for name, one in value.items()}
        case list() | tuple():
            return [json_value(one) for one in value]
        case bytes() | bytearray() | memoryview():
            return body_of(bytes(value))["text"]
        case datetime():
            return iso(value)
        case Decimal():
            return str(value)
        case bool() | None | str():
            return value
        case int():
            return value if -_MAX_SAFE < value < _MAX_SAFE else str(value)
        case float():
            return value if isfinite(value) else str(value)
        case _:
            return str(value)


def body_of(body: bytes) -> dict[str, Any]:
    """The body of a message: its text, its size, and whether the text is base64 or cut off."""
    shown = body[:MAX_BODY]
    is_cut = len(body) > MAX_BODY
    try:
        # A character at the cut may be incomplete.
        text, is_text = shown.decode(errors="ignore" if is_cut else "strict"), True
    except UnicodeDecodeError:
        text, is_text = b64encode(shown).decode(), False
    return {"text": text, "size": len(body), "is_text": is_text, "is_cut": is_cut}
