"""Iceberg tables of an audit on this machine: pyiceberg, the catalog, the files of a table."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pyarrow import fs

from bide.errors import InvalidInputError
from bide.pipelines.table_paths import check_path

_CATALOG: Final = "_state/catalog.db"
_CATALOG_NAME: Final = "bide"
_NOT_IN_PATHS: Final = "?%"


def import_pyiceberg(folder: str) -> Any:
    """Import the package pyiceberg, for tables in a folder.

    Raises:
        InvalidInputError: it is not installed, or does not support the path.
    """
    # SQLAlchemy makes a URL of the path of the catalog.
    check_path(folder, "Iceberg", _NOT_IN_PATHS)
    try:
        import pyiceberg.catalog.sql
        import pyiceberg.exceptions
        import pyiceberg.expressions
    except ImportError as error:
        raise InvalidInputError("Iceberg tables need the package pyiceberg: pip install 'bide[iceberg]'") from error
    return pyiceberg


def open_catalog(root: str) -> Any:
    """The catalog of the Iceberg tables of an audit, a database of SQLite. It is created if it is missing.

    Raises:
        InvalidInputError: see :func:`import_pyiceberg`.
    """
    pyiceberg = import_pyiceberg(root)
    return pyiceberg.catalog.sql.SqlCatalog(_CATALOG_NAME, uri=catalog_uri(root))


def catalog_uri(root: str) -> str:
    """The URI of the catalog of an audit, for SQLAlchemy."""
    return f"sqlite:///{posixpath.join(root, _CATALOG)}"


def identifier(table: str) -> tuple[str, str]:
    """The name of a table in the catalog: ``audit.messages``, or ``_state.pending`` for ``_state/pending``."""
    namespace, _, name = table.rpartition("/")
    return namespace or "audit", name


def open_table(catalog: Any, root: str, table: str) -> Any:
    """The newest version of a table; None if it does not exist.

    Raises:
        InvalidInputError: the folder was moved or copied, or the table cannot be read.
    """
    pyiceberg = import_pyiceberg(root)
    place = posixpath.join(root, table)
    try:
        opened = catalog.load_table(identifier(table))
    except pyiceberg.exceptions.NoSuchTableError:
        return None
    except OSError as error:
        raise InvalidInputError(
            f"the Iceberg table {place} cannot be read: {error}; its files have absolute paths, so that a folder that "
            "was moved has to be moved back"
        ) from error
    if not (Path(place).exists() and Path(opened.location()).exists() and Path(place).samefile(opened.location())):
        raise InvalidInputError(
            f"the Iceberg table {place} was written as {opened.location()}, and its files have absolute paths: "
            "use it there"
        )
    return opened


def data_files(opened: Any, row_filter: Any = None) -> Iterator[tuple[str, Any]]:
    """The files of an opened table: paths relative to its folder, and what pyiceberg knows about each.

    Args:
        row_filter: leave out files that have no rows of which this expression is true.

    Raises:
        InvalidInputError: another program has changed the table, so that these files are not all there is to it.
    """
    for task in opened.scan(*([] if row_filter is None else [row_filter])).plan_files():
        if task.delete_files:
            raise _changed_error(opened, "files of deleted rows")
        yield path_in_table(opened, task.file.file_path), task.file


def path_in_table(opened: Any, path: str) -> str:
    """The path of a file of an opened table, relative to the folder of the table.

    Raises:
        InvalidInputError: another program has changed the table, so that it has files in other folders.
    """
    location = f"{opened.location()}/"
    if not path.startswith(location):
        raise _changed_error(opened, "files of other folders")
    return path.removeprefix(location)


def _changed_error(opened: Any, found: str) -> InvalidInputError:
    return InvalidInputError(
        f"the Iceberg table {opened.location()} has {found}, because another program has changed it, and bide does not "
        "support these: name another folder"
    )


def iceberg_files(files: fs.FileSystem, root: str, table: str) -> list[str] | None:
    """The files of the newest version of an Iceberg table, relative to its folder; None if it is not an Iceberg table.

    A table without rows has no files. The folder also has files of earlier versions, and of writes that did not finish.

    Args:
        root: the folder of the audit.

    Raises:
        InvalidInputError: pyiceberg is not installed, or the table cannot be read, or is not on this machine.
    """
    if not is_iceberg_audit(files, root):
        return None
    if not isinstance(files, fs.LocalFileSystem):
        raise InvalidInputError(
            f"the Iceberg tables in {root} are not on this machine: copy the folder to its path here"
        )
    with open_catalog(root) as catalog:
        opened = open_table(catalog, root, table)
        if opened is None:
            # A process may have been killed while it created the table.
            is_folder = files.get_file_info(posixpath.join(root, table)).type == fs.FileType.Directory
            return [] if is_folder else None
        return sorted(path for path, _ in data_files(opened))


def is_iceberg_audit(files: fs.FileSystem, root: str) -> bool:
    """Whether the tables of the audit in a folder are Iceberg tables."""
    return bool(files.get_file_info(posixpath.join(root, _CATALOG)).type == fs.FileType.File)
