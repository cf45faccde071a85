"""The application, its queues and its tasks."""

# A program as users of Celery write it, and Celery has no type annotations.
# mypy: ignore-errors

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery
from kombu import Exchange, Queue

app = Celery("project", backend=f"file://{os.environ['RESULTS']}")
app.conf.update(
    task_queues=[
        Queue("work"),
        Queue("letters", Exchange("post", "topic"), "letter.#"),
        Queue("urgent", queue_arguments={"x-max-priority": 10}),
        # The exchange is a direct one.
        Queue("safe", Exchange("safe"), "safe", queue_arguments={"x-queue-type": "quorum"}),
    ],
    task_default_queue="work",
    task_routes={"write": {"queue": "letters", "routing_key": "letter.new"}, "guard": {"queue": "safe"}},
    broker_connection_retry_on_startup=True,
    broker_transport_options={"confirm_publish": True},
    task_send_sent_event=True,
    worker_send_task_events=True,
    worker_prefetch_multiplier=1,
    result_expires=None,
)


def facts_file(task_id: str) -> Path:
    """Where a task writes its facts, beside Celery's result.

    Celery reads and writes a result in two steps, and stores the state of a run after it has sent the retry. On a busy
    machine it can so replace the result of the last run by the state of the one before.
    """
    return Path(os.environ["RESULTS"]) / f"facts-{task_id}.json"


def facts(task: Any, **more: Any) -> dict[str, Any]:
    """When and how a task was started. Written to its file, too."""
    request = task.request
    found = {
        "at": time.time(),
        "eta": request.eta,
        "exchange": request.delivery_info["exchange"],
        "routing_key": request.delivery_info["routing_key"],
        "priority": request.delivery_info["priority"],
        "retries": request.retries,
        "headers": sorted(request.headers or ()),
        **more,
    }
    file = facts_file(request.id)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(found))
    unfinished.replace(file)
    return found


@app.task(bind=True, name="remind")
def remind(self: Any, *args: Any) -> dict[str, Any]:
    return facts(self, args=args)


@app.task(bind=True, name="write")
def write(self: Any) -> dict[str, Any]:
    """Its queue is bound to a topic exchange."""
    return facts(self)


@app.task(bind=True, name="guard")
def guard(self: Any) -> dict[str, Any]:
    """Its queue is a quorum queue."""
    return facts(self)


@app.task(bind=True, name="persist", max_retries=5)
def persist(self: Any, countdowns: list[float], runs: list[float]) -> dict[str, Any]:
    """Retry after each countdown, and return when each run started."""
    runs = [*runs, time.time()]
    if self.request.retries < len(countdowns):
        raise self.retry(args=(countdowns, runs), countdown=countdowns[self.request.retries])
    return facts(self, runs=runs)


@app.task(bind=True, name="insist", autoretry_for=(OSError,), retry_backoff=1, retry_jitter=False, max_retries=2)
def insist(self: Any) -> dict[str, Any]:
    """Fail twice, and let Celery retry with backoff."""
    if self.request.retries < 2:
        raise OSError("not yet")
    return facts(self)


@app.task(name="add")
def add(first: int, second: int) -> int:
    return first + second


@app.task(name="total")
def total(numbers: list[int]) -> list[float]:
    return [sum(numbers), time.time()]
