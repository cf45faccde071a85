"""The record of operations, read from a stalled broker or while it grows."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

import bide
from bide.error_queues import operator_log, read_operator_log
from bide.error_queues.operator_log import IDS_PER_RECORD, OperatorLogWriter
from bide.errors import ConnectionLostError
from tests.faults.proxy import Proxy
from tests.support import Vhost
from tests.timeouts import TIMEOUT

CONSUME_OK = b"\x00\x3c\x00\x15"
STEPS = ["begun", *["ids"] * 3, "ended"]


@pytest.fixture(autouse=True)
def less_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_log, "_QUIET", 0.2)


@pytest.fixture(autouse=True)
async def recorded(vhost: Vhost, quiet: None) -> None:
    """Far more than the broker sends together with the answer that it is going to send something."""
    async with bide.connect(vhost.url) as client:
        record = OperatorLogWriter(client, operation="retry", queue="error", run="r")
        await record.begin({})
        await record.ids(["an id as long as they usually are"] * IDS_PER_RECORD * 3)
        await record.end({})


async def read(url: str) -> list[str]:
    async with bide.connect(url) as client:
        return [one.step async for one in read_operator_log(client)]


def stall_at(proxy: Proxy, number: int) -> asyncio.Event:
    """Stall the connection after some subscriptions; the event is set when it is stalled."""
    answered, stalled = 0, asyncio.Event()

    def stall(data: bytes) -> bytes:
        nonlocal answered
        answered += data.count(CONSUME_OK)
        if answered >= number and not stalled.is_set():
            proxy.stall()
            stalled.set()
        return data

    proxy.rewrite = stall
    return stalled


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_a_pause_of_the_broker_does_not_truncate_the_record(vhost: Vhost, number: int) -> None:
    async with Proxy(vhost.url) as proxy:
        stalled = stall_at(proxy, number)
        reading = asyncio.create_task(read(proxy.url))
        await asyncio.wait_for(stalled.wait(), TIMEOUT)
        # Several times what it takes for the end, where the broker answers.
        await asyncio.sleep(1)
        proxy.moving.set()
        assert await reading == STEPS


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_a_broker_that_stops_answering_is_an_error(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(operator_log, "_TIMEOUT", 1.0)
    async with Proxy(vhost.url) as proxy:
        stall_at(proxy, number)
        with pytest.raises(ConnectionLostError, match=r"(has not answered|delivered nothing) for 1 s"):
            await read(proxy.url)


async def test_reading_a_growing_record_ends(vhost: Vhost) -> None:
    async with bide.connect(vhost.url) as client:
        other = OperatorLogWriter(client, operation="discard", queue="error", run="other")

        async def go_on() -> None:
            while True:
                await other.ids(["one"])
                await asyncio.sleep(0.05)  # a steady stream of records

        growing = asyncio.create_task(go_on())
        try:
            async with asyncio.timeout(TIMEOUT):
                found = await read(vhost.url)
        finally:
            growing.cancel()
            # What else ended it is raised.
            with suppress(asyncio.CancelledError):
                await growing
    assert found[: len(STEPS)] == STEPS
