"""bide as one file, for executors of Spark that do not have it installed.

An executor needs bide, pamqp, and httpx2 with what that builds on (to ask the management API, before it looks at a
queue). All of it is pure Python. PySpark and PyArrow it has anyway; what else bide builds on is for its command line.
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

PACKAGES: Final = ("bide", "pyspark_bide", "pamqp", "httpx2", "httpcore2", "anyio", "h11", "idna", "truststore")
MODULES: Final = ("typing_extensions",)
"""What is in it, by the names under which it is imported."""

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

    Spark takes no two files of one name in the same session: the name depends on its contents.
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
        for name, contents in _contents():
            archive.writestr(name, contents)
            if name.endswith(".py"):
                archive.writestr(f"{name}c", _compiled(contents, name))
    return found.getvalue()


def _contents() -> Iterator[tuple[str, bytes]]:
    """Names of files, and what is in them. They may come out of such a file themselves, on a cluster."""
    for package in PACKAGES:
        yield from _files(package, files(package))
    for module in MODULES:
        spec = find_spec(module)
        if spec is not None and isinstance(spec.loader, InspectLoader):
            yield f"{module}.py", (spec.loader.get_source(module) or "").encode()
    for name in (*PACKAGES, *MODULES):
        # Some ask for their own version when they are imported.
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
    """What Python keeps in ``.pyc`` files: another Python sees that it is not its own, and takes the source."""
    code = compile(source, name, "exec", dont_inherit=True)
    flags = _HASHED_AND_NOT_CHECKED.to_bytes(4, "little")
    return MAGIC_NUMBER + flags + source_hash(source) + marshal.dumps(code)
