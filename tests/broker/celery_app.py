"""A Celery application for a worker (``-A tests.broker.celery_app``) and for senders.

The worker finds its broker in the environment variable ``CELERY_BROKER_URL``, a setting of Celery's own.
"""

from __future__ import annotations

import time
from typing import Any, Final

import celery
from celery import signals
from kombu import entity

# Only part of kombu has type annotations.
Exchange: Any = entity.Exchange
Queue: Any = entity.Queue

TASK: Final = "run"
REPORTS: Final = "reports"
"""The queue of the worker's reports: one message when it is ready, then one per start of a task."""

WORK: Final = "work"
"""The worker's default queue."""

EXCHANGE: Final = "tasks"
ROUTING_KEY: Final = "order.created"

PLAIN: Final = "plain"
"""A queue of the worker behind a direct exchange, which Celery cannot delay messages to."""


def create(url: str | None = None) -> Any:
    """The application, for the broker at ``url``. Its first queue is a quorum queue: native delayed delivery is on."""
    quorum = {"x-queue-type": "quorum"}
    app = celery.Celery("tests", broker=url)
    app.conf.update(
        task_queues=[
            Queue(WORK, Exchange(EXCHANGE, "topic"), ROUTING_KEY, queue_arguments=quorum),
            Queue(PLAIN, Exchange(PLAIN, "direct"), PLAIN, queue_arguments=quorum),
        ],
        task_default_queue=WORK,
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"confirm_publish": True},
    )
    app.task(run, bind=True, name=TASK)
    return app


def run(self: Any, label: str, *, retries: int = 0, countdown: int = 0) -> None:
    """The task: report its start, and retry it the given number of times."""
    report(self.app, label=label, retries=self.request.retries)
    if self.request.retries < retries:
        raise self.retry(countdown=countdown)


def report(app: Any, *, label: str, retries: int) -> None:
    with app.producer_or_acquire() as producer:
        values = {"label": label, "at": time.time(), "retries": retries}
        producer.publish(values, exchange="", routing_key=REPORTS, serializer="json")


def tell_ready(sender: Any, **_: Any) -> None:
    report(sender.app, label="ready", retries=0)


# Only a process that is a worker gets this signal.
signals.worker_ready.connect(tell_ready, weak=False)

app = create()
