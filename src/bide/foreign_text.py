"""Text of other systems, made safe for terminals, logs, JSON and HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

_UNSAFE_IN_JSON: Final = re.compile(r"[^\x00-\x7e]")


def visible(text: str, *, keep: str = "") -> str:
    r"""Write characters that are not printable as escapes: ``\x1b``, ``\x9b``, ``\u202e``.

    These are control characters (C0 and C1), line and paragraph separators, bidirectional controls and other invisible
    characters, and surrogates. They can move a cursor, forge a line, or change the order in which text is shown.

    Args:
        keep: characters to leave unchanged, such as ``"\n\t"`` for text of several lines.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else _escape(one) for one in text)


def visible_json(value: Any, *, indent: int | None = None) -> str:
    r"""A value as JSON. Characters that :func:`visible` escapes are written as JSON escapes: ``\u009b``.

    Raises:
        ValueError: JSON cannot represent a number, such as NaN.
        TypeError: JSON cannot represent a value of this type.
    """
    # json.dumps escapes control characters below U+0020 in strings, and writes only ASCII outside of strings.
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    return _UNSAFE_IN_JSON.sub(lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], text)


def visible_values(values: Mapping[str, Any] | tuple[Any, ...] | None) -> Any:
    """The arguments of a log record, with unprintable characters in text and exceptions escaped."""
    if isinstance(values, Mapping):
        return {name: _visible_value(value) for name, value in values.items()}
    return tuple(_visible_value(value) for value in values) if values else values


def _visible_value(value: Any) -> Any:
    return visible(str(value)) if isinstance(value, str | BaseException) else value


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
