"""Servers that send unexpected frames while a connection opens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bide.amqp import codec
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import AuthenticationError
from tests.broker.receiving import eventually
from tests.timeouts import TIMEOUT


@asynccontextmanager
async def server(mechanisms: bytes, *after_opening: bytes) -> AsyncIterator[tuple[str, bytearray]]:
    """The address of a server that offers these mechanisms, and all that a client sends to it."""
    received = bytearray()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send(payload: bytes) -> None:
            writer.write(codec.frame(codec.METHOD, 0, payload))

        start = codec.table({"product": "RabbitMQ", "version": "4.0.5"})
        locales = codec.long_string(b"en_US")
        answers = iter(
            [
                [codec.method(10, 10, b"\x00\x09", start, codec.long_string(mechanisms), locales)],
                [codec.method(10, 30, codec.short(100), codec.long(131072), codec.short(0))],
                [codec.method(10, 41, b"\x00"), *after_opening],
            ]
        )
        try:
            while data := await reader.read(65536):
                received.extend(data)
                for payload in next(answers, []):
                    send(payload)
        except ConnectionError:
            return
        finally:
            writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield f"amqp://user:hidden@127.0.0.1:{listening.sockets[0].getsockname()[1]}/", received


@pytest.mark.parametrize("mechanisms", [b"EXTERNAL", b"AMQPLAIN RABBIT-CR-DEMO", b"", b"PLAINER"])
async def test_a_password_is_not_sent_where_plain_is_not_offered(mechanisms: bytes) -> None:
    async with server(mechanisms) as (url, received), asyncio.timeout(TIMEOUT):
        with pytest.raises(AuthenticationError, match="not PLAIN: use auth=external"):
            await Connection.open(BrokerUrl.parse(url))
        assert bytes(received) == codec.PROTOCOL_HEADER


async def test_control_characters_in_the_reason_of_an_alarm_are_escaped(caplog: pytest.LogCaptureFixture) -> None:
    """The broker's connection.blocked."""
    blocked = codec.method(10, 60, codec.short_string("low\x1b[2J\nCRITICAL: all is lost\u202e"))
    caplog.set_level(logging.WARNING)
    async with server(b"PLAIN", blocked) as (url, _), asyncio.timeout(TIMEOUT):
        connection = await Connection.open(BrokerUrl.parse(url))

        async def blocked_now() -> bool:
            return connection.blocked_by is not None

        await eventually(blocked_now)
        connection.give_up(AuthenticationError("done"))
    assert connection.blocked_by == "low\\x1b[2J\\nCRITICAL: all is lost\\u202e"
    assert [one for one in caplog.messages if "blocks publishing" in one] == [
        f"the broker at {connection.address} blocks publishing: {connection.blocked_by}"
    ]
