"""Copies out of streams that end, and out of those that give nothing for another reason."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import ConnectionLostError
from bide.pipelines import replay_taps
from bide.pipelines.replay_taps import copies, first_offsets
from tests.broker.receiving import fresh
from tests.faults.proxy import Proxy
from tests.support import Vhost

CONSUME_OK = b"\x00\x3c\x00\x15"


@pytest.fixture(autouse=True)
def less_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_taps, "_PATIENCE", 3.0)


async def new_stream(url: str) -> str:
    name = fresh("s")
    async with bide.connect(url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue(name, arguments={"x-queue-type": "stream"})]))
    return name


@pytest.fixture
async def stream(vhost: Vhost) -> str:
    """A stream with three messages."""
    name = await new_stream(vhost.url)
    await publish(vhost.url, name, 3)
    return name


async def publish(url: str, stream: str, number: int) -> None:
    async with bide.connect(url) as client:
        for one in range(number):
            await client.publish(str(one), to=stream)


async def found(url: str, stream: str, offsets: Sequence[int]) -> list[int]:
    """Those of the offsets at which there is something."""
    connection = await Connection.open(BrokerUrl.parse(url))
    try:
        return [offset async for offset, _ in copies(connection, stream, offsets)]
    finally:
        await connection.close()


async def test_a_broker_that_stands_still_is_no_end_of_a_stream(vhost: Vhost, stream: str) -> None:
    async with Proxy(vhost.url) as proxy:
        connection = await Connection.open(BrokerUrl.parse(proxy.url))
        seen = copies(connection, stream, [1, 3])
        assert (await anext(seen))[0] == 1
        proxy.stall()
        # What comes while nothing passes is in the stream, and not read.
        await publish(vhost.url, stream, 1)
        with pytest.raises(ConnectionLostError, match=f"{stream} has given nothing for 3 s, .* before the offset 3:"):
            await anext(seen)
        proxy.moving.set()
        await connection.close()
    assert await found(vhost.url, stream, [1, 3]) == [1, 3]


async def test_a_broker_that_stands_still_has_no_empty_streams(vhost: Vhost, stream: str) -> None:
    streams = [await new_stream(vhost.url)]
    assert await asyncio.to_thread(first_offsets, vhost.url, [*streams, stream, fresh("gone")]) == {stream: 0}
    async with Proxy(vhost.url) as proxy:

        def stall_then(data: bytes) -> bytes:
            if CONSUME_OK in data:
                proxy.stall()
            return data

        proxy.rewrite = stall_then
        with pytest.raises(ConnectionLostError, match="has not answered for 3 s"):
            await asyncio.to_thread(first_offsets, proxy.url, streams)


async def test_what_is_behind_the_end_of_a_stream_is_left_out(vhost: Vhost, stream: str) -> None:
    """A stream that was deleted and declared again is shorter than it was."""
    assert await found(vhost.url, stream, [0, 2, 3, 30_000]) == [0, 2]
    assert await found(vhost.url, fresh("gone"), [0]) == []
