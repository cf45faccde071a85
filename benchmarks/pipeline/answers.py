"""Protocol of the benchmark's processes: a JSON object per line, answered by one with times."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from benchmarks.pipeline.metered import tree_seconds

Times = dict[str, float]
Job = Callable[..., Times]


@contextmanager
def timed() -> Iterator[Times]:
    """Measure the block: seconds, and processor time of this process and its descendants."""
    times: Times = {}
    began, used = time.monotonic(), tree_seconds(os.getpid())
    yield times
    times["seconds"] = time.monotonic() - began
    times["processor_seconds"] = tree_seconds(os.getpid()) - used


def answer_to_parent() -> TextIO:
    """Take standard output for answers alone; whatever prints writes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(jobs: Mapping[str, Job], answers: TextIO) -> None:
    """Do the job of each line, until the input ends."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        try:
            found: Mapping[str, Any] = jobs[request.pop("job")](**request)
        except Exception as error:  # noqa: BLE001 (the parent decides whether this checkout has to be able to do it)
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers)
