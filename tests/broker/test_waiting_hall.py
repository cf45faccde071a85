"""The waiting hall and its relay on a real broker."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

import pytest

import bide
from bide.admin.infrastructure import install, remove
from bide.admin.locate import management_api
from bide.admin.verify import verify
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delay.waiting_hall import HEADER_REST
from bide.error_queues.undeliverable import resend
from bide.errors import (
    AccessRefusedError,
    DeclarationMismatchError,
    NotAppliedError,
    NotEmptyError,
)
from bide.local_broker import LocalBroker
from bide.relay import Relay, Relayed
from bide.relay.decision import HEADER_DELAY
from bide.topology import Binding, Exchange, Queue, Topology
from tests.broker.conftest import limit_messages
from tests.broker.receiving import eventually, ready, receive
from tests.broker.workers import at_work
from tests.leaks import no_leaks
from tests.relay_process import Process, relay
from tests.support import Vhost
from tests.timeouts import MAX_LATENESS, TIMEOUT

FOUR = bide.WaitingHall(levels=4)
HALL = bide.WaitingHall(levels=4, resolution=timedelta(milliseconds=100))
OTHERS = Topology(
    [Exchange("shop", "topic"), Exchange("inner", internal=True)],
    [Queue.quorum("orders"), Queue.quorum("created"), Queue.quorum("picked-up")],
    [Binding("shop", "created", "order.#")],
)
UNDELIVERABLE = HALL.undeliverable


TAPS = {"check-in": FOUR.check_in} | {f"level-{level}": FOUR.level_name(level) for level in range(4)}
"""Queues that get a copy of the message at every exchange of the hall."""


class Walk(NamedTuple):
    """A message on its way through a hall of four levels."""

    url: str
    process: Process
    receiver: subprocess.Popen[bytes]


@pytest.fixture(scope="module", autouse=True)
def walk(broker: LocalBroker) -> Iterator[Walk]:
    """The example of the design that the hall is made after, on its way for 27 seconds while the other tests run."""
    vhost = Vhost(name="27-seconds", url=broker.add_vhost("27-seconds"), broker=broker)
    tapped = Topology(
        queues=[Queue.quorum(name) for name in (*TAPS, "final", "copy")],
        bindings=[
            *(Binding(exchange, name, "#") for name, exchange in TAPS.items()),
            Binding(FOUR.delivery_exchange, "final", "my-key"),
            Binding(FOUR.delivery_exchange, "copy", "my-key"),
        ],
    )
    with relay(vhost, "--levels", "4") as process, bide.connect_sync(vhost.url) as client:
        client.declare(FOUR.topology() | tapped)
        client.publish("remind", exchange=FOUR.check_in, routing_key="my-key", headers={HEADER_DELAY: 27_000})
        with subprocess.Popen(
            [sys.executable, "-m", "bide", "--url", vhost.url, "receive", "final", "--count", "1", "--json"],
            stdout=subprocess.PIPE,
        ) as receiver:
            try:
                yield Walk(vhost.url, process, receiver)
            finally:
                receiver.terminate()
    broker.delete_vhost(vhost.name)


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    """A relay may leave neither a task nor an unhandled error behind."""
    async with no_leaks():
        yield


@pytest.fixture
async def client(vhost: Vhost, quiet: None) -> AsyncIterator[bide.Client]:
    """A client of the hall, with some targets."""
    async with bide.connect(vhost.url, infrastructure=HALL) as client:
        picked_up = Topology(bindings=[Binding(HALL.delivery_exchange, "picked-up", "pick.*")])
        await client.declare(HALL.topology() | OTHERS | picked_up)
        yield client


@pytest.fixture
async def connection(vhost: Vhost, quiet: None) -> AsyncIterator[Connection]:
    """A bare connection, for what a client of others does."""
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    yield connection
    await connection.close()


@asynccontextmanager
async def relaying(url: str, hall: bide.WaitingHall = HALL, **settings: Any) -> AsyncIterator[Relay]:
    """A relay at work; that it fails is an error."""
    relay = Relay(url, hall=hall, **{"allow": ["*"], **settings})
    async with at_work(relay):
        yield relay


async def test_queues_and_exchanges_get_the_message_as_it_was_sent(client: bide.Client, vhost: Vhost) -> None:
    headers = {"text": "ü", "number": 1 << 40, "list": [1, {"deep": None}], "raw": b"\xff", "decimal": Decimal("1.5")}
    properties: dict[str, Any] = {
        "message_id": "m",
        "correlation_id": "c",
        "reply_to": "r",
        "content_type": "text/plain",
        "type": "t",
        "app_id": "a",
        "timestamp": datetime(2026, 1, 2, tzinfo=UTC),
        "priority": 7,
        "user_id": BrokerUrl.parse(vhost.url).user,
    }
    async with relaying(vhost.url) as relay:
        addresses: list[dict[str, Any]] = [{"to": "orders"}, {"exchange": "shop", "routing_key": "order.created"}]
        for address in addresses:
            receipt = await client.publish(
                b"\x00body", **address, delay="1.85s", headers=headers, expiration="1m", **properties
            )
            # 1.9 s: one round of 0.8, then 0.8 + 0.2 + 0.1, and the three queues of the relay.
            assert receipt.hops == 1 + 3 + 3
        (queued,) = await receive(client, "orders", 1)
        (routed,) = await receive(client, "created", 1)
    # One that the machine holds up needs no round, and goes on at once if it is due by then.
    assert replace(relay.done, rounds=0, delayed=0) == Relayed(delivered=2)
    assert relay.done.rounds <= 2
    for message, exchange, key in ((queued, "", "orders"), (routed, "shop", "order.created")):
        assert message.body == b"\x00body"
        assert (message.exchange, message.routing_key, message.headers) == (exchange, key, headers)
        assert {name: message.raw.values[name] for name in properties} == properties
        assert message.raw.values["expiration"] == "60000"
        # Other consumers see it so too.
        assert (message.raw.exchange, message.raw.routing_key) == (exchange, key)
        assert set(message.raw.values["headers"]) == {*headers, "bide-to", "bide-due", "bide-sent"}
        assert message.lateness is not None
        assert timedelta(0) <= message.lateness < MAX_LATENESS


async def test_a_message_that_passed_every_queue_before_is_not_dropped_as_a_cycle(
    client: bide.Client, vhost: Vhost, connection: Connection
) -> None:
    """Below 4.0.1 the broker holds a message for ever whose ``x-death`` knows the queue that it comes to next."""
    deaths = [
        {"queue": queue.name, "reason": "expired", "count": 1, "exchange": "", "routing-keys": ["x"]}
        for queue in HALL.topology().queues
    ]
    async with relaying(vhost.url), await connection.channel(confirms=True) as channel:
        headers = {"x-delay": 1900, "x-death": deaths, "bide-to": "q:orders"}
        await channel.publish(exchange=HALL.check_in, routing_key="x", values={"headers": headers}, body=b"")
        (message,) = await receive(client, "orders", 1)
        assert set(message.raw.values["headers"]) == {"bide-to", "bide-due"}


async def test_a_delay_of_many_rounds_is_delivered_on_time(client: bide.Client, vhost: Vhost) -> None:
    one = bide.WaitingHall(levels=1, resolution=HALL.resolution, prefix="one")
    async with relaying(vhost.url, one) as relay, bide.connect(vhost.url, infrastructure=one) as sender:
        receipt = await sender.publish(b"", to="orders", delay="3s")
        assert receipt.hops == 2 * 29 + 3
        (message,) = await receive(client, "orders", 1)
        assert message.lateness is not None
        assert message.lateness >= timedelta(0)
    # A relay that is late at one turn makes up for it: it goes round less often, or needs no level at the end.
    assert 1 <= relay.done.rounds <= 29
    assert relay.done.delayed <= 1
    assert (relay.done.delivered, relay.done.refused) == (1, 0)


async def test_a_client_without_bide_delays_with_x_delay(
    client: bide.Client, vhost: Vhost, connection: Connection
) -> None:
    """Check in with a routing key and ``x-delay``, and be picked up under that key."""
    async with relaying(vhost.url), await connection.channel(confirms=True) as channel:
        sent = datetime.now(UTC)
        await channel.publish(
            exchange=HALL.check_in,
            routing_key="pick.me",
            values={"headers": {"x-delay": "350", "CC": ["pick.never-twice"]}, "expiration": "100000"},
            body=b"hello",
        )
        (message,) = await receive(client, "picked-up", 1)
        assert message.received_at - sent >= timedelta(milliseconds=350)
        assert (message.raw.exchange, message.raw.routing_key) == (HALL.delivery_exchange, "pick.me")
        assert message.headers == {"CC": ["pick.never-twice"]}
        for headers in ({"x-delay": "soon"}, {"bide-to": "missing"}):
            await channel.publish(exchange=HALL.check_in, routing_key="pick.me", values={"headers": headers}, body=b"?")
        await channel.publish(exchange=HALL.check_in, routing_key="unbound.key", values={}, body=b"?")
        aside = await receive(client, UNDELIVERABLE, 3)
        assert {message.raw.routing_key for message in aside} == {"pick.me", "unbound.key"}
        assert await ready(connection, "picked-up") == 0


async def test_an_endpoint_retries_through_the_hall(client: bide.Client, vhost: Vhost) -> None:
    app = bide.Endpoint(
        "orders",
        retry=bide.Retry(immediate=0, delays=["300ms"], jitter=0),
        error_queue="error",
        management_url=vhost.broker.management_url,
    )
    seen: list[tuple[str, str, int]] = []
    done = asyncio.Event()

    @app.handler
    async def handle(message: bide.Message) -> None:
        seen.append((message.exchange, message.routing_key, message.history.attempts))
        if len(seen) == 1:
            raise ConnectionError("not yet")
        done.set()

    async with relaying(vhost.url) as relay:
        running = asyncio.create_task(app.run(client))
        await client.declare(OTHERS | Topology(bindings=[Binding("shop", "orders", "retried")]))
        await client.publish(b"", exchange="shop", routing_key="retried", delay="200ms")
        await asyncio.wait_for(done.wait(), TIMEOUT)
        app.stop()
        await running
    assert seen == [("shop", "retried", 0), ("shop", "retried", 1)]
    assert relay.done.delivered == 2


async def test_messages_for_missing_targets_are_set_aside_and_resent(
    client: bide.Client, vhost: Vhost, connection: Connection
) -> None:
    await client.declare(Topology([Exchange("late", "topic")], [Queue.quorum("gone")]))
    await client.publish(b"q", to="gone", delay="300ms")
    await client.publish(b"x", exchange="late", routing_key="a.b", delay="300ms")
    await client.publish(b"unbound", exchange="shop", routing_key="missing", delay="300ms")
    await client.publish(b"not picked up", exchange=HALL.delivery_exchange, routing_key="later.1", delay="300ms")
    channel = await connection.channel()
    await channel.delete_exchange("late")
    await channel.delete_queue("gone")
    async with relaying(vhost.url) as relay:

        async def set_aside() -> bool:
            # The relay counts a message when the broker has confirmed it.
            return await ready(connection, UNDELIVERABLE) == relay.done.undeliverable == 4

        await eventually(set_aside)
        await client.declare(
            Topology(
                [Exchange("late", "topic")],
                [Queue.quorum("gone"), Queue.quorum("new")],
                [Binding("late", "new", "a.*")],
            )
        )
        kept = {"x:shop: UnroutableError": 1, f"x:{HALL.delivery_exchange}: UnroutableError": 1}
        for sent in (2, 0):
            result = await resend(client, allow=["*"])
            assert (result.sent, dict(result.kept)) == (sent, kept)
        await client.declare(
            HALL.topology() | OTHERS | Topology(bindings=[Binding(HALL.delivery_exchange, "picked-up", "later.*")])
        )
        result = await resend(client, allow=["*"])
        assert result.sent == 1
        (picked_up,) = await receive(client, "picked-up", 1)
        assert picked_up.raw.routing_key == "later.1"
        (queued,) = await receive(client, "gone", 1)
        (routed,) = await receive(client, "new", 1)
    assert queued.body == b"q"
    assert (routed.body, routed.routing_key) == (b"x", "a.b")


async def test_a_refusing_target_delays_no_other_and_gets_its_messages_later(
    client: bide.Client, vhost: Vhost, connection: Connection
) -> None:
    full = Queue("full", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    await client.declare(Topology(queues=[full]))
    async with relaying(vhost.url, prefetch=10) as relay:
        await asyncio.gather(*(client.publish(f"full {number}", to="full", delay="100ms") for number in range(20)))
        await asyncio.gather(*(client.publish(str(number), to="orders", delay="100ms") for number in range(300)))
        messages = await receive(client, "orders", 300)
        assert len({message.body for message in messages}) == 300

        async def all_but_one_are_refused() -> bool:
            return relay.done.refused >= 19

        await eventually(all_but_one_are_refused)
        got: set[bytes] = set()
        async with asyncio.timeout(TIMEOUT), client.consume("full", prefetch=1) as offered:
            async for message in offered:
                await message.ack()
                got.add(message.body)
                if len(got) == 20:
                    break
    assert relay.done.undeliverable == 0


async def test_only_messages_that_close_the_channel_are_set_aside(
    client: bide.Client, vhost: Vhost, connection: Connection, small_messages_only: Callable[[], None]
) -> None:
    """Only these are set aside; the others arrive, and what goes to a queue arrives once."""
    big = b"b" * 200_000
    async with relaying(vhost.url, prefetch=500) as relay:

        async def send(number: int) -> None:
            await client.publish(f"{number}", to="orders", delay="300ms")
            if number % 20 == 0:
                await client.publish(f"{number}", exchange="inner", delay="300ms")

        await asyncio.gather(*(send(number) for number in range(100)))
        messages = await receive(client, "orders", 100)
        assert {message.body for message in messages} == {f"{number}".encode() for number in range(100)}

        async def set_aside() -> bool:
            return await ready(connection, UNDELIVERABLE) == 5

        await eventually(set_aside)
        # One that the machine held up until it was due goes on at once.
        assert relay.done.delayed <= 105
    await receive(client, UNDELIVERABLE, 5)
    # They came in when they were not too large yet.
    for number in range(10):
        await client.publish(f"{number}", to="orders", delay="100ms")
        await client.publish(big, to="orders", delay="3s" if number % 2 else "100ms")
    small_messages_only()
    async with relaying(vhost.url) as relay:
        bodies: set[bytes] = set()
        async with asyncio.timeout(TIMEOUT), client.consume("orders") as several:
            async for message in several:
                await message.ack()
                # Those that were on the channel together with one that is too large may come twice.
                bodies.add(message.body)
                if len(bodies) == 10:
                    break
        assert bodies == {f"{number}".encode() for number in range(10)}
        aside = await receive(client, UNDELIVERABLE, 10)
        assert {message.body for message in aside} == {big}
    assert relay.done.undeliverable == 10


@pytest.fixture
def small_messages_only(broker: LocalBroker) -> Iterator[Callable[[], None]]:
    """Limits messages to 100,000 bytes when it is called, until the end of the test."""
    usual: list[int] = []
    yield lambda: usual.append(limit_messages(broker, 100_000))
    for size in usual:
        limit_messages(broker, size)


async def test_broken_connections_of_two_relays_lose_nothing(client: bide.Client, vhost: Vhost) -> None:
    count = 2000
    async with relaying(vhost.url), relaying(vhost.url):
        sending = client.publish_many(
            bide.OutgoingMessage(f"{number}", to="orders", delay="400ms") for number in range(count)
        )
        bodies: set[bytes] = set()
        closing = asyncio.create_task(_close_relays(vhost, 3))
        await sending
        async with asyncio.timeout(TIMEOUT), client.consume("orders", prefetch=500) as messages:
            async for message in messages:
                await message.ack()
                assert message.lateness is not None
                assert message.lateness >= timedelta(0)
                bodies.add(message.body)
                if len(bodies) == count:
                    break
        await closing
    assert len(bodies) == count


async def _close_relays(vhost: Vhost, times: int) -> None:
    """As an operator does, or a network."""
    closing = (
        '[rabbit_networking:close_connection(rabbit_misc:pget(pid, C), "test") || '
        "C <- rabbit_networking:connection_info_all([pid, vhost, client_properties]), "
        f'rabbit_misc:pget(vhost, C) =:= <<"{vhost.name}">>, '
        '{<<"connection_name">>, longstr, N} <- rabbit_misc:pget(client_properties, C), '
        'binary:match(N, <<"(relay)">>) =/= nomatch].'
    )
    for _ in range(times):
        await asyncio.to_thread(vhost.broker.rabbitmqctl, "eval", closing)


async def test_verify_reports_a_missing_relay(vhost: Vhost, connection: Connection) -> None:
    await install(connection, HALL)
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
        report = await verify(connection, HALL, api)
        assert [(one.check, one.status) for one in report.problems] == [("relays", "problem")]
        assert "call bide.Relay(allow=[...])" in report.problems[0].text
        async with relaying(vhost.url, declare=False):
            report = await verify(connection, HALL, api)
            assert report.ok, report.problems
            (relays,) = (one for one in report.findings if one.check == "relays")
            assert relays.text == "1 at work"
        await (await connection.channel()).delete_queue(HALL.level_name(2))
        report = await verify(connection, HALL, api)
        assert any(HALL.level_name(2) in one.text for one in report.problems if one.check == "queues")


async def test_destroy_refuses_while_messages_wait(client: bide.Client, vhost: Vhost, connection: Connection) -> None:
    await client.publish(b"", to="orders", delay="1h")
    with pytest.raises(NotEmptyError, match=r"1 message waits in bide\.hall-100ms\.v1\.receiving"):
        await remove(connection, HALL, None)
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
        other = bide.WaitingHall(levels=3, prefix="other")
        await install(connection, other)
        removed = await remove(connection, HALL, api, force=True)
        assert removed.complete
        assert removed.removed.queues == len(HALL.topology().queues)
        assert not [one for one in await api.queues(vhost.name, "hall") if HALL.owns(one.queue.name)]
        assert len(await api.queues(vhost.name, "hall")) == len(other.topology().queues)


async def test_deleting_the_hall_ends_its_relay(vhost: Vhost, connection: Connection) -> None:
    relay = Relay(vhost.url, hall=HALL, allow=[])
    consuming = asyncio.Event()
    running = asyncio.create_task(relay.run(on_start=lambda _: consuming.set()))
    await asyncio.wait_for(consuming.wait(), TIMEOUT)
    await remove(connection, HALL, None)
    with pytest.raises(NotAppliedError, match="was deleted"):
        await asyncio.wait_for(running, TIMEOUT)


async def test_a_relay_works_with_minimal_permissions(client: bide.Client, vhost: Vhost) -> None:
    """To write to the exchanges of the hall and its targets, to read from two queues, and to configure nothing."""
    broker = vhost.broker
    await asyncio.to_thread(broker.rabbitmqctl, "add_user", "relay", "secret")
    try:
        rights = ("^$", r"^(bide\.hall-.*|amq\.default|shop)$", r"^bide\.hall-.*\.(receiving|distributing)$")
        await asyncio.to_thread(broker.rabbitmqctl, "set_permissions", "-p", vhost.name, "relay", *rights)
        async with relaying(broker.vhost_url(vhost.name, user="relay", password="secret")) as relay:
            user = BrokerUrl.parse(vhost.url).user
            await client.publish(b"queue", to="orders", delay="100ms", user_id=user)
            await client.publish(b"exchange", exchange="shop", routing_key="order.created", delay="100ms")
            await client.publish(b"forbidden", exchange="inner", delay="100ms")
            (queued,) = await receive(client, "orders", 1)
            (routed,) = await receive(client, "created", 1)
            (aside,) = await receive(client, UNDELIVERABLE, 1)
        assert (queued.body, routed.body, aside.body) == (b"queue", b"exchange", b"forbidden")
        # The relay may not send in the name of the publisher.
        assert "user_id" not in queued.raw.values
        assert queued.raw.values["headers"]["bide-user-id"] == user
        assert replace(relay.done, delayed=0) == Relayed(delivered=2, undeliverable=1)
    finally:
        await asyncio.to_thread(broker.rabbitmqctl, "delete_user", "relay")


async def test_a_relay_that_cannot_work_fails_at_the_start(vhost: Vhost, connection: Connection) -> None:
    with pytest.raises(NotAppliedError, match=r"bide\.admin\.infrastructure\.install"):
        await Relay(vhost.url, hall=HALL, allow=[], declare=False).run()
    await (await connection.channel()).declare_queue(Queue.quorum(HALL.level_name(1)))
    with pytest.raises(DeclarationMismatchError, match="level-01"):
        await Relay(vhost.url, hall=HALL, allow=[]).run()
    await (await connection.channel()).delete_queue(HALL.level_name(1))
    broker = vhost.broker
    await asyncio.to_thread(broker.rabbitmqctl, "add_user", "guest-of-the-hall", "secret")
    try:
        url = broker.vhost_url(vhost.name, user="guest-of-the-hall", password="secret")
        await asyncio.to_thread(
            broker.rabbitmqctl, "set_permissions", "-p", vhost.name, "guest-of-the-hall", "^$", "^$", "^$"
        )
        # From 4.3 on the broker does not even tell such a user what there is.
        with pytest.raises((NotAppliedError, AccessRefusedError)):
            await Relay(url, hall=HALL, allow=[]).run()
        await install(connection, HALL)
        with pytest.raises(AccessRefusedError, match="guest-of-the-hall"):
            await Relay(url, hall=HALL, allow=[]).run()
        # It may read, but not write: found out with the first message, which stays.
        await asyncio.to_thread(
            broker.rabbitmqctl, "set_permissions", "-p", vhost.name, "guest-of-the-hall", "^$", "^$", ".*"
        )
        async with await connection.channel(confirms=True) as channel:
            await channel.publish(
                exchange=HALL.check_in, routing_key="k", values={"headers": {"x-delay": 500}}, body=b""
            )
        with pytest.raises(AccessRefusedError, match="level-02"):
            await asyncio.wait_for(Relay(url, hall=HALL, allow=[]).run(), TIMEOUT)

        async def back() -> bool:
            return await ready(connection, HALL.receiving_queue) == 1

        await eventually(back)
    finally:
        await asyncio.to_thread(broker.rabbitmqctl, "delete_user", "guest-of-the-hall")


async def test_a_delay_of_27_seconds_passes_the_documented_hops(walk: Walk) -> None:
    """Levels of 1, 2, 4 and 8 seconds: 27, 19 and 11 seconds to go, then ``1.0.1.1``; the routing key is restored.

    If the machine delays the relay, less time is left at each turn, and after some seconds of delay a round is missing.
    """
    out, _ = await asyncio.to_thread(walk.receiver.communicate, timeout=TIMEOUT)
    assert 0 <= json.loads(out)["lateness_ms"] < MAX_LATENESS.total_seconds() * 1000
    done = walk.process.stop()
    rounds = done.pop("rounds")
    assert rounds in (1, 2)
    assert done == {"delayed": 1, "delivered": 1, "refused": 0, "undeliverable": 0}
    async with bide.connect(walk.url) as client:
        (message,) = await receive(client, "copy", 1)
        assert message.sent_at is not None
        assert message.due is not None
        assert message.due - message.sent_at >= timedelta(seconds=27)
        assert (message.body, message.raw.exchange, message.raw.routing_key) == (
            *(b"remind", FOUR.delivery_exchange),
            "my-key",
        )

        checked_in = await receive(client, "check-in", rounds + 1)
        first, second, *third = (_header(one, HEADER_REST) for one in checked_in)
        assert (first, second) == (None, 19_000)
        assert all(8_000 <= one <= 11_000 for one in third)
        assert {one.raw.routing_key for one in checked_in} == {"my-key"}
        assert [_waited(one) for one in checked_in] == [set(), *[{FOUR.meditating}] * rounds]
        (last,) = await receive(client, "level-0", 1)
        way = last.raw.routing_key
        rest = int(way.replace(".", ""), base=2)
        assert 0 < rest <= min(15, *(one // 1000 for one in (second, *third)))
        levels = range(rest.bit_length() - 1, -1, -1)
        passed = [*[(await receive(client, f"level-{level}", 1))[0] for level in levels[:-1]], last]
        assert {one.raw.routing_key for one in passed} == {way}
        # A zero, as that of the four seconds, takes no queue.
        assert [_waited(one) for one in passed] == [
            {FOUR.level_name(above) for above in levels if above > level and rest >> above & 1} for level in levels
        ]


def _header(message: bide.Message, name: str) -> Any:
    return message.raw.values["headers"].get(name)


def _waited(message: bide.Message) -> set[str]:
    """The queues that it has waited in since the relay sent it on: RabbitMQ 3.10 changes the order of three or more."""
    return {death["queue"] for death in _header(message, "x-death") or []}
