"""The Celery application of the worker process."""

from __future__ import annotations

import os
from typing import Any

from celery import signals

from benchmarks.suite.arrivals import URL_VARIABLE, Arrivals
from benchmarks.suite.clients.celery import TASK, application

app = application(os.environ[URL_VARIABLE])
_arrivals = Arrivals.of_environment()


@app.task(name=TASK)  # type: ignore[untyped-decorator]  # Celery has no types
def begin(due: float, body: str) -> None:
    """The task: write down that it begins."""
    _arrivals.add(due)


def _tell_ready(**_: Any) -> None:
    _arrivals.tell_ready()


signals.worker_ready.connect(_tell_ready, weak=False)
