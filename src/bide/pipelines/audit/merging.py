"""Merging of small batches of an audit, which continues after an interruption."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Collection, Iterator, Mapping
from datetime import date
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from bide.pipelines.audit.columns import APPENDED_TABLES
from bide.pipelines.audit.table_files import files_of_day, sizes_of_batches

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder

MAX_BATCHES: Final = 20
"""If a day of a table has more small batches than this, the small batches are merged into one."""

SMALL_BYTES: Final = 64 * 1024 * 1024
"""Batches of this size and larger are not merged, so that old rows are not rewritten repeatedly."""

MERGED_BYTES: Final = 2 * SMALL_BYTES
"""The largest size of a merged batch. Two small batches always fit."""

MERGED_FOLDER: Final = "_state/merged"
"""The folder for the rows of merged batches, until :func:`replace_batches` moves it."""

_MERGE: Final = "_state/merge.json"


def to_merge(sizes: Mapping[int, int]) -> list[int]:
    """The batches of a day to merge if it has more than :data:`MAX_BATCHES` small ones; otherwise an empty list.

    These are the smallest ones, up to :data:`MERGED_BYTES` in all, so that no merge takes much longer than others.

    Args:
        sizes: the bytes of all batches of the day.
    """
    small = sorted((size, number) for number, size in sizes.items() if size < SMALL_BYTES)
    if len(small) <= MAX_BATCHES:
        return []
    totals = accumulate(size for size, _ in small)
    return sorted(number for (_, number), total in zip(small, totals, strict=True) if total <= MERGED_BYTES)


def facts_to_merge(folder: Folder, days: Collection[date]) -> Iterator[tuple[str, date, list[int]]]:
    """The batches of facts to merge on these days: table, day, and numbers of the batches.

    Call this while nothing writes to the tables and no note refers to the batches.
    """
    for table in APPENDED_TABLES:
        for day in days:
            if batches := to_merge(sizes_of_batches(files_of_day(folder, table, day))):
                yield table, day, batches


def replace_batches(folder: Folder, table: str, day: date, batches: list[int]) -> None:
    """Replace batches of a day with the rows in :data:`MERGED_FOLDER`.

    A file records what to replace. After an interruption, :func:`finish_replacing` repeats the steps, so that no row is
    lost or duplicated.
    """
    folder.write_json(folder.path(_MERGE), {"table": table, "day": str(day), "batches": batches})
    finish_replacing(folder)


def finish_replacing(folder: Folder) -> None:
    """Finish an interrupted :func:`replace_batches`."""
    if not folder.exists(record := folder.path(_MERGE)):
        return
    merge = json.loads(folder.read_bytes(record))
    place = folder.path(merge["table"], f"day={merge['day']}")
    merged = folder.path(MERGED_FOLDER)
    if folder.exists(merged):
        for batch in merge["batches"]:
            if folder.exists(old := posixpath.join(place, f"batch={batch}")):
                folder.files.delete_dir(old)
        # The number is that of the last merged batch. It is committed, so that no round writes a batch of this number.
        folder.files.move(merged, posixpath.join(place, f"batch={merge['batches'][-1]}"))
    folder.files.delete_file(record)
