"""Patterns 13, 16 and 17: delays."""

from __future__ import annotations

import time
from datetime import timedelta

import bide
from bide.patterns.broadcast import fanout_broadcast
from bide.patterns.delays import delayed_delivery_cascade, delayed_retry_cascade, private_publisher_delay
from bide.topology import Binding, Exchange, Queue, Topology
from tests.broker.endpoints import Recorder, running
from tests.broker.receiving import receive
from tests.support import Vhost
from tests.timeouts import MAX_LATENESS

THREE_LEVELS = bide.NServiceBus(routing="direct", levels=3)
"""The cascade of the pattern's own picture, with seconds for minutes: any delay up to 7."""


async def test_a_cascade_delivers_after_the_delay_and_restores_the_message(vhost_url: str) -> None:
    async with bide.connect(vhost_url, infrastructure=THREE_LEVELS, declare=False) as client:
        await client.declare(delayed_retry_cascade(queues=["app1", "app2"], levels=3))
        started = time.monotonic()
        await client.publish("three", to="app1", delay="3s", expiration="1ms", headers={"mine": 1})
        await client.publish("one", to="app2", delay="1s")
        (one,) = await receive(client, "app2", 1)
        assert 1 <= time.monotonic() - started < 1 + MAX_LATENESS.total_seconds()
        (three,) = await receive(client, "app1", 1)
        assert 3 <= time.monotonic() - started < 3 + MAX_LATENESS.total_seconds()
        assert [one.body, three.body] == [b"one", b"three"]
        # Its way stands in the key; what it was sent with is restored, and a TTL of its own did not cut the wait.
        assert three.raw.routing_key == "0.1.1.app1"
        assert three.headers["mine"] == 1
        assert three.expiration == timedelta(milliseconds=1)
        assert three.expired


async def test_an_endpoint_retries_through_the_cascade_out_of_order(vhost_url: str) -> None:
    recorder = Recorder()
    app = bide.Endpoint("app1", retry=bide.Retry(immediate=0, delays=["1s"]), observers=[recorder])
    order: list[str] = []

    @app.handler
    async def handle(message: bide.Message) -> None:
        if message.body == b"fails once" and not message.history.retries:
            raise ConnectionError("try later")
        order.append(message.body.decode())

    async with bide.connect(vhost_url, infrastructure=THREE_LEVELS, declare=False) as client:
        await client.declare(delayed_retry_cascade(queues=["app1"], levels=3))
        await client.publish("fails once", to="app1")
        await client.publish("follows", to="app1")
        async with running(app, client, recorder):
            await recorder.until("processed", count=2)
    assert order == ["follows", "fails once"]


async def test_a_client_delays_with_only_the_declared_queues(vhost: Vhost) -> None:
    clock = bide.Clock(max_delay=timedelta(seconds=20), resolution=timedelta(milliseconds=50))
    async with bide.connect(vhost.url, infrastructure=clock) as client:
        pattern = delayed_delivery_cascade(queues=["orders"], max_delay="20s", resolution="50ms")
        await client.declare(pattern)
        receipt = await client.publish("later", to="orders", delay="300ms")
        assert receipt.hops == 1
        # Nothing but what the pattern declared: the client adds nothing.
        names = {str(one["name"]) for one in vhost.broker.management.call("GET", "queues", vhost.name)}
        assert {name for name in names if ".settle." not in name} == {one.name for one in pattern.queues}
        (message,) = await receive(client, "orders", 1)
    assert message.lateness is not None
    assert timedelta(0) <= message.lateness < MAX_LATENESS


async def test_a_private_publisher_exchange_delays_only_its_own_messages(client: bide.Client) -> None:
    main = Topology([Exchange("bookings", "topic")], [Queue("new")], [Binding("bookings", "new", "booking.new")])
    await client.declare(main)
    await client.declare(private_publisher_delay("publisher3", to="bookings", delay="500ms"), external={"bookings"})
    started = time.monotonic()
    await client.publish("later", exchange="publisher3", routing_key="booking.new")
    await client.publish("now", exchange="bookings", routing_key="booking.new")
    found = {one.body: one for one in await receive(client, "new", 2)}
    assert time.monotonic() - started >= 0.5
    assert set(found) == {b"now", b"later"}
    # The message itself shows whether it waited. The order does not: the second could be sent too late for that.
    (death,) = found[b"later"].raw.values["headers"]["x-death"]
    assert (death["reason"], death["queue"]) == ("expired", "publisher3.delay")
    assert "x-death" not in (found[b"now"].raw.values.get("headers") or {})
    assert found[b"later"].routing_key == "booking.new"


async def test_a_shorter_expiration_waits_behind_a_longer_delay(client: bide.Client) -> None:
    await client.declare(fanout_broadcast("main", queues=["q"]))
    await client.declare(private_publisher_delay("own", to="main", delay="800ms"), external={"main"})
    started = time.monotonic()
    await client.publish("first", exchange="own")
    await client.publish("short", exchange="own", expiration="50ms")
    messages = await receive(client, "q", 2)
    assert [one.body for one in messages] == [b"first", b"short"]
    assert time.monotonic() - started >= 0.8
