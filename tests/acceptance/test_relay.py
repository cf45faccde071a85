"""``bide relay`` as processes: the example of the seed at its own pace, and relays that are frozen, killed, stopped."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.broker import LocalBroker
from bide.delay.passing import HEADER_DELAY
from bide.delay.waiting_hall import HEADER_REST
from bide.topology import Binding, Queue, Topology
from tests.broker.receiving import eventually, ready, receive
from tests.support import Vhost

SEED = bide.WaitingHall(levels=4)
QUICK = bide.WaitingHall(levels=4, resolution=timedelta(milliseconds=100))
QUICKLY = ("--levels", "4", "--resolution", "100ms")
PATIENCE = 20.0


class Process:
    """One ``bide relay``."""

    def __init__(self, vhost: Vhost, *options: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bide", "relay", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**environment, "BIDE_URL": vhost.url},
        )

    def wait_until_it_works(self) -> None:
        """It says so in a line of its own."""
        assert self.process.stderr is not None
        said = b""
        deadline = time.monotonic() + PATIENCE
        while b"\n" not in said:
            readable, _, _ = select.select([self.process.stderr], [], [], max(deadline - time.monotonic(), 0))
            assert readable, "the relay says nothing"
            part = os.read(self.process.stderr.fileno(), 4096)
            assert part, f"the relay ended: {said.decode()}"
            said += part
        assert said.startswith(b"relaying bide.hall"), said.decode()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)

    def stop(self) -> dict[str, Any]:
        """End it with SIGTERM, and return what it says that it has done."""
        self.process.terminate()
        out, err = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, err.decode()
        done: dict[str, Any] = json.loads(out)
        return done


@contextmanager
def relay(vhost: Vhost, *options: str) -> Iterator[Process]:
    """A relay at work, which does not outlive the test."""
    process = Process(vhost, "--json", *options)
    try:
        process.wait_until_it_works()
        yield process
    finally:
        if process.process.poll() is None:
            process.kill()


TAPS = {"check-in": SEED.check_in} | {f"level-{level}": SEED.level_name(level) for level in range(4)}
"""Queues that get a copy of the message at every exchange of the hall."""


class Seed(NamedTuple):
    """A message on its way through a hall of four levels."""

    url: str
    process: Process


@pytest.fixture(scope="module", autouse=True)
def seed(broker: LocalBroker) -> Iterator[Seed]:
    """The example of the seed, under way while the other tests run: it takes 27 seconds."""
    vhost = Vhost(name="relay-27-seconds", url=broker.add_vhost("relay-27-seconds"), broker=broker)
    tapped = Topology(
        queues=[Queue.quorum(name) for name in (*TAPS, "final")],
        bindings=[
            *(Binding(exchange, name, "#") for name, exchange in TAPS.items()),
            Binding(SEED.delivery_exchange, "final", "my-key"),
        ],
    )
    with relay(vhost, "--levels", "4") as process, bide.connect_sync(vhost.url) as client:
        client.declare(SEED.topology() | tapped)
        client.publish("remind", exchange=SEED.check_in, routing_key="my-key", headers={HEADER_DELAY: 27_000})
        yield Seed(vhost.url, process)
    broker.delete_vhost(vhost.name)


@pytest.mark.parametrize("between", ["check-in and levels", "levels and target"])
async def test_a_relay_that_is_killed_between_consume_and_confirm_loses_nothing(vhost: Vhost, between: str) -> None:
    """It is frozen first, so that the messages are certainly in its hands and none of them is sent on."""
    count = 300
    at_target = between == "levels and target"
    async with bide.connect(vhost.url, infrastructure=QUICK) as client:
        await client.declare(Topology(queues=[Queue.quorum("orders")]))
        connection = await Connection.open(BrokerUrl.parse(vhost.url))
        with relay(vhost, *QUICKLY) as frozen:
            if at_target:
                # Long enough for all of them to be in the levels when it is frozen.
                await client.publish_many(bide.Letter(f"{n}", to="orders", delay="1.5s") for n in range(count))

                async def in_the_levels() -> bool:
                    return sum([await ready(connection, QUICK.level_name(level)) for level in range(4)]) == count

                await eventually(in_the_levels, step=0.01)
                frozen.signal(signal.SIGSTOP)
            else:
                frozen.signal(signal.SIGSTOP)
                await client.publish_many(bide.Letter(f"{n}", to="orders", delay="300ms") for n in range(count))

            async def in_its_hands() -> bool:
                # Nothing in the levels, nothing ready: what is left is with the only consumer there is.
                queues = [*QUICK.relay_queues, QUICK.meditating, *(QUICK.level_name(level) for level in range(4))]
                return not sum([await ready(connection, name) for name in queues])

            if at_target:
                # By its due time each of them has left the levels.
                await asyncio.sleep(1.6)
            await eventually(in_its_hands)
            assert await ready(connection, "orders") == 0
            frozen.kill()
        with relay(vhost, *QUICKLY) as other:
            bodies: dict[bytes, int] = {}
            async with asyncio.timeout(PATIENCE), client.consume("orders", prefetch=count) as messages:
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


async def test_three_relays_at_full_speed_of_which_one_is_killed_again_and_again(vhost: Vhost) -> None:
    count, kills = 6000, 5
    bodies: dict[int, int] = {}
    async with bide.connect(vhost.url, infrastructure=QUICK) as client:
        await client.declare(Topology(queues=[Queue.quorum("orders")]))
        with relay(vhost, *QUICKLY) as first, relay(vhost, *QUICKLY) as second:

            async def kill() -> None:
                for _ in range(kills):
                    with relay(vhost, *QUICKLY) as victim:
                        await _grow(bodies, 50)
                        victim.kill()

            await client.bind("orders")
            sending = asyncio.create_task(
                _send(client, (bide.Letter(f"{n}", to="orders", delay=f"{300 + n % 2300}ms") for n in range(count)))
            )
            killing = asyncio.create_task(kill())
            async with asyncio.timeout(60), client.consume("orders", prefetch=1000) as messages:
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
            done = [first.stop(), second.stop()]
    assert sorted(bodies) == list(range(count))
    assert all(one["delivered"] for one in done)
    assert not any(one["undeliverable"] for one in done)


async def _grow(bodies: dict[int, int], number: int) -> None:
    """Wait until so many more came."""
    enough = len(bodies) + number

    async def grown() -> bool:
        return len(bodies) >= enough

    await eventually(grown, step=0.005)


async def _send(client: bide.Client, letters: Iterator[bide.Letter]) -> None:
    await client.publish_many(letters)


async def test_sigterm_finishes_what_is_in_hand(vhost: Vhost) -> None:
    """With all messages consumed and none sent on, it sends on every one of them before it ends, and no more."""
    count = 500
    async with bide.connect(vhost.url, infrastructure=QUICK) as client:
        await client.declare(Topology(queues=[Queue.quorum("orders")]))
        await client.bind("orders")
        connection = await Connection.open(BrokerUrl.parse(vhost.url))
        with relay(vhost, *QUICKLY) as process:
            process.signal(signal.SIGSTOP)
            await client.publish_many(bide.Letter(f"{n}", to="orders", delay="1h") for n in range(count))

            async def taken() -> bool:
                return await ready(connection, QUICK.receiving_queue) == 0

            await eventually(taken)
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)
            done = process.stop()
        assert done["rounds"] == count
        await connection.close()


def test_what_it_says_when_it_cannot_work(vhost: Vhost) -> None:
    process = Process(vhost, "--no-declare")
    _, err = process.process.communicate(timeout=PATIENCE)
    assert process.process.returncode == 1
    assert err.decode().count("\n") == 1
    assert "bide delay apply --layout waiting-hall" in err.decode()
    process = Process(vhost, "--levels", "0")
    _, err = process.process.communicate(timeout=PATIENCE)
    assert (process.process.returncode, b"0 levels: give 1 to 28" in err) == (2, True)


async def test_27_seconds_hop_by_hop(seed: Seed) -> None:
    """Levels of 1, 2, 4 and 8 seconds: 27, 19 and 11 seconds to go, then ``1.0.1.1``, and the routing key restored."""
    async with bide.connect(seed.url) as client:
        (message,) = await receive(client, "final", 1, seconds=60)
        assert message.lateness is not None
        assert message.sent_at is not None
        assert message.due is not None
        assert message.due - message.sent_at >= timedelta(seconds=27)
        assert timedelta(0) <= message.lateness < timedelta(seconds=5)
        assert (message.body, message.raw.exchange, message.raw.routing_key) == (
            *(b"remind", SEED.delivery_exchange),
            "my-key",
        )

        checked_in = await receive(client, "check-in", 3)
        assert [_header(one, HEADER_REST) for one in checked_in] == [None, 19_000, 11_000]
        assert {one.raw.routing_key for one in checked_in} == {"my-key"}
        assert [_waited(one) for one in checked_in] == [[], [SEED.meditating], [SEED.meditating]]
        passed = [(await receive(client, f"level-{level}", 1))[0] for level in (3, 2, 1, 0)]
        assert {one.raw.routing_key for one in passed} == {"1.0.1.1"}
        eight, two = SEED.level_name(3), SEED.level_name(1)
        # The zero of the four seconds takes no queue.
        assert [_waited(one) for one in passed] == [[], [eight], [eight], [eight, two]]
    done = seed.process.stop()
    assert done == {"rounds": 2, "delayed": 1, "delivered": 1, "refused": 0, "undeliverable": 0}


def _header(message: bide.Message, name: str) -> Any:
    return message.raw.values["headers"].get(name)


def _waited(message: bide.Message) -> list[str]:
    """The queues that it has waited in since the relay sent it on, in order."""
    return [death["queue"] for death in reversed(_header(message, "x-death") or [])]
