"""Requirements of the pipelines: PySpark, PyArrow and Java."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Final

JAVA: Final = 17
"""The oldest release of Java that Spark 4 supports."""

NO_SPARK: Final = f"Spark is missing: install bide[spark], and Java {JAVA} or later"

_PACKAGES: Final = ("pyspark", "pyarrow")
_SPECIFICATION: Final = re.compile(rb"^ *java\.specification\.version = (?:1\.)?(\d+)", re.M)
_TIMEOUT: Final = 30.0


def missing() -> str | None:
    """Why Spark cannot start on this machine, and what to install, in one sentence; None if it can."""
    if (packages := missing_packages()) is not None:
        return packages
    release = java_release()
    if release is None or release < JAVA:
        found = "found none" if release is None else f"found {release}"
        return f"Spark needs Java {JAVA} or later, but {found}: install it, or set JAVA_HOME to its folder"
    return None


def missing_packages() -> str | None:
    """The same as :func:`missing`, but without the check of Java, which takes longer."""
    if any(find_spec(name) is None for name in _PACKAGES):
        return NO_SPARK
    return None


def java_release() -> int | None:
    """The release of Java that Spark would start, from JAVA_HOME or else from PATH; None if there is none."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if program is None:
        return None
    try:
        result = subprocess.run(
            [program, "-XshowSettings:properties", "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # macOS without Java has a program named java that only prints an error.
    found = _SPECIFICATION.search(result.stderr)
    return int(found[1]) if found else None
