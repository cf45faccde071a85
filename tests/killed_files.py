"""A file system that kills its process before a change."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, Final

import deltalake
from deltalake.table import TableOptimizer
from pyarrow import fs
from pyiceberg.table import CreateTableTransaction, Transaction

TRANSACTIONS: Final[tuple[tuple[Any, str], ...]] = (
    (deltalake, "write_deltalake"),
    (deltalake.DeltaTable, "create"),
    (deltalake.DeltaTable, "delete"),
    (deltalake.DeltaTable, "vacuum"),
    (TableOptimizer, "compact"),
    (Transaction, "commit_transaction"),
    (CreateTableTransaction, "commit_transaction"),
)
"""The functions that change Delta and Iceberg tables, with the objects that have them."""


class KillingFiles(fs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
    """Passes on calls to a file system, and kills the process instead of the last change.

    Attributes:
        left: how many changes are made before that.
    """

    def __init__(self, files: fs.FileSystem, left: int) -> None:
        self._files = files
        self.left = left

    def change(self) -> None:
        """Count a change, and kill the process instead of the last one."""
        if self.left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def _change(self) -> fs.FileSystem:
        self.change()
        return self._files

    def watch_transactions(self) -> None:
        """Count transactions of Delta and Iceberg tables as changes too, which are made without this file system."""
        for owner, name in TRANSACTIONS:
            setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, transaction: Callable[..., Any]) -> Callable[..., Any]:
        """A function that counts a change, and does it."""

        def counted(*args: Any, **options: Any) -> Any:
            self.change()
            return transaction(*args, **options)

        return counted

    def get_type_name(self) -> str:
        return "killing"

    def normalize_path(self, path: str) -> str:
        return str(self._files.normalize_path(path))

    def get_file_info(self, paths: list[str]) -> Any:
        return self._files.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        return self._files.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._change().create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._change().delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._change().delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError  # no table is a whole file system

    def delete_file(self, path: str) -> None:
        self._change().delete_file(path)

    def move(self, source: str, target: str) -> None:
        self._change().move(source, target)

    def copy_file(self, source: str, target: str) -> None:
        self._change().copy_file(source, target)

    def open_input_stream(self, path: str) -> Any:
        return self._files.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        return self._files.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return self._change().open_output_stream(path)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        return self._change().open_append_stream(path)
