"""Search for the processes of a local broker by a variable in their environment.

Every process of a broker has ``BIDE_BROKER_FOLDER=<its folder>`` in its environment. A process id in a file can become
stale, and the system can reuse it for another program. The variable is read from the running process each time, so it
always identifies the right one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

FOLDER_MARK = "BIDE_BROKER_FOLDER"
_POLL_SECONDS = 0.02
"""Seconds between two checks of processes, because no event reports the end of a process that is not a child."""


def marked(folder: Path) -> list[int]:
    """Return the ids of the running processes of the broker in *folder*, without zombies."""
    if sys.platform == "linux":
        pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
        return sorted(pid for pid in pids if is_marked(pid, folder))
    else:
        return sorted(_marked_by_ps(folder, "-A"))


def is_marked(pid: int, folder: Path) -> bool:
    """Return whether process *pid* is running and belongs to the broker in *folder*."""
    if sys.platform == "linux":
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # the process has ended, or belongs to another user
            return False
        return f"{FOLDER_MARK}={folder}".encode() in environment.split(b"\0")
    else:
        return pid in _marked_by_ps(folder, "-p", str(pid))


def _marked_by_ps(folder: Path, *selection: str) -> list[int]:
    """Ask ps (macOS, BSD), whose ``-E`` appends the environment of the user's own processes to the command."""
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


def is_paused(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP."""
    if sys.platform == "linux":
        try:
            status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:  # the process has ended
            return False
        # The name of the program, in parentheses, can contain anything.
        return status.rpartition(")")[2].split()[0] == "T"
    else:
        command = ["/bin/ps", "-o", "state=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.startswith("T")


def send_signal(pid: int, number: int) -> None:
    """Send a signal; a process that has ended is not an error."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def wait_until_gone(folder: Path, *, seconds: float) -> list[int]:
    """Wait until no process of the broker in *folder* is left; after *seconds*, return those that are."""
    deadline = time.monotonic() + seconds
    times_seen_none = 0
    # Checked twice, because a process has no environment for a moment while it executes another program.
    while times_seen_none < 2:
        left = marked(folder)
        if left and time.monotonic() >= deadline:
            return left
        times_seen_none = 0 if left else times_seen_none + 1
        time.sleep(_POLL_SECONDS)  # no event reports the end of a process that is not a child
    return []
