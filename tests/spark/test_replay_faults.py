"""Replays from streams that end or stall."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import ConnectionLostError, NotFoundError
from bide.pipelines.replay import tap_reader
from bide.pipelines.replay.tap_reader import ReplayMessage, ReplayRun, available_offsets, read_copies, send_back
from tests.broker.receiving import fresh
from tests.faults.proxy import Proxy
from tests.support import Vhost
from tests.timeouts import TIMEOUT

CONSUME_OK = b"\x00\x3c\x00\x15"


@pytest.fixture(autouse=True)
def short_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent stream is soon asked for its end; the broker has the usual time to answer."""
    monkeypatch.setattr(tap_reader, "_QUIET", 1.0)


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


@asynccontextmanager
async def busy(url: str, stream: str) -> AsyncIterator[None]:
    """Messages keep coming meanwhile, one by one: a few hundred at most in the time of a test."""
    async with bide.connect(url) as client:

        async def go_on() -> None:
            while True:
                await client.publish("new", to=stream)
                await asyncio.sleep(0.1)  # a steady stream of messages

        coming = asyncio.create_task(go_on())
        try:
            yield
        finally:
            coming.cancel()
            # What else ended it is raised.
            with suppress(asyncio.CancelledError):
                await coming


async def found(url: str, stream: str, offsets: Sequence[int]) -> list[int]:
    """Those of the offsets at which there is something."""
    connection = await Connection.open(BrokerUrl.parse(url))
    try:
        return [offset async for offset, _ in read_copies(connection, stream, offsets)]
    finally:
        await connection.close()


async def test_a_stalled_broker_is_not_taken_for_the_end_of_a_stream(
    vhost: Vhost, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Proxy(vhost.url) as proxy:
        connection = await Connection.open(BrokerUrl.parse(proxy.url))
        seen = read_copies(connection, stream, [1, 3])
        assert (await anext(seen))[0] == 1
        proxy.stall()
        # What comes while nothing passes is in the stream, and not read.
        await publish(vhost.url, stream, 1)
        with monkeypatch.context() as patch:
            patch.setattr(tap_reader, "_TIMEOUT", 2.0)
            with pytest.raises(
                ConnectionLostError, match=f"nothing of the stream {stream} for 1 s, .* before offset 3:"
            ):
                await anext(seen)
        proxy.moving.set()
        await connection.close()
    assert await found(vhost.url, stream, [1, 3]) == [1, 3]


async def test_a_message_that_arrives_after_a_pause_is_read(vhost: Vhost, stream: str) -> None:
    async with Proxy(vhost.url) as proxy:
        connection = await Connection.open(BrokerUrl.parse(proxy.url))
        seen = read_copies(connection, stream, [1, 3])
        assert (await anext(seen))[0] == 1
        proxy.stall()
        await publish(vhost.url, stream, 1)
        # After the quiet time, while the end of the stream is looked up.
        asyncio.get_running_loop().call_later(2.0, proxy.resume)
        assert [offset async for offset, _ in seen] == [3]
        await connection.close()


async def test_a_stalled_broker_is_not_taken_for_an_empty_stream(
    vhost: Vhost, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = await new_stream(vhost.url)
    wanted = {empty: 0, fresh("gone"): 0}
    assert await asyncio.to_thread(available_offsets, vhost.url, {**wanted, stream: 2}) == {stream: range(3)}
    monkeypatch.setattr(tap_reader, "_TIMEOUT", 3.0)
    async with Proxy(vhost.url) as proxy:

        def stall_then(data: bytes) -> bytes:
            if CONSUME_OK in data:
                proxy.stall()
            return data

        proxy.rewrite = stall_then
        with pytest.raises(ConnectionLostError, match="has not answered for 3 s"):
            await asyncio.to_thread(available_offsets, proxy.url, {empty: 0})


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_a_stalled_broker_is_not_taken_for_a_short_stream(
    vhost: Vhost, stream: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whichever subscription is the last that it answers."""
    monkeypatch.setattr(tap_reader, "_TIMEOUT", 5.0)
    async with Proxy(vhost.url) as proxy:
        answered = 0

        def stall_at_last(data: bytes) -> bytes:
            nonlocal answered
            answered += data.count(CONSUME_OK)
            if answered == number:
                proxy.stall()
            return data

        proxy.rewrite = stall_at_last
        with pytest.raises(ConnectionLostError, match="has not answered for 5 s"):
            await asyncio.to_thread(available_offsets, proxy.url, {stream: 30_000})
        assert answered == number


async def test_offsets_behind_the_end_of_a_stream_are_left_out(vhost: Vhost, stream: str) -> None:
    """A stream that was deleted and declared again is shorter than it was."""
    assert await found(vhost.url, stream, [0, 2, 3, 30_000]) == [0, 2]
    assert await found(vhost.url, fresh("gone"), [0]) == []
    assert await found(vhost.url, await new_stream(vhost.url), [5]) == []
    # As in a notebook, where a loop runs in this very thread.
    assert available_offsets(vhost.url, {stream: 30_000}) == {stream: range(3)}


@pytest.mark.parametrize("far", [15_000, 30_000], ids=["near enough to read on", "behind another subscription"])
async def test_offsets_behind_the_end_of_a_growing_stream_are_left_out(vhost: Vhost, stream: str, far: int) -> None:
    """It will have that offset one day, with another message there."""
    async with busy(vhost.url, stream), asyncio.timeout(TIMEOUT):
        assert await found(vhost.url, stream, [0, far]) == [0]
        held = (await asyncio.to_thread(available_offsets, vhost.url, {stream: far}))[stream]
        assert held.start == 0
        assert 3 <= held.stop < far
        # What it has by now is not at its end, however much comes behind it.
        assert await found(vhost.url, stream, held) == [*held]


async def test_a_replayed_message_is_sent_to_its_target_without_delay(vhost: Vhost) -> None:
    """The sender waits until each message is due, since waiting on the broker could not be interrupted."""
    stream = await new_stream(vhost.url)
    async with bide.connect(vhost.url, declare=False) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
        for number in range(3):
            await client.publish(str(number), to=stream, message_id=f"m{number}")
        names = ("other", "m0", "m1", "m2")
        wanted = [
            ReplayMessage(message_id=name, queue="orders", stream=stream, offset=max(number - 1, 0))
            for number, name in enumerate(names)
        ]
        way = ReplayRun(url=vhost.url, run="run")
        assert await send_back(wanted, way, skip_missing=True) == 3
        async with client.consume("orders") as messages:
            found = [await anext(messages) for _ in range(3)]
        assert sorted(str(one.message_id) for one in found) == ["m0", "m1", "m2"]
        assert [one.due for one in found] == [None] * 3


async def test_nothing_is_sent_while_a_message_is_missing(vhost: Vhost, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent then would be sent once more with the others."""
    # Of two bodies, each a byte long: the third is read again.
    monkeypatch.setattr(tap_reader, "_READ_AHEAD", 2)
    stream = await new_stream(vhost.url)
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders"), bide.Queue.quorum("mail")]))
        for number in range(3):
            await client.publish(str(number), to=stream, message_id=f"m{number}")
        places = [(0, "orders"), (2, "orders"), (1, "orders"), (1, "mail")]
        wanted = [ReplayMessage(message_id=f"m{n}", queue=queue, stream=stream, offset=n) for n, queue in places]
        other = ReplayMessage(message_id="other", queue="orders", stream=stream, offset=2)
        way = ReplayRun(url=vhost.url, run="run")
        for missing in (other, ReplayMessage(message_id="m3", queue="orders", stream=fresh("gone"), offset=3)):
            with pytest.raises(NotFoundError, match=r"^1 of 5 messages were dropped .*with skip_missing=True"):
                await send_back([*wanted, missing], way, skip_missing=False)
        assert await send_back(wanted, way, skip_missing=False) == 4
        for queue, ids in (("mail", ["m1"]), ("orders", ["m0", "m1", "m2"])):
            # Behind what was sent, whatever that was.
            await client.publish("last", to=queue, message_id="last")
            found: list[str | None] = []
            async with client.consume(queue) as messages:
                while "last" not in found:
                    message = await anext(messages)
                    found.append(message.message_id)
                    await message.ack()
            assert sorted(map(str, found)) == sorted([*ids, "last"])
