"""The RPC server of pattern 18 when a reply cannot be sent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

import bide
from bide.amqp.connection import Connection
from bide.errors import ReplyTimeoutError
from bide.messaging.rpc import Caller
from bide.messaging.rpc_server import serve
from tests.broker.receiving import eventually, ready
from tests.faults.cutting import Proxy
from tests.leaks import no_leaks
from tests.support import Vhost


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    """No error of a request may be left for the event loop to log."""
    async with no_leaks():
        yield


@asynccontextmanager
async def serving(
    client: bide.Client, queue: str, handler: Callable[[bide.Message], Awaitable[str]]
) -> AsyncIterator[None]:
    task = asyncio.create_task(serve(client, queue, handler))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


class Handled(list[bytes]):
    """A handler that records request bodies, and raises for the body ``fails``."""

    async def __call__(self, request: bide.Message) -> str:
        self.append(request.body)
        if request.body == b"fails":
            raise LookupError("no such item")
        return "a reply"

    async def has(self, *bodies: bytes) -> bool:
        return sorted(self) == sorted(bodies)


async def declared(client: bide.Client) -> None:
    """The queue of the servers, and where what they reject goes."""
    await client.declare(
        bide.Topology(
            queues=[
                bide.Queue("rejected"),
                bide.Queue(
                    "requests", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "rejected"}
                ),
            ]
        )
    )


async def test_a_request_with_an_empty_reply_to_is_rejected(vhost: Vhost, vhost_connection: Connection) -> None:
    handled = Handled()
    async with bide.connect(vhost.url) as client:
        await declared(client)
        channel = await vhost_connection.channel(confirms=True)
        for body in (b"works", b"fails"):
            # bide itself sends no such thing.
            await channel.publish(exchange="", routing_key="requests", values={"reply_to": ""}, body=body)
        async with serving(client, "requests", handled):
            await client.publish("the last", to="requests")
            await eventually(partial(handled.has, b"works", b"fails", b"the last"))

            async def rejected() -> bool:
                return await ready(vhost_connection, "rejected") == 1

            await eventually(rejected)
    assert await ready(vhost_connection, "requests") == 0
    assert sorted(handled) == [b"fails", b"the last", b"works"]


async def test_a_server_without_write_permission_logs_and_continues(
    vhost: Vhost, vhost_connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    handled = Handled()
    vhost.broker.add_user("mute", "secret")
    vhost.broker.set_permissions(vhost.name, "mute", configure="^$", write="^$", read=".*")
    try:
        async with bide.connect(vhost.url) as client, bide.connect(
            vhost.broker.vhost_url(vhost.name, user="mute", password="secret")
        ) as mute, Caller(client, timeout="10s") as caller:  # fmt: skip
            await declared(client)
            async with serving(mute, "requests", handled):
                calls = [caller.call(body, to="requests") for body in ("works", "fails")]
                for one in await asyncio.gather(*calls, return_exceptions=True):
                    assert isinstance(one, ReplyTimeoutError)

                async def rejected() -> bool:
                    return await ready(vhost_connection, "rejected") == 1

                await eventually(rejected)
        assert sorted(handled) == [b"fails", b"works"]
        assert await ready(vhost_connection, "requests") == 0
    finally:
        vhost.broker.delete_user("mute")
    warnings = [one.message for one in caplog.records if one.message.startswith("cannot reply to")]
    assert len(warnings) == 2
    assert "give this user the permission" in warnings[0]


async def test_a_refused_reply_is_retried_until_it_is_taken(vhost: Vhost, vhost_connection: Connection) -> None:
    handled = Handled()
    replies = bide.Queue("replies", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    async with bide.connect(vhost.url) as client:
        await declared(client)
        await client.declare(bide.Topology(queues=[replies]))
        await client.publish("in the way", to="replies")
        async with serving(client, "requests", handled):
            started = time.monotonic()
            await client.publish("works", to="requests", reply_to="replies")
            await eventually(partial(handled.has, b"works", b"works"))
            assert time.monotonic() - started >= 0.9
            channel = await vhost_connection.channel()
            await channel.purge_queue("replies")

            async def replied() -> bool:
                return await ready(vhost_connection, "replies") == 1

            await eventually(replied)


async def test_a_connection_lost_before_a_requeue_redelivers_the_request(
    vhost: Vhost, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bide.messaging.rpc_server")
    handled = Handled()
    full = bide.Queue("full", arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
    async with bide.connect(vhost.url) as client, Proxy(vhost.url) as proxy, bide.connect(proxy.url) as server:
        await declared(client)
        await client.declare(bide.Topology(queues=[full]))
        async with serving(server, "requests", handled):
            await client.publish("works", to="requests", reply_to="full")
            await eventually(partial(handled.has, b"works"))
            proxy.cut()

            async def is_logged() -> bool:
                return any("will be redelivered" in one.message for one in caplog.records)

            await eventually(is_logged)
    assert len(handled) > 1
