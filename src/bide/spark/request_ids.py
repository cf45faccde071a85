"""Request ids of schedules, the same for each attempt at a task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from bide.schedules.names import partition_of
from bide.schedules.requests import RequestId

CHUNK_ROWS: Final = 1_000
"""Rows whose request ids share a session in each partition of the log. A gate remembers 1,000 ranges of numbers of a
session. 1,000 rows never need more, whichever of them are left out."""


def request_ids(columns: Mapping[str, Sequence[Any]], *, run: str, first: int, seed: str = "") -> list[str | None]:
    """The request ids of consecutive rows; None for a row without a key.

    Gates apply a request id once, whatever the request contains. So the session depends on the contents of a chunk of
    rows: if a repeated task has other rows, or another order, its request ids are new.

    Args:
        columns: the values of each column, among them ``key``.
        run: an id of the partition that is the same when the partition is sent again.
        first: the index of the first row in the partition.
        seed: the fields that all messages have in common.
    """
    keys = columns["key"]
    rows = list(zip(*columns.values(), strict=True))
    found: list[str | None] = []
    for start in range(0, len(rows), CHUNK_ROWS):
        contents = blake2b(repr((run, first + start, seed, *columns)).encode(), digest_size=10)
        for row in rows[start : start + CHUNK_ROWS]:
            contents.update(repr(row).encode("utf-8", errors="backslashreplace"))
        session, numbers = contents.hexdigest(), Counter[int]()
        for key in keys[start : start + CHUNK_ROWS]:
            if not isinstance(key, str):
                found.append(None)
                continue
            partition = partition_of(key)
            numbers[partition] += 1
            # Each partition of the log has its own session, so that the numbers in a session have no gaps.
            found.append(str(RequestId(f"{session}{partition}", numbers[partition])))
    return found
