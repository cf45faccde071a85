"""The machine that the benchmark runs on, and the releases of what is compared."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Final

PACKAGES: Final = ("bide", "aio-pika", "aiormq", "pika", "kombu", "py-amqp", "celery", "dramatiq")
_DISTRIBUTIONS: Final = {"py-amqp": "amqp"}


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
