"""Values of messages as values of JSON."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from math import isfinite
from typing import Any, Final

MAX_BODY: Final = 64_000
"""Bytes of a message's body that the page shows."""

_MAX_SAFE: Final = 2**53
"""Integers beyond this are not exact in a browser."""


def iso(moment: datetime) -> str:
    """A time as ISO 8601, as all times of the page are passed."""
    return moment.isoformat(timespec="milliseconds")


def plain(value: Any) -> Any:
    """A value of AMQP as a value of JSON. Times are ISO 8601."""
    match value:
        case Mapping():
            return {str(name): plain(one) for name, one in value.items()}
        case list() | tuple():
            return [plain(one) for one in value]
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
