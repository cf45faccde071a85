"""Add byte code to the archives from which Spark's Python processes import PySpark.

PySpark has its sources in archives. Every Python process that Spark starts compiles the modules that it imports from
them, which takes 1.7 s of processor time, and 0.7 s with byte code. The tests start hundreds of these processes.

Run it with the Python and the PySpark that will use the archives: ``.venv/bin/python scripts/compile_pyspark.py``.
"""

from __future__ import annotations

import importlib.util
import py_compile
import tempfile
import warnings
import zipfile
from pathlib import Path

# Byte code is not checked against its source, because an archive is replaced as a whole.
UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH


def compile_archive(archive: Path) -> None:
    """Add byte code to the sources in an archive. The archive is replaced in one step."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as name:
        folder, made = Path(name, "content"), Path(name, archive.name)
        with zipfile.ZipFile(archive) as before:
            before.extractall(folder)
        for source in folder.rglob("*.py"):
            inside = source.relative_to(folder)
            py_compile.compile(
                str(source), str(source.with_suffix(".pyc")), str(archive / inside), invalidation_mode=UNCHECKED
            )
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as after:
            for file in sorted(folder.rglob("*")):
                if file.is_file():
                    after.write(file, file.relative_to(folder))
        made.replace(archive)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # warnings of PySpark's sources
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise SystemExit("compile_pyspark: this Python has no PySpark")
    for one in Path(found.origin).parent.glob("python/lib/*.zip"):
        compile_archive(one)
