"""The stream protocol over TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trustme

import bide
from bide.amqp import tls_warnings
from bide.errors import AuthenticationError, BrokerUnreachableError, TlsError
from bide.local_broker.installation import numbers
from bide.streams.amqp10 import sections
from bide.streams.log import Address, StreamLogs
from bide.streams.range_reader import OffsetRange, read_range
from tests.broker.receiving import fresh
from tests.faults.conftest import DedicatedBroker
from tests.support import stream_port
from tests.timeouts import TIMEOUT


def address_of(dedicated: DedicatedBroker, **options: Any) -> Address:
    """Where its streams are, with options of the URL."""
    url = dedicated.broker.url.replace("amqp://", "amqps://")
    chosen = {"cafile": dedicated.folder / "ca.pem", "timeout": f"{TIMEOUT:.0f}", **options}
    query = "&".join(f"{name}={value}" for name, value in chosen.items())
    return Address.of(f"{url}?{query}", dedicated.stream_tls_port)


async def test_an_unverified_certificate_is_logged_once(
    dedicated: DedicatedBroker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_warnings, "_warned", set())
    url = f"{dedicated.broker.url.replace('amqp://', 'amqps://')}?verify=false"
    for _ in range(2):
        Address.of(url, dedicated.stream_tls_port).connect().close()
    (warning,) = [one for one in caplog.messages if "verify=false" in one]
    assert "is not checked" in warning


async def test_a_stream_is_read_over_tls(dedicated: DedicatedBroker) -> None:
    body, stream = b"x" * 90_000, fresh("s")
    async with bide.connect(dedicated.broker.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue(stream, arguments={"x-queue-type": "stream"})]))
        for _ in range(30):
            await client.publish(body, to=stream)
    with StreamLogs(address_of(dedicated)) as logs:
        assert logs.end(stream) == 30
    wanted = OffsetRange(stream=stream, start=0, end=30)
    found = [
        sections(one).body
        for chunk, first, last in read_range(address_of(dedicated), wanted, fail_on_data_loss=True)
        for one in list(chunk.messages())[first:last]
        if isinstance(one, bytes)
    ]
    assert found == [body] * 30


async def test_an_untrusted_broker_is_refused(dedicated: DedicatedBroker, tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "wrong.pem"))
    with pytest.raises(TlsError, match=r"not trusted .*cafile in the URL"):
        address_of(dedicated, cafile=tmp_path / "wrong.pem").connect()


async def test_mixing_tls_and_plain_ports_is_an_error(dedicated: DedicatedBroker) -> None:
    plain = stream_port(dedicated.broker)
    with pytest.raises(BrokerUnreachableError):
        Address(url=address_of(dedicated, timeout=5).url, port=plain).connect()
    with pytest.raises(BrokerUnreachableError, match="rabbitmq_stream"):
        Address.of(f"{dedicated.broker.url}?timeout=2", dedicated.stream_tls_port).connect()


async def test_a_certificate_can_be_the_login(dedicated: DedicatedBroker, tmp_path: Path) -> None:
    certificate = dedicated.authority.issue_cert("reader", common_name="reader", key_type=trustme.KeyType.RSA)
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "client.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "client.key"))
    address = address_of(dedicated, certfile=tmp_path / "client.pem", keyfile=tmp_path / "client.key", auth="external")
    if numbers(dedicated.broker.release) < (3, 11):
        with pytest.raises(BrokerUnreachableError, match="does not open a connection of the stream protocol"):
            address.connect()
        return
    with pytest.raises(AuthenticationError, match="does not accept the name in the client certificate"):
        address.connect()
    dedicated.broker.add_user("reader", "never-used")
    dedicated.broker.set_permissions("/", "reader")
    with address.connect() as connection:
        assert connection.release >= (3, 11)
