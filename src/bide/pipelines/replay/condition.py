"""Conditions that only compare columns with text, without Spark."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from bide.pipelines.engine import NeedsSparkError
from bide.recoverability.failed import FailedMessage

_COLUMNS: Final[Mapping[str, Callable[[FailedMessage], str | None]]] = {
    "message_id": lambda message: message.message_id,
    "type": lambda message: message.message_type,
    "queue": lambda message: message.queue,
    "endpoint": lambda message: message.endpoint,
    "reason": lambda message: message.reason,
    "exception": lambda message: message.exception,
    "text": lambda message: message.text,
    "`group`": lambda message: message.group,
    "exchange": lambda message: message.exchange,
    "routing_key": lambda message: message.routing_key,
    "id": lambda message: message.id,
}
"""The columns of text of an error queue, as they are written in SQL."""

AUDIT_COLUMNS: Final = ("message_id", "type", "queue", "endpoint", "reason", "exception", "text", "`group`")
"""The columns of text of an audit."""

# Spark reads a backslash as an escape, leaves out two quotation marks in a row, and replaces variables such as
# ${env:HOME}. Text with one of these is left to Spark.
_LITERAL: Final = r"'(?:[^'\\$]|\$(?!\{))*'"
_TERM: Final = re.compile(
    rf"""\s*(?P<column>{"|".join(_COLUMNS)})
    (?: \s*(?P<equal>=|<>|!=)\s*(?P<text>{_LITERAL})
      | \s+(?P<is_not>not\s+)?like\s*(?P<pattern>{_LITERAL})
      | \s+(?P<is_not_in>not\s+)?in\s*\(\s*(?P<texts>{_LITERAL}(?:\s*,\s*{_LITERAL})*)\s*\)
    )\s*(?P<next>and\b|\Z)""",
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class TextCondition:
    """A condition of comparisons, all of which have to hold.

    Attributes:
        text: the condition in SQL.
        comparisons: functions of the value of a column that is not null. In SQL, a comparison with null is not true.
    """

    text: str
    comparisons: tuple[tuple[str, Callable[[str], bool]], ...]

    @classmethod
    def parse(cls, text: str, columns: Collection[str] = tuple(_COLUMNS)) -> TextCondition:
        """Parse a condition such as ``exception like 'Timeout%' and endpoint = 'orders'``.

        Args:
            columns: the columns of text, by default those of an error queue.

        Raises:
            NeedsSparkError: the condition has anything but comparisons (``=``, ``<>``, ``like``, ``in``) of columns of
                text with text, joined by ``and``.
        """
        found = []
        place = 0
        while True:
            match = _TERM.match(text, place)
            if match is None or match["column"].lower() not in columns:
                raise NeedsSparkError("the condition is more than comparisons of columns with text")
            found.append((match["column"].lower(), _comparison(match)))
            place = match.end()
            if not match["next"]:
                return cls(text, tuple(found))

    def holds(self, message: FailedMessage) -> bool:
        """Whether a message of an error queue meets the condition."""
        return self._holds(lambda column: _COLUMNS[column](message))

    def holds_for(self, row: Mapping[str, Any]) -> bool:
        """Whether a failure of an audit meets the condition.

        Args:
            row: the values by column, with the name ``group`` without quotes.
        """
        return self._holds(lambda column: row[column.strip("`")])

    def _holds(self, value_of: Callable[[str], str | None]) -> bool:
        values = ((value_of(column), compare) for column, compare in self.comparisons)
        return all(value is not None and compare(value) for value, compare in values)


def _comparison(match: re.Match[str]) -> Callable[[str], bool]:
    if match["equal"]:
        return partial(_is_in, frozenset([match["text"][1:-1]]), match["equal"] == "=")
    if match["pattern"]:
        return partial(_is_like, _expression_of(match["pattern"][1:-1]), match["is_not"] is None)
    texts = frozenset(one[1:-1] for one in re.findall(_LITERAL, match["texts"]))
    return partial(_is_in, texts, match["is_not_in"] is None)


def _expression_of(pattern: str) -> re.Pattern[str]:
    """A pattern of ``like`` as a regular expression."""
    first, *others = ("".join("." if one == "_" else re.escape(one) for one in part) for part in pattern.split("%"))
    if others:
        # It is enough to find each part at its first place. Atomic groups do not backtrack, so the time is linear.
        *middle, last = others
        first += "".join(f"(?>.*?{part})" for part in middle) + f".*{last}"
    return re.compile(first, re.DOTALL)


def _is_in(texts: frozenset[str], expected: bool, value: str) -> bool:
    return (value in texts) is expected


def _is_like(pattern: re.Pattern[str], expected: bool, value: str) -> bool:
    return (pattern.fullmatch(value) is not None) is expected
