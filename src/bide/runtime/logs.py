"""Loggers that escape control characters in text of other systems."""

from __future__ import annotations

import logging
import traceback

from bide.foreign_text import visible, visible_values


def logger(name: str) -> logging.Logger:
    """The logger of a module that logs names, ids or errors written by other systems.

    Every handler receives them with control characters escaped, so that a header cannot forge a line or move a cursor.
    The template of a record is unchanged, so that tools can still group records by it.
    """
    found = logging.getLogger(name)
    found.addFilter(_make_visible)
    return found


def _make_visible(record: logging.LogRecord) -> bool:
    record.args = visible_values(record.args)
    if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
        # Formatters use this text instead of making their own.
        record.exc_text = visible("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"), keep="\n\t")
    return True
