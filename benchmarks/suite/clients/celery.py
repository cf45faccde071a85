"""Celery: tasks with a countdown, by native delayed delivery."""

from __future__ import annotations

import asyncio
import time
from itertools import cycle
from typing import Any, Final

import celery
from kombu import entity

from benchmarks.suite.clients import end_to_end
from benchmarks.suite.processor import Meter
from benchmarks.suite.setup import TARGET, prepare, random_minutes
from benchmarks.suite.task import Answer, Job
from bide.delay.celery import Celery

# Only part of kombu has type annotations.
Exchange: Any = entity.Exchange
Queue: Any = entity.Queue

TASK: Final = "benchmarks.suite.task"
_EXCHANGE: Final = "tasks"
_BODY: Final = "x" * 200
_PREFETCH: Final = 1_000
"""For every process of the pool: with a quorum queue a worker cannot raise it while it holds tasks back."""


def application(url: str | None = None) -> Any:
    """An application with one quorum queue behind a topic exchange, which switches native delayed delivery on."""
    app = celery.Celery("bench", broker=url)
    exchange = Exchange(_EXCHANGE, "topic")
    app.conf.update(
        task_queues=[Queue(TARGET, exchange, TARGET, queue_arguments={"x-queue-type": "quorum"})],
        task_default_queue=TARGET,
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"confirm_publish": True},
        worker_prefetch_multiplier=_PREFETCH,
    )
    return app


def publish(job: Job) -> Answer:
    """``apply_async(countdown=...)``: every call waits for its confirm."""
    asyncio.run(prepare(job.url, Celery()))
    task = application(job.url).signature(TASK, args=["x" * job.options["size"]])
    countdowns = cycle(round(delay.total_seconds()) for delay in random_minutes())
    task.apply_async(countdown=next(countdowns))
    sent = 0
    meter = Meter(job.pid)
    end = time.perf_counter() + job.options["seconds"]
    while time.perf_counter() < end:
        task.apply_async(countdown=next(countdowns))
        sent += 1
    return Answer(values=meter.read(sent))


def lateness(job: Job) -> Answer:
    """A worker on all cores, and senders."""
    return end_to_end.measure(
        job,
        worker=["celery", "-A", "benchmarks.suite.clients.celery_worker", "worker", "--loglevel", "warning"],
        variables={},
        sender=f"{__name__}:send",
    )


def send(job: Job) -> Answer:
    """One sender."""
    app = application(job.url)
    return end_to_end.send(job, lambda delay, due: app.signature(TASK, args=[due, _BODY]).apply_async(countdown=delay))
