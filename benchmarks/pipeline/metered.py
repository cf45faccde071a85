"""Processor time of a tree of processes.

``python -m benchmarks.pipeline.metered RESULT COMMAND ...`` runs a command, and writes to the file RESULT what all its
processes used, including those that outlive it, such as the JVM of Spark.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER: Final = 36
_OUTLIVES: Final = 60
"""Seconds in which all processes of a command have to end after it."""


def tree_seconds(pid: int) -> float:
    """Processor time of a process, of its descendants, and of those that they have waited for, in seconds."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of a process, in parentheses, may have spaces.
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        one = int(path.parent.name)
        parents[one] = int(fields[1])
        used[one] = sum(map(int, fields[11:15]))
    return sum(ticks for one, ticks in used.items() if _descends(one, pid, parents)) / _TICKS


def _descends(one: int, ancestor: int, parents: dict[int, int]) -> bool:
    while one != ancestor:
        if one not in parents:
            return False
        one = parents[one]
    return True


def main(result: str, *command: str) -> int:
    """Run a command, and wait for all processes that it started."""
    # Processes whose parent has ended become children of this one.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    began = time.monotonic()
    pid = os.posix_spawnp(command[0], command, os.environ)
    used, seconds, code = 0.0, 0.0, 0
    while True:
        try:
            ended, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            break
        used += usage.ru_utime + usage.ru_stime
        if ended == pid:
            seconds, code = time.monotonic() - began, os.waitstatus_to_exitcode(status)
            signal.alarm(_OUTLIVES)
    Path(result).write_text(json.dumps({"seconds": seconds, "processor_seconds": used}), encoding="utf-8")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
