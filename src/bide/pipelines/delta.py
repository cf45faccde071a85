"""Delta tables in a folder on this machine: the package deltalake, and the files of a table."""

from __future__ import annotations

import posixpath
from typing import Any, Final

import pyarrow as pa
from pyarrow import fs

from bide.errors import InvalidInputError
from bide.pipelines.table_paths import check_path

_READER_VERSION: Final = 1
"""The reader version in Delta's protocol of tables that bide writes: without deletion vectors and mappings of
columns."""

_LOG: Final = "_delta_log"
_NOT_IN_PATHS: Final = "[]^|\\%"


def import_deltalake(folder: str) -> Any:
    """Import the package deltalake, for tables in a folder.

    Raises:
        InvalidInputError: it is not installed, or does not support the path.
    """
    # deltalake 1.6.6 makes a URL of the path: it panics at some of these characters, and decodes others.
    check_path(folder, "Delta", _NOT_IN_PATHS)
    try:
        import deltalake
    except ImportError as error:
        raise InvalidInputError("Delta tables need the package deltalake: pip install 'bide[delta]'") from error
    return deltalake


def is_delta_table(files: fs.FileSystem, path: str) -> bool:
    """Whether a folder is a Delta table."""
    return bool(files.get_file_info(posixpath.join(path, _LOG)).type == fs.FileType.Directory)


def delta_files(files: fs.FileSystem, path: str) -> list[str] | None:
    """The files of the newest version of a Delta table, relative to its folder; None if it is not a Delta table.

    A table without rows has no files. The folder also has files of earlier versions, and of writes that did not finish.
    As bide writes no deletion vectors, all rows of the listed files are rows of the table, and any reader of Parquet
    can read them.

    Raises:
        InvalidInputError: deltalake is not installed, or the table cannot be read, or is not on this machine.
    """
    if not is_delta_table(files, path):
        return None
    if not isinstance(files, fs.LocalFileSystem):
        raise InvalidInputError(f"the Delta table {path} is not on this machine: copy the folder to this machine")
    deltalake = import_deltalake(path)
    if not deltalake.DeltaTable.is_deltatable(path):
        return []  # A process was killed while it created the table.
    try:
        opened = deltalake.DeltaTable(path)
    except deltalake.exceptions.DeltaError as error:
        raise InvalidInputError(f"the Delta table {path} cannot be read: {error}; name another folder") from error
    return sorted(newest_files(opened, path).column("path").to_pylist())


def newest_files(opened: Any, path: str) -> pa.Table:
    """The files of an opened Delta table.

    The columns are ``path`` (relative), ``size_bytes``, ``partition.*``, and the statistics ``min.*`` and ``max.*``.

    Raises:
        InvalidInputError: another program has changed the table, so that these files are not all there is to it.
    """
    if (version := opened.protocol().min_reader_version) > _READER_VERSION:
        raise InvalidInputError(
            f"the Delta table {path} needs readers of version {version}, because another program has changed it, and "
            f"bide supports version {_READER_VERSION}: name another folder"
        )
    return pa.table(opened.get_add_actions(flatten=True))
