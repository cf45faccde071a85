"""The machine of the benchmark, and the releases of the compared software."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

import bide

PACKAGES: Final = (
    "bide",
    "aio-pika",
    "aiormq",
    "pika",
    "kombu",
    "py-amqp",
    "celery",
    "dramatiq",
    "faststream",
    "taskiq",
    "taskiq-aio-pika",
)
_DISTRIBUTIONS: Final = {"py-amqp": "amqp"}
_GLANCE: Final = 0.5
_IDLE: Final = slice(3, 5)
"""Of the times in /proc/stat: with nothing to do, or nothing but to wait for a disk."""

_STOLEN: Final = 7
"""Of the times in /proc/stat: ready to run, while the host of a virtual machine runs others."""


def circumstances() -> dict[str, object]:
    """What the figures of a run were measured with: its time, the machine and its load before, the source."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe(),
        "source": source(),
        "cores_in_use_before": round(busy_cores(), 2),
    }


def describe() -> dict[str, str]:
    """Processor, memory, kernel, Python."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory / (1 << 30):.0f} GB",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def release_of(package: str) -> str | None:
    """The release of a package, None where it is not installed."""
    try:
        return metadata.version(_DISTRIBUTIONS.get(package, package))
    except metadata.PackageNotFoundError:
        return None


def releases() -> dict[str, str]:
    """The releases of all packages that are compared, as far as they are installed."""
    found = {package: release_of(package) for package in PACKAGES}
    return {package: release for package, release in found.items() if release is not None}


def source(folder: Path = Path(bide.__file__).parent) -> str:
    """The commit of bide's own files, with a plus where they were changed since; empty where they are in no repository.

    A package that is installed into an environment within the repository of something else has no commit.

    Args:
        folder: of the package.
    """
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return ""
    commit, changed = _git(folder, "rev-parse", "--short=10", "HEAD"), _git(folder, "status", "--porcelain", "--", ".")
    return f"{commit or ''}{'+' if changed else ''}"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def busy_cores() -> float:
    """Cores that the machine is using at the moment, for whatever: looked at for half a second."""
    # In this order, a pause of this process makes the span longer, and never shows more cores than there are.
    start, before = time.perf_counter(), _busy_seconds()
    time.sleep(_GLANCE)
    return (_busy_seconds() - before) / (time.perf_counter() - start)


def stolen_seconds() -> float:
    """Processor time, of all cores, that a virtual machine's host has given to others since it was started."""
    return _times()[_STOLEN]


def _busy_seconds() -> float:
    times = _times()
    return sum(times) - sum(times[_IDLE])


def _times() -> list[float]:
    """Seconds of all cores since the machine was started, by what they did."""
    first = Path("/proc/stat").read_text().partition("\n")[0]
    # What guests have used is part of user and nice.
    return [int(field) / os.sysconf("SC_CLK_TCK") for field in first.split()[1:9]]
