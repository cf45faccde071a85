"""Endpoints that lose their connection, error queue or own queue."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import bide
from bide.amqp.connection import Connection
from bide.endpoint import Event
from bide.error_queues.undeliverable import resend
from bide.errors import ConsumerCancelledError
from bide.topology import Queue
from tests.broker.endpoints import Recorder, running
from tests.broker.receiving import consuming_connection_of, eventually, ready_at, receive
from tests.faults.conftest import CLOCK
from tests.faults.cutting import Proxy
from tests.support import Vhost
from tests.timeouts import TIMEOUT

QUEUE, ERROR = "orders", "orders.error"


class Cutting(Recorder):
    """Breaks the connections when a successor was confirmed and its original is not yet acknowledged.

    The endpoint reports the event at this moment.

    Attributes:
        left: number of times.
        handled: counted by the handler, by id and delayed retries.
        remembered: ids of messages that come back now, of which no other delivery was on its way.
    """

    def __init__(self, proxy: Proxy, kind: str, times: int) -> None:
        super().__init__()
        self._proxy = proxy
        self._kind = kind
        self._cut: Connection | None = None
        self._noticed_at = datetime.min.replace(tzinfo=UTC)
        self.left = times
        self.handled: Counter[tuple[str | None, int]] = Counter()
        self.remembered: set[str | None] = set()

    async def started(self, client: bide.Client) -> None:
        await super().started(client)
        self._client = client

    async def happened(self, event: Event) -> None:
        await super().happened(event)
        connection = self._client._consuming_connection._connection
        # Not the one that was cut a moment ago, for another message.
        if event.kind != self._kind or not self.left or connection is None or connection is self._cut:
            return
        if self.handled[event.message_id, 0] == 1 and event.delivered_at > self._noticed_at:
            self.remembered.add(event.message_id)
        self.left -= 1
        self._cut, self._noticed_at = connection, datetime.max.replace(tzinfo=UTC)
        self._proxy.cut()
        # The acknowledgement must find the connection gone.
        await noticed(connection)
        self._noticed_at = self._client.now()


async def noticed(connection: Connection) -> None:
    """Wait until the client has noticed a lost connection."""

    async def is_gone() -> bool:
        return not connection.is_open

    await eventually(is_gone, step=0.001)


@pytest.fixture
async def cutting(vhost: Vhost, quiet: None) -> Any:
    """A cutting proxy before a virtual host of its own."""
    async with Proxy(vhost.url) as proxy:
        yield proxy


def endpoint(recorder: Recorder, vhost: Vhost, **options: Any) -> bide.Endpoint:
    return bide.Endpoint(
        QUEUE,
        error_queue=ERROR,
        observers=[recorder],
        management_url=vhost.broker.management_url,
        # Everything fails here, and nothing should wait for that.
        slow_down_after=None,
        **options,
    )


async def emptied(vhost: Vhost, queue: str) -> Counter[str | None]:
    """The ids of all messages of a queue without other consumers."""
    async with bide.connect(vhost.url) as client:
        number = await ready_at(vhost.url, queue)
        return Counter(one.message_id for one in await receive(client, queue, number)) if number else Counter()


@pytest.mark.parametrize("kind", ["retried", "parked"])
async def test_a_cut_between_confirm_and_ack_does_not_repeat_the_handler(
    cutting: Proxy, vhost: Vhost, kind: str
) -> None:
    """The successor is there and the original comes back: it is acknowledged by the process that remembers it."""
    recorder = Cutting(cutting, kind, times=3)
    delays = ["1s"] if kind == "retried" else []
    app = endpoint(recorder, vhost, retry=bide.Retry(immediate=0, delays=delays), concurrency=5)

    @app.handler
    async def fail(message: bide.Message) -> None:
        recorder.handled[message.message_id, message.history.retries] += 1
        raise ValueError("never")

    ids = {f"m{number}" for number in range(20)}
    async with bide.connect(cutting.url, infrastructure=CLOCK) as client:
        async with bide.connect(vhost.url) as sender, running(app, client, recorder):
            await asyncio.gather(*(sender.publish(b"x", to=QUEUE, message_id=one) for one in ids))

            async def all_parked() -> bool:
                return {one.message_id for one in recorder.events if one.kind == "parked"} == ids

            await eventually(all_parked)
        assert recorder.left == 0
    # At the first cut nothing can have come back.
    assert recorder.remembered
    assert {recorder.handled[one, 0] for one in recorder.remembered} == {1}
    parked = await emptied(vhost, ERROR)
    assert set(parked) == ids
    # A cut takes confirms that are under way with it, so that a copy is sent again, and gives the original to another
    # handler before that is done.
    assert max(parked.values()) <= 1 + 2 * 3
    assert await emptied(vhost, QUEUE) == Counter()


async def test_parking_waits_for_a_full_error_queue(vhost: Vhost, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    app = endpoint(recorder, vhost, retry=bide.Retry(immediate=0, delays=[]), concurrency=2)
    ids = [f"m{number}" for number in range(6)]

    @app.handler
    async def fail(message: bide.Message) -> None:
        raise ValueError("never")

    async with bide.connect(vhost.url, infrastructure=CLOCK) as client:
        full = Queue(ERROR, arguments={"x-queue-type": "quorum", "x-max-length": 2, "x-overflow": "reject-publish"})
        await client.declare(bide.Topology(queues=[full]))
        with caplog.at_level(logging.ERROR, "bide"):
            async with running(app, client, recorder):
                for one in ids:
                    await client.publish(b"x", to=QUEUE, message_id=one)

                async def refused() -> bool:
                    return any("cannot forward" in one.getMessage() for one in caplog.records)

                await eventually(refused)
                # Quorum queues take a few more than their limit.
                assert recorder.kinds().count("parked") < len(ids)
                found: Counter[str | None] = Counter()
                while not set(found) >= set(ids):
                    found.update(one.message_id for one in await receive(client, ERROR, 1))
                await recorder.until("parked", count=len(ids))
    assert set(found) == set(ids)
    assert max(found.values()) == 1


@pytest.mark.parametrize("idle", [True, False])
async def test_a_queue_that_is_deleted_under_an_endpoint_is_an_error(vhost: Vhost, idle: bool) -> None:
    """Running handlers finish. Their retries go to the queue of that name, if it exists again by then."""
    recorder, inside, deleted = Recorder(), asyncio.Event(), asyncio.Event()
    retry = bide.Retry(immediate=0, delays=["3s"])
    app = endpoint(recorder, vhost, retry=retry, drain=timedelta(seconds=TIMEOUT), prefetch=30)

    @app.handler
    async def fail_at_first(message: bide.Message) -> None:
        if not message.history.retries:
            inside.set()
            await deleted.wait()
            raise ValueError("not yet")

    async with bide.connect(vhost.url, infrastructure=CLOCK) as client:
        work = asyncio.create_task(app.run(client))
        await asyncio.wait_for(recorder.ready.wait(), TIMEOUT)
        if not idle:
            await client.publish(b"x", to=QUEUE)
            await asyncio.wait_for(inside.wait(), TIMEOUT)
        # Until the first message comes, it fetches one alone.
        await consumed(vhost, work, prefetch=1 if idle else 30)
        await client.destroy(bide.Topology(queues=[bide.Queue(QUEUE)]), force=True)
        deleted.set()
        with pytest.raises(ConsumerCancelledError, match=QUEUE):
            await asyncio.wait_for(work, TIMEOUT)
    assert recorder.kinds() == ([] if idle else ["retried"])
    if not idle:
        recorder.ready.clear()
        retried = recorder.events[0]
        assert retried.delay is not None
        async with bide.connect(vhost.url, infrastructure=CLOCK) as client, running(app, client, recorder):
            is_late = client.now() >= retried.ended_at + retried.delay
            processed = asyncio.create_task(recorder.until("processed"))
            while is_late and not processed.done():
                # The machine is slow: what was due before the queue was back is set aside.
                await resend(client, allow=[QUEUE])
                await asyncio.sleep(0.1)  # before the next attempt
            await processed
        assert recorder.kinds() == ["retried", "processed"]


async def consumed(vhost: Vhost, work: asyncio.Task[None], *, prefetch: int) -> None:
    """Wait until the queue has such a consumer; an endpoint that has ended raises its error."""
    command = ("list_consumers", "-p", vhost.name, "--no-table-headers", "queue_name", "prefetch_count")

    async def has_happened() -> bool:
        if work.done():
            await work
        # In a thread: the endpoint is connecting in this event loop, and on a loaded machine rabbitmqctl can take
        # longer than the ten seconds that it has for that.
        reply = await asyncio.to_thread(vhost.broker.rabbitmqctl, *command)
        return f"{QUEUE}\t{prefetch}" in reply.splitlines()

    await eventually(has_happened)


async def test_a_cut_while_handlers_run_repeats_only_their_messages(cutting: Proxy, vhost: Vhost) -> None:
    recorder, started, free = Recorder(), asyncio.Event(), asyncio.Event()
    app = endpoint(recorder, vhost, retry=bide.Retry(immediate=0, delays=[]), concurrency=5)
    handled: Counter[str | None] = Counter()

    @app.handler
    async def wait(message: bide.Message) -> None:
        handled[message.message_id] += 1
        if len(handled) == 5:
            started.set()
        await free.wait()

    async with (
        bide.connect(vhost.url) as sender,
        bide.connect(cutting.url, infrastructure=CLOCK) as client,
        running(app, client, recorder),
    ):
        for number in range(20):
            await sender.publish(b"x", to=QUEUE, message_id=f"m{number}")
        await asyncio.wait_for(started.wait(), TIMEOUT)
        connection = await consuming_connection_of(client)
        cutting.cut()
        # The handlers end on a connection that is gone: their messages were handled, and come back.
        await noticed(connection)
        free.set()

        await recorder.until("processed", count=20)
    # What was handled and could not be acknowledged is remembered by its id, and not handled again.
    assert set(handled.values()) == {1}
    assert recorder.kinds() == ["processed"] * 20
    assert await emptied(vhost, QUEUE) == Counter()


async def test_a_copy_is_sent_when_the_broker_is_back(cutting: Proxy, vhost: Vhost) -> None:
    recorder = Recorder()
    app = endpoint(recorder, vhost, retry=bide.Retry(immediate=0, delays=[]))

    @app.handler
    async def fail(message: bide.Message) -> None:
        # From now on there is no broker, and the copy for the error queue waits for one.
        if not cutting.cuts:
            cutting.refusing = True
            cutting.cut()
        raise ValueError("never")

    async with (
        bide.connect(vhost.url) as sender,
        bide.connect(cutting.url, infrastructure=CLOCK) as client,
        running(app, client, recorder),
    ):
        await sender.publish(b"x", to=QUEUE, message_id="one")

        async def cut() -> bool:
            return cutting.cuts > 0

        await eventually(cut)
        assert recorder.events == []
        cutting.refusing = False
        await recorder.until("parked")
    # The cut gave the original back too: by the time of the stop it is parked a second time, acknowledged, or waits.
    assert set(await emptied(vhost, ERROR)) == {"one"}
