"""Text of other systems, made safe for terminals, logs, JSON and HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

_UNSAFE_IN_JSON: Final = re.compile(r"[^\x00-\x7e]")


def visible(text: str, *, keep: str = "") -> str:
    r"""Write characters that are not printable as escapes: ``\x1b``, ``\x9b``, ``\u202e``.

    These are control characters (C0 and C1), line and paragraph ends, bidirectional controls and other invisible
    characters, and surrogates: what can move a cursor, forge a line, or show a text in another order than it has.

    Args:
        keep: characters to leave as they are, such as ``"\n\t"`` for a text of several lines.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else _escape(one) for one in text)


def visible_json(value: Any, *, indent: int | None = None) -> str:
    r"""A value as JSON, in which characters that :func:`visible` escapes are JSON escapes: ``\u009b``.

    Raises:
        ValueError: a number has no form in JSON.
        TypeError: a value has none.
    """
    # Within strings json.dumps escapes all characters below the space; outside of them there is only ASCII.
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    return _UNSAFE_IN_JSON.sub(lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], text)


def visible_values(values: Mapping[str, Any] | tuple[Any, ...] | None) -> Any:
    """The arguments of a log record, with texts and exceptions made visible."""
    if isinstance(values, Mapping):
        return {name: _visible_value(value) for name, value in values.items()}
    return tuple(_visible_value(value) for value in values) if values else values


def _visible_value(value: Any) -> Any:
    return visible(str(value)) if isinstance(value, str | BaseException) else value


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
