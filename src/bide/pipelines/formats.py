"""What tables may come from, and where things may be put: what can be said of it before Spark is wanted.

Light, because the command line names the formats.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import Final

from bide.errors import InvalidInputError

FORMATS: Final = ("parquet", "csv", "json", "orc", "table")
_SUFFIXES: Final = {"jsonl": "json", "ndjson": "json", "gz": "", "zst": "", "bz2": ""}
_PATTERN: Final = re.compile(r"[*?\[{]")
_SIGNS: Final = re.compile(r"[]\\[{}*?]")
# Hadoop writes file:/data and hdfs:/data with one slash itself, and takes what is before a colon for a scheme.
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


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


def is_uri(source: str) -> bool:
    """Whether Hadoop takes this for a URI, and not for a path."""
    return _SCHEME.match(source) is not None


def for_spark(folder: str, *parts: str) -> str:
    """A folder, or what is in it, as Spark finds it where Arrow does.

    Spark takes a path without a scheme for one of its default file system, which may be a cluster's; Arrow takes it for
    one of this machine.
    """
    place = folder if "://" in folder else f"file://{Path(folder).absolute()}"
    return "/".join((place.rstrip("/"), *parts))


def to_read(place: str) -> str:
    """A folder of ours for Spark to read: it writes to a path as it is, and reads ``[eu]`` in it as a pattern."""
    return _SIGNS.sub(r"\\\g<0>", place)


def refuse_missing(source: str, format: str | None, *, reads_here: bool) -> None:
    """Say what is wrong with the name of a table before Spark is started for it, as far as that can be known.

    Args:
        reads_here: whether a path is one of this machine.

    Raises:
        InvalidInputError: its format is unknown, or it names a file that is not there.
    """
    kind = format or guess_format(source)
    if kind == "table" or not reads_here or is_uri(source) or _PATTERN.search(source):
        return
    try:
        Path(source).stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidInputError(f"{source} does not exist: name a file or a folder of {kind} files") from error
    except OSError:
        # A folder above it may not be entered, for example: nobody knows, and Spark says what it makes of it.
        return


def refuse_unwritable(option: str, place: str, *, is_here: bool) -> None:
    """Say that a folder cannot be made, or be written to, before Spark works for it, as far as that can be known.

    Args:
        option: that names the folder.
        is_here: whether a path is one of this machine.

    Raises:
        InvalidInputError: there is a file in its way, or a folder that is another user's.
    """
    if not is_here or is_uri(place):
        return
    path = Path(place).absolute()
    for one in (path, *path.parents):
        try:
            found = one.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return
        if not stat.S_ISDIR(found.st_mode) or not os.access(one, os.W_OK | os.X_OK):
            raise InvalidInputError(f"{option} {place} cannot be used: {one} is no folder that can be written to")
        return
