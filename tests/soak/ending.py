"""The errors with which a killed query may end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import bide
from bide.pipelines.session import NO_WORKER

AFTERMATH: Final = 60.0
"""Seconds in which the end of a query is owed to what has hit it."""

OWN: Final = f"{Path(bide.__file__).parent}/"
_OF_SPARK: Final = "/pyspark/"
_TRACEBACK: Final = "Traceback (most recent call last):"
_FILE: Final = re.compile(r'File "([^"\n]+)", line \d+')

_WORKER_GONE: Final = "Python worker exited unexpectedly"


def is_allowed(text: str, *, since_hit: float, since_kill: float) -> bool:
    """Whether this end of a query is the work of what was killed, or of a machine too busy to start a process.

    Args:
        text: what Spark says of it.
        since_hit: seconds since something of this query was killed, stopped or cancelled.
        since_kill: seconds since a process was killed, of whichever query: Spark gives its Python processes now to one
            of them and now to the other.
    """
    if is_of_bide(text):
        return False
    lost = since_kill < AFTERMATH and _WORKER_GONE in text
    return lost or since_hit < AFTERMATH or NO_WORKER in text


def is_of_bide(text: str) -> bool:
    """Whether the error is from bide: a kill cannot cause it, since the broker stays up.

    What libraries raise counts for who called them: bide, or Spark, whose pipes to the JVM break when that is killed.
    """
    if "bide.errors." in text:
        return True
    for traceback in text.split(_TRACEBACK)[1:]:
        callers = [file for file in _FILE.findall(traceback) if file.startswith(OWN) or _OF_SPARK in file]
        if callers and callers[-1].startswith(OWN):
            return True
    return False
