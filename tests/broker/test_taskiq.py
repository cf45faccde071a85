"""Delays, retries and schedules of taskiq's tasks, with its own broker and the adapter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import aio_pika
import pytest
import taskiq_aio_pika
from taskiq import Context, SmartRetryMiddleware, TaskiqDepends
from taskiq.api import run_receiver_task
from taskiq.brokers.inmemory_broker import InmemoryResultBackend
from taskiq.exceptions import SendTaskError
from taskiq_aio_pika import Exchange, Queue
from taskiq_aio_pika.exceptions import IncorrectRoutingKeyError

import bide
from bide.errors import InvalidDelayError, InvalidInputError
from bide.integrations import Delays
from bide.integrations.taskiq import AioPikaBroker, KeyedScheduleSource
from tests.broker.receiving import eventually, ready_at
from tests.relay_process import gate
from tests.support import Vhost
from tests.timeouts import TIMEOUT

MAX_LATENESS = 30.0
"""Seconds. A message on a wrong route waits for minutes, or never arrives."""

Kind = Literal["stock", "adapted"]


@dataclass
class Runs:
    """What tasks did, and when, in seconds since ``began``."""

    began: float = field(default_factory=time.time)
    _runs: asyncio.Queue[tuple[Any, float]] = field(default_factory=asyncio.Queue)

    def add(self, label: Any) -> None:
        self._runs.put_nowait((label, time.time() - self.began))

    async def next(self) -> tuple[Any, float]:
        async with asyncio.timeout(TIMEOUT):
            return await self._runs.get()

    async def many(self, count: int) -> list[tuple[Any, float]]:
        return [await self.next() for _ in range(count)]


def make_broker(url: str, kind: Kind = "adapted", **options: Any) -> Any:
    """A broker with results in memory. taskiq's own has a queue with a TTL for each message, as its manual says."""
    if kind == "stock":
        options.setdefault("delay_queue", Queue(name="delay"))
    make: Any = AioPikaBroker if kind == "adapted" else taskiq_aio_pika.AioPikaBroker
    broker = make(url, reconnect_interval=0.1, **options).with_result_backend(InmemoryResultBackend())
    retries = SmartRetryMiddleware(default_retry_count=3, default_delay=0.2, no_result_on_retry=True)
    return broker.with_middlewares(retries)


def adding(broker: Any, runs: Runs) -> Any:
    """A task that adds its label to the runs."""

    async def add(label: str) -> None:
        runs.add(label)

    return broker.register_task(add, task_name="add")


@asynccontextmanager
async def started(broker: Any) -> AsyncIterator[Callable[[], None]]:
    """The broker, and a function that starts its worker in this process."""
    broker.is_worker_process = True
    await broker.startup()
    workers: list[asyncio.Task[None]] = []

    def work() -> None:
        workers.append(asyncio.create_task(run_receiver_task(broker)))

    yield work
    for one in workers:
        one.cancel()
        with suppress(asyncio.CancelledError):
            await one
    await broker.shutdown()


@pytest.fixture(params=["stock", "adapted"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """taskiq's own broker, and the adapter."""
    kind: Kind = request.param
    return kind


# --- with and without the adapter


async def test_a_delayed_task_runs_when_it_is_due(vhost: Vhost, kind: Kind) -> None:
    """Once, with its arguments and labels, and its result can be awaited."""
    broker = make_broker(vhost.url, kind)
    runs = Runs()

    async def double_it(number: int, context: Annotated[Context, TaskiqDepends()]) -> int:
        runs.add([number, context.message.labels["size"]])
        return 2 * number

    double = broker.register_task(double_it, size="large")
    async with started(broker) as work:
        work()
        at_once = await double.kiq(1)
        delayed = await double.kicker().with_labels(delay=0.31).kiq(2)
        assert [one for one, _ in await runs.many(2)] == [[1, "large"], [2, "large"]]
        for task, result in ((at_once, 2), (delayed, 4)):
            assert (await task.wait_result(check_interval=0.02, timeout=TIMEOUT)).return_value == result


async def test_a_failed_task_is_retried_after_its_delay(vhost: Vhost, kind: Kind) -> None:
    """By taskiq's retry middleware, which counts in labels."""
    broker = make_broker(vhost.url, kind)
    runs = Runs()

    async def fail(context: Annotated[Context, TaskiqDepends()]) -> str:
        retries = int(context.message.labels.get("_retries", 0))
        runs.add(retries)
        if retries < 2:
            raise ValueError(f"failure {retries}")
        return "done"

    fail_twice = broker.register_task(fail, retry_on_error=True)
    async with started(broker) as work:
        work()
        task = await fail_twice.kiq()
        found = await runs.many(3)
        assert (await task.wait_result(check_interval=0.02, timeout=TIMEOUT)).return_value == "done"
    assert [retries for retries, _ in found] == [0, 1, 2]
    for (_, before), (_, after) in pairwise(found):
        assert 0.2 <= after - before < 0.2 + MAX_LATENESS


async def test_a_task_out_of_retries_ends_with_its_error(vhost: Vhost, kind: Kind) -> None:
    """After three attempts, the last ones delayed, and its queue is empty."""
    broker = make_broker(vhost.url, kind)
    runs = Runs()

    async def fail() -> None:
        runs.add("tried")
        raise ValueError("failed")

    failing = broker.register_task(fail, retry_on_error=True, max_retries=3)
    async with started(broker) as work:
        work()
        task = await failing.kiq()
        assert [label for label, _ in await runs.many(3)] == ["tried"] * 3
        result = await task.wait_result(check_interval=0.02, timeout=TIMEOUT)
        assert (result.is_err, str(result.error)) == (True, "failed")
        await adding(broker, runs).kiq("last")
        assert (await runs.next())[0] == "last"


async def test_a_delay_of_zero_is_no_delay(vhost: Vhost, kind: Kind) -> None:
    """Also of a retry: the task goes straight to its queue."""
    broker = make_broker(vhost.url, kind)
    runs = Runs()

    async def fail_once(context: Annotated[Context, TaskiqDepends()]) -> str:
        runs.add(context.message.labels.get("_retries", 0))
        if not context.message.labels.get("_retries"):
            raise ValueError("failed")
        return "done"

    failing = broker.register_task(fail_once, retry_on_error=True)
    async with started(broker) as work:
        work()
        task = await failing.kicker().with_labels(delay=0).kiq()
        assert [int(label) for label, _ in await runs.many(2)] == [0, 1]
        assert (await task.wait_result(check_interval=0.02, timeout=TIMEOUT)).return_value == "done"


@pytest.mark.parametrize(("sender", "receiver"), [("stock", "adapted"), ("adapted", "stock")])
async def test_workers_run_what_the_other_broker_delayed(vhost: Vhost, sender: Kind, receiver: Kind) -> None:
    """So workers can be moved one by one, and back, with tasks waiting."""
    runs = Runs()
    # The stock queue of delayed tasks has to stay until it is empty.
    sending, receiving = (make_broker(vhost.url, kind, delay_queue=Queue(name="delay")) for kind in (sender, receiver))
    tasks = [adding(broker, runs) for broker in (sending, receiving)]
    async with started(sending):
        await tasks[0].kicker().with_labels(delay=0.3).kiq("delayed")
    async with started(receiving) as work:
        work()
        label, at = await runs.next()
    assert label == "delayed"
    assert at >= 0.3


# --- the adapter alone


@pytest.mark.parametrize("exchange_type", ["topic", "direct"])
async def test_a_short_delay_does_not_wait_for_a_longer_one(vhost: Vhost, exchange_type: str) -> None:
    """taskiq's own queue is held up by its first message. Here nothing waits unacknowledged, and 10 ms are 10 ms."""
    runs = Runs()
    exchange = Exchange(name="tasks", type=aio_pika.ExchangeType(exchange_type))
    queues = [Queue(name="a"), Queue(name="b", routing_key="key.b")]
    broker = make_broker(vhost.url, exchange=exchange, task_queues=queues)
    task = adding(broker, runs)

    async def send(label: str, delay: float, queue: str) -> None:
        await task.kicker().with_labels(delay=delay, queue_name=queue).kiq(label)

    async with started(broker) as work:
        runs.began = time.time()
        for label, delay, queue in (
            *(("long", 3600.0, "a"), ("a", 0.6, "a"), ("b", 0.3, "key.b"), ("soon", 0.01, "a")),
            *(("now", 0.0, "key.b"), ("past", -1.0, "a")),
        ):
            await send(label, delay, queue)
        work()
        found = dict(await runs.many(5))
        assert sorted(found) == ["a", "b", "now", "past", "soon"]
        for label, least in (("a", 0.6), ("b", 0.3), ("soon", 0.01)):
            assert least <= found[label] < least + MAX_LATENESS

        async def waits() -> bool:
            return await ready_at(vhost.url, "bide.v1.h1") == 1

        await eventually(waits)
        if exchange_type == "direct":
            with pytest.raises(SendTaskError) as caught:
                await send("nowhere", 1, "c")
            assert isinstance(caught.value.__cause__, IncorrectRoutingKeyError)


async def test_a_delayed_task_arrives_as_taskiq_sends_it(vhost: Vhost, release: tuple[int, ...]) -> None:
    broker = make_broker(vhost.url)
    task = adding(broker, Runs())
    kicker = task.kicker().with_task_id("id").with_labels(priority=3, other="x")
    async with started(broker), await aio_pika.connect(vhost.url) as connection:
        await kicker.kiq("label")
        await kicker.with_labels(delay=0.01).kiq("label")
        channel = await connection.channel()
        queue = await channel.get_queue("taskiq")
        async with queue.iterator(timeout=TIMEOUT) as messages:
            plain, late = [await anext(messages) for _ in range(2)]
            for one in (plain, late):
                await one.ack()
    restored = Delays().restore("", "", {"headers": late.headers})
    assert restored.values["headers"].pop("delay") == "0.01"
    assert restored.values["headers"] == plain.headers
    assert (late.delivery_mode, late.routing_key) == (plain.delivery_mode, plain.routing_key)
    # From 4.0 on and below 4.3, a priority would hold back other messages that wait.
    assert late.priority == (0 if (4, 0) <= release < (4, 3) else 3)


async def test_delays_go_on_after_a_lost_connection(vhost: Vhost) -> None:
    """And after the infrastructure was deleted."""
    runs = Runs()
    broker = make_broker(vhost.url)
    task = adding(broker, runs)
    async with started(broker) as work:
        work()
        kicker = task.kicker().with_labels(delay=0.01)
        await kicker.kiq("first")
        connection = broker.write_conn
        assert connection is not None
        assert connection.transport is not None
        await connection.transport.connection.close()
        await kicker.kiq("second")
        async with connection.channel() as channel:
            for exchange in ("bide.v1.in.c", "bide.v1.c"):
                await channel.exchange_delete(exchange)
        await kicker.kiq("third")
        assert sorted(label for label, _ in await runs.many(3)) == ["first", "second", "third"]


async def test_wrong_delays_are_refused(vhost: Vhost) -> None:
    broker = make_broker(vhost.url)
    task = adding(broker, Runs())
    async with started(broker):
        for delay in ("soon", 1e9, 1e300):
            with pytest.raises(SendTaskError) as caught:
                await task.kicker().with_labels(delay=delay).kiq("label")
            assert isinstance(caught.value.__cause__, InvalidDelayError)


# --- schedules


async def test_a_schedule_can_be_cancelled_while_it_waits(vhost: Vhost, tmp_path: Path) -> None:
    """By its id, which is the key; no scheduler runs."""
    runs = Runs()
    broker = make_broker(vhost.url)
    task = adding(broker, runs)
    source = KeyedScheduleSource(broker, bide.connect(vhost.url))

    async def schedule(key: str, label: str, seconds: float) -> Any:
        due = datetime.now(UTC) + timedelta(seconds=seconds)
        return await task.kicker().with_schedule_id(key).with_labels(a="b").schedule_by_time(source, due, label)

    async with started(broker) as work:
        work()
        created = await schedule("one", "cancelled", 3600)
        await schedule("two", "replaced", 3600)
        await schedule("two", "runs", 0.1)
        with gate(vhost, tmp_path):
            await created.unschedule()
            assert (await source.cancel("one")).outcome is bide.ScheduleOutcome.NOT_FOUND
            assert (await runs.next())[0] == "runs"
            assert (await source.cancel("two")).outcome is bide.ScheduleOutcome.TOO_LATE
        assert await source.get_schedules() == []
        with pytest.raises(InvalidInputError, match="recurs"):
            await task.kicker().schedule_by_cron(source, "* * * * *", "label")
    await source.shutdown()
