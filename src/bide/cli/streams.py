"""Standard input, output and error, also where the caller closed them or the disk is full."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Final

_FAILED: Final = 1


def open_missing() -> None:
    """Have three standard streams, whatever the caller closed.

    Otherwise a socket would get the number of a closed one, and what is printed would go to the broker. Reading from a
    closed input fails, and so does writing to a closed output: nothing that was not printed counts as printed.
    """
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one. The mode is the one that makes its use fail, but for errors.
            os.open(os.devnull, mode)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (for the life of the process)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def finished(code: int) -> int:
    """Write what is still in memory, and return the exit code: 1 if the output cannot be written."""
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
    """Let the interpreter not try once more, at its end, to write what cannot be written."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
