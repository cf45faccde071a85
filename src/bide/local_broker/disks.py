"""Small file systems in memory for the data of nodes, whose disks tests can fill."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from bide.errors import LocalBrokerError


def check() -> None:
    """Check that this user can mount file systems.

    Raises:
        LocalBrokerError: this is not root on Linux.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise LocalBrokerError("disks of the nodes' own need root on Linux: omit the size of the disks")
    _find("mount")


def create(folders: Iterable[Path], size: int) -> None:
    """Mount an empty file system of *size* bytes for the data of each of the nodes in *folders*.

    Raises:
        LocalBrokerError: the system refused.
    """
    for folder in folders:
        command = [_find("mount"), "-t", "tmpfs", "-o", f"size={size},mode=0700", "bide", str(folder / "data")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LocalBrokerError(
                f"'{' '.join(command)}' failed with status {done.returncode}: {done.stderr.strip()}; omit the size of "
                "the disks if this system does not allow them"
            )


def cleanup(folders: Iterable[Path]) -> tuple[list[str], ...]:
    """Return the commands that undo :func:`create`, although a process that is about to end may still use the files."""
    return tuple([_find("umount"), "--lazy", str(folder / "data")] for folder in folders)


def _find(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise LocalBrokerError(f"disks of the nodes' own need the command '{program}': install util-linux")
    return path
