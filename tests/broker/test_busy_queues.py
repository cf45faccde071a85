"""Quorum queues that are too busy to count, which the broker reports as empty."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

import bide
from bide.admin.schedule_findings import schedule_findings
from bide.admin.verify import _check_relays
from bide.client.gate_check import GateCheck
from bide.error_queues import ErrorQueue
from bide.errors import NotEmptyError, QueueBusyError
from tests.broker.receiving import connected
from tests.broker.schedule_log import NAMES, gating, wait_for_leaders
from tests.broker.workers import at_work
from tests.faults.proxy import Proxy
from tests.support import Vhost
from tests.timeouts import TIMEOUT

QUEUE = bide.Topology(queues=[bide.Queue.quorum("q")])

PATIENCE = timedelta(seconds=TIMEOUT)
"""The timeout of clients: on a slow machine, 20 attempts to count a busy queue can take more than the usual 30 s."""


@pytest.fixture
async def client(vhost: Vhost) -> AsyncIterator[bide.Client]:
    """A client, with a queue of three messages."""
    async with bide.connect(vhost.url, timeout=PATIENCE) as client:
        await client.declare(QUEUE)
        for number in range(3):
            await client.publish(b"x", to="q", message_id=f"{number}")
        yield client


@asynccontextmanager
async def suspended(vhost: Vhost, queue: str = "q") -> AsyncIterator[None]:
    """Let the queue do nothing, as on a machine that is overloaded."""
    process = f"'{vhost.name}_{queue}'"
    await asyncio.to_thread(vhost.broker.rabbitmqctl, "eval", f"sys:suspend({process}).")
    try:
        yield
    finally:
        await asyncio.to_thread(vhost.broker.rabbitmqctl, "eval", f"sys:resume({process}).")


async def stall(vhost: Vhost, queue: str = "q") -> None:
    """Let the queue do nothing for 3 s."""
    # 3 s is longer than the broker waits for a count (250 ms), and shorter than the 20 attempts of the client.
    code = "sys:suspend(Queue), spawn(fun() -> timer:sleep(3000), sys:resume(Queue) end)."
    await asyncio.to_thread(vhost.broker.rabbitmqctl, "eval", f"Queue = '{vhost.name}_{queue}', {code}")


async def test_the_messages_of_a_busy_queue_are_counted(client: bide.Client, vhost: Vhost) -> None:
    await stall(vhost)
    assert await client.message_count("q") == 3


async def test_the_messages_of_a_busy_error_queue_are_all_seen(client: bide.Client, vhost: Vhost) -> None:
    """A thousand more than the number at the start are seen at most."""
    await client.publish_many(bide.OutgoingMessage(b"x", to="q") for _ in range(1_100))
    queue = ErrorQueue(client, "q", audit=False, management_url=vhost.broker.management_url)
    await stall(vhost)
    assert await queue.count() == 1_103


@pytest.mark.parametrize("others", [0, 5])
async def test_a_busy_queue_with_messages_is_not_deleted(client: bide.Client, vhost: Vhost, others: int) -> None:
    """Queues are counted together, so one that is busy makes all replies late."""
    topology = bide.Topology(queues=[bide.Queue.quorum(f"empty-{number}") for number in range(others)]) | QUEUE
    await client.declare(topology)
    await stall(vhost)
    with pytest.raises(NotEmptyError, match=r"3 messages wait in q \(3\)"):
        await client.destroy(topology)
    assert await client.message_count("q") == 3


async def test_a_queue_that_stays_busy_is_not_taken_for_an_empty_one(client: bide.Client, vhost: Vhost) -> None:
    async with suspended(vhost):
        with pytest.raises(QueueBusyError, match=r"'q' is too busy to count.* within 250 ms, 20 times; try again when"):
            await client.message_count("q")
        with pytest.raises(QueueBusyError):
            await client.destroy(QUEUE)
    assert await client.message_count("q") == 3


async def test_a_slow_connection_is_not_taken_for_a_busy_queue(vhost: Vhost) -> None:
    async with Proxy(vhost.url) as proxy, bide.connect(proxy.url, timeout=PATIENCE) as client:
        await client.declare(QUEUE)
        proxy.lag = 0.4
        assert await client.message_count("q") == 0
        assert (await client.destroy(QUEUE)).queues == 1


async def test_counting_over_a_slow_connection_needs_no_other_permission(vhost: Vhost) -> None:
    """From RabbitMQ 4.2.6 on, a passive declaration needs one."""
    name = f"counter-{vhost.name}"
    vhost.broker.add_user(name, "secret")
    vhost.broker.set_permissions(vhost.name, name, configure="^q$", write="^q$", read="^q$")
    url = vhost.broker.vhost_url(vhost.name, user=name, password="secret")
    async with Proxy(url) as proxy, bide.connect(proxy.url, timeout=PATIENCE) as client:
        await client.declare(QUEUE)
        proxy.lag = 0.4
        assert await client.message_count("q") == 0
        assert (await client.destroy(QUEUE)).queues == 1


async def test_gates_with_a_queue_that_stays_busy_are_not_reported_as_missing(vhost: Vhost, tmp_path: Path) -> None:
    async with gating(vhost.url, tmp_path / "gate"), connected(vhost.url) as connection:
        await wait_for_leaders(vhost.url)
        async with suspended(vhost, NAMES.queries(3)):
            (found,) = [one for one in await schedule_findings(connection, None) if one.check == "gates"]
    assert found.status == "not checked"
    assert f"{NAMES.queries(3)!r} is too busy to count" in found.text


async def test_gates_with_a_busy_queue_are_found(
    vhost: Vhost, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "bide")
    async with gating(vhost.url, tmp_path / "gate"), connected(vhost.url) as connection:
        await wait_for_leaders(vhost.url)
        await stall(vhost, NAMES.queries(3))
        (found,) = [one for one in await schedule_findings(connection, None) if one.check == "gates"]
        assert (found.status, found.text) == ("ok", "all 8 partitions are led by a gate")
        await stall(vhost, NAMES.queries(3))
        await GateCheck(NAMES).check(connection, 3)
        assert [one for one in caplog.messages if "gate" in one] == []


async def test_a_relay_with_a_busy_queue_is_found(vhost: Vhost) -> None:
    hall = bide.WaitingHall(levels=2)
    async with at_work(bide.Relay(vhost.url, hall=hall, allow=["*"])), connected(vhost.url) as connection:
        await stall(vhost, hall.relay_queues[0])
        (found,) = await _check_relays(connection, hall)
        assert (found.status, found.text) == ("ok", "1 at work")
