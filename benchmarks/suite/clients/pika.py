"""pika: its blocking connection, and its asynchronous one."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import pika

from benchmarks.suite.confirmed import Confirmed
from benchmarks.suite.errors import BenchmarkError
from benchmarks.suite.processor import Meter
from benchmarks.suite.setup import TARGET, WINDOW, Plain, PlainMessages, fill, minutes_clock, prepare
from benchmarks.suite.task import Answer, Job

_TURN: Final = 100


def publish_blocking(job: Job) -> Answer:
    """Publish, and wait for each confirm."""
    messages = PlainMessages(asyncio.run(prepare(job.url, minutes_clock())))
    body = bytes(job.options["size"])
    connection = pika.BlockingConnection(pika.URLParameters(job.url))
    channel = connection.channel()
    channel.confirm_delivery()
    sent = 0
    meter = Meter(job.pid)
    end = time.perf_counter() + job.options["seconds"]
    while time.perf_counter() < end:
        one = messages.next()
        channel.basic_publish(one.exchange, one.routing_key, body, _properties(one), mandatory=True)
        sent += 1
    values = meter.read(sent)
    connection.close()
    return Answer(values=values)


def _properties(one: Plain) -> Any:
    return pika.BasicProperties(headers=one.headers, message_id=one.message_id, delivery_mode=2)


class _Pipeline:
    """Publishes while confirms come in."""

    def __init__(self, job: Job, messages: PlainMessages) -> None:
        self._job = job
        self._messages = messages
        self._body = bytes(job.options["size"])
        self._confirmed = Confirmed()
        self._sent = 0
        self._end = 0.0
        self._meter: Meter | None = None
        self.answer: Answer | None = None
        self._channel: Any = None
        self.connection: Any = pika.SelectConnection(
            pika.URLParameters(job.url),
            on_open_callback=self._opened,
            on_close_callback=lambda connection, reason: connection.ioloop.stop(),
        )

    def _opened(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._ready)

    def _ready(self, channel: Any) -> None:
        self._channel = channel
        channel.confirm_delivery(self._on_confirm, callback=lambda _: self._start())

    def _start(self) -> None:
        self._meter = Meter(self._job.pid)
        self._end = time.perf_counter() + self._job.options["seconds"]
        self._fill()

    def _on_confirm(self, frame: Any) -> None:
        if isinstance(frame.method, pika.spec.Basic.Nack):
            raise BenchmarkError("the broker refused a message")
        self._confirmed.add(frame.method.delivery_tag, multiple=frame.method.multiple)
        self._fill()

    def _fill(self) -> None:
        ended = time.perf_counter() >= self._end
        # A whole turn, so that a confirm of one message does not send one more alone.
        while not ended and self._sent - self._confirmed.count <= WINDOW - _TURN:
            for _ in range(_TURN):
                one = self._messages.next()
                self._channel.basic_publish(one.exchange, one.routing_key, self._body, _properties(one), mandatory=True)
            self._sent += _TURN
            ended = time.perf_counter() >= self._end
        if ended and self.answer is None and self._confirmed.count == self._sent:
            assert self._meter is not None
            self.answer = Answer(values=self._meter.read(self._sent))
            self.connection.close()


def publish_pipelined(job: Job) -> Answer:
    """Publish over a ``SelectConnection``, confirms coming in meanwhile."""
    pipeline = _Pipeline(job, PlainMessages(asyncio.run(prepare(job.url, minutes_clock()))))
    pipeline.connection.ioloop.start()
    if pipeline.answer is None:
        raise BenchmarkError("pika's connection ended early")
    return pipeline.answer


def consume(job: Job) -> Answer:
    """Receive with a callback over a blocking connection, and acknowledge message by message."""
    asyncio.run(fill(job))
    wanted = job.options["messages"]
    connection = pika.BlockingConnection(pika.URLParameters(job.url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=job.options["prefetch"])
    received = 0

    def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        nonlocal received
        channel.basic_ack(method.delivery_tag)
        received += 1
        if received == wanted:
            channel.stop_consuming()

    meter = Meter(job.pid)
    channel.basic_consume(TARGET, on_message)
    channel.start_consuming()
    values = meter.read(received)
    connection.close()
    return Answer(values=values)
