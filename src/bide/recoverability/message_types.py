"""Names of message types, from the ``type`` property and NServiceBus's headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

ENCLOSED_TYPES: Final = "NServiceBus.EnclosedMessageTypes"
"""Header of NServiceBus with the types of a message, the most derived one first, separated by semicolons."""


def message_type(values: Mapping[str, Any]) -> str | None:
    """The sender's message type: the ``type`` property, or the first of NServiceBus's enclosed message types."""
    return next(iter(message_types(values)), None)


def message_types(values: Mapping[str, Any]) -> tuple[str, ...]:
    """All types of a message: the ``type`` property, then NServiceBus's enclosed message types, derived ones first."""
    found = []
    if isinstance(name := values.get("type"), str) and name:
        found.append(name)
    if isinstance(enclosed := (values.get("headers") or {}).get(ENCLOSED_TYPES), str):
        found += _enclosed(enclosed)
    return tuple(dict.fromkeys(found)) if found else ()


def _enclosed(header: str) -> Iterator[str]:
    """The names in the header, without their assemblies: ``Shop.OrderPlaced, Shop.Messages, Version=1.0.0.0;...``."""
    for part in _split(header, ";"):
        if name := next(_split(part, ",")).strip():
            yield name


def _split(text: str, separator: str) -> Iterator[str]:
    """Split a text at separators outside of brackets, which hold the arguments of a generic type."""
    start = depth = 0
    for position, character in enumerate(text):
        if character in "[]":
            depth += 1 if character == "[" else -1
        elif character == separator and depth <= 0:
            yield text[start:position]
            start = position + 1
    yield text[start:]
