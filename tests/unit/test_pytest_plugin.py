"""The pytest plugin of bide."""

from __future__ import annotations

from importlib.metadata import entry_points

import bide
from bide.testing import MemoryBroker
from bide.testing.rules.clock import VirtualClock


def test_pytest_finds_the_plugin() -> None:
    (plugin,) = (one for one in entry_points(group="pytest11") if one.name == "bide")
    assert plugin.value == "bide.testing.pytest_plugin"


async def test_each_test_has_a_broker_and_its_clock(bide_broker: MemoryBroker, bide_clock: VirtualClock) -> None:
    async with bide_broker.connect() as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders")]))
        await client.publish("pay, please", to="reminders", delay="3d")
        bide_clock.advance("3d")
        message = await anext(client.consume("reminders"))
        assert message.body == b"pay, please"
        assert await client.release() == (4, 3, 0)


def test_each_test_has_a_new_broker(bide_broker: MemoryBroker) -> None:
    with bide_broker.connect_sync() as client:
        assert not client.wait_for(client.client.exists("reminders"))
