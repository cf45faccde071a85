"""Stream positions in a Spark checkpoint, and how offsets are split into batches and tasks.

A document of version 1: ``{"v": 1, "streams": {"orders": 23}}`` has the next offset of each stream, in the order
of their names (Spark compares the texts). More keys make a query's first batch, and the first one with a new
stream, the same when they are repeated after a crash, although Spark does not keep where they begin: ``"initial"``
marks the position that a new query begins at (Spark ends an empty first batch with it), and ``"since"`` in the end of
a batch says where it begins in streams that have no position yet, or that position. ``"begin"`` stands in all ends
that PySpark before 4.2 asks for, which does not tell whether the query is new: where it begins if it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Final

from bide.errors import InvalidInputError
from bide.streams.log import OffsetRange

VERSION: Final = 1

Document = dict[str, Any]
"""What Spark writes as JSON."""


def document(
    positions: Mapping[str, int],
    *,
    initial: bool = False,
    since: Mapping[str, int] | None = None,
    begin: Mapping[str, int] | None = None,
) -> Document:
    """The document of these positions."""
    made: Document = {"v": VERSION, "streams": dict(sorted(positions.items()))}
    if initial:
        made["initial"] = True
    if since:
        made["since"] = dict(sorted(since.items()))
    if begin:
        made["begin"] = dict(sorted(begin.items()))
    return made


def positions_of(found: Mapping[str, Any]) -> dict[str, int]:
    """The positions in a document.

    Raises:
        InvalidInputError: it is of another version, or another source's.
    """
    return _numbers(found, "streams")


def begin_of(start: Mapping[str, Any], end: Mapping[str, Any]) -> dict[str, int]:
    """Where a batch between two documents begins, in each stream that it reads.

    Raises:
        InvalidInputError: a document is of another version, or another source's.
    """
    ends = positions_of(end)
    since = _numbers(end, "since") if "since" in end else {}
    if start.get("initial"):
        # Asked anew after a crash, it may be later than it was: the end knows. One that is initial ends an empty batch.
        begin = _numbers(end, "begin") if "begin" in end else {}
        known = {**(ends if end.get("initial") else positions_of(start)), **since, **begin}
        return {stream: known.get(stream, 0) for stream in ends}
    known = {**since, **positions_of(start)}
    return {stream: known.get(stream, 0) for stream in ends}


def _numbers(found: Mapping[str, Any], key: str) -> dict[str, int]:
    if found.get("v") != VERSION:
        raise InvalidInputError(
            f"the checkpoint has offsets of version {found.get('v')!r}, and this bide reads version {VERSION}: "
            "it is of another source, or of a newer bide"
        )
    numbers = found.get(key)
    if not isinstance(numbers, dict) or not all(type(one) is int and one >= 0 for one in numbers.values()):
        raise InvalidInputError(f"the checkpoint has offsets that cannot be read: {dict(found)!r}")
    return dict(numbers)


def limited(begin: Mapping[str, int], end: Mapping[str, int], limit: int) -> dict[str, int]:
    """An earlier end, so that at most *limit* offsets lie between; each stream gets its share of what there is."""
    waiting = {stream: max(0, end[stream] - begin[stream]) for stream in sorted(end)}
    total = sum(waiting.values())
    if total <= limit:
        return dict(end)
    shares = {stream: limit * count // total for stream, count in waiting.items()}
    left = limit - sum(shares.values())
    # What rounding left over: to those that it cost most.
    for stream in sorted(waiting, key=lambda one: (-(limit * waiting[one] % total), one))[:left]:
        shares[stream] += 1
    return {stream: min(end[stream], begin[stream]) + share for stream, share in shares.items()}


def split(ranges: Iterable[OffsetRange], at_least: int | None) -> list[OffsetRange]:
    """Ranges for tasks: those that are not empty, the long ones cut so that there are about *at_least*."""
    full = [one for one in ranges if one.end > one.start]
    total = sum(one.end - one.start for one in full)
    if at_least is None or len(full) >= at_least:
        return full
    parts: list[OffsetRange] = []
    for one in full:
        size = one.end - one.start
        count = min(size, max(1, -(-at_least * size // total)))
        cuts = [one.start + size * number // count for number in range(count + 1)]
        parts += [OffsetRange(stream=one.stream, start=start, end=end) for start, end in pairwise(cuts)]
    return parts
