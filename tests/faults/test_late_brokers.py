"""Clients that wait for a broker that starts later."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

import bide
from bide.amqp.url import BrokerUrl
from bide.errors import AuthenticationError, BrokerUnreachableError, VirtualHostError
from tests.broker.receiving import eventually
from tests.faults.proxy import Proxy
from tests.support import Vhost
from tests.timeouts import TIMEOUT

WAIT = timedelta(seconds=TIMEOUT)


@pytest.fixture
def closed() -> Iterator[socket.socket]:
    """A socket that has a port and does not listen, so that nothing else gets this port."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield one


@pytest.fixture
def closed_port(closed: socket.socket) -> int:
    """A port that nothing listens on."""
    return int(closed.getsockname()[1])


async def waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def waits() -> bool:
        return caplog.text.count("waiting for the broker: ") >= 3

    await eventually(waits)


async def test_a_client_waits_for_a_port_that_opens_later(
    vhost: Vhost, closed: socket.socket, closed_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="bide")
    url = BrokerUrl.parse(vhost.url)
    ((host, port),) = url.hosts

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection(host, port)

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                target.write(data)
            target.close()

        await asyncio.gather(copy(reader, back_writer), copy(back_reader, writer))

    late = vhost.url.replace(f":{port}", f":{closed_port}")
    connecting = asyncio.ensure_future(_connected(late, wait=WAIT))
    await waited_for(caplog)
    levels = [one.levelno for one in caplog.records if one.message.startswith("waiting for the broker: ")]
    assert levels[:3] == [logging.WARNING, logging.INFO, logging.INFO], "shown once by default"
    assert not connecting.done()
    server = await asyncio.start_server(forward, sock=closed)
    client = await connecting
    assert client.connected
    await client.close()
    server.close()
    await server.wait_closed()


async def _connected(url: str, *, wait: str | timedelta) -> bide.Client:
    return await bide.connect(url, wait=wait)


async def test_a_client_waits_while_the_port_is_open_and_connections_are_closed(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """A container's port is often open before the program in it listens."""
    caplog.set_level(logging.INFO, logger="bide")
    proxy.refusing = True
    connecting = asyncio.ensure_future(asyncio.to_thread(bide.connect_sync, proxy.url, wait=WAIT))
    await waited_for(caplog)
    proxy.refusing = False
    client = await connecting
    assert client.connected
    await asyncio.to_thread(client.close)


async def test_the_end_of_the_wait_names_its_length_and_the_last_error(closed_port: int) -> None:
    begun = time.monotonic()
    with pytest.raises(BrokerUnreachableError, match=r"within 0:00:00\.4 \(wait=\): no broker answers at 127\.0\.0\.1"):
        await bide.connect(f"amqp://127.0.0.1:{closed_port}", wait="400ms")
    assert time.monotonic() - begun >= 0.4


async def test_a_client_without_a_wait_fails_at_once(closed_port: int) -> None:
    for wait in (None, "0s"):
        with pytest.raises(BrokerUnreachableError, match=r"^no broker answers"):
            await bide.connect(f"amqp://127.0.0.1:{closed_port}", wait=wait)


async def test_a_refusal_is_not_waited_for(vhost: Vhost) -> None:
    for url, error in (
        (vhost.url.replace("@", "x@"), AuthenticationError),
        (f"{vhost.url}-missing", VirtualHostError),
    ):
        with pytest.raises(error):
            await asyncio.wait_for(_connected(url, wait="1h"), TIMEOUT)
