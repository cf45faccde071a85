"""Stream positions in a Spark checkpoint, and the split of offsets into batches and tasks.

A document of version 1, ``{"v": 1, "streams": {"orders": 23}}``, has the next offset of each stream, sorted by name
because Spark compares documents as text.

Spark does not store where the first batch of a query begins, nor where a new stream begins. Three more keys ensure
that such a batch has the same messages when Spark repeats it after a crash:

- ``"initial"`` marks the start position of a new query. If the first batch is empty, this document is also its end.
- ``"since"`` is in the document of the end of a batch. It has the offsets at which the batch begins, for streams that
  had no position before. In the first batch, these are all streams.
- ``"begin"`` is in the same document, and has the start position of a new query. It is written with PySpark before 4.2,
  which does not report whether a query is new.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Final

from bide.errors import InvalidInputError
from bide.streams.range_reader import OffsetRange

VERSION: Final = 1

Document = dict[str, Any]
"""A document of the checkpoint, which Spark writes as JSON."""


def document(
    positions: Mapping[str, int],
    *,
    initial: bool = False,
    since: Mapping[str, int] | None = None,
    begin: Mapping[str, int] | None = None,
) -> Document:
    """Create the document of these positions."""
    result: Document = {"v": VERSION, "streams": dict(sorted(positions.items()))}
    if initial:
        result["initial"] = True
    if since:
        result["since"] = dict(sorted(since.items()))
    if begin:
        result["begin"] = dict(sorted(begin.items()))
    return result


def positions_of(found: Mapping[str, Any]) -> dict[str, int]:
    """The positions in a document.

    Raises:
        InvalidInputError: the document has another version, or belongs to another source.
    """
    return _offsets(found, "streams")


def begin_of(start: Mapping[str, Any], end: Mapping[str, Any]) -> dict[str, int]:
    """The start of a batch between two documents, for each stream that the batch reads.

    Raises:
        InvalidInputError: a document has another version, or belongs to another source.
    """
    ends = positions_of(end)
    since = _offsets(end, "since") if "since" in end else {}
    if start.get("initial"):
        # After a crash, Spark asks for the start of the query again, which may be at a later offset by then. The end of
        # the batch has the original start. If the end is marked initial, too, the batch is empty.
        begin = _offsets(end, "begin") if "begin" in end else {}
        known = {**(ends if end.get("initial") else positions_of(start)), **since, **begin}
        return {stream: known.get(stream, 0) for stream in ends}
    known = {**since, **positions_of(start)}
    return {stream: known.get(stream, 0) for stream in ends}


def _offsets(found: Mapping[str, Any], key: str) -> dict[str, int]:
    if found.get("v") != VERSION:
        raise InvalidInputError(
            f"the checkpoint has offsets of version {found.get('v')!r}, but this bide reads version {VERSION}: "
            "the checkpoint belongs to another source, or to a newer bide. Use another checkpoint, or update bide"
        )
    numbers = found.get(key)
    if not isinstance(numbers, dict) or not all(type(one) is int and one >= 0 for one in numbers.values()):
        raise InvalidInputError(f"the checkpoint has invalid offsets, {dict(found)!r}: use another checkpoint")
    return dict(numbers)


def limited(begin: Mapping[str, int], end: Mapping[str, int], limit: int) -> dict[str, int]:
    """Limit a batch to *limit* offsets; returns its end. The share of each stream is proportional to its backlog."""
    backlog = {stream: max(0, end[stream] - begin[stream]) for stream in sorted(end)}
    total = sum(backlog.values())
    if total <= limit:
        return dict(end)
    shares = {stream: limit * count // total for stream, count in backlog.items()}
    left = limit - sum(shares.values())
    # Rounding down left some offsets over: give them to the streams that lost the largest fractions.
    for stream in sorted(backlog, key=lambda one: (-(limit * backlog[one] % total), one))[:left]:
        shares[stream] += 1
    return {stream: min(end[stream], begin[stream]) + share for stream, share in shares.items()}


def split(ranges: Iterable[OffsetRange], at_least: int | None) -> list[OffsetRange]:
    """Split ranges into one per task, at least *at_least* if there are enough offsets. Empty ranges are dropped."""
    non_empty = [one for one in ranges if one.end > one.start]
    total = sum(one.end - one.start for one in non_empty)
    if at_least is None or len(non_empty) >= at_least:
        return non_empty
    parts: list[OffsetRange] = []
    for one in non_empty:
        size = one.end - one.start
        count = min(size, max(1, -(-at_least * size // total)))
        cuts = [one.start + size * number // count for number in range(count + 1)]
        parts += [OffsetRange(stream=one.stream, start=start, end=end) for start, end in pairwise(cuts)]
    return parts
