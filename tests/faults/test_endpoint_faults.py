"""Endpoints whose connection, error queue or own queue goes away under them: nothing is lost, and nothing hangs."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest

import bide
from bide.endpoint import Event
from bide.errors import ConsumerCancelledError, TargetNotFoundError
from bide.topology import Queue
from tests.broker.endpoints import Recorder, running
from tests.broker.receiving import eventually, ready, receive
from tests.faults.conftest import CLOCK
from tests.faults.cutting import Proxy
from tests.support import Vhost

QUEUE, ERROR = "orders", "orders.error"


class Cutting(Recorder):
    """Breaks the connections when a successor was confirmed and its original is not yet acknowledged.

    That is when the endpoint tells of it.

    Attributes:
        left: so many times.
    """

    def __init__(self, proxy: Proxy, kind: str, times: int) -> None:
        super().__init__()
        self._proxy = proxy
        self._kind = kind
        self.left = times

    async def happened(self, event: Event) -> None:
        await super().happened(event)
        if event.kind == self._kind and self.left:
            self.left -= 1
            self._proxy.cut()
            # The acknowledgement must find the connection gone.
            await asyncio.sleep(0.05)


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
    """The ids of all that is in a queue that nobody else reads from."""
    async with bide.connect(vhost.url) as client:
        number = await ready(await client._publisher.connection(), queue)
        return Counter(one.message_id for one in await receive(client, queue, number)) if number else Counter()


@pytest.mark.parametrize("kind", ["retried", "parked"])
async def test_a_connection_cut_between_the_confirm_and_the_acknowledgement(
    cutting: Proxy, vhost: Vhost, kind: str
) -> None:
    """The successor is there and the original comes back: it is acknowledged by the process that remembers it."""
    recorder = Cutting(cutting, kind, times=3)
    delays = ["1s"] if kind == "retried" else []
    app = endpoint(recorder, vhost, retry=bide.Retry(immediate=0, delays=delays), concurrency=5)
    handled: Counter[tuple[str | None, int]] = Counter()

    @app.handler
    async def fail(message: bide.Message) -> None:
        handled[message.message_id, message.history.retries] += 1
        raise ValueError("never")

    ids = {f"m{number}" for number in range(20)}
    async with bide.connect(cutting.url, infrastructure=CLOCK) as client:
        async with bide.connect(vhost.url) as sender, running(app, client, recorder):
            await asyncio.gather(*(sender.publish(b"x", to=QUEUE, message_id=one) for one in ids))

            async def all_parked() -> bool:
                return {one.message_id for one in recorder.events if one.kind == "parked"} == ids

            await eventually(all_parked, seconds=25)
        assert recorder.left == 0
    parked = await emptied(vhost, ERROR)
    assert set(parked) == ids
    # A cut takes the confirms that are under way with it, and the acknowledgements: of five messages in hand at most.
    assert sum(parked.values()) - len(ids) <= 3 * 5
    assert max(parked.values()) <= 1 + 2 * 3
    assert await emptied(vhost, QUEUE) == Counter()


async def test_an_error_queue_that_is_full_is_waited_for(vhost: Vhost, caplog: pytest.LogCaptureFixture) -> None:
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
                    return any("cannot pass on" in one.getMessage() for one in caplog.records)

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
    recorder, inside = Recorder(), asyncio.Event()
    app = endpoint(recorder, vhost, retry=bide.Retry(immediate=0, delays=["1s"]), drain="2s")

    @app.handler
    async def fail(message: bide.Message) -> None:
        inside.set()
        await asyncio.sleep(0.5)
        raise ValueError("its retry has no queue to go to any more")

    async with bide.connect(vhost.url, infrastructure=CLOCK) as client:
        work = asyncio.create_task(app.run(client))
        await asyncio.wait_for(recorder.ready.wait(), 20)
        if not idle:
            await client.publish(b"x", to=QUEUE)
            await asyncio.wait_for(inside.wait(), 10)
        else:
            await consumed(vhost)
        connection = await client._publisher.connection()
        async with await connection.channel() as channel:
            await channel.delete_queue(QUEUE)
        with pytest.raises((ConsumerCancelledError, TargetNotFoundError), match=QUEUE):
            await asyncio.wait_for(work, 10)


async def consumed(vhost: Vhost) -> None:
    """Wait until the queue has its consumer."""

    async def there() -> bool:
        reply = vhost.broker.rabbitmqctl("list_consumers", "-p", vhost.name, "--quiet", "--no-table-headers")
        return QUEUE in reply

    await eventually(there)


async def test_a_connection_cut_while_handlers_run_repeats_what_was_in_hand_alone(cutting: Proxy, vhost: Vhost) -> None:
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
        await asyncio.wait_for(started.wait(), 10)
        cutting.cut()
        # The handlers end on a connection that is gone: their messages were handled, and come back.
        await asyncio.sleep(0.05)
        free.set()

        await recorder.until("processed", count=20)
    # What was handled and could not be acknowledged is remembered by its id, and not handled again.
    assert set(handled.values()) == {1}
    assert recorder.kinds() == ["processed"] * 20
    assert await emptied(vhost, QUEUE) == Counter()


async def test_a_copy_that_cannot_go_out_is_sent_when_the_broker_is_back(cutting: Proxy, vhost: Vhost) -> None:
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
