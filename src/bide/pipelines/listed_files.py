"""The files of tables of an audit with versions: Delta and Iceberg."""

from __future__ import annotations

import posixpath

from pyarrow import fs

from bide.errors import InvalidInputError
from bide.pipelines.delta import delta_files, import_deltalake
from bide.pipelines.iceberg import iceberg_files, import_pyiceberg


def check_place(place: str, table_format: str) -> None:
    """Check that Delta or Iceberg tables can be in a folder.

    Raises:
        InvalidInputError: the folder is a URI, or the package for the format does not support its path, or is not
            installed.
    """
    if "://" in place:
        raise InvalidInputError(
            f"{table_format.title()} tables need a folder on this machine: give a path instead of {place}"
        )
    (import_deltalake if table_format == "delta" else import_pyiceberg)(place)


def listed_files(files: fs.FileSystem, root: str, table: str) -> list[str] | None:
    """The files of the newest version of a Delta or Iceberg table, relative to its folder; None for other tables.

    Args:
        root: the folder of the audit.

    Raises:
        InvalidInputError: the package for the format is not installed, or the table cannot be read, or is not on this
            machine.
    """
    if (found := delta_files(files, posixpath.join(root, table))) is not None:
        return found
    return iceberg_files(files, root, table)
