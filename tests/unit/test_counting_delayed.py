"""A management API that does not answer while the delayed-message plugin counts."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import pytest

from bide.admin.locate import management_api
from bide.amqp.url import BrokerUrl
from bide.delayed_plugin.exchanges import TYPE
from bide.delayed_plugin.replacing import COUNTING_TIMEOUT, find_delayed
from bide.errors import ManagementApiError

SHOP = BrokerUrl.parse("amqp://ana:secret@127.0.0.1/shop")
OVERVIEW = json.dumps({"exchange_types": [{"name": TYPE}]}).encode()


@pytest.mark.parametrize(
    ("is_closed", "within", "reason"),
    [
        (False, timedelta(milliseconds=50), "no answer within 0.05 s"),
        (True, COUNTING_TIMEOUT, "Server disconnected without sending a response."),
    ],
    ids=["late", "closed"],
)
async def test_the_error_says_that_the_plugin_counts_its_messages(
    is_closed: bool, within: timedelta, reason: str
) -> None:
    asked = []
    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for body in (OVERVIEW, b""):
            asked.append((await reader.readuntil(b"\r\n")).split()[1])
            await reader.readuntil(b"\r\n\r\n")
            if body:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        if not is_closed:
            await over.wait()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, management_api(SHOP, environment={"BIDE_MANAGEMENT_URL": address}) as api:
        with pytest.raises(ManagementApiError) as raised:
            await find_delayed(api, "shop", within=within)
        over.set()
    text = str(raised.value)
    assert text.startswith(f"the management API at {address} did not answer ({reason}): the delayed-message plugin")
    assert "management.tcp.idle_timeout" in text
    assert "unset" not in text
    assert asked == [b"/api/overview", b"/api/exchanges/shop?disable_stats=true"]


async def test_an_address_without_a_server_is_not_blamed_on_the_plugin() -> None:
    async with management_api(SHOP, "http://127.0.0.1:1") as api:
        with pytest.raises(ManagementApiError, match=r"no management API answers at .*: enable it with"):
            await find_delayed(api, "shop")
