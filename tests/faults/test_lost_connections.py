"""Connections that break at the worst moments, without silent loss."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import (
    BrokerUnreachableError,
    ConnectionLostError,
    DeliveryLostError,
    PublishInDoubtError,
)
from tests.broker.receiving import connection_of, eventually, receive, until_ready
from tests.faults.conftest import CLOCK, declared
from tests.faults.cutting import Proxy
from tests.timeouts import MAX_LATENESS, TIMEOUT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support import Vhost


@pytest.fixture
async def proxy(vhost: Vhost) -> AsyncIterator[Proxy]:
    async with Proxy(vhost.url) as proxy:
        yield proxy


async def test_a_message_without_a_confirm_is_repeated(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK) as client:
        await client.publish(b"first", to=queue)
        proxy.deaf = True
        publishing = asyncio.create_task(client.publish(b"second", to=queue, message_id="same"))
        await until_ready(vhost.url, queue, 2)
        assert not publishing.done()
        proxy.deaf = False
        proxy.cut()
        receipt = await publishing
        assert receipt.attempts == 2
        messages = await receive(client, queue, 3)
    assert [message.message_id for message in messages][1:] == ["same", "same"]


async def test_with_on_lost_raise_a_message_without_a_confirm_is_in_doubt(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK, on_lost="raise") as client:
        await client.publish(b"first", to=queue)
        proxy.deaf = True
        publishing = asyncio.create_task(client.publish(b"second", to=queue, message_id="doubtful"))
        await until_ready(vhost.url, queue, 2)
        proxy.deaf = False
        proxy.cut()
        with pytest.raises(PublishInDoubtError, match="doubtful") as caught:
            await publishing
        assert caught.value.message_id == "doubtful"
        # The client itself goes on.
        assert (await client.publish(b"third", to=queue)).attempts == 1


async def test_an_absent_broker_fails_other_calls_in_time(vhost: Vhost, proxy: Proxy) -> None:
    topology = bide.Topology(queues=[bide.Queue("q")])
    async with bide.connect(proxy.url, infrastructure=CLOCK, timeout="3s") as client:
        await client.declare(topology)
        lost = (await connection_of(client)).lost
        proxy.refusing = True
        proxy.cut()
        await lost
        calls = [
            client.declare(topology),
            client.destroy(topology),
            client.exists("q"),
            client.bind("q"),
            client.release(),
            client.infrastructure(),
        ]
        async with asyncio.timeout(MAX_LATENESS.total_seconds()):
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in outcomes] == [BrokerUnreachableError] * len(calls)
        assert "was not back within 3 s: check that the broker is running" in str(outcomes[0])
        assert vhost.broker.password not in str(outcomes[0])
        proxy.refusing = False

        async def goes_on() -> bool:
            # On a slow machine a connection may take longer than the time limit.
            with suppress(BrokerUnreachableError):
                return await client.exists("q")
            return False

        await eventually(goes_on)


@pytest.mark.parametrize("on_lost", ["repeat", pytest.param("raise", marks=pytest.mark.long)])
async def test_cuts_at_random_bytes_lose_nothing(vhost: Vhost, proxy: Proxy, on_lost: Any) -> None:
    """Every message is confirmed and there, or reported as in doubt; duplicates only among what was sent again."""
    queue = await declared(vhost.url)
    chance, cuts = random.Random(7), 20
    total, confirmed, doubtful, repeated = 2000, set[str](), set[str](), set[str]()

    async def send(client: bide.Client, number: int) -> None:
        name = f"m{number}"
        while True:
            try:
                receipt = await client.publish(b"x" * 100, to=queue, delay="1s", message_id=name)
            except PublishInDoubtError:
                doubtful.add(name)
                continue
            except bide.BideError:
                continue
            confirmed.add(name)
            if receipt.attempts > 1:
                repeated.add(name)
            return

    def next_cut() -> int | None:
        return chance.randint(1, 20_000) if proxy.cuts < cuts else None

    async with bide.connect(proxy.url, infrastructure=CLOCK, on_lost=on_lost, max_in_flight=200) as client:
        proxy.next_cut, proxy.cut_after = next_cut, next_cut()
        await asyncio.gather(*(send(client, number) for number in range(total)))
    assert proxy.cuts == cuts
    assert len(confirmed) == total
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    found = Counter[str]()

    async def drained() -> bool:
        channel = await connection.channel()
        while (delivery := await channel.get(queue)) is not None:
            found[delivery.values["message_id"]] += 1
            channel.ack(delivery.delivery_tag)
        await channel.close()
        return len(found) == total

    await eventually(drained)
    duplicates = {name for name, count in found.items() if count > 1}
    assert duplicates <= repeated | doubtful
    await connection.close()


async def test_consuming_continues_and_unsettled_messages_are_redelivered(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK) as client:
        await client.publish(b"one", to=queue, message_id="one")
        async with asyncio.timeout(TIMEOUT), client.consume(queue) as messages:
            message = await anext(messages)
            proxy.cut()

            async def noticed() -> bool:
                return message.lost

            await eventually(noticed)
            with pytest.raises(DeliveryLostError, match="one"):
                await message.ack()
            again = await anext(messages)
            assert (again.message_id, again.redelivered) == ("one", True)
            await again.ack()


async def test_a_silent_broker_is_noticed_by_its_missing_heartbeats(vhost: Vhost, proxy: Proxy) -> None:
    connection = await Connection.open(BrokerUrl.parse(f"{proxy.url}?heartbeat=1"))
    proxy.stall()
    async with asyncio.timeout(TIMEOUT):
        error = await connection.lost
    assert isinstance(error, ConnectionLostError)
    assert "silent" in str(error)


async def test_a_closed_port_is_an_error_that_names_it() -> None:
    with pytest.raises(BrokerUnreachableError, match=r"127\.0\.0\.1:1 .*BIDE_URL"):
        async with bide.connect("amqp://guest:secret@127.0.0.1:1/"):
            pass
