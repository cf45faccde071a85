"""Numbers with their nouns, for errors, log lines and output."""

from __future__ import annotations


def quantity(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: ``1 message``, ``2,000 messages``.

    Args:
        plural: the plural, if it is not the noun with an ``s``; with a verb for example ``"messages wait"``.
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"
