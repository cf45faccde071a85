"""dramatiq: actors that are sent to with a delay."""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import cycle

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from bide.bench.job import Answer, Job
from bide.bench.processor import Meter
from bide.bench.stage import TARGET, random_minutes


def publish(job: Job) -> Answer:
    """``send_with_options(delay=...)``: every call waits for its confirm."""
    broker = RabbitmqBroker(url=job.url, confirm_delivery=True)
    actor = dramatiq.actor(broker=broker, queue_name=TARGET)(_nothing)
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


def _nothing(body: str) -> None:
    """Is never called: nobody works here."""
