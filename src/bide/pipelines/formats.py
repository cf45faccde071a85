"""What tables may come from. Light, because the command line names the formats before Spark is wanted."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from bide.errors import InvalidInputError

FORMATS: Final = ("parquet", "csv", "json", "orc", "table")
_SUFFIXES: Final = {"jsonl": "json", "ndjson": "json", "gz": "", "zst": "", "bz2": ""}


def guess_format(source: str) -> str:
    """The format that the suffix of a file tells.

    Raises:
        InvalidInputError: it tells none.
    """
    for suffix in reversed(PurePosixPath(source).suffixes):
        kind = _SUFFIXES.get(suffix[1:].lower(), suffix[1:].lower())
        if kind in FORMATS:
            return kind
        if kind:
            break
    raise InvalidInputError(f"the name {source!r} does not tell a format: give one of {', '.join(FORMATS)}")
