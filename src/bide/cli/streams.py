"""Standard streams that the caller closed, or that cannot be written."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Final

_FAILED: Final = 1


def open_missing() -> None:
    """Open standard streams that the caller closed, so that all three exist.

    Otherwise a socket would get the file descriptor of a closed stream, and output would go to the broker. Reading from
    a closed input and writing to a closed output still fail, so that lost output is reported.
    """
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # os.open returns the lowest free descriptor, which is the closed stream's. The mode makes reading standard
            # input and writing standard output fail.
            os.open(os.devnull, mode)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (for the life of the process)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (as above)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 (as above)


def flush_output(code: int) -> int:
    """Flush standard output, and return the exit code: *code*, or 1 instead of 0 if the output cannot be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if code == 0:
            code = _FAILED
            if not isinstance(error, BrokenPipeError):
                with suppress(OSError):
                    sys.stderr.write(f"bide: the output cannot be written: {error.strerror}\n")
        discard_output()
    return code


def discard_output() -> None:
    """Keep the interpreter from trying again, at exit, to write output that cannot be written."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
