"""bide as one zip file, for Spark executors without an installation of bide.

An executor needs bide, pamqp, cronsim, and httpx2 with its dependencies (bide queries the management API before it
reads a queue). All of these are pure Python. Executors have PySpark and PyArrow themselves; the other dependencies of
bide are for its command line only.
"""

from __future__ import annotations

import marshal
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.abc import InspectLoader
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import MAGIC_NUMBER, find_spec, source_hash
from io import BytesIO
from pathlib import Path
from typing import Final
from zipfile import ZIP_DEFLATED, ZipFile

PACKAGES: Final = (
    "bide",
    "pyspark_bide",
    "cronsim",
    "pamqp",
    "httpx2",
    "httpcore2",
    "anyio",
    "h11",
    "idna",
    "truststore",
)
MODULES: Final = ("typing_extensions",)
"""Contents of the bundle, by import name."""

_SUFFIXES: Final = (".py", ".css")
_UNCHECKED_HASH: Final = 1  # a flag of .pyc files, see PEP 552


def write_bundle(path: str | os.PathLike[str]) -> Path:
    """Write a zip file for ``--py-files``, ``spark.submit.pyFiles``, ``addPyFile`` or ``addArtifacts(pyfile=True)``.

    The file has the sources, which every Python that bide supports can run, and bytecode for the Python that writes the
    file. Without bytecode, a worker compiles the sources at each start, which takes four times as long as importing the
    bytecode.

    Args:
        path: the path of the file; an existing file is replaced.

    Returns:
        The absolute path.
    """
    target = Path(path).absolute()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_bytes(_bundle())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


@cache
def own_bundle() -> Path:
    """The bundle of this process, written once and deleted when the process ends.

    The name has a digest of the contents, because a Spark session refuses two files of the same name.
    """
    contents = _bundle()
    path = Path(_folder().name, f"bide-{sha256(contents).hexdigest()[:12]}.zip")
    path.write_bytes(contents)
    return path


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="bide-")


def _bundle() -> bytes:
    buffer = BytesIO()
    with ZipFile(buffer, "w", ZIP_DEFLATED) as archive:
        for name, contents in _contents():
            archive.writestr(name, contents)
            if name.endswith(".py"):
                archive.writestr(f"{name}c", _compiled(contents, name))
    return buffer.getvalue()


def _contents() -> Iterator[tuple[str, bytes]]:
    """Names and contents of all files, which are read from a bundle if bide was imported from one."""
    for package in PACKAGES:
        yield from _files(package, files(package))
    for module in MODULES:
        spec = find_spec(module)
        if spec is not None and isinstance(spec.loader, InspectLoader):
            yield f"{module}.py", (spec.loader.get_source(module) or "").encode()
    for name in (*PACKAGES, *MODULES):
        # Some packages look up their own version when they are imported.
        with suppress(PackageNotFoundError):
            installed = distribution(name)
            if (text := installed.read_text("METADATA")) is not None:
                yield f"{name}-{installed.version}.dist-info/METADATA", text.encode()


def _files(name: str, folder: Traversable) -> Iterator[tuple[str, bytes]]:
    for one in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if one.is_dir():
            yield from _files(f"{name}/{one.name}", one)
        elif one.name.endswith(_SUFFIXES):
            yield f"{name}/{one.name}", one.read_bytes()


def _compiled(source: bytes, name: str) -> bytes:
    """The contents of a ``.pyc`` file. Another release of Python sees the magic number and uses the source instead."""
    code = compile(source, name, "exec", dont_inherit=True)
    flags = _UNCHECKED_HASH.to_bytes(4, "little")
    return MAGIC_NUMBER + flags + source_hash(source) + marshal.dumps(code)
