"""Small file systems in memory for the data of nodes, whose disks tests can fill."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from bide.local_broker.root_commands import RootCommands

_COMMANDS: Final = RootCommands(feature="disks of the nodes' own", option="the size of the disks", package="util-linux")


def check() -> None:
    """Check that this user can mount file systems.

    Raises:
        LocalBrokerError: this is not root on Linux, or the command is missing.
    """
    _COMMANDS.check("mount")


def create(folders: Iterable[Path], size: int) -> None:
    """Mount an empty file system of *size* bytes for the data of each of the nodes in *folders*.

    Raises:
        LocalBrokerError: the system refused.
    """
    for folder in folders:
        _COMMANDS.run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "bide", str(folder / "data"))


def cleanup(folders: Iterable[Path]) -> tuple[list[str], ...]:
    """Return the commands that undo :func:`create`, although a process that is about to end may still use the files."""
    return tuple([_COMMANDS.find("umount"), "--lazy", str(folder / "data")] for folder in folders)
