"""TLS: trusted and untrusted certificates, plain ports, and login by certificate."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import trustme

import bide
from bide.amqp import tls_warnings
from bide.errors import AuthenticationError, BrokerUnreachableError, InvalidUrlError, TlsError
from tests.broker.receiving import fresh
from tests.faults.conftest import CLOCK, DedicatedBroker
from tests.timeouts import TIMEOUT


def written(authority: trustme.CA, folder: Path, name: str) -> Path:
    """The certificate of an authority, as a file."""
    path = folder / f"{name}.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


async def test_publishing_and_consuming_work_over_tls(dedicated: DedicatedBroker, tmp_path: Path) -> None:
    trusted = written(dedicated.authority, tmp_path, "right")
    async with bide.connect(dedicated.url(tls=f"cafile={trusted}"), infrastructure=CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("tls")]))
        body = b"x" * 90_000
        await asyncio.gather(*(client.publish(body, to="tls") for _ in range(50)))
        async with client.consume("tls") as messages:
            for _ in range(50):
                message = await anext(messages)
                assert message.body == body
                await message.ack()


async def test_another_authority_is_refused(dedicated: DedicatedBroker, tmp_path: Path) -> None:
    wrong = written(trustme.CA(), tmp_path, "wrong")
    with pytest.raises(TlsError, match=r"certificate is not trusted .*cafile in the URL") as caught:
        await bide.connect(dedicated.url(tls=f"cafile={wrong}"))
    assert dedicated.broker.password not in str(caught.value)
    # Nor do the authorities of this system know it.
    with pytest.raises(TlsError, match="not trusted"):
        await bide.connect(dedicated.url(tls=""))
    client = await bide.connect(dedicated.url(tls="verify=false"))
    await client.close()


async def test_an_unverified_certificate_is_logged_once(
    dedicated: DedicatedBroker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_warnings, "_warned", set())
    for _ in range(2):
        client = await bide.connect(dedicated.url(tls="verify=false"))
        await client.close()
    (warning,) = [one for one in caplog.messages if "verify=false" in one]
    assert "is not checked" in warning
    assert dedicated.broker.password not in caplog.text


async def test_a_host_name_missing_in_the_certificate_is_refused(dedicated: DedicatedBroker, tmp_path: Path) -> None:
    trusted = written(dedicated.authority, tmp_path, "right")
    # An old way to write 127.0.0.1: the address is right, the name is not.
    url = dedicated.url(tls=f"cafile={trusted}").replace("@127.0.0.1:", "@127.1:")
    with pytest.raises(TlsError, match=r"not trusted .*127\.1"):
        await bide.connect(url)


async def test_tls_to_a_plain_port_is_an_error(dedicated: DedicatedBroker, tmp_path: Path) -> None:
    trusted = written(dedicated.authority, tmp_path, "right")
    plain = dedicated.url().replace("amqp://", "amqps://") + f"?cafile={trusted}&timeout={TIMEOUT:.0f}"
    with pytest.raises(BrokerUnreachableError, match=r"amqp://|TLS"):
        await bide.connect(plain)


async def test_plain_to_a_tls_port_is_an_error(dedicated: DedicatedBroker) -> None:
    url = dedicated.url(tls=f"timeout={TIMEOUT:.0f}").replace("amqps://", "amqp://")
    with pytest.raises(BrokerUnreachableError, match="amqps://"):
        await bide.connect(url)


async def test_missing_certificate_files_are_errors(dedicated: DedicatedBroker, tmp_path: Path) -> None:
    with pytest.raises(InvalidUrlError, match=r"missing\.pem"):
        await bide.connect(dedicated.url(tls=f"cafile={tmp_path}/missing.pem"))
    with pytest.raises(InvalidUrlError, match=r"missing\.pem"):
        await bide.connect(dedicated.url(tls=f"verify=false&certfile={tmp_path}/missing.pem"))


@pytest.fixture
def identity(dedicated: DedicatedBroker, tmp_path: Path) -> str:
    """URL options of a client with a certificate in the name of ``dispatcher``."""
    certificate = dedicated.authority.issue_cert("dispatcher", common_name="dispatcher", key_type=trustme.KeyType.RSA)
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "client.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "client.key"))
    trusted = written(dedicated.authority, tmp_path, "right")
    return f"cafile={trusted}&certfile={tmp_path}/client.pem&keyfile={tmp_path}/client.key&auth=external"


async def test_a_certificate_can_be_the_login(dedicated: DedicatedBroker, identity: str) -> None:
    with pytest.raises(AuthenticationError, match="certificate"):
        await bide.connect(dedicated.url(tls=identity))
    dedicated.broker.add_user("dispatcher", "never-used")
    dedicated.broker.set_permissions("/", "dispatcher")
    async with bide.connect(dedicated.url(tls=identity)) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("by-certificate")]))
        # The broker checks this against the name that it took from the certificate.
        await client.publish(b"", to="by-certificate", user_id="dispatcher")
        assert (await anext(client.consume("by-certificate"))).user_id == "dispatcher"


async def test_an_untrusted_client_certificate_is_an_error(
    dedicated: DedicatedBroker, identity: str, tmp_path: Path
) -> None:
    stranger = trustme.CA().issue_cert("dispatcher", common_name="dispatcher")
    stranger.cert_chain_pems[0].write_to_path(str(tmp_path / "client.pem"))
    stranger.private_key_pem.write_to_path(str(tmp_path / "client.key"))
    with pytest.raises(TlsError, match=r"does not accept the client certificate .*certfile and keyfile in"):
        await bide.connect(dedicated.url(tls=identity))


async def test_external_login_without_a_certificate_is_an_error(dedicated: DedicatedBroker, tmp_path: Path) -> None:
    trusted = written(dedicated.authority, tmp_path, "right")
    with pytest.raises(AuthenticationError, match="certificate"):
        await bide.connect(dedicated.url(tls=f"cafile={trusted}&auth=external"))


async def test_a_context_of_the_caller_is_used_on_all_connections(dedicated: DedicatedBroker) -> None:
    context = ssl.create_default_context()
    dedicated.authority.configure_trust(context)
    queue = fresh("q")
    async with bide.connect(dedicated.url(tls=""), ssl_context=context) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        await client.publish("x", to=queue)
        message = await client.get(queue)
        assert message is not None
        await message.ack()
    with await asyncio.to_thread(bide.connect_sync, dedicated.url(tls=""), ssl_context=context) as sync:
        assert await asyncio.to_thread(sync.exists, queue)
    with pytest.raises(TlsError, match="not trusted"):
        await bide.connect(dedicated.url(tls=""), ssl_context=ssl.create_default_context())


async def test_a_context_is_refused_beside_settings_of_the_url() -> None:
    context = ssl.create_default_context()
    with pytest.raises(InvalidUrlError, match="without TLS: give amqps://"):
        bide.connect("amqp://localhost", ssl_context=context)
    for option in ("cafile=ca.pem", "verify=false", "certfile=a.pem"):
        with pytest.raises(InvalidUrlError, match="remove them from the URL"):
            bide.connect(f"amqps://localhost?{option}", ssl_context=context)
