"""Failed and undeliverable messages of schedules, found by key and sent again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import bide
from bide.error_queues import ErrorQueue, Selection
from bide.error_queues.undeliverable import resend
from bide.errors import InvalidInputError
from bide.schedules.names import ScheduleNames
from tests.broker.endpoints import Recorder, running
from tests.broker.receiving import connected, eventually, receive
from tests.broker.schedule_log import gating
from tests.support import Vhost

UNDELIVERABLE = ScheduleNames().undeliverable


@pytest.fixture
async def client(vhost: Vhost, tmp_path: Path) -> AsyncIterator[bide.Client]:
    """A client, with a gate that delivers to one queue of two."""
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders"), bide.Queue.quorum("mail")]))
        async with gating(vhost.url, tmp_path / "gate", allow=["reminders"]):
            yield client


async def undeliverable(client: bide.Client, vhost: Vhost, number: int) -> ErrorQueue:
    """The undeliverable queue of the schedule log, when it has this many messages."""
    queue = ErrorQueue(client, UNDELIVERABLE, management_url=vhost.broker.management_url)

    async def arrived() -> bool:
        return await queue.count() == number

    await eventually(arrived)
    return queue


async def check_waits(client: bide.Client, made: bide.Scheduled) -> None:
    """A schedule waits as it was made, and can be cancelled."""
    found = await client.scheduled(made.key)
    assert found is not None
    assert (found.state, found.id, found.version, found.body) == ("waiting", made.id, made.version, b"next")
    assert (await client.cancel(made.key)).outcome is bide.ScheduleOutcome.CANCELLED


async def test_undeliverable_messages_are_found_by_key_and_sent_again(client: bide.Client, vhost: Vhost) -> None:
    made = await client.schedule(b"first", key="invoice:1", to="mail", delay="0s", headers={"mine": "1"})
    await client.schedule(b"second", key="invoice:2", to="gone", delay="0s")
    queue = await undeliverable(client, vhost, 2)
    waiting = await client.schedule(b"next", key="invoice:1", to="mail", delay="1d")
    (found,) = [one async for one in queue.messages(Selection(key="invoice:1"))]
    assert (found.key, found.schedule_id, found.queue) == ("invoice:1", made.id, "mail")
    assert (found.reason, found.body) == ("undeliverable", b"first")
    assert [one.name for one in await queue.groups(by="key")] == ["invoice:1", "invoice:2"]
    sent = await resend(client, allow=["mail"], queue=UNDELIVERABLE, management_url=vhost.broker.management_url)
    assert (sent.sent, dict(sent.kept)) == (1, {"q:gone: TargetNotAllowedError": 1})
    (message,) = await receive(client, "mail", 1)
    assert (message.body, message.headers) == (b"first", {"mine": "1"})
    assert (message.key, message.schedule_id) == ("invoice:1", made.id)
    await check_waits(client, waiting)
    assert await queue.count(Selection(key="invoice:2")) == 1


async def test_a_message_for_an_exchange_keeps_its_routing_key(client: bide.Client, vhost: Vhost) -> None:
    await client.declare(
        bide.Topology([bide.Exchange("shop", "topic")], bindings=[bide.Binding("shop", "mail", "order.*")]),
        external=["mail"],
    )
    await client.schedule(b"x", key="k", exchange="shop", routing_key="order.created", delay="0s")
    await undeliverable(client, vhost, 1)
    sent = await resend(client, allow=["shop"], queue=UNDELIVERABLE, management_url=vhost.broker.management_url)
    assert sent.sent == 1
    (message,) = await receive(client, "mail", 1)
    assert (message.exchange, message.routing_key, message.key) == ("shop", "order.created", "k")


@pytest.mark.parametrize("target", ["x:bide.v1.schedule.gates", "x:bide.v1.schedule", "q:bide.v1.schedule.0"])
async def test_a_message_is_never_sent_to_the_log(client: bide.Client, vhost: Vhost, target: str) -> None:
    """Anyone who may write to the queue could otherwise have an operator forge a record of a gate."""
    await client.schedule(b"x", key="k", to="mail", delay="0s")
    await undeliverable(client, vhost, 1)
    (message,) = await receive(client, UNDELIVERABLE, 1)
    values = {**message.raw.values, "headers": {**message.raw.values["headers"], "bide-to": target}}
    async with connected(vhost.url) as connection:
        channel = await connection.channel(confirms=True)
        await channel.publish(exchange="", routing_key=UNDELIVERABLE, values=values, body=b"a record")
    sent = await resend(client, allow=["*"], queue=UNDELIVERABLE, management_url=vhost.broker.management_url)
    assert (sent.sent, dict(sent.kept)) == (0, {f"{target}: DelayQueueError": 1})


async def test_only_undeliverable_queues_are_resent(client: bide.Client) -> None:
    with pytest.raises(InvalidInputError, match="is not an undeliverable queue"):
        await resend(client, allow=["*"], queue="mail")


async def test_a_retried_message_keeps_its_key_and_leaves_another_schedule_under_it_alone(
    client: bide.Client, vhost: Vhost
) -> None:
    recorder = Recorder()
    app = bide.Endpoint("reminders", retry=bide.Retry(immediate=0, delays=["100ms"]), observers=[recorder])

    waiting: list[bide.Scheduled] = []

    @app.handler
    async def fail(message: bide.Message) -> None:
        if not waiting:
            waiting.append(await client.schedule(b"next", key="invoice:42", to="reminders", delay="1d"))
        raise RuntimeError(message.key)

    async with running(app, client, recorder):
        made = await client.schedule(b"x", key="invoice:42", to="reminders", delay="0s")
        await recorder.until("parked")
    queue = ErrorQueue(client, management_url=vhost.broker.management_url)
    (found,) = [one async for one in queue.messages(Selection(key="invoice:42"))]
    assert (found.key, found.schedule_id, found.text) == ("invoice:42", made.id, "invoice:42")
    assert await queue.count(Selection(key="invoice")) == 0
    assert (await queue.retry(Selection(key="invoice:42"))).done == 1
    (message,) = await receive(client, "reminders", 1)
    assert (message.key, message.schedule_id) == ("invoice:42", made.id)
    await check_waits(client, waiting[0])
