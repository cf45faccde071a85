"""What the pipelines need beside bide itself, and whether it is here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Final

JAVA: Final = 17
"""The oldest that Spark 4 runs on."""

_PACKAGES: Final = ("pyspark", "pyarrow")
_SPECIFICATION: Final = re.compile(rb"^ *java\.specification\.version = (?:1\.)?(\d+)", re.M)
_PATIENCE: Final = 30.0


def missing() -> str | None:
    """What keeps Spark from starting on this machine, and the way out, in one sentence; None if all is there."""
    if (packages := missing_packages()) is not None:
        return packages
    release = java_release()
    if release is None or release < JAVA:
        found = "there is none" if release is None else f"this one is {release}"
        return f"Spark needs a Java {JAVA} or later, and {found}: install one, or set JAVA_HOME to the folder of one"
    return None


def missing_packages() -> str | None:
    """The same, but for a Java, which takes longer to ask."""
    if any(find_spec(name) is None for name in _PACKAGES):
        return f"Spark is missing: install bide[spark], and a Java {JAVA} or later"
    return None


def java_release() -> int | None:
    """The release of the Java that Spark would start, JAVA_HOME's or else the first in PATH; None without one."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if program is None:
        return None
    try:
        said = subprocess.run(
            [program, "-XshowSettings:properties", "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # A macOS without Java has a program of this name, which only says so.
    found = _SPECIFICATION.search(said.stderr)
    return int(found[1]) if found else None
