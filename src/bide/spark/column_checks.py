"""Checks of whole Arrow columns, which are much faster than checks of rows."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from bide.delay.protocol import MAX_NAME_BYTES
from bide.schedules.names import CONTROL


def is_utf8(column: pa.Array) -> bool:
    """Whether all text in a column is UTF-8. Spark passes on text from files without a check."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def are_short_strings(texts: pa.Array) -> bool:
    """Whether all texts fit into a short string of AMQP."""
    longest = pc.max(pc.binary_length(texts)).as_py()
    return longest is None or longest <= MAX_NAME_BYTES


def has_no_empty_text(texts: pa.Array) -> bool:
    """Whether no text is empty. Nulls are ignored."""
    shortest = pc.min(pc.binary_length(texts)).as_py()
    return shortest is None or shortest > 0


def are_keys(texts: pa.Array) -> bool:
    """Whether all texts are valid keys of schedules, given that none is empty or too long."""
    return not pc.any(pc.match_substring_regex(texts, CONTROL.pattern)).as_py()


def is_between(numbers: pa.Array, lowest: int, highest: int) -> bool:
    """Whether all numbers are in a range, both ends included. Nulls are ignored."""
    found = pc.min_max(numbers).as_py()
    return found["min"] is None or (lowest <= found["min"] and found["max"] <= highest)
