"""Database of DuckDB in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import duckdb


@contextmanager
def memory_database() -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection to a database in memory, which moves what does not fit into a temporary folder.

    Raises:
        KeyboardInterrupt: a signal interrupted a query.
    """
    # By default, the folder would be .tmp in the current one, and would remain.
    with (
        TemporaryDirectory(prefix="bide-") as folder,
        duckdb.connect(":memory:", config={"temp_directory": folder}) as connection,
    ):
        try:
            yield connection
        except RuntimeError as error:
            # DuckDB replaces the KeyboardInterrupt of Python.
            if str(error) == "Query interrupted":
                raise KeyboardInterrupt from error
            raise
