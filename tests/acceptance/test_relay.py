"""``bide relay`` as processes that are frozen, killed and stopped."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from datetime import timedelta
from urllib.request import urlopen

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.topology import Queue, Topology
from tests.broker.receiving import eventually, ready, receive
from tests.relay_process import Process, relay
from tests.support import Vhost
from tests.timeouts import TIMEOUT

QUICK = bide.WaitingHall(levels=4, resolution=timedelta(milliseconds=100))
QUICKLY = ("--levels", "4", "--resolution", "100ms")
UNHURRIED = bide.WaitingHall(levels=6, resolution=timedelta(seconds=1))


@pytest.mark.slow
@pytest.mark.parametrize("between", ["check-in and levels", "levels and target"])
async def test_a_relay_killed_between_consume_and_confirm_loses_nothing(vhost: Vhost, between: str) -> None:
    """It is frozen first, so that the messages are certainly in its hands and none of them is sent on."""
    count = 300
    at_target = between == "levels and target"
    hall, options = (UNHURRIED, ("--levels", "6", "--resolution", "1s")) if at_target else (QUICK, QUICKLY)
    levels = [hall.level_name(level) for level in range(hall.levels)]
    async with bide.connect(vhost.idle_url, infrastructure=hall) as client:
        await client.declare(Topology(queues=[Queue.quorum("orders")]))
        connection = await Connection.open(BrokerUrl.parse(vhost.idle_url))
        with relay(vhost, *options) as frozen:
            if at_target:
                # Long enough for all of them to be in the levels when it is frozen, on a slow machine too: they wait
                # for 32 s in the first one.
                await client.publish_many(bide.OutgoingMessage(f"{n}", to="orders", delay="40s") for n in range(count))

                async def delayed() -> bool:
                    return sum([await ready(connection, name) for name in levels]) == count

                await eventually(delayed, step=0.01)
                frozen.signal(signal.SIGSTOP)
            else:
                frozen.signal(signal.SIGSTOP)
                await client.publish_many(
                    bide.OutgoingMessage(f"{n}", to="orders", delay="300ms") for n in range(count)
                )

            async def unsettled() -> bool:
                # Nothing in the levels, nothing ready: what is left is with the only consumer there is.
                queues = [*hall.relay_queues, hall.meditating, *levels]
                return not sum([await ready(connection, name) for name in queues])

            if at_target:
                # By its due time each of them has left the levels.
                await asyncio.sleep(40.1)
            await eventually(unsettled)
            assert await ready(connection, "orders") == 0
            frozen.kill()
        with relay(vhost, *options) as other:
            bodies: dict[bytes, int] = {}
            async with asyncio.timeout(TIMEOUT), client.consume("orders", prefetch=count) as messages:
                async for message in messages:
                    await message.ack()
                    bodies[message.body] = bodies.get(message.body, 0) + 1
                    if len(bodies) == count:
                        break
            done = other.stop()
        await connection.close()
    assert done["delivered"] >= count
    if not at_target:
        # The first one had sent on nothing at all, so there is no duplicate either.
        assert done["delivered"] == sum(bodies.values()) == count


async def test_a_relay_killed_before_its_confirms_loses_nothing(vhost: Vhost) -> None:
    """The hall takes nothing, because its meditating queue is gone: messages are sent, returned, and sent again."""
    count = 300
    # A client that has to connect again declares the queue again.
    async with bide.connect(vhost.idle_url, infrastructure=QUICK) as client:
        await client.declare(Topology(queues=[Queue.quorum("orders")]))
        await client.bind("orders")
        connection = await Connection.open(BrokerUrl.parse(vhost.idle_url))
        with relay(vhost, *QUICKLY) as stuck:
            await (await connection.channel()).delete_queue(QUICK.meditating)
            # A relay that is held up delivers what is due by then, and has less to get rid of.
            await client.publish_many(bide.OutgoingMessage(f"{n}", to="orders", delay="30s") for n in range(count))
            # It counts what it could not get rid of, at the 1st, 10th and 100th.
            # In a thread, so that the connection goes on with its heartbeats.
            await asyncio.to_thread(stuck.wait_until_it_says, b"(100 times)")
            assert await ready(connection, QUICK.receiving_queue) == 0
            stuck.kill()

        async def back() -> bool:
            # On a slow machine some of them became due before the kill, and were delivered.
            return await ready(connection, QUICK.receiving_queue) + await ready(connection, "orders") >= count

        await eventually(back)
        await client.declare(QUICK.topology())
        await connection.close()
        with relay(vhost, *QUICKLY):
            missing = {f"{n}".encode() for n in range(count)}
            async with client.consume("orders") as messages:
                # A message may come twice, as after any kill.
                while missing:
                    async with asyncio.timeout(TIMEOUT):
                        message = await anext(messages)
                    missing.discard(message.body)
                    await message.ack()


@pytest.mark.long
async def test_repeated_kills_of_one_of_three_relays_lose_nothing(vhost: Vhost) -> None:
    count, kills, killed = 3000, 4, 0
    bodies: dict[int, int] = {}
    async with bide.connect(vhost.idle_url, infrastructure=QUICK) as client:
        await client.declare(Topology(queues=[Queue.quorum("orders")]))
        with relay(vhost, *QUICKLY) as first, relay(vhost, *QUICKLY) as second:

            async def kill() -> None:
                nonlocal killed
                for _ in range(kills):
                    with relay(vhost, *QUICKLY) as victim:
                        await _grow(bodies, 50)
                        victim.kill()
                        killed += 1

            await client.bind("orders")
            # Over twelve seconds: a relay takes some of them to start.
            sending = asyncio.create_task(
                _send(
                    client, (bide.OutgoingMessage(f"{n}", to="orders", delay=f"{300 + 4 * n}ms") for n in range(count))
                )
            )
            killing = asyncio.create_task(kill())
            async with asyncio.timeout(TIMEOUT), client.consume("orders", prefetch=1000) as messages:
                async for message in messages:
                    await message.ack()
                    assert message.lateness is not None
                    assert message.lateness >= timedelta(0)
                    bodies[int(message.body)] = bodies.get(int(message.body), 0) + 1
                    if len(bodies) == count:
                        break
            killing.cancel()
            await asyncio.gather(sending, killing, return_exceptions=True)
            assert sending.exception() is None
            assert killing.cancelled() or killing.exception() is None
            assert killed >= 2
            done = [first.stop(), second.stop()]
    assert sorted(bodies) == list(range(count))
    assert all(one["delivered"] for one in done)
    assert not any(one["undeliverable"] for one in done)


async def _grow(bodies: dict[int, int], number: int) -> None:
    """Wait until the given number of further messages arrived."""
    enough = len(bodies) + number

    async def grown() -> bool:
        return len(bodies) >= enough

    await eventually(grown, step=0.005)


async def _send(client: bide.Client, messages: Iterator[bide.OutgoingMessage]) -> None:
    await client.publish_many(messages)


async def test_sigterm_sends_every_consumed_message_before_the_end(vhost: Vhost) -> None:
    """With all messages consumed and none sent on, it sends on every one of them before it ends, and no more."""
    count = 500
    async with bide.connect(vhost.idle_url, infrastructure=QUICK) as client:
        await client.declare(Topology(queues=[Queue.quorum("orders")]))
        await client.bind("orders")
        connection = await Connection.open(BrokerUrl.parse(vhost.idle_url))
        with relay(vhost, *QUICKLY) as process:
            process.signal(signal.SIGSTOP)
            await client.publish_many(bide.OutgoingMessage(f"{n}", to="orders", delay="1h") for n in range(count))

            async def taken() -> bool:
                return await ready(connection, QUICK.receiving_queue) == 0

            await eventually(taken)
            # One SIGTERM alone: a second one would end the relay at once.
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)
            out, err = await asyncio.to_thread(process.process.communicate, timeout=TIMEOUT)
        assert process.process.returncode == 0, err.decode()
        assert json.loads(out)["rounds"] == count
        await connection.close()


def test_a_relay_that_cannot_start_gives_the_reason(vhost: Vhost) -> None:
    process = Process(vhost, "--no-declare")
    _, err = process.process.communicate(timeout=TIMEOUT)
    assert process.process.returncode == 1
    assert err.decode().count("\n") == 1
    assert "run 'bide delay apply --layout waiting-hall'" in err.decode()
    process = Process(vhost, "--levels", "0")
    _, err = process.process.communicate(timeout=TIMEOUT)
    assert (process.process.returncode, b"0 levels: give 1 to 28" in err) == (2, True)


async def test_a_relay_serves_its_metrics(vhost: Vhost) -> None:
    process = Process(vhost, "--metrics", "0", *QUICKLY)
    try:
        output = (await asyncio.to_thread(process.wait_until_it_says, b"relaying bide.hall")).decode()
        url = output.partition("metrics on ")[2].split()[0]
        async with bide.connect(vhost.idle_url, infrastructure=QUICK) as client:
            await client.declare(Topology(queues=[Queue.quorum("orders")]))
            await client.publish(b"1", to="orders", delay="1s")
            await receive(client, "orders", 1)

        def read() -> str:
            with urlopen(url, timeout=TIMEOUT) as page:
                text: str = page.read().decode()
                return text

        async def is_counted() -> bool:
            # The relay counts a delivery after its confirm, which may be after the receipt.
            page = await asyncio.to_thread(read)
            return f'bide_relay_messages_total{{hall="{QUICK.base}",result="delivered"}} 1.0' in page

        await eventually(is_counted)
    finally:
        process.kill()
