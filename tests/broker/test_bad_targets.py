"""Missing and refusing targets of delayed messages, and the messages of other targets."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delay.protocol import HEADER_DUE, HEADER_TO
from bide.error_queues.undeliverable import resend
from bide.management.api import ManagementApi
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.receiving import delete_bound, eventually, fresh, ready, receive
from tests.timeouts import MAX_LATENESS

if TYPE_CHECKING:
    from tests.support import Vhost

pytestmark = pytest.mark.usefixtures("stock_dead_lettering")

BAD = 100
GOOD = 1000
"""Far below the three minutes for which a refusing target stops a queue, far above what a loaded machine adds."""


async def fill(connection: Connection, queue: str) -> None:
    channel = await connection.channel(confirms=True)
    await channel.publish(exchange="", routing_key=queue, values={"message_id": "filler"}, body=b"")
    await channel.close()


async def publish_and_check(client: bide.Client, bad: dict[str, str], *, isolated: bool = False) -> None:
    """A hundred messages to the bad target and a thousand to a good one, through the same queues, all on time."""
    good = fresh("good")
    await client.declare(bide.Topology(queues=[bide.Queue.quorum(good)]))
    await asyncio.gather(
        *(client.publish(b"bad", delay="1s", isolated=isolated and "to" in bad, **bad) for _ in range(BAD))  # type: ignore[arg-type]  # options by name
    )
    await asyncio.gather(*(client.publish(b"good", to=good, delay="1.2s") for _ in range(GOOD)))
    messages = await receive(client, good, GOOD)
    late = [message for message in messages if message.lateness is None or message.lateness > MAX_LATENESS]
    assert not late
    assert all(message.lateness is not None and message.lateness >= timedelta(0) for message in messages)


async def test_a_full_queue_that_is_not_isolated_delays_others(client: bide.Client, connection: Connection) -> None:
    """As docs/guarantees.md describes, and a proof that the other tests meet a broker with the stock prefetch."""
    full, held_up, control = fresh("full"), fresh("held-up"), fresh("control")
    limits: dict[str, str | int] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    others = [bide.Queue.quorum(held_up), bide.Queue.quorum(control)]
    await client.declare(bide.Topology(queues=[bide.Queue.quorum(full, limits), *others]))
    await fill(connection, full)
    await fill(connection, full)
    # Through a digit queue that no other test of this module uses, and the control through another, two seconds later.
    await asyncio.gather(*(client.publish(b"bad", to=full, delay="3s") for _ in range(40)))
    await client.publish(b"", to=held_up, delay="3s")
    await client.publish(b"", to=control, delay="5s")
    await receive(client, control, 1)
    assert await ready(connection, held_up) == 0


async def test_messages_for_a_deleted_queue_are_set_aside(client: bide.Client, connection: Connection) -> None:
    queue = fresh("deleted")
    before = await ready(connection, SMALL_CLOCK.undeliverable)
    await delete_bound(client, connection, queue)
    await publish_and_check(client, {"to": queue})

    async def set_aside() -> bool:
        return await ready(connection, SMALL_CLOCK.undeliverable) == before + BAD

    await eventually(set_aside)


async def test_an_undeliverable_message_has_its_target_in_its_headers(
    client: bide.Client, connection: Connection
) -> None:
    queue = fresh("deleted")
    async with await connection.channel() as channel:
        await channel.purge_queue(SMALL_CLOCK.undeliverable)
    await delete_bound(client, connection, queue)
    receipt = await client.publish(b"body", to=queue, delay="300ms", headers={"mine": 1})
    (message,) = await receive(client, SMALL_CLOCK.undeliverable, 1)
    headers = message.raw.values["headers"]
    assert headers[HEADER_TO] == f"q:{queue}"
    assert message.due is not None
    assert receipt.due is not None
    assert headers[HEADER_DUE] == round(message.due.timestamp() * 1000)
    assert timedelta(0) <= message.due - receipt.due < timedelta(milliseconds=1)
    assert (message.body, message.routing_key, message.headers) == (b"body", queue, {"mine": 1})
    assert message.message_id == receipt.message_id


async def test_a_recreated_queue_is_bound_again(clock_url: str, connection: Connection) -> None:
    for delay in ("5s", "10s", "19s"):
        if await is_bound_before_a_message_is_due(clock_url, connection, delay):
            return
    pytest.fail("the machine was too slow each time")


async def is_bound_before_a_message_is_due(url: str, connection: Connection, delay: str) -> bool:
    """Declare a queue anew while a message for it waits; False if the message was due before the queue was bound."""
    queue = fresh("again")
    async with bide.connect(url, infrastructure=SMALL_CLOCK) as first:
        await first.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        await first.bind(queue)
        channel = await connection.channel()
        await channel.purge_queue(SMALL_CLOCK.undeliverable)
        # This client binds the queue anew, as every client does at its first message and every 30 s.
        async with bide.connect(url, infrastructure=SMALL_CLOCK) as second:
            receipt = await first.publish(b"lost binding", to=queue, delay=delay)
            await channel.delete_queue(queue)
            await first.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
            await second.publish(b"later", to=queue, delay="50ms")
            assert receipt.due is not None
            if second.now() >= receipt.due:

                async def has_ended() -> bool:
                    return await ready(connection, queue) + await ready(connection, SMALL_CLOCK.undeliverable) == 2

                await eventually(has_ended)
                return False
            messages = await receive(second, queue, 2)
    assert {message.body for message in messages} == {b"lost binding", b"later"}
    assert await ready(connection, SMALL_CLOCK.undeliverable) == 0
    return True


async def test_a_full_isolated_queue_does_not_delay_others(client: bide.Client, connection: Connection) -> None:
    queue = fresh("full")
    limits: dict[str, str | int] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue, limits)]))
    # A quorum queue refuses only once it knows that it is over its limit.
    await fill(connection, queue)
    await fill(connection, queue)
    await publish_and_check(client, {"to": queue}, isolated=True)
    release_queue = SMALL_CLOCK.release_queue(bide.QueueTarget(queue, isolated=True))
    assert release_queue.endswith(queue)


async def test_an_exchange_without_a_match_does_not_delay_others(client: bide.Client) -> None:
    exchange = fresh("empty")
    await client.declare(bide.Topology([bide.Exchange(exchange, "topic")]))
    await publish_and_check(client, {"exchange": exchange, "routing_key": "order.created"})


@pytest.mark.usefixtures("quick_redelivery")
async def test_messages_for_an_exchange_wait_until_it_has_a_queue(client: bide.Client, connection: Connection) -> None:
    exchange, queue = fresh("late"), fresh("q")
    await client.declare(bide.Topology([bide.Exchange(exchange, "topic")]))
    await client.publish(b"x", exchange=exchange, routing_key="a.b", delay="100ms")
    release_queue = SMALL_CLOCK.release_queue(bide.ExchangeTarget(exchange, "a.b"))

    async def was_tried() -> bool:
        # It is with the dead-letter worker then, and no longer counted as ready.
        return await ready(connection, release_queue) == 0

    await eventually(was_tried)
    binding = bide.Binding(exchange, queue, "#")
    await client.declare(bide.Topology([bide.Exchange(exchange, "topic")], [bide.Queue.quorum(queue)], [binding]))
    (message,) = await receive(client, queue, 1)
    assert (message.body, message.exchange, message.routing_key) == (b"x", exchange, "a.b")


async def test_a_deleted_exchange_does_not_delay_others(client: bide.Client, connection: Connection) -> None:
    exchange, queue = fresh("gone"), fresh("q")
    topology = bide.Topology(
        [bide.Exchange(exchange, "topic")], [bide.Queue.quorum(queue)], [bide.Binding(exchange, queue, "#")]
    )
    await client.declare(topology)
    await client.publish(b"x", exchange=exchange, routing_key="a.b", delay="600ms")
    channel = await connection.channel()
    await channel.delete_exchange(exchange)
    await publish_and_check(client, {"exchange": exchange, "routing_key": "a.b"})


async def test_undeliverable_messages_are_resent_when_the_target_is_back(vhost: Vhost) -> None:
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        other = await Connection.open(BrokerUrl.parse(vhost.url))
        await delete_bound(client, other, "back", "gone")
        await client.publish(b"1", to="back", delay="300ms", headers={"mine": 1}, message_id="m1", priority=2)
        await client.publish(b"2", to="gone", delay="300ms")

        async def was_set_aside() -> bool:
            return await ready(other, SMALL_CLOCK.undeliverable) == 2

        await eventually(was_set_aside)
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("back")]))
        result = await resend(client, allow=["*"])
        assert (result.sent, dict(result.kept)) == (1, {"q:gone: TargetNotFoundError": 1})
        (message,) = await receive(client, "back", 1)
        assert (message.body, message.message_id, message.headers, message.priority) == (b"1", "m1", {"mine": 1}, 2)
        assert await ready(other, SMALL_CLOCK.undeliverable) == 1
        await other.close()


async def test_resending_in_vain_does_not_use_up_the_delivery_limit(
    vhost: Vhost, vhost_connection: Connection, api: ManagementApi
) -> None:
    """A quorum queue drops a message that was requeued more often. Since RabbitMQ 4.0 the default is 20 times."""
    undeliverable, management = SMALL_CLOCK.undeliverable, vhost.broker.management_url
    gone = bide.Topology([bide.Exchange("gone-too", "topic")], [bide.Queue.quorum("gone")])
    body = {"pattern": "undeliverable", "definition": {"delivery-limit": 5}, "apply-to": "queues"}
    await api.call("PUT", "policies", vhost.name, "limit", body=body)

    async def were_set_aside() -> bool:
        return await ready(vhost_connection, undeliverable) == 2

    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await delete_bound(client, vhost_connection, "gone")
        await client.publish(b"1", to="gone", delay="300ms", headers={"mine": 1}, message_id="m1")
        # To an exchange, with its own routing key, as the relay of a waiting hall sets it aside.
        async with await vhost_connection.channel(confirms=True) as channel:
            values = {"message_id": "m2", "headers": {HEADER_TO: "x:gone-too"}}
            await channel.publish(exchange=undeliverable, routing_key="a.b", values=values, body=b"2")
        await eventually(were_set_aside)
        for _ in range(12):
            result = await resend(client, allow=["*"], management_url=management)
            assert (result.sent, sum(result.kept.values())) == (0, 2)
        await client.declare(gone | bide.Topology(bindings=[bide.Binding("gone-too", "gone", "a.*")]))
        result = await resend(client, allow=["*"], management_url=management)
        assert (result.sent, result.kept) == (2, {})
        messages = await receive(client, "gone", 2)
    found = {one.message_id: (one.body, one.routing_key, one.headers) for one in messages}
    assert found == {"m1": (b"1", "gone", {"mine": 1}), "m2": (b"2", "a.b", {})}


async def test_a_forged_target_that_is_refused_does_not_keep_other_messages_from_being_sent_on(vhost: Vhost) -> None:
    """One at once, to an exchange, and one after a delay, for which its queue has to be bound."""
    clock = bide.Clock()
    name = f"operator-{vhost.name}"
    vhost.broker.add_user(name, "secret")
    vhost.broker.set_permissions(vhost.name, name, write=r"^(bide\.v1\..*|amq\.default|good)$")
    other = await Connection.open(BrokerUrl.parse(vhost.url))
    channel = await other.channel(confirms=True)
    async with bide.connect(vhost.url) as client:
        queues = [bide.Queue.quorum("good"), bide.Queue.quorum("salaries")]
        await client.declare(clock.core_topology() | bide.Topology([bide.Exchange("private", "fanout")], queues))
        soon = int(client.now().timestamp() * 1000) + 3_600_000
        forged = {HEADER_TO: "x:private"}, {HEADER_TO: "q:salaries", HEADER_DUE: soon}
        for headers in (*forged, {HEADER_TO: "q:good"}, *forged, {HEADER_TO: "q:good"}):
            values = {"message_id": "m", "headers": headers}
            await channel.publish(exchange=clock.undeliverable, routing_key="", values=values, body=b"")
        url = vhost.broker.vhost_url(vhost.name, user=name, password="secret")
        async with bide.connect(url) as operator:
            result = await resend(operator, allow=["*"])
        refused = {"x:private: AccessRefusedError": 2, "q:salaries: AccessRefusedError": 2}
        assert (result.sent, dict(result.kept)) == (2, refused)
        assert len(await receive(client, "good", 2)) == 2
        assert await ready(other, clock.undeliverable) == 4
    await other.close()
    vhost.broker.delete_user(name)
