"""The health of a client, and the callbacks for lost and recovered connections."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import bide
from bide.errors import BideError, ConnectionLostError
from tests.broker.receiving import eventually, fresh
from tests.faults.proxy import Proxy
from tests.timeouts import TIMEOUT


class Events:
    """What the callbacks of a client were called with."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.errors: list[BideError] = []
        self.threads: set[str] = set()

    def disconnected(self, error: BideError) -> None:
        self.seen.append("disconnected")
        self.errors.append(error)
        self.threads.add(threading.current_thread().name)

    def reconnected(self) -> None:
        self.seen.append("reconnected")

    async def has(self, *seen: str) -> None:
        async def happened() -> bool:
            return self.seen == list(seen)

        await eventually(happened)


def is_connected(client: bide.Client) -> bool:
    """A function, because a type checker takes an attribute for unchanged."""
    return client.connected


async def test_an_idle_client_reconnects_and_reports_both_changes_once(proxy: Proxy) -> None:
    events, queue = Events(), fresh("q")
    async with bide.connect(
        proxy.url, on_disconnected=events.disconnected, on_reconnected=events.reconnected
    ) as client:
        assert is_connected(client)
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        # Opens the receiving connection.
        assert await client.get(queue) is None
        proxy.refusing = True
        proxy.cut()
        await events.has("disconnected")
        assert is_connected(client) is False
        assert isinstance(events.errors[0], ConnectionLostError)
        proxy.refusing = False
        await events.has("disconnected", "reconnected")
        assert is_connected(client)
        assert proxy.accepted >= 4
    assert not is_connected(client)
    assert events.seen == ["disconnected", "reconnected"]


async def test_a_publish_during_the_loss_is_sent_and_the_change_is_reported(proxy: Proxy) -> None:
    events, queue = Events(), fresh("q")
    async with bide.connect(
        proxy.url, on_disconnected=events.disconnected, on_reconnected=events.reconnected
    ) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        for number in range(1, 6):
            proxy.deaf = True
            publishing = asyncio.create_task(client.publish(b"", to=queue))
            await asyncio.sleep(0)  # sends the message
            proxy.deaf = False
            proxy.cut()
            await asyncio.wait_for(publishing, TIMEOUT)
            await events.has(*["disconnected", "reconnected"] * number)
            assert client.connected


async def test_a_client_that_closes_while_it_reconnects_ends_at_once(proxy: Proxy) -> None:
    events = Events()
    async with bide.connect(proxy.url, on_disconnected=events.disconnected) as client:
        proxy.refusing = True
        proxy.cut()
        await events.has("disconnected")
    assert not client.connected


async def test_a_callback_that_fails_is_logged_and_the_client_reconnects(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(error: BideError) -> None:
        raise KeyError("no such metric")

    events = Events()
    async with bide.connect(proxy.url, on_disconnected=fail, on_reconnected=events.reconnected) as client:
        with caplog.at_level(logging.ERROR, logger="bide"):
            proxy.cut()
            await events.has("reconnected")
        assert "no such metric" in caplog.text
        assert client.connected


async def test_the_synchronous_client_calls_back_in_its_thread(proxy: Proxy) -> None:
    events = Events()
    client = await asyncio.to_thread(
        bide.connect_sync, proxy.url, on_disconnected=events.disconnected, on_reconnected=events.reconnected
    )
    assert client.connected
    proxy.cut()
    await events.has("disconnected", "reconnected")
    assert client.connected
    assert events.threads == {"bide"}
    await asyncio.to_thread(client.close)
    assert not client.connected


@asynccontextmanager
async def steady(
    proxy: Proxy, events: Events, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[bide.Client, str]]:
    """A client and its queue. If its connection breaks, the first attempt to open it again comes at once, and pauses
    between attempts are longer than a test may take."""
    queue = fresh("q")
    async with bide.connect(proxy.url, on_disconnected=events.disconnected) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        # A connection that breaks within a second is opened again after a pause.
        await asyncio.sleep(1.1)
        monkeypatch.setattr("bide.runtime.backoff.Backoff.next", lambda self: 1000.0)
        yield client, queue


async def test_a_publish_does_not_wait_for_the_end_of_a_pause_in_the_background(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    async with steady(proxy, events, monkeypatch) as (client, queue):
        proxy.refusing = True
        before = proxy.accepted
        proxy.cut()
        await events.has("disconnected")

        async def has_tried() -> bool:
            return proxy.accepted > before

        await eventually(has_tried)
        proxy.refusing = False
        await asyncio.wait_for(client.publish(b"", to=queue), TIMEOUT)
        assert client.connected


async def test_a_publish_does_not_wait_for_a_pause_after_a_failed_attempt_in_the_background(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publish begins while the attempt is under way, so before the pause."""
    async with steady(proxy, Events(), monkeypatch) as (client, queue):
        before = proxy.accepted
        proxy.stall()
        proxy.cut()

        async def is_trying() -> bool:
            return proxy.accepted > before

        await eventually(is_trying)
        publishing = asyncio.ensure_future(client.publish(b"", to=queue))
        # More than the steps that a publish takes until it waits for the connection.
        for _ in range(100):
            await asyncio.sleep(0)
        proxy.cut()
        proxy.moving.set()
        await asyncio.wait_for(publishing, TIMEOUT)
        assert client.connected
