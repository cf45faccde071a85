"""Endpoints on the in-memory broker: hours of retries in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import pytest

import bide
import bide.testing
from bide.endpoint.event import Event
from tests.timeouts import MAX_LATENESS, TIMEOUT

RELEASES = [(3, 10), (4, 0), (4, 3)]


@asynccontextmanager
async def running(app: bide.Endpoint, client: bide.Client, b: bide.testing.MemoryBroker) -> AsyncIterator[None]:
    task = asyncio.create_task(app.run(client))
    await b.settled()
    try:
        yield
    finally:
        app.stop()
        await asyncio.wait_for(task, TIMEOUT)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("release", RELEASES)
async def test_retries_run_at_their_due_times(release: tuple[int, ...]) -> None:
    times: list[datetime] = []
    app = bide.Endpoint("orders", retry=bide.Retry(immediate=1, delays=["5s", "1h", "2d"], jitter=0))
    async with bide.testing.broker(release=release) as b, b.connect() as client:

        @app.handler
        async def fail(message: bide.Message) -> None:
            times.append(b.clock.now())
            raise ConnectionError("no")

        async with running(app, client, b):
            start = b.clock.now()
            await client.publish("x", to="orders", delay="10m")
            await b.run("3d")
            error = await anext(client.consume("error"))
            assert error.body == b"x"
            await error.ack()
    after = [time - start for time in times]
    first = timedelta(minutes=10)
    second, third = first + timedelta(seconds=5), first + timedelta(hours=1, seconds=5)
    fourth = third + timedelta(days=2)
    assert after == [one for due in (first, second, third, fourth) for one in (due, due)]


class Kinds(bide.Observer):
    """What happened, and when."""

    def __init__(self, b: bide.testing.MemoryBroker) -> None:
        self._clock = b.clock
        self._start = b.clock.now()
        self.seen: list[tuple[str, str | None, timedelta]] = []

    async def happened(self, event: Event) -> None:
        self.seen.append((event.kind, event.message_id, self._clock.now() - self._start))


@pytest.mark.parametrize("redelivered", [False, True])
async def test_an_expiration_counts_from_the_due_time(redelivered: bool) -> None:
    """Also where a process died with the message, and a copy counts the deliveries of a queue that does not."""
    async with bide.testing.broker() as b, b.connect() as client:
        kinds = Kinds(b)
        app = bide.Endpoint("orders", retry=bide.Retry(immediate=0, delays=["40m"] * 5, jitter=0), observers=[kinds])

        @app.handler
        async def fail(message: bide.Message) -> None:
            raise ConnectionError("no")

        await client.declare(bide.Topology(queues=[bide.Queue("orders")]))
        await client.publish("x", to="orders", message_id="one", delay="2h", expiration="1h")
        await b.run("2h")
        if redelivered:
            async with client.consume("orders") as messages:
                await anext(messages)
        async with running(app, client, b):
            await b.run("1d")
    minutes = [(kind, timedelta(minutes=after)) for kind, after in (("retried", 120), ("expired", 160))]
    assert [(kind, after) for kind, _, after in kinds.seen] == minutes


async def test_a_counting_copy_that_is_too_late_is_not_handled() -> None:
    async with bide.testing.broker() as b, b.connect() as client:
        kinds = Kinds(b)
        app = bide.Endpoint("orders", concurrency=1, prefetch=1, observers=[kinds])
        go_on = asyncio.Event()

        @app.handler
        async def handle(message: bide.Message) -> None:
            if message.message_id == "slow":
                await go_on.wait()

        await client.declare(bide.Topology(queues=[bide.Queue("orders")]))
        await client.publish("x", to="orders", message_id="one", delay="2h", expiration="1h")
        await b.run("2h")
        async with client.consume("orders") as messages:
            await anext(messages)
        await client.publish("x", to="orders", message_id="slow")
        async with running(app, client, b):
            # The copy of the first is behind the other one.
            await b.run("2h")
            go_on.set()
            await b.settled()
    assert [(kind, message_id) for kind, message_id, _ in kinds.seen] == [("processed", "slow"), ("expired", "one")]


async def test_handlers_in_threads_get_every_message() -> None:
    seen: list[bytes] = []
    app = bide.Endpoint("orders")
    async with bide.testing.broker() as b, b.connect() as client:

        @app.handler
        def take(message: bide.Message) -> None:
            seen.append(message.body)

        async with running(app, client, b):
            for number in range(5):
                await client.publish(str(number), to="orders", delay=f"{number + 1}h")
            await b.run("3h")
            assert seen == [b"0", b"1", b"2"]
            await b.run("2h")
    assert seen == [b"0", b"1", b"2", b"3", b"4"]


async def test_settled_waits_only_once_for_a_message_that_is_never_settled() -> None:
    async with bide.testing.broker() as b, b.connect() as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        await client.publish("x", to="q")
        async with client.consume("q") as messages:
            await anext(messages)
            loop = asyncio.get_running_loop()
            await b.settled(timeout="50ms")
            before = loop.time()
            await b.settled(timeout="2m")
            assert loop.time() - before < MAX_LATENESS.total_seconds()


async def test_a_broker_in_memory_has_no_management_api(caplog: pytest.LogCaptureFixture) -> None:
    app = bide.Endpoint("orders")
    caplog.set_level(logging.WARNING)
    async with bide.testing.broker() as b, b.connect() as client:

        @app.handler
        async def take(message: bide.Message) -> None:
            """Nothing to do."""

        async with running(app, client, b):
            assert "the in-memory broker has no management API" in caplog.text


async def test_a_missing_audit_queue_does_not_hold_a_handled_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    handled: list[bytes] = []
    app = bide.Endpoint("orders", audit_queue="audit", retry=bide.Retry(delays=()))
    async with bide.testing.broker() as b, b.connect(infrastructure=bide.NServiceBus(levels=3)) as client:

        @app.handler
        async def handle(message: bide.Message) -> None:
            handled.append(message.body)

        async with running(app, client, b):
            await client.publish(b"one", to="orders")
            await b.settled()
            assert await client.message_count("audit") == 1
            b.host().delete_queue("audit", owner=None)
            await client.publish(b"two", to="orders")
            await b.run("1m")
            b.host().delete_exchange("audit")
            await client.publish(b"three", to="orders")
            await b.run("1m")
        assert await client.message_count("orders") == 0
    assert handled == [b"one", b"two", b"three"]
    assert [one.levelno for one in caplog.records if "cannot audit" in one.message] == [logging.ERROR] * 2


async def test_the_log_names_the_class_of_an_exception(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bide.endpoint")
    app = bide.Endpoint("orders", retry=bide.Retry(immediate=1, delays=["1s"], jitter=0))

    @app.handler
    async def fail(message: bide.Message) -> None:
        if message.message_id == "silent":
            raise ConnectionError
        message.json()["kind"]

    async with bide.testing.broker() as b, b.connect() as client, running(app, client, b):
        for message_id in ("one", "silent"):
            await client.publish("{}", to="orders", message_id=message_id)
            await b.run("1m")
    expected = [
        f"orders: {message_id} failed{what}{error}"
        for message_id, error in (("one", ": KeyError: 'kind'"), ("silent", ": ConnectionError"))
        for what in (" (attempt 1)", ", next attempt in 0:00:01", " (attempt 1)", " and was parked in error")
    ]
    assert [one for one in caplog.messages if " failed" in one] == expected
