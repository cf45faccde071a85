"""Files of the tables of an audit."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from pyarrow import fs

from bide.pipelines.audit.queries import BATCH
from bide.pipelines.formats import is_hidden

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """A file of a table with batches.

    Attributes:
        path: the path in the folder of the table.
        size: the size in bytes.
        first: the number of the first batch that may have rows in the file; *last* is that of the last one.
    """

    path: str
    size: int
    first: int
    last: int

    @property
    def batches(self) -> range:
        """The numbers of the batches that may have rows in the file."""
        return range(self.first, self.last + 1)


def sizes_of_batches(files: Iterable[TableFile]) -> dict[int, int]:
    """The bytes of each batch that may have rows in files."""
    sizes = Counter[int]()
    for file in files:
        sizes.update(dict.fromkeys(file.batches, file.size))
    return dict(sizes)


def files_of_day(folder: Folder, table: str, day: date) -> list[TableFile]:
    """The files of a day of a Parquet table with batches."""
    return [
        TableFile(path=path, size=size, first=(batch := int(partition_of(BATCH, path))), last=batch)
        for path, size in parquet_files(folder, table, day)
    ]


def parquet_files(folder: Folder, table: str, day: date) -> Iterator[tuple[str, int]]:
    """The files of a day of a Parquet table, as paths in the folder of the table, and their bytes."""
    root = folder.path(table)
    selector = fs.FileSelector(posixpath.join(root, f"day={day}"), allow_not_found=True, recursive=True)
    for one in sorted(folder.files.get_file_info(selector), key=lambda one: one.path):
        if one.is_file and is_data_file(one.base_name):
            yield one.path.removeprefix(f"{root}/"), one.size


def is_data_file(name: str) -> bool:
    """Whether a file of this name has rows."""
    return name.endswith(".parquet") and not is_hidden(name)


def partition_of(column: str, path: str) -> str:
    """The value of a partition column, from the path of a file."""
    value: str = re.findall(rf"(?:^|/){column}=([^/]+)/", path)[-1]
    return value
