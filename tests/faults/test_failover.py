"""Failover from broken nodes; slow or blocked nodes keep their clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest
from prometheus_client import CollectorRegistry

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.failover import moves
from bide.errors import BrokerError, BulkInDoubtError, PublishInDoubtError, PublishRefusedError
from bide.messages.outgoing import OutgoingMessage
from bide.observability.metrics import Metrics
from tests.broker.receiving import connection_of, eventually, fresh, receive
from tests.faults.conftest import CLOCK, DedicatedBroker
from tests.faults.proxy import Proxy, url_of, without_confirms
from tests.support import Vhost
from tests.timeouts import MAX_LATENESS, TIMEOUT

HEARTBEAT = 6
"""Seconds. A client receives some heartbeats before it leaves a node, and a connection survives a pause of 10 s."""


@pytest.fixture
async def hosts(vhost: Vhost, quiet: None) -> AsyncIterator[tuple[Proxy, Proxy]]:
    """Two ways to the same broker, as if they were two nodes of a cluster."""
    async with Proxy(vhost.url) as first, Proxy(vhost.url) as second:
        yield first, second


async def prepared(client: bide.Client) -> str:
    queue = fresh("q")
    await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
    await client.publish(b"", to=queue, message_id="first")
    return queue


async def address(client: bide.Client) -> str:
    return (await connection_of(client)).address


async def until_sent(client: bide.Client) -> None:
    """Wait until the broker has to confirm a message."""
    connection = await connection_of(client)

    async def is_waiting() -> bool:
        return connection.is_waiting

    await eventually(is_waiting)


async def fill(client: bide.Client, queue: str) -> None:
    while True:
        await client.publish(b"", to=queue)


async def test_hosts_are_not_always_tried_in_the_order_of_the_url(hosts: tuple[Proxy, Proxy]) -> None:
    url = url_of(*hosts).replace("order=given", "order=random")
    seen: set[str] = set()
    # One order in 64 tries is a chance of 2 to the power of -63.
    for _ in range(64):
        async with bide.connect(url) as client:
            seen.add(await address(client))
        if len(seen) == 2:
            break
    assert len(seen) == 2


@pytest.mark.parametrize("delay", [None, "1s"])
async def test_a_client_leaves_a_node_that_stops(hosts: tuple[Proxy, Proxy], delay: str | None) -> None:
    first, second = hosts
    before = moves.copy()
    registry = CollectorRegistry()
    Metrics(registry)
    async with bide.connect(url_of(first, second), infrastructure=CLOCK) as client:
        queue = await prepared(client)
        await client.publish(b"", to=queue, delay=delay)
        first.stall()
        begun = asyncio.get_running_loop().time()
        receipt = await client.publish(b"", to=queue, delay=delay, message_id="second")
        assert asyncio.get_running_loop().time() - begun < MAX_LATENESS.total_seconds()
        assert receipt.attempts == 2
        assert second.accepted == 1
    assert moves - before == {"silent": 1}
    shown = registry.get_sample_value("bide_connection_moves_total", {"reason": "silent"})
    assert shown == moves["silent"]


@pytest.mark.slow
async def test_clients_leave_a_broken_node_at_different_times(hosts: tuple[Proxy, Proxy]) -> None:
    first, second = hosts
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(bide.connect(url_of(first, second), infrastructure=CLOCK))
            # All of them leave at the same time with a chance of less than 1e-9. With twelve of them it was 3e-6.
            for _ in range(20)
        ]
        queue = await prepared(clients[0])
        await asyncio.gather(*(client.publish(b"", to=queue) for client in clients))
        first.stall()

        async def moved(client: bide.Client) -> float:
            await client.publish(b"", to=queue)
            return loop.time()

        times = await asyncio.gather(*(moved(client) for client in clients))
        assert second.accepted == len(clients)
    # Each leaves after 6 to 7.8 s, at random.
    assert max(times) - min(times) > 0.5


@pytest.mark.slow
async def test_a_client_leaves_a_second_node_that_stops(
    hosts: tuple[Proxy, Proxy],
) -> None:
    first, second = hosts
    before = moves.copy()
    async with bide.connect(url_of(first, second), infrastructure=CLOCK) as client:
        queue = await prepared(client)
        for used, other in (hosts, hosts[::-1]):
            used.stall()
            await client.publish(b"", to=queue)
            connection = await connection_of(client)
            assert connection.url == BrokerUrl.parse(url_of(first, second))
            assert connection.address == other.url.rpartition("@")[2].partition("/")[0]
            used.moving.set()
    assert moves - before == {"silent": 2}


@pytest.mark.slow
async def test_pauses_between_moves_grow(
    hosts: tuple[Proxy, Proxy], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pause = 4.0
    monkeypatch.setattr("bide.client.failover.FIRST_PAUSE", pause)
    begun = moves.total()
    async with bide.connect(url_of(*hosts), infrastructure=CLOCK) as client:
        queue = await prepared(client)
        # Only now: a busy broker may take longer than these limits to declare the queue.
        for name, value in (("PROBE_AFTER", 0.4), ("PROBE_ANSWER", 1.0), ("LEAVE_AFTER", 0.8)):
            monkeypatch.setattr(f"bide.client.failover.{name}", value)
        for used, other in (hosts, hosts[::-1], hosts):
            used.stall()
            await client.publish(b"", to=queue)
            other.moving.set()
            used.moving.set()
    assert moves.total() - begun == 3
    # Of the moves themselves: until a message is confirmed after one may take a broker seconds.
    times = [one.created for one in caplog.records if one.getMessage().startswith("leaving the broker at")]
    # Without the pauses it would take about 1.4 s.
    assert times[1] - times[0] >= pause / 2
    assert times[2] - times[1] >= pause


async def test_a_consumer_leaves_a_node_with_its_publisher(hosts: tuple[Proxy, Proxy]) -> None:
    first, second = hosts
    async with bide.connect(url_of(first, second), infrastructure=CLOCK) as client:
        queue = await prepared(client)
        async with client.consume(queue) as messages:
            assert (await anext(messages)).message_id == "first"
            first.stall()
            await client.publish(b"", to=queue, message_id="second")
            async with asyncio.timeout(TIMEOUT):
                while (message := await anext(messages)).message_id != "second":
                    await message.ack()
                await message.ack()


async def test_with_on_lost_raise_a_publish_on_a_stopped_node_is_in_doubt(
    hosts: tuple[Proxy, Proxy],
) -> None:
    first, second = hosts
    async with bide.connect(url_of(first, second), infrastructure=CLOCK, on_lost="raise") as client:
        queue = await prepared(client)
        first.stall()
        with pytest.raises(PublishInDoubtError, match=r"left the host .*: the node at .* answers nothing at all"):
            await client.publish(b"", to=queue, message_id="second")
        await client.publish(b"", to=queue, message_id="third")
        assert second.accepted == 1
        assert [one.message_id for one in await receive(client, queue, 2)] == ["first", "third"]


async def test_a_client_leaves_a_node_without_confirms_for_one_that_confirms(
    hosts: tuple[Proxy, Proxy],
) -> None:
    first, second = hosts
    before = moves.copy()
    async with bide.connect(f"{url_of(first, second)}&heartbeat={HEARTBEAT}", infrastructure=CLOCK) as client:
        queue = await prepared(client)
        first.rewrite = without_confirms
        begun = asyncio.get_running_loop().time()
        receipts = await asyncio.gather(*(client.publish(b"", to=queue, message_id=f"m{n}") for n in range(10)))
        assert asyncio.get_running_loop().time() - begun < MAX_LATENESS.total_seconds()
        assert [one.attempts for one in receipts] == [2] * 10
        assert second.accepted >= 1
        # The first ones did reach the broker here, and only their confirms were lost.
        assert len(await receive(client, queue, 21)) == 21
    assert moves - before == {"unconfirmed": 1}


async def test_a_refusing_target_does_not_keep_a_client_on_a_broken_node(
    hosts: tuple[Proxy, Proxy],
) -> None:
    first, second = hosts
    before = moves.copy()
    async with bide.connect(f"{url_of(first, second)}&heartbeat={HEARTBEAT}", infrastructure=CLOCK) as client:
        queue, full = await prepared(client), fresh("q")
        limited = bide.Queue.quorum(full, {"x-max-length": 1, "x-overflow": "reject-publish"})
        await client.declare(bide.Topology(queues=[limited]))
        with pytest.raises(PublishRefusedError):
            await fill(client, full)
        first.rewrite = without_confirms
        refused = asyncio.create_task(client.publish(b"", to=full))
        await until_sent(client)
        begun = asyncio.get_running_loop().time()
        await client.publish(b"", to=queue)
        assert asyncio.get_running_loop().time() - begun < MAX_LATENESS.total_seconds()
        # Whether the first host took it is not known.
        with pytest.raises(PublishInDoubtError):
            await refused
    assert moves - before == {"unconfirmed": 1}


@pytest.mark.long
async def test_a_target_without_a_leader_does_not_keep_a_client_on_a_broken_node(
    hosts: tuple[Proxy, Proxy], vhost: Vhost
) -> None:
    first, second = hosts
    before = moves.copy()
    url, timeout = f"{url_of(first, second)}&heartbeat={HEARTBEAT}", timedelta(seconds=TIMEOUT)
    async with bide.connect(url, infrastructure=CLOCK, timeout=timeout) as client:
        queue, lost = await prepared(client), await prepared(client)
        leader = f'list_to_existing_atom("{vhost.name}_{lost}")'
        await asyncio.to_thread(vhost.broker.rabbitmqctl, "eval", f"sys:suspend({leader}).")
        try:
            first.rewrite = without_confirms
            waiting = asyncio.create_task(client.publish(b"", to=lost))
            await until_sent(client)
            await client.publish(b"", to=queue)
            assert moves - before == {"unconfirmed": 1}
        finally:
            await asyncio.to_thread(vhost.broker.rabbitmqctl, "eval", f"sys:resume({leader}).")
        await waiting


async def test_a_bulk_publish_leaves_a_node_without_confirms(hosts: tuple[Proxy, Proxy]) -> None:
    first, second = hosts
    async with bide.connect(f"{url_of(first, second)}&heartbeat={HEARTBEAT}", infrastructure=CLOCK) as client:
        queue = await prepared(client)
        first.rewrite = without_confirms
        begun = asyncio.get_running_loop().time()
        report = await client.publish_many(OutgoingMessage(b"", to=queue) for _ in range(100))
        assert asyncio.get_running_loop().time() - begun < MAX_LATENESS.total_seconds()
        assert report.confirmed == 100
        assert second.accepted == 1


@pytest.mark.slow
@pytest.mark.parametrize("bulk", [False, True])
async def test_without_confirms_from_any_node_the_error_names_the_lost_majority(
    hosts: tuple[Proxy, Proxy], bulk: bool
) -> None:
    first, second = hosts
    before = moves.copy()
    # A client needs up to 9 s to find out, and longer while it gets no processor time.
    async with bide.connect(url_of(first, second), infrastructure=CLOCK, timeout="22s") as client:
        queue = await prepared(client)
        first.rewrite = second.rewrite = without_confirms
        with pytest.raises(
            (PublishInDoubtError, BulkInDoubtError), match="the majority of the cluster's nodes is lost"
        ):
            await (client.publish_many([OutgoingMessage(b"", to=queue)]) if bulk else client.publish(b"", to=queue))
    assert moves == before


@pytest.mark.slow
async def test_a_slow_node_is_not_left(hosts: tuple[Proxy, Proxy]) -> None:
    first, second = hosts
    before = moves.copy()
    async with bide.connect(url_of(first, second), infrastructure=CLOCK) as client:
        queue = await prepared(client)
        first.lag = 4.5
        for _ in range(3):
            assert (await client.publish(b"", to=queue)).attempts <= 2
        assert await address(client) == first.url.rpartition("@")[2].partition("/")[0]
    assert moves == before


@pytest.mark.slow
async def test_a_node_that_blocks_publishers_is_not_left(dedicated: DedicatedBroker, quiet: None) -> None:
    before = moves.copy()
    async with (
        Proxy(dedicated.url()) as first,
        Proxy(dedicated.url()) as second,
        bide.connect(url_of(first, second), infrastructure=CLOCK, timeout=timedelta(seconds=TIMEOUT)) as client,
    ):
        queue = await prepared(client)
        connection = await connection_of(client)
        await asyncio.to_thread(dedicated.broker.rabbitmqctl, "set_vm_memory_high_watermark", "0.000001")
        try:

            async def blocked() -> bool:
                # The broker checks its memory periodically, and blocks a connection at its next publish.
                publishing.append(asyncio.create_task(client.publish(b"", to=queue)))
                return connection.blocked_by is not None

            publishing: list[asyncio.Task[bide.Receipt]] = []
            await eventually(blocked)
            done, _ = await asyncio.wait({publishing[-1]}, timeout=12)
            assert not done
            assert second.accepted == 0
        finally:
            await asyncio.to_thread(dedicated.broker.rabbitmqctl, "set_vm_memory_high_watermark", "0.6")
        assert {one.attempts for one in await asyncio.gather(*publishing)} == {1}
        assert await connection_of(client) is connection
    assert moves == before


@pytest.mark.slow
async def test_a_single_host_is_not_left(vhost: Vhost, proxy: Proxy) -> None:
    before = moves.copy()
    async with bide.connect(proxy.url, infrastructure=CLOCK, timeout="22s") as client:
        queue = await prepared(client)
        proxy.rewrite = without_confirms
        # It may be a broker of one node, which has no majority to lose.
        with pytest.raises(PublishInDoubtError, match="confirms and declares nothing: it is overloaded, or it is one"):
            await client.publish(b"", to=queue)
        assert proxy.accepted == 1
    assert moves == before


@pytest.mark.slow
async def test_a_node_with_all_channels_in_use_is_not_taken_for_silent(hosts: tuple[Proxy, Proxy]) -> None:
    first, second = hosts
    before = moves.copy()
    url = f"{url_of(first, second)}&heartbeat=60"
    async with bide.connect(url, infrastructure=CLOCK, timeout="22s") as client:
        queue = await prepared(client)
        connection = await connection_of(client)
        connection.channel_max = 5
        opening = await asyncio.gather(*(connection.channel() for _ in range(5)), return_exceptions=True)
        assert any(isinstance(one, BrokerError) for one in opening)
        first.rewrite = second.rewrite = without_confirms
        with pytest.raises(PublishInDoubtError, match="answers, but confirms and declares nothing"):
            await client.publish(b"", to=queue)
    assert moves == before


async def test_a_host_that_was_left_is_not_tried_first(hosts: tuple[Proxy, Proxy]) -> None:
    first, second = hosts
    url = BrokerUrl.parse(url_of(first, second))
    (host, port) = url.hosts[0]
    connection = await Connection.open(url, last=f"{host}:{port}")
    assert (first.accepted, second.accepted) == (0, 1)
    await connection.close()


async def test_a_blocked_event_loop_is_not_taken_for_a_silent_broker(vhost: Vhost, proxy: Proxy) -> None:
    async with bide.connect(f"{proxy.url}?heartbeat=1", infrastructure=CLOCK) as client:
        connection = await connection_of(client)
        # The proxy is in the same event loop. (The broker hears nothing meanwhile either, and may give up by itself.)
        time.sleep(3)  # noqa: ASYNC251 (to block the event loop is the test)
        await asyncio.sleep(0.1)  # time for the watch, whose timers are overdue, to take the broker for silent
        assert not connection.lost.done() or "silent" not in str(connection.lost.result())
