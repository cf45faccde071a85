"""Frames in flight to a stream, stored once and without a gap whatever breaks."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager

import pika
import pytest

from bide.local_broker import LocalBroker
from bide.streams.amqp10_encoder import StreamMessageEncoder
from bide.streams.log import Address
from bide.streams.publisher import StreamPublisher
from tests.faults.cutting import Proxy
from tests.stream_contents import bodies
from tests.support import Vhost, stream_port
from tests.timeouts import TIMEOUT

FRAME = 5
"""Messages in a frame."""

CUTS = 15

# The loop sleeps between kills, so that the publisher can connect again and publish.
KILL_LEADERS = """
    Stream = rabbit_misc:r(<<"VHOST">>, queue, <<"s">>),
    Stop = rabbit_misc:r(<<"VHOST">>, queue, <<"stop">>),
    Kill = fun Again() ->
        case {rabbit_amqqueue:lookup(Stream), rabbit_amqqueue:lookup(Stop)} of
            {{ok, Queue}, {error, not_found}} ->
                exit(amqqueue:get_pid(Queue), kill),
                timer:sleep(300),
                Again();
            _ -> ok
        end
    end,
    spawn(Kill).
"""
"""End the process that writes the stream, and those that RabbitMQ starts instead, until there is a queue ``stop``."""

_encode = StreamMessageEncoder("s", (4, 3, 6)).encode


def declare(url: str, name: str, **arguments: str) -> None:
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        given = {f"x-{name.replace('_', '-')}": value for name, value in arguments.items()}
        connection.channel().queue_declare(name, durable=True, arguments={"x-queue-type": "stream", **given})


def address_of(broker: LocalBroker, url: str) -> Address:
    """The address, with long to answer for a broker without CPU time."""
    return Address.of(f"{url}?timeout={TIMEOUT:.0f}", stream_port(broker))


@pytest.fixture
def address(vhost: Vhost) -> Address:
    declare(vhost.url, "s")
    return address_of(vhost.broker, vhost.url)


@pytest.fixture
async def proxy(address: Address, quiet: None) -> AsyncIterator[Proxy]:
    async with Proxy(f"rabbitmq-stream://{address.url.hosts[0][0]}:{address.port}") as proxy:
        yield proxy


def through(proxy: Proxy, address: Address) -> Address:
    return Address(url=address.url, port=int(proxy.url.rpartition(":")[2]))


@contextmanager
def publisher(address: Address) -> Iterator[StreamPublisher]:
    with StreamPublisher(address, "s", "p", timeout=TIMEOUT) as made:
        yield made


def publish(into: StreamPublisher, *frames: int) -> None:
    """Publish frames by their numbers, from 1."""
    for frame in frames:
        first = (frame - 1) * FRAME + 1
        into.publish(first, [_encode({}, str(number).encode()) for number in range(first, first + FRAME)])


def up_to(frame: int) -> list[str]:
    """The bodies of all frames up to one."""
    return [str(number) for number in range(1, frame * FRAME + 1)]


def publish_until_reconnected(
    address: Address, caplog: pytest.LogCaptureFixture, times: int, begin: Callable[[], object]
) -> int:
    """Publish until connections have been lost a few times, and ten frames more; return the number of frames.

    Args:
        begin: called when the first frame is stored; lets the faults begin.
    """

    def has_reconnected() -> bool:
        return sum("publishing into s again" in one.getMessage() for one in caplog.records) >= times

    frame = 1
    with publisher(address) as into, caplog.at_level(logging.INFO, "bide"):
        publish(into, frame)
        into.flush()
        begin()
        while not has_reconnected():
            frame += 1
            publish(into, frame)
        publish(into, *range(frame + 1, frame + 11))
        into.flush()
    return frame + 10


async def test_messages_are_stored_once_though_connections_break_at_any_byte(proxy: Proxy, address: Address) -> None:
    chance = random.Random(20)

    def next_cut() -> int | None:
        return chance.randrange(1_000, 5_000) if proxy.cuts < CUTS else None

    def publish_all() -> None:
        with publisher(through(proxy, address)) as into:
            publish(into, *range(1, 201))
            into.flush()

    proxy.cut_after, proxy.next_cut = next_cut(), next_cut
    await asyncio.to_thread(publish_all)
    assert proxy.cuts == CUTS
    assert await asyncio.to_thread(bodies, address, "s") == up_to(200)


@pytest.mark.parametrize("ahead", [1, 2, 4])
async def test_frames_of_another_attempt_that_arrive_late_are_stored_once(
    proxy: Proxy, address: Address, ahead: int
) -> None:
    """As those of a killed process, which are still on their way when the next attempt publishes."""
    loop = asyncio.get_running_loop()

    def publish_beside() -> None:
        with publisher(through(proxy, address)) as old, publisher(address) as new, publisher(address) as asking:
            publish(old, 1)
            old.flush()
            proxy.stall()
            publish(old, 2, 3)
            publish(new, *range(1, ahead + 1))
            new.flush()
            assert asking.last_id() == ahead * FRAME
            loop.call_soon_threadsafe(proxy.resume)
            old.flush()
            assert asking.last_id() == max(ahead, 3) * FRAME
            publish(new, *range(ahead + 1, 7))
            new.flush()

    await asyncio.to_thread(publish_beside)
    assert await asyncio.to_thread(bodies, address, "s") == up_to(6)


async def test_messages_are_stored_once_though_the_leader_changes(
    vhost: Vhost, address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    def publish_and_count() -> int:
        kill = KILL_LEADERS.replace("VHOST", vhost.name)
        frames = publish_until_reconnected(address, caplog, 3, lambda: vhost.broker.rabbitmqctl("eval", kill))
        declare(vhost.url, "stop")
        return frames

    frames = await asyncio.to_thread(publish_and_count)
    assert await asyncio.to_thread(bodies, address, "s") == up_to(frames)
