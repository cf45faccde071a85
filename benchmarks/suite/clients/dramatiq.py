"""dramatiq: actors called with a delay."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from itertools import cycle
from typing import Final

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from benchmarks.suite.clients import end_to_end
from benchmarks.suite.processor import Meter
from benchmarks.suite.setup import TARGET, random_minutes
from benchmarks.suite.task import Answer, Job

ACTOR: Final = "begin"
_BODY: Final = "x" * 200
_DELAY_PREFETCH: Final = 65_535
"""The most that AMQP allows. What a worker does not hold in memory it does not deliver in time."""


def publish(job: Job) -> Answer:
    """``send_with_options(delay=...)``: every call waits for its confirm."""
    broker = RabbitmqBroker(url=job.url, confirm_delivery=True)
    actor = dramatiq.actor(broker=broker, actor_name=ACTOR, queue_name=TARGET)(_nothing)
    body = "x" * job.options["size"]
    delays = cycle(delay // timedelta(milliseconds=1) for delay in random_minutes())
    actor.send_with_options(args=(body,), delay=next(delays))
    sent = 0
    meter = Meter(job.pid)
    end = time.perf_counter() + job.options["seconds"]
    while time.perf_counter() < end:
        actor.send_with_options(args=(body,), delay=next(delays))
        sent += 1
    values = meter.read(sent)
    broker.close()
    return Answer(values=values)


def lateness(job: Job) -> Answer:
    """A worker on all cores, and senders."""
    return end_to_end.measure(
        job,
        worker=["dramatiq", "benchmarks.suite.clients.dramatiq_worker", "--processes", str(os.cpu_count())],
        variables={"dramatiq_delay_queue_prefetch": str(_DELAY_PREFETCH)},
        sender=f"{__name__}:send",
    )


def send(job: Job) -> Answer:
    """One sender."""
    broker = RabbitmqBroker(url=job.url, confirm_delivery=True)
    actor = dramatiq.actor(broker=broker, actor_name=ACTOR, queue_name=TARGET)(_begin)
    return end_to_end.send(
        job, lambda delay, due: actor.send_with_options(args=(due, _BODY), delay=round(delay * 1000))
    )


def _nothing(body: str) -> None:
    """Never called: this process runs no worker."""


def _begin(due: float, body: str) -> None:
    """Is called in the worker, where it does something."""
