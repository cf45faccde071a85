"""Loggers that escape control characters in text of other systems."""

from __future__ import annotations

import logging
import traceback

from bide.foreign_text import visible, visible_values
from bide.runtime.bounded_cache import BoundedCache


def logger(name: str) -> logging.Logger:
    """The logger of a module that logs names, ids or errors written by other systems.

    Every handler receives them with control characters escaped, so that a header cannot forge a line or move a cursor.
    The template of a record is unchanged, so that tools can still group records by it.
    """
    found = logging.getLogger(name)
    found.addFilter(_make_visible)
    return found


class RepeatedWarnings:
    """Logs a warning that may repeat at its 1st, 10th, 100th... occurrence.

    Args:
        log: the logger of the module.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts = BoundedCache[str, int]()

    def warn(self, what: str) -> None:
        """Count an occurrence, and log it if it is the 1st, 10th, 100th..."""
        count = self._counts[what] = self._counts.get(what, 0) + 1
        if str(count).strip("0") == "1":
            self._log.warning("%s%s", what, "" if count == 1 else f" ({count} times)")


def _make_visible(record: logging.LogRecord) -> bool:
    record.args = visible_values(record.args)
    if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
        # Formatters use this text instead of making their own.
        record.exc_text = visible("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"), keep="\n\t")
    return True
