"""Formats of input tables, and checks of paths that are possible before Spark starts.

The module imports little, because the command line needs the list of formats.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from bide.errors import InvalidInputError

FORMATS: Final = ("parquet", "csv", "json", "orc", "table")
_FORMAT_BY_SUFFIX: Final = {"jsonl": "json", "ndjson": "json", "gz": "", "zst": "", "bz2": ""}
"""The format of each suffix that is not a format itself; empty for a compression, where the suffix before it counts."""
_PATTERN: Final = re.compile(r"[*?\[{]")
_PATTERN_CHARACTERS: Final = re.compile(r"[]\\[{}*?]")
# Hadoop reads a text before a colon as a scheme, and also accepts one slash after it, as in file:/data and hdfs:/data.
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_DEFAULT_FILE_SYSTEM: Final = ("spark.hadoop.fs.defaultFS", "spark.hadoop.fs.default.name")
_CONFIGURATION_FOLDERS: Final = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR", "SPARK_HOME")
"""Environment variables that name folders of configuration files, which may set the default file system too."""


def guess_format(source: str) -> str:
    """Guess the format of a file from its suffix.

    Raises:
        InvalidInputError: the suffix is not that of a known format.
    """
    for suffix in reversed(PurePosixPath(source).suffixes):
        kind = _FORMAT_BY_SUFFIX.get(suffix[1:].lower(), suffix[1:].lower())
        if kind in FORMATS:
            return kind
        if kind:
            break
    raise InvalidInputError(
        f"the name {source!r} does not have the suffix of a known format: give the format, one of {', '.join(FORMATS)}"
    )


def is_uri(source: str) -> bool:
    """Whether Hadoop reads this as a URI rather than a path."""
    return _SCHEME.match(source) is not None


def spark_uri(folder: str, *parts: str) -> str:
    """The URI by which Spark finds the same folder, or path in the folder, as Arrow.

    Spark looks up a path without a scheme in its default file system, which may be that of a cluster. Arrow looks up
    the same path on this machine.
    """
    uri = folder if "://" in folder else f"file://{Path(folder).absolute()}"
    return "/".join((uri.rstrip("/"), *parts))


def escape_pattern_characters(place: str) -> str:
    """Escape a path for Spark's readers, which take ``[eu]`` in a path as a pattern; its writers take it literally."""
    return _PATTERN_CHARACTERS.sub(r"\\\g<0>", place)


def refuse_missing(source: str, format: str | None, *, reads_local_paths: bool) -> None:
    """Check the name of a table before Spark starts, as far as that is possible.

    Args:
        source: a path, a URI, or the name of a table in the catalog.
        format: the format; None to guess it from the name.
        reads_local_paths: whether a path refers to this machine.

    Raises:
        InvalidInputError: the format is unknown, or the file does not exist.
    """
    kind = format or guess_format(source)
    if kind == "table" or not reads_local_paths or is_uri(source) or is_pattern(source):
        return
    try:
        Path(source).stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidInputError(f"{source} does not exist: name a file or a folder of {kind} files") from error
    except OSError:
        # A parent folder without permission, for example. Spark may have the permission, or else reports the error.
        return


def refuse_unwritable(option: str, place: str, *, is_local: bool) -> None:
    """Check before Spark starts that a folder can be created or written to, as far as that is possible.

    Args:
        option: the option that names the folder, for the error.
        place: a path or a URI.
        is_local: whether a path refers to this machine.

    Raises:
        InvalidInputError: the path or a parent of it is a file, or a folder without write permission.
    """
    if not is_local or is_uri(place):
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
            reason = f"{one} is not a writable folder"
            raise InvalidInputError(f"{option} {place} cannot be used: {reason}; name another folder")
        return


def is_pattern(source: str) -> bool:
    """Whether Spark reads a path as a pattern, which can match several files."""
    return _PATTERN.search(source) is not None


def is_hidden(name: str) -> bool:
    """Whether Spark ignores files and folders of this name."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name) or name.endswith("._COPYING_")


def is_below_hidden(path: str, root: str) -> bool:
    """Whether Spark ignores a file below *root*, because of its name or of a folder's."""
    return any(is_hidden(part) for part in path.removeprefix(root).split("/"))


def runs_locally(master: str | None) -> bool:
    """Whether a session with this master runs on this machine alone, as far as is known before the session starts."""
    return master.startswith("local") if master is not None else not is_submitted()


def reads_local_paths(master: str | None, configuration: Mapping[str, str]) -> bool:
    """Whether a session with these arguments certainly looks up a path without a scheme on this machine."""
    configured = any(name in configuration for name in _DEFAULT_FILE_SYSTEM)
    return runs_locally(master) and not configured and not any(os.environ.get(name) for name in _CONFIGURATION_FOLDERS)


def is_submitted() -> bool:
    """Whether ``spark-submit`` started this process, so that the JVM is running and has a master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ
