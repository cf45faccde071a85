"""The search for the management API of a broker."""

from __future__ import annotations

import asyncio
import logging

import pytest

from bide.admin.locate import management_api
from bide.amqp import tls_warnings
from bide.amqp.url import BrokerUrl
from bide.errors import ManagementApiError

SHOP = BrokerUrl.parse("amqp://ana:secret@shop.example/orders")


@pytest.mark.parametrize(
    ("named", "environment", "address"),
    [
        (None, {}, "http://shop.example:15672"),
        ("https://api.example", {"BIDE_MANAGEMENT_URL": "http://elsewhere.example:80"}, "https://api.example:15671"),
        (None, {"BIDE_MANAGEMENT_URL": "http://api.example:8080/"}, "http://api.example:8080"),
        (
            None,
            {"BIDE_URL": "amqp://bob@shop.example/bills", "BIDE_MANAGEMENT_URL": "http://api.example"},
            "http://api.example:15672",
        ),
        # Both variables describe one broker: for another broker the URL would be wrong.
        (
            None,
            {"BIDE_URL": "amqp://ana:secret@bank.example", "BIDE_MANAGEMENT_URL": "http://bank.example"},
            "http://shop.example:15672",
        ),
        # Nothing is to be decided by it.
        (None, {"BIDE_URL": "amqp://shop.example/a/b"}, "http://shop.example:15672"),
    ],
)
def test_the_address_comes_from_the_argument_then_the_environment_then_the_broker_url(
    named: str | None, environment: dict[str, str], address: str
) -> None:
    assert management_api(SHOP, named, environment=environment).address == address


async def test_an_unreachable_address_from_the_environment_names_its_variable() -> None:
    """'bide broker start' sets the variable: in a shell that goes on to another broker, it is the wrong one."""
    async with management_api(SHOP, environment={"BIDE_MANAGEMENT_URL": "http://127.0.0.1:1"}) as api:
        with pytest.raises(ManagementApiError, match=r"the address in BIDE_MANAGEMENT_URL .*: unset BIDE_MANAGEMENT"):
            await api.overview()
    async with management_api(SHOP, "http://127.0.0.1:1") as api:
        with pytest.raises(ManagementApiError, match=r"at http://127.0.0.1:1 \(.*: enable it with"):
            await api.overview()


async def test_a_management_api_on_another_machine_does_not_get_a_password_over_http_without_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_warnings, "_warned", set())
    # A unit test has no other machine.
    monkeypatch.setattr(tls_warnings, "_is_remote", lambda _peer, _own: True)
    warned_before_requests = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        warned_before_requests.append(sum(one.levelno >= logging.WARNING for one in caplog.records))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, management_api(SHOP, f"http://127.0.0.1:{port}") as api:
        await api.overview()
        await api.overview()
    assert warned_before_requests == [1, 1]
    assert f"'ana' is sent to the management API at http://127.0.0.1:{port} without TLS" in caplog.text
    assert "secret" not in caplog.text
