"""bide as one file, for executors of Spark that do not have it installed.

An executor needs bide and pamqp, which are pure Python; PySpark and PyArrow it has anyway. What else bide builds on is
for its command line.
"""

from __future__ import annotations

import marshal
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import MAGIC_NUMBER, source_hash
from io import BytesIO
from pathlib import Path
from typing import Final
from zipfile import ZIP_DEFLATED, ZipFile

PACKAGES: Final = ("bide", "pyspark_bide", "pamqp")
"""What is in it."""

_SUFFIXES: Final = (".py", ".css")
_HASHED_AND_NOT_CHECKED: Final = 1  # a flag of compiled files, PEP 552


def write_bundle(path: str | os.PathLike[str]) -> Path:
    """Write a zip file for ``--py-files``, ``spark.submit.pyFiles``, ``addPyFile`` or ``addArtifacts(pyfile=True)``.

    It has the sources, for any Python that bide knows, and what this Python compiles of them: a worker that had to
    do so would do it again at each start, which takes four times as long as the import of what is compiled.

    Args:
        path: of the file; one that is there is replaced.

    Returns:
        the same, absolute.
    """
    target = Path(path).absolute()
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_bytes(_bundle())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    return target


@cache
def own_bundle() -> Path:
    """The file, written once, to be deleted when the process ends.

    Spark takes no two files of one name in the same session: the name tells what is in it.
    """
    contents = _bundle()
    place = Path(_folder().name, f"bide-{sha256(contents).hexdigest()[:12]}.zip")
    place.write_bytes(contents)
    return place


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="bide-")


def _bundle() -> bytes:
    found = BytesIO()
    with ZipFile(found, "w", ZIP_DEFLATED) as archive:
        for package in PACKAGES:
            for name, file in _files(package, files(package)):
                source = file.read_bytes()
                archive.writestr(name, source)
                if name.endswith(".py"):
                    archive.writestr(f"{name}c", _compiled(source, name))
        for name, text in _metadata():
            archive.writestr(name, text)
    return found.getvalue()


def _files(name: str, folder: Traversable) -> Iterator[tuple[str, Traversable]]:
    for one in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if one.is_dir():
            yield from _files(f"{name}/{one.name}", one)
        elif one.name.endswith(_SUFFIXES):
            yield f"{name}/{one.name}", one


def _compiled(source: bytes, name: str) -> bytes:
    """What Python keeps in ``.pyc`` files: another Python sees that it is not its own, and takes the source."""
    code = compile(source, name, "exec", dont_inherit=True)
    flags = _HASHED_AND_NOT_CHECKED.to_bytes(4, "little")
    return MAGIC_NUMBER + flags + source_hash(source) + marshal.dumps(code)


def _metadata() -> Iterator[tuple[str, str]]:
    """What tells the version, which bide says to the broker."""
    try:
        found = distribution("bide")
    except PackageNotFoundError:  # a source folder that is not installed
        return
    if (text := found.read_text("METADATA")) is not None:
        yield f"bide-{found.version}.dist-info/METADATA", text
