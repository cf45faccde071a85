"""Conditions in SQL, for queries of waiting schedules."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from bide.schedules.records import ScheduleFilter

_SURROGATES: Final = range(0xD800, 0xE000)
_LAST_CHARACTER: Final = 0x10FFFF


def others(without: Collection[str]) -> str:
    """A condition in SQL that leaves out targets."""
    return f"AND target NOT IN ({', '.join('?' * len(without))}) " if without else ""


def where_of(wanted: ScheduleFilter, after: str | None = None) -> tuple[str, tuple[str | int, ...]]:
    """A condition in SQL, and its values."""
    conditions: list[tuple[str, str | int | None]] = [
        ("key >= ?", wanted.prefix or None),
        ("key < ?", _end_of(wanted.prefix)),
        ("key > ?", after),
        ("target = ?", wanted.target),
        ("due >= ?", wanted.due_from),
        ("due < ?", wanted.due_before),
    ]
    used = [(text, value) for text, value in conditions if value is not None]
    return " AND ".join(text for text, _ in used) or "1", tuple(value for _, value in used)


def _end_of(prefix: str) -> str | None:
    """The first text behind all that begin with a prefix, in the order of code points; None if there is none."""
    for place in range(len(prefix) - 1, -1, -1):
        following = ord(prefix[place]) + 1
        if following in _SURROGATES:
            following = _SURROGATES.stop
        if following <= _LAST_CHARACTER:
            return prefix[:place] + chr(following)
    return None
