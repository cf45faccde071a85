"""Messages handed from one thread to the event loop of another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from bide.client.bulk.thread_feed import ThreadFeed
from bide.messages.outgoing import OutgoingMessage
from bide.schedules.outgoing import OutgoingSchedule
from tests.timeouts import TIMEOUT


def batch(start: int, number: int = 3) -> list[OutgoingMessage]:
    return [OutgoingMessage(b"", to=str(one)) for one in range(start, start + number)]


def names(messages: Sequence[OutgoingMessage | OutgoingSchedule]) -> list[str | None]:
    return [one.to for one in messages]


def here(function: Callable[[], None]) -> None:
    """As a loop's call from its own thread."""
    function()


async def taken(feed: ThreadFeed) -> list[OutgoingMessage | OutgoingSchedule]:
    return [message async for message in feed]


async def test_messages_added_by_a_thread_arrive_in_order() -> None:
    """Repeated many times, because it tests for a race."""
    for round_ in range(50):
        feed = ThreadFeed(asyncio.get_running_loop().call_soon_threadsafe)

        def fill(feed: ThreadFeed = feed, number: int = round_) -> None:
            for start in range(0, 3 * number, 3):
                feed.wait_for_room()
                feed.add(batch(start))
            feed.end()

        thread = threading.Thread(target=fill)
        thread.start()
        async with asyncio.timeout(TIMEOUT):
            assert names(await taken(feed)) == names(batch(0, 3 * round_))
        thread.join()


async def test_an_ended_feed_without_messages_is_empty() -> None:
    feed = ThreadFeed(here)
    feed.end()
    assert await taken(feed) == []
    assert feed.has_ended


async def test_a_thread_waits_while_the_feed_is_full() -> None:
    feed = ThreadFeed(here)
    for start in range(4):
        feed.wait_for_room()
        feed.add(batch(start))
    went_on = threading.Event()

    def fifth() -> None:
        feed.wait_for_room()
        went_on.set()

    thread = threading.Thread(target=fifth)
    thread.start()
    assert not went_on.wait(0.05)
    assert (await anext(aiter(feed))).to == "0"
    assert await asyncio.to_thread(went_on.wait, TIMEOUT)
    thread.join()


async def test_messages_not_taken_are_left() -> None:
    feed = ThreadFeed(here)
    for start in (0, 3, 6):
        feed.add(batch(start))
    messages = aiter(feed)
    for _ in range(4):
        await anext(messages)
    assert names(feed.left()) == names(batch(4, 5))
    assert feed.left() == []


async def test_abandoning_the_feed_releases_a_waiting_thread() -> None:
    feed = ThreadFeed(here)
    for start in range(4):
        feed.wait_for_room()
        feed.add(batch(start))
    waiting = asyncio.create_task(asyncio.to_thread(feed.wait_for_room))
    feed.abandon()
    async with asyncio.timeout(TIMEOUT):
        await waiting
        # However often.
        for _ in range(3):
            await asyncio.to_thread(feed.wait_for_room)
    assert feed.is_abandoned
