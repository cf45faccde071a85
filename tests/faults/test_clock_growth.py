"""A broker that is stalled or killed while a ``Clock`` grows."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

import bide
from bide.admin.apply import exists
from bide.errors import BideError, PublishError
from tests.broker.receiving import connected, connection_of, eventually, fresh, ready
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from bide.amqp.connection import Connection
    from bide.local_broker import LocalBroker
    from tests.faults.conftest import DedicatedBroker
    from tests.faults.proxy import Proxy
    from tests.support import Vhost


async def test_a_stalled_broker_does_not_use_up_the_channels(
    vhost: Vhost, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What many publishes need again is asked for once, and those that time out leave that running."""
    rebind_after = timedelta(milliseconds=200)
    for module in ("broker_state", "declared_infrastructure"):
        monkeypatch.setattr(f"bide.client.{module}.REBIND_AFTER", rebind_after)
    shop, queue = fresh("shop"), fresh("q")
    topology = bide.Topology([bide.Exchange(shop, "fanout")], [bide.Queue.quorum(queue)], [bide.Binding(shop, queue)])
    # Without heartbeats: on a slow machine, 3,000 publishes take longer than a client waits for one.
    async with bide.connect(f"{proxy.url}?heartbeat=0", timeout="300ms", max_in_flight=100_000) as client:
        await client.declare(topology)

        async def publish(number: int) -> BaseException | None:
            try:
                if number % 3:
                    await client.publish(b"", to=queue, delay=timedelta(seconds=1 + number % 3))
                else:
                    await client.publish(b"", exchange=shop)
            except BaseException as error:  # noqa: BLE001 (what it is is what is tested)
                return error
            return None

        async def works() -> bool:
            return all(one is None for one in await asyncio.gather(*(publish(number) for number in range(6))))

        await eventually(works)
        connection = await connection_of(client)
        # What was bound for these messages has to be bound again for the next.
        await asyncio.sleep(1.5 * rebind_after.total_seconds())  # past the time after which it binds again
        proxy.stall()
        failed: Counter[str] = Counter()
        for _ in range(4):
            errors = await asyncio.gather(*(publish(number) for number in range(750)))
            failed.update(type(error).__name__ for error in errors)
            assert all(isinstance(error, PublishError) for error in errors), failed
        assert len(connection._channels) < 10
        proxy.moving.set()
        # It goes on where it was, on the same connection.
        await eventually(works)
        assert await connection_of(client) is connection


async def test_a_shortage_of_channels_does_not_fail_a_publish(vhost: Vhost, proxy: Proxy) -> None:
    """Channels that were given up count until the broker has closed them."""
    queue = fresh("q")
    async with bide.connect(proxy.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        await client.publish(b"", to=queue)
        connection = await connection_of(client)
        proxy.stall()
        opening = [asyncio.create_task(connection.channel()) for _ in range(connection.channel_max - 2)]

        async def are_opened() -> bool:
            return len(connection._channels) > len(opening)

        await eventually(are_opened)
        for task in opening:
            task.cancel()
        await asyncio.wait(opening)
        publishing = [
            asyncio.create_task(client.publish(b"", to=queue, delay=f"{number}s", user_id=None))
            for number in range(1, 4)
        ]
        others = [asyncio.create_task(client.publish(b"", exchange=f"{queue}-{number}")) for number in range(50)]
        # Time for a publish to fail that does not wait for a channel; nothing else shows that it waits.
        await asyncio.sleep(0.5)
        assert not any(one.done() for one in (*publishing, *others))
        proxy.moving.set()
        assert [one.attempts for one in await asyncio.gather(*publishing)] == [1, 1, 1]
        for error in await asyncio.gather(*others, return_exceptions=True):
            assert isinstance(error, bide.errors.TargetNotFoundError)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_new_digit_queue_does_not_lose_a_confirmed_message_when_its_node_is_killed(
    dedicated: DedicatedBroker,
) -> None:
    broker: LocalBroker = dedicated.broker
    for number in range(3):
        vhost = f"new-{number}"
        url = broker.add_vhost(vhost)
        async with bide.connect(url, timeout=timedelta(seconds=TIMEOUT)) as client:
            await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
            await client.publish(b"", to="q", delay="5m")
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.restart)
            connection = await connection_of(client)

            async def there(connection: Connection = connection) -> bool:
                return await ready(connection, "bide.v1.m5") == 1

            await eventually(there)
        broker.delete_vhost(vhost)


async def test_a_publish_timeout_does_not_cancel_its_declarations(vhost: Vhost, proxy: Proxy) -> None:
    queue = fresh("q")
    async with bide.connect(proxy.url, timeout="500ms") as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))

        async def works() -> bool:
            # A slow machine may take longer than the timeout.
            try:
                await client.publish(b"", to=queue)
            except BideError:
                return False
            return True

        await eventually(works)
        proxy.rate = 2_000
        reason = "the queues and bindings that it needs were not declared yet"
        with pytest.raises(BideError, match=rf"not sent within 0\.5 s: {reason}"):
            await client.publish(b"", to=queue, delay="1s")
        connection = await connection_of(client)
        async with connected(vhost.url) as direct:
            await eventually(lambda: exists(direct, bide.Clock().core_topology()))
        proxy.rate = None
        assert await connection_of(client) is connection
