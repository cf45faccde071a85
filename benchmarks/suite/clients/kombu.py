"""kombu with py-amqp: each publish waits for its confirm."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kombu import connection as kombu_connection

from benchmarks.suite.processor import Meter
from benchmarks.suite.setup import TARGET, PlainMessages, minutes_clock, prepare
from benchmarks.suite.task import Answer, Job

# Only part of kombu has type annotations.
Connection: Any = kombu_connection.Connection


def publish(job: Job) -> Answer:
    """Publish, and wait for each confirm."""
    messages = PlainMessages(asyncio.run(prepare(job.url, minutes_clock())))
    body = bytes(job.options["size"])
    with Connection(job.url, transport_options={"confirm_publish": True}) as connection:
        producer = connection.Producer()
        producer.publish(b"", exchange="", routing_key=TARGET)
        sent = 0
        meter = Meter(job.pid)
        end = time.perf_counter() + job.options["seconds"]
        while time.perf_counter() < end:
            one = messages.next()
            producer.publish(
                body,
                exchange=one.exchange,
                routing_key=one.routing_key,
                headers=one.headers,
                message_id=one.message_id,
                content_type="application/octet-stream",
                content_encoding="binary",
                delivery_mode=2,
                mandatory=True,
            )
            sent += 1
        return Answer(values=meter.read(sent))
