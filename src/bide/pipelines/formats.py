"""What tables may come from. Light, because the command line names the formats before Spark is wanted."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Final

from bide.errors import InvalidInputError

FORMATS: Final = ("parquet", "csv", "json", "orc", "table")
_SUFFIXES: Final = {"jsonl": "json", "ndjson": "json", "gz": "", "zst": "", "bz2": ""}
_PATTERN: Final = re.compile(r"[*?\[{]")


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


def refuse_missing(source: str, format: str | None, *, is_here: bool) -> None:
    """Say what is wrong with the name of a table before Spark is started for it, as far as that can be known.

    Args:
        is_here: whether Spark reads the files of this machine.

    Raises:
        InvalidInputError: its format is unknown, or it names a file that is not there.
    """
    kind = format or guess_format(source)
    if kind == "table" or not is_here or "://" in source or _PATTERN.search(source):
        return
    if not Path(source).exists():
        raise InvalidInputError(f"{source} does not exist: name a file or a folder of {kind} files")
