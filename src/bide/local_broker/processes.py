"""The processes of a broker, found by a mark in their environment.

Every process that a broker starts carries ``BIDE_BROKER_FOLDER=<its folder>`` in its environment. A process id in a
file goes stale, and the system may give it to a stranger; the mark cannot: the system is asked for it each time, and
it dies with the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

FOLDER_MARK = "BIDE_BROKER_FOLDER"
# There is no event for "a process that is not my child has ended", so it is asked for at this interval.
_POLL_SECONDS = 0.02


def marked(folder: Path) -> list[int]:
    """Return the ids of the live processes of the broker in *folder*, zombies excepted."""
    if sys.platform == "linux":
        pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
        return sorted(pid for pid in pids if is_marked(pid, folder))
    else:
        return sorted(_marked_by_ps(folder, "-A"))


def is_marked(pid: int, folder: Path) -> bool:
    """Return whether process *pid* is alive and belongs to the broker in *folder*."""
    if sys.platform == "linux":
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            return False
        return f"{FOLDER_MARK}={folder}".encode() in environment.split(b"\0")
    else:
        return pid in _marked_by_ps(folder, "-p", str(pid))


def _marked_by_ps(folder: Path, *selection: str) -> list[int]:
    """Ask ps (macOS, the BSDs), whose ``-E`` appends the environment of the user's own processes to the command."""
    listing = subprocess.run(
        ["/bin/ps", *selection, "-E", "-ww", "-o", "pid=", "-o", "command="],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    ).stdout
    mark = f" {FOLDER_MARK}={folder} "
    return [int(line.split(None, 1)[0]) for line in listing.splitlines() if mark in f"{line} "]


def send_signal(pid: int, number: int) -> None:
    """Send a signal; a process that has ended in the meantime is fine."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def wait_until_gone(folder: Path, *, seconds: float) -> list[int]:
    """Wait until no process of the broker in *folder* is left; return those that are left after *seconds*."""
    deadline = time.monotonic() + seconds
    sightings_of_none = 0
    # Twice, since a process has no environment in the moment in which it becomes another program.
    while sightings_of_none < 2:
        left = marked(folder)
        if left and time.monotonic() >= deadline:
            return left
        sightings_of_none = 0 if left else sightings_of_none + 1
        time.sleep(_POLL_SECONDS)
    return []
