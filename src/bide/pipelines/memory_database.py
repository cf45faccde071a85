"""In-memory DuckDB database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import duckdb


@contextmanager
def memory_database() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open an in-memory database. DuckDB writes data that exceeds its memory limit to a temporary folder.

    Raises:
        KeyboardInterrupt: a signal interrupted a query.
    """
    # By default, DuckDB writes to .tmp in the current folder, and leaves that folder behind.
    with (
        TemporaryDirectory(prefix="bide-") as folder,
        duckdb.connect(":memory:", config={"temp_directory": folder}) as connection,
    ):
        try:
            yield connection
        except RuntimeError as error:
            # DuckDB raises this RuntimeError instead of KeyboardInterrupt.
            if str(error) == "Query interrupted":
                raise KeyboardInterrupt from error
            raise
