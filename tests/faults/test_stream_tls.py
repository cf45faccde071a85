"""The stream protocol over TLS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

import bide
from bide.amqp import exposure
from bide.errors import AuthenticationError, BrokerUnreachableError, TlsError
from bide.local_broker import LocalBroker
from bide.local_broker.installation import numbers
from bide.streams.amqp10 import sections
from bide.streams.log import Address, StreamLogs
from bide.streams.range_reader import OffsetRange, read_range
from tests.faults.conftest import TLS_PLUGINS, certified, free_port, tls_settings
from tests.support import Rabbitmq, stream_port


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """A broker whose streams are read over TLS."""

    broker: LocalBroker
    port: int
    authority: trustme.CA
    folder: Path

    def address(self, **options: Any) -> Address:
        """Where its streams are, with options of the URL."""
        url = self.broker.url.replace("amqp://", "amqps://")
        chosen = {"cafile": self.folder / "ca.pem", "timeout": 5, **options}
        return Address.of(f"{url}?{'&'.join(f'{name}={value}' for name, value in chosen.items())}", self.port)


@pytest.fixture(scope="module")
def secured(rabbitmq: Rabbitmq, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("stream-tls")
    authority = certified(rabbitmq, folder)
    port = free_port()
    config = f"stream.listeners.ssl.local = 127.0.0.1:{port}\n{tls_settings(folder)}"
    with rabbitmq.start(ephemeral=True, plugins=TLS_PLUGINS, extra_config=config) as broker:
        yield Secured(broker=broker, port=port, authority=authority, folder=folder)


async def test_an_unverified_certificate_is_logged_once(
    secured: Secured, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposure, "_warned", set())
    url = f"{secured.broker.url.replace('amqp://', 'amqps://')}?verify=false"
    for _ in range(2):
        Address.of(url, secured.port).connect().close()
    (warning,) = [one for one in caplog.messages if "verify=false" in one]
    assert "is not checked" in warning


async def test_a_stream_is_read_over_tls(secured: Secured) -> None:
    body = b"x" * 90_000
    async with bide.connect(secured.broker.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue("s", arguments={"x-queue-type": "stream"})]))
        for _ in range(30):
            await client.publish(body, to="s")
    with StreamLogs(secured.address()) as logs:
        assert logs.end("s") == 30
    wanted = OffsetRange(stream="s", start=0, end=30)
    found = [
        sections(one).body
        for chunk, first, last in read_range(secured.address(), wanted, fail_on_data_loss=True)
        for one in list(chunk.messages())[first:last]
        if isinstance(one, bytes)
    ]
    assert found == [body] * 30


async def test_an_untrusted_broker_is_refused(secured: Secured, tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "wrong.pem"))
    with pytest.raises(TlsError, match=r"not trusted .*cafile in the URL"):
        secured.address(cafile=tmp_path / "wrong.pem").connect()


async def test_mixing_tls_and_plain_ports_is_an_error(secured: Secured) -> None:
    plain = stream_port(secured.broker)
    with pytest.raises(BrokerUnreachableError):
        Address(url=secured.address().url, port=plain).connect()
    with pytest.raises(BrokerUnreachableError, match="rabbitmq_stream"):
        Address.of(f"{secured.broker.url}?timeout=2", secured.port).connect()


async def test_a_certificate_can_be_the_login(secured: Secured, tmp_path: Path) -> None:
    certificate = secured.authority.issue_cert("reader", common_name="reader", key_type=trustme.KeyType.RSA)
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "client.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "client.key"))
    address = secured.address(certfile=tmp_path / "client.pem", keyfile=tmp_path / "client.key", auth="external")
    if numbers(secured.broker.release) < (3, 11):
        with pytest.raises(BrokerUnreachableError, match="does not open a connection of the stream protocol"):
            address.connect()
        return
    with pytest.raises(AuthenticationError, match="does not accept the name in the client certificate"):
        address.connect()
    secured.broker.add_user("reader", "never-used")
    secured.broker.set_permissions("/", "reader")
    with address.connect() as connection:
        assert connection.release >= (3, 11)
