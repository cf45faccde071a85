"""A client of the schedule log that appends records itself, and gates at work."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import bide
from bide.amqp.channel import Channel
from bide.amqp.delivery import Delivery
from bide.gate.log_reader import LogReader, LogRecord
from bide.patterns.rpc import DIRECT_REPLY_TO
from bide.schedules.answers import decode_answer
from bide.schedules.encoding import encode
from bide.schedules.entries import ScheduleAnswer
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import PARTITIONS, ScheduleNames, partition_of
from bide.schedules.questions import QuestionAnswer, ScheduleQuestion, decode_question_answer, encode_question
from bide.schedules.records import Action, AddSchedule, ChangeSchedule, Operation, ScheduleFilter
from bide.schedules.recurrence import Recurrence
from bide.schedules.requests import RequestId
from tests.broker.receiving import connected, eventually, has_consumer
from tests.broker.workers import at_work
from tests.timeouts import TIMEOUT

NAMES = ScheduleNames()
_REPEAT = 2.0


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class LogClient:
    """Appends operations and questions, and gets the answers. Open it with :func:`log_client`."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.sent: list[RequestId] = []
        self._sessions = [secrets.token_hex(4) for _ in range(PARTITIONS)]
        self._counts = [0] * PARTITIONS
        self._answers: dict[str, asyncio.Future[Delivery]] = {}

    async def open(self) -> None:
        await self.channel.consume(DIRECT_REPLY_TO, on_message=self._take, on_end=lambda _: None, no_ack=True)

    def _take(self, delivery: Delivery) -> None:
        future = self._answers.get(delivery.values["correlation_id"])
        if future is not None and not future.done():
            future.set_result(delivery)

    def next_request(self, partition: int) -> RequestId:
        """The id of a request; each partition has a session, so that its numbers have no gaps."""
        self._counts[partition] += 1
        return RequestId(self._sessions[partition], self._counts[partition])

    def add_record(
        self,
        key: str,
        to: str,
        delay_ms: int = 0,
        *,
        body: bytes = b"",
        properties: dict[str, Any] | None = None,
        routing_key: str = "",
        every: Recurrence | None = None,
        **conditions: Any,
    ) -> AddSchedule:
        due = now_ms() + delay_ms
        request = self.next_request(partition_of(key))
        return AddSchedule(
            request=request,
            key=key,
            target=to,
            routing_key=routing_key,
            nominal=due,
            due=due,
            recurrence=None if every is None else every.spec(),
            message=ScheduledMessage.of(properties or {}, body),
            **conditions,
        )

    async def add(self, key: str, to: str, delay_ms: int = 0, **more: Any) -> AddSchedule:
        """Schedule a message; the append is confirmed."""
        record = self.add_record(key, to, delay_ms, **more)
        await self.append(record)
        return record

    async def append(self, record: Operation, partition: int | None = None) -> None:
        if partition is None:
            assert record.key is not None
            partition = partition_of(record.key)
        values = {"delivery_mode": 2, "reply_to": DIRECT_REPLY_TO}
        await self.channel.publish(
            exchange=NAMES.operations, routing_key=str(partition), values=values, body=encode(record)
        )

    async def call(self, record: Operation, partition: int | None = None) -> ScheduleAnswer:
        """Append an operation and wait for its answer; append it again each 2 s, as clients do."""
        future = self._answers[str(record.request)] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(TIMEOUT):
            while not future.done():
                await self.append(record, partition)
                await asyncio.wait({future}, timeout=_REPEAT)
        return decode_answer(future.result().body)

    async def change(self, action: Action, key: str, **more: Any) -> ScheduleAnswer:
        return await self.call(
            ChangeSchedule(request=self.next_request(partition_of(key)), action=action, key=key, **more)
        )

    async def change_all(self, action: Action, partition: int, chosen: ScheduleFilter, **more: Any) -> ScheduleAnswer:
        record = ChangeSchedule(request=self.next_request(partition), action=action, filter=chosen, **more)
        return await self.call(record, partition)

    async def ask(self, question: ScheduleQuestion, partition: int) -> QuestionAnswer:
        asked = secrets.token_hex(8)
        future = self._answers[asked] = asyncio.get_running_loop().create_future()
        values = {"reply_to": DIRECT_REPLY_TO, "correlation_id": asked}
        await self.channel.publish(
            exchange=NAMES.operations,
            routing_key=f"queries.{partition}",
            values=values,
            body=encode_question(question),
        )
        async with asyncio.timeout(TIMEOUT):
            return decode_question_answer((await future).body)


@asynccontextmanager
async def log_client(url: str) -> AsyncIterator[LogClient]:
    async with connected(url) as connection:
        client = LogClient(await connection.channel(confirms=True))
        await client.open()
        yield client


async def read_log(url: str, partition: int) -> list[LogRecord]:
    """All records of a partition up to now."""
    end = secrets.token_hex(8).encode()
    found = list[LogRecord]()
    async with connected(url) as connection:
        channel = await connection.channel(confirms=True)
        await channel.publish(
            exchange=NAMES.operations, routing_key=str(partition), values={"delivery_mode": 2}, body=end
        )
        reader = await LogReader.open(connection, NAMES.log(partition), "first")
        async with asyncio.timeout(TIMEOUT):
            while True:
                for one in await reader.batch():
                    if one.body == end:
                        return found
                    found.append(one)


@asynccontextmanager
async def gating(url: str, state: Path, **settings: Any) -> AsyncIterator[bide.Gate]:
    """A gate that has begun to read the log; that it fails is an error. See :func:`wait_for_leaders`."""
    gate = bide.Gate(url, **{"allow": ["*"], "state": state, **settings})
    async with at_work(gate):
        yield gate


async def wait_for_leaders(url: str) -> None:
    """Wait until gates answer questions on all partitions.

    A gate that reads the log leads a moment later, and consumes the questions after that. Without a consumer,
    ``verify`` warns, and so does a client that has waited 2 s for an answer.
    """
    async with connected(url) as connection:
        for number in range(PARTITIONS):
            await eventually(partial(has_consumer, connection, NAMES.queries(number)))
