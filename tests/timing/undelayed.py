"""The baseline: latency of undelayed messages through another client."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Final, Self

import pika

QUEUE: Final = "undelayed"
_INTERVAL: Final = 0.02


class UndelayedMessages:
    """Publishes to a quorum queue and receives from it, in a thread of its own, until the block ends.

    The client is pika, so that what slows bide down does not lengthen the yardstick. Messages are sent at an even rate,
    whether or not earlier ones have arrived, and their time counts from when each was to be sent. A pause of the
    machine is then part of as many of them as of the delayed messages.

    Attributes:
        milliseconds: from the time that each message was to be sent to its receipt.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="undelayed messages")
        self._error: Exception | None = None
        self.milliseconds: list[float] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
                self._send_and_receive(connection)
        except Exception as error:  # noqa: BLE001 (raised where the block ends)
            self._error = error

    def _send_and_receive(self, connection: Any) -> None:
        scheduled: list[float] = []

        def receive(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            self.milliseconds.append((time.monotonic() - scheduled[int(body)]) * 1_000)

        channel = connection.channel()
        channel.queue_delete(QUEUE)  # with what an earlier round has left
        channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        channel.basic_consume(QUEUE, receive, auto_ack=True)
        start = time.monotonic()
        while not self._ends.is_set():
            now = time.monotonic()
            moment = start + len(scheduled) * _INTERVAL
            if now < moment:
                connection.process_data_events(time_limit=moment - now)
            else:
                channel.basic_publish("", QUEUE, str(len(scheduled)), pika.BasicProperties(delivery_mode=2))
                scheduled.append(moment)
