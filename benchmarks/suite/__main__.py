"""``python -m benchmarks.suite``: a job from standard input, its answer on standard output."""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import os
import sys

from benchmarks.suite.task import Answer, Job


def main() -> None:
    """Do one job."""
    job = Job.from_json(sys.stdin.read())
    # The answer alone goes to standard output: what a library prints there goes to the log.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    module, _, name = job.work.partition(":")
    work = getattr(importlib.import_module(module), name)
    # What the imports made is not garbage, and need not be looked at again and again.
    gc.collect()
    gc.freeze()
    result = work(job)
    answer: Answer = asyncio.run(result) if inspect.iscoroutine(result) else result
    answers.write(answer.to_json())
    answers.close()


if __name__ == "__main__":
    main()
