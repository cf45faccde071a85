"""The synchronous client over lost connections: each message once, none lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import bide
from bide.client.message_sync import SyncMessage
from tests.broker.receiving import eventually, fresh, until_ready
from tests.faults.proxy import Proxy
from tests.support import Vhost
from tests.timeouts import TIMEOUT


async def filled(url: str, number: int) -> str:
    """A queue with ``number`` messages: "0", "1", ..."""
    queue = fresh("q")
    async with bide.connect(url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        done = await client.publish_many(
            bide.OutgoingMessage(b"", to=queue, message_id=str(one)) for one in range(number)
        )
        assert done.confirmed == number
    return queue


def received(
    url: str, queue: str, is_last: Callable[[list[str]], bool], then: Callable[[int, SyncMessage], None]
) -> list[str]:
    """The ids of messages up to the last one, each acknowledged after it was handled.

    Args:
        is_last: whether these ids are enough.
    """
    found: list[str] = []
    timeout = timedelta(seconds=TIMEOUT)
    with bide.connect_sync(url) as client, client.consume(queue, prefetch=1_000, timeout=timeout) as messages:
        while not is_last(found):
            message = next(messages)
            assert message.message_id is not None
            found.append(message.message_id)
            then(len(found), message)
            if not message.lost:
                message.ack()
    return found


def are_250(found: list[str]) -> bool:
    return len(found) == 250


def nothing(number: int, message: SyncMessage) -> None:
    """Do nothing with it."""


async def test_messages_arrive_once_in_order_and_the_rest_is_requeued(vhost: Vhost) -> None:
    queue = await filled(vhost.url, 500)
    first = await asyncio.to_thread(received, vhost.url, queue, are_250, nothing)
    assert first == [str(one) for one in range(250)]
    # The broker hears of a channel's end a little later.
    await until_ready(vhost.url, queue, 250)
    second = await asyncio.to_thread(received, vhost.url, queue, are_250, nothing)
    assert second == [str(one) for one in range(250, 500)]


async def test_messages_lost_at_a_cut_are_not_handed_out(vhost: Vhost, proxy: Proxy) -> None:
    """Prefetched messages and the unsettled one are redelivered after the connection breaks."""
    queue = await filled(vhost.url, 40)
    loop = asyncio.get_running_loop()

    async def is_lost(message: SyncMessage) -> bool:
        return message.lost

    async def cut(message: SyncMessage) -> None:
        proxy.cut()
        await eventually(partial(is_lost, message))

    def cut_at_five(number: int, message: SyncMessage) -> None:
        if number == 5:
            asyncio.run_coroutine_threadsafe(cut(message), loop).result()

    left = {str(one) for one in range(4, 40)}
    # Acknowledgements of just before the cut may not have come through: there may be more than these.
    found = await asyncio.to_thread(received, proxy.url, queue, lambda ids: left <= set(ids[5:]), cut_at_five)
    assert found[:5] == [str(one) for one in range(5)]
    assert len(found[5:]) == len(set(found[5:]))
    assert proxy.cuts
