"""Allowed targets of components that deliver messages for others."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delay.protocol import HEADER_SET_ASIDE
from bide.error_queues import ErrorQueue, Selection, read_operator_log
from bide.error_queues.undeliverable import resend
from bide.errors import InvalidInputError, TargetNotAllowedError
from bide.messaging.rpc import Caller, serve
from bide.relay import Relay
from bide.topology import Binding, Exchange, Queue, Topology
from tests.broker.receiving import eventually, fresh, ready, receive
from tests.broker.test_error_queues import park
from tests.relay_process import relay
from tests.support import Vhost
from tests.timeouts import TIMEOUT

HALL = bide.WaitingHall(levels=4, resolution=timedelta(milliseconds=100))
QUICKLY = ("--levels", "4", "--resolution", "100ms")
STRANGER = "stranger"


@pytest.fixture
async def stranger(vhost: Vhost) -> AsyncIterator[Connection]:
    """A connection of a user with write permission on the check-in exchange only."""
    broker = vhost.broker
    async with bide.connect(vhost.url, infrastructure=HALL) as client:
        await client.declare(
            HALL.topology()
            | Topology(
                [Exchange("shop", "topic"), Exchange("private", "fanout")],
                [Queue.quorum(name) for name in ("orders.eu", "salaries", "routed", "picked-up")],
                [
                    Binding("shop", "routed", "#"),
                    Binding("private", "salaries"),
                    Binding(HALL.delivery_exchange, "picked-up", "pick.me"),
                ],
            )
        )
    await asyncio.to_thread(broker.rabbitmqctl, "add_user", STRANGER, "secret")
    try:
        await asyncio.to_thread(
            broker.rabbitmqctl, "set_permissions", "-p", vhost.name, STRANGER, "^$", r"\.check-in$", "^$"
        )
        # Without heartbeats: a test is blocked while a relay starts.
        url = f"{broker.vhost_url(vhost.name, user=STRANGER, password='secret')}?heartbeat=0"
        connection = await Connection.open(BrokerUrl.parse(url))
        yield connection
        await connection.close()
    finally:
        await asyncio.to_thread(broker.rabbitmqctl, "delete_user", STRANGER)


async def _check_in(connection: Connection, key: str = "k", *, body: bytes = b"", **headers: object) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with await connection.channel(confirms=True) as channel:
        await channel.publish(exchange=HALL.check_in, routing_key=key, values={"headers": named}, body=body)


async def test_a_relay_does_not_deliver_where_the_sender_may_not_write(vhost: Vhost, stranger: Connection) -> None:
    """By a header for a queue, an exchange, or further queues in a CC list; due at once, and after a delay."""
    refused: tuple[dict[str, Any], ...] = (
        {"bide_to": "q:salaries"},
        {"bide_to": "q:salaries", "x_delay": 86_400_000},
        {"bide_to": "x:private"},
        {"bide_to": "q:orders.eu", "CC": ["salaries"]},
        {"bide_to": "q:orders.eu", "bide_cc": ["salaries"]},
        {"bide_to": "q:orders.eu", "CC": [HALL.distributing_queue]},
    )
    connection = await Connection.open(BrokerUrl.parse(vhost.idle_url))
    with relay(vhost, *QUICKLY, "--allow", "orders.*", "--allow", "x:shop") as process:
        for number, headers in enumerate(refused):
            await _check_in(stranger, body=b"%d" % number, **headers)
        await _check_in(stranger, body=b"yes", bide_to="q:orders.eu", x_delay=300)
        await _check_in(stranger, "any.key", body=b"yes", bide_to="x:shop", x_delay=300)
        await _check_in(stranger, "pick.me", body=b"yes", x_delay=300)
        async with bide.connect(vhost.url, infrastructure=HALL) as client:
            for queue in ("orders.eu", "routed", "picked-up"):
                (message,) = await receive(client, queue, 1)
                assert message.body == b"yes"

            async def set_aside() -> bool:
                return await ready(connection, HALL.undeliverable) == len(refused)

            await eventually(set_aside)
            aside = await receive(client, HALL.undeliverable, len(refused))
        assert process.stop()["undeliverable"] == len(refused)
    for message in aside:
        reason = message.raw.values["headers"][HEADER_SET_ASIDE]
        assert "salaries" in reason or "private" in reason or "waiting hall itself" in reason
        assert "allow=[...]" in reason or "waiting hall itself" in reason
    assert {message.body for message in aside} == {b"%d" % number for number in range(len(refused))}
    assert await ready(connection, "salaries") == 0
    await connection.close()


class _TwoOfAName(dict[str, Any]):
    """Headers of which one is there twice: ``BCC``."""

    def items(self) -> Any:
        return (("BCC", ["nowhere"]), *super().items())


async def test_a_relay_ignores_a_second_bcc_header(vhost: Vhost, stranger: Connection) -> None:
    """The broker removes one BCC header as it routes by it. The next would be in force as the relay publishes."""
    connection = await Connection.open(BrokerUrl.parse(vhost.idle_url))
    with relay(vhost, *QUICKLY, "--allow", "orders.*"):
        async with await stranger.channel(confirms=True) as channel:
            for delay in (0, 300):
                headers = _TwoOfAName({"bide-to": "q:orders.eu", "BCC": ["salaries"], "x-delay": delay})
                await channel.publish(exchange=HALL.check_in, routing_key="k", values={"headers": headers}, body=b"")
        async with bide.connect(vhost.url, infrastructure=HALL) as client:
            await receive(client, "orders.eu", 2)
    assert await ready(connection, "salaries") == 0
    await connection.close()


async def test_resending_does_not_deliver_messages_refused_by_the_relay(vhost: Vhost, stranger: Connection) -> None:
    relay = Relay(vhost.url, hall=HALL, allow=["orders.*"])
    consuming = asyncio.Event()
    running = asyncio.create_task(relay.run(on_start=lambda _: consuming.set()))
    await asyncio.wait_for(consuming.wait(), TIMEOUT)
    await _check_in(stranger, body=b"secret", bide_to="q:salaries")
    async with bide.connect(vhost.url, infrastructure=HALL) as client:
        connection = await Connection.open(BrokerUrl.parse(vhost.url))

        async def set_aside() -> bool:
            return await ready(connection, HALL.undeliverable) == 1

        await eventually(set_aside)
        relay.stop()
        await running
        result = await resend(client, allow=["orders.*"])
        assert (result.sent, dict(result.kept)) == (0, {"q:salaries: TargetNotAllowedError": 1})
        assert await ready(connection, "salaries") == 0
        result = await resend(client, allow=["q:salaries"])
        assert (result.sent, dict(result.kept)) == (1, {})
        (message,) = await receive(client, "salaries", 1)
        assert message.body == b"secret"
        assert HEADER_SET_ASIDE not in message.raw.values["headers"]
        await connection.close()


async def test_a_message_set_aside_keeps_its_properties(vhost: Vhost, stranger: Connection) -> None:
    """A property that would act on the undeliverable queue, and another user's name, among it."""
    async with await stranger.channel(confirms=True) as channel:
        values = {
            "headers": {"bide-to": "q:salaries", "mine": [1, {"two": 3}]},
            "expiration": "600000",
            "priority": 3,
            "user_id": STRANGER,
            "message_id": "m",
        }
        await channel.publish(exchange=HALL.check_in, routing_key="k", values=values, body=b"body")
    with relay(vhost, *QUICKLY, "--allow", "orders.*"):
        async with bide.connect(vhost.url, infrastructure=HALL) as client:
            (message,) = await receive(client, HALL.undeliverable, 1)
    assert (message.body, message.message_id, message.headers) == (b"body", "m", {"mine": [1, {"two": 3}]})
    assert (message.priority, message.expiration) == (3, timedelta(minutes=10))
    assert "user_id" not in message.raw.values
    assert message.raw.values["headers"]["bide-user-id"] == STRANGER


async def test_a_server_does_not_reply_where_the_caller_may_not_write(vhost: Vhost) -> None:
    async with bide.connect(vhost.url) as client, asyncio.TaskGroup() as tasks:
        await client.declare(Topology(queues=[Queue(name) for name in ("requests", "replies.1", "salaries")]))

        async def answer(request: bide.Message) -> bytes:
            return request.body

        serving = tasks.create_task(serve(client, "requests", answer, allow=["replies.*"]))
        await client.publish(b"no", to="requests", reply_to="salaries")
        await client.publish(b"yes", to="requests", reply_to="replies.1")
        (reply,) = await receive(client, "replies.1", 1)
        assert reply.body == b"yes"
        async with Caller(client) as caller:
            assert (await caller.call(b"direct", to="requests", timeout=timedelta(seconds=TIMEOUT))).body == b"direct"
        connection = await Connection.open(BrokerUrl.parse(vhost.url))
        assert await ready(connection, "salaries") == 0
        await connection.close()
        serving.cancel()


async def test_a_server_does_not_reply_to_a_delay_queue(vhost: Vhost) -> None:
    """A reply has no keys of a target, and would block the level of a cascade."""
    infrastructure = bide.NServiceBus(routing="direct")
    level = infrastructure.waiting_queues()[-1].name
    async with bide.connect(vhost.url, infrastructure=infrastructure) as client, asyncio.TaskGroup() as tasks:
        queues = Topology(queues=[Queue(name) for name in ("requests", "replies")])
        await client.declare(infrastructure.topology() | queues)

        async def answer(request: bide.Message) -> bytes:
            return request.body

        serving = tasks.create_task(serve(client, "requests", answer))
        await client.publish(b"no", to="requests", reply_to=level)
        await client.publish(b"yes", to="requests", reply_to="replies")
        (reply,) = await receive(client, "replies", 1)
        assert reply.body == b"yes"
        serving.cancel()
        connection = await Connection.open(BrokerUrl.parse(vhost.url))
        assert await ready(connection, level) == 0
        await connection.close()


STRANGERS_HEADERS: tuple[dict[str, Any], ...] = (
    {"bide-failed-queue": "{}"},
    {"NServiceBus.FailedQ": "{}"},
    {"x-death": [{"queue": "{}", "reason": "rejected", "count": 1, "exchange": "", "routing-keys": ["k"]}]},
)


def _naming(headers: dict[str, Any], queue: str) -> dict[str, Any]:
    """The headers of a failed message, with the name of a queue filled in."""
    ((name, value),) = headers.items()
    return {name: queue} if isinstance(value, str) else {name: [{**value[0], "queue": queue}]}


@pytest.mark.parametrize("headers", STRANGERS_HEADERS, ids=["bide", "nservicebus", "x-death"])
async def test_a_retry_does_not_deliver_where_a_stranger_may_not_write(
    client: bide.Client, headers: Any, connection: Connection
) -> None:
    error, orders, salaries = fresh("error"), fresh("orders"), fresh("salaries")
    await park(client, error, 3, orders)
    await client.declare(Topology(queues=[Queue.quorum(salaries)]))
    async with await connection.channel(confirms=True) as channel:
        values = {"message_id": "forged", "headers": _naming(headers, salaries)}
        await channel.publish(exchange="", routing_key=error, values=values, body=b"forged")
    queue = ErrorQueue(client, error)
    (forged,) = [one async for one in queue.messages(Selection(queue=salaries))]
    assert forged.message_id == "forged"

    with pytest.raises(TargetNotAllowedError, match=salaries):
        await queue.edit("forged", body=b"still forged", allow=["orders*"])
    moved = await queue.retry(Selection(), allow=["orders*"])
    assert (moved.done, dict(moved.queues), sum(moved.kept.values())) == (3, {orders: 3}, 1)
    (reason,) = moved.kept
    assert salaries in reason
    assert "allow=[...]" in reason
    assert (await ready(connection, orders), await ready(connection, salaries)) == (3, 0)
    begun = [
        one.details["allow"] async for one in read_operator_log(client) if (one.queue, one.step) == (error, "begun")
    ]
    assert begun == [["orders*"]]
    moved = await queue.retry(Selection(), over="1s", allow=["orders*", "q:salaries*"])
    assert (moved.done, dict(moved.queues)) == (1, {salaries: 1})


async def test_an_empty_list_allows_no_queue(client: bide.Client) -> None:
    error, orders = fresh("error"), fresh("orders")
    await park(client, error, 2, orders)
    queue = ErrorQueue(client, error)
    moved = await queue.retry(Selection(), to=orders, allow=[])
    assert (moved.done, sum(moved.kept.values())) == (0, 2)
    with pytest.raises(InvalidInputError, match="list of patterns"):
        await queue.retry(Selection(), allow="orders")
    assert await queue.count() == 2


def test_a_relay_without_allowed_targets_is_refused(vhost: Vhost) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bide", "relay", "--url", vhost.url],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "Missing option '--allow'" in done.stderr


@pytest.mark.parametrize("patterns", [[""], ["q:"], "orders", [5], [b"orders"], 5, None])
def test_a_pattern_that_can_match_nothing_is_refused(patterns: Any) -> None:
    with pytest.raises(InvalidInputError, match="give"):
        Relay(hall=HALL, allow=patterns)
