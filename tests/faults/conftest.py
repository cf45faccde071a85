"""Fixtures: a proxy before the shared broker, and a dedicated broker for faults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest
import trustme

import bide
from bide.local_broker import LocalBroker
from bide.local_broker.configuration import PLUGINS
from tests.broker.receiving import fresh, receive
from tests.faults.proxy import Proxy
from tests.leaks import no_leaks
from tests.ports import held_port
from tests.support import Rabbitmq, Vhost

CLOCK = bide.Clock(max_delay=timedelta(seconds=20), resolution=timedelta(seconds=1))
"""20 digit queues: applied in a moment."""

BODY_LIMIT = 100_000


async def declared(url: str) -> str:
    """A queue, with the clock and a binding to it in place."""
    queue = fresh("q")
    async with bide.connect(url, infrastructure=CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        await client.publish(b"", to=queue, delay="1s")
        await receive(client, queue, 1)
    return queue


def too_old(vhost: Vhost) -> Callable[[bytes], bytes]:
    """Replace the broker's release in its greeting by an unsupported one."""
    real = vhost.broker.release.encode()
    old = {6: b"3.9.29", 5: b"3.9.9"}[len(real)]
    before, after = (b"\x07versionS\x00\x00\x00" + bytes((len(one),)) + one for one in (real, old))
    return lambda data: data.replace(before, after)


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    """A fault may leave neither a task nor an unhandled error behind."""
    async with no_leaks():
        yield


@pytest.fixture
async def proxy(vhost: Vhost, quiet: None) -> AsyncIterator[Proxy]:
    """A proxy before a virtual host of its own."""
    async with Proxy(vhost.url) as proxy:
        yield proxy


@dataclass(frozen=True, slots=True, kw_only=True)
class DedicatedBroker:
    """A broker that tests may stop or block. It listens for TLS too, and takes bodies up to ``BODY_LIMIT`` bytes.

    Attributes:
        stream_tls_port: for the stream protocol over TLS.
        authority: signed the broker's certificate, and is trusted by it.
        folder: for certificates.
    """

    broker: LocalBroker
    tls_port: int
    stream_tls_port: int
    authority: trustme.CA
    folder: Path

    def url(self, *, user: str | None = None, password: str = "", vhost: str = "/", tls: str | None = None) -> str:
        """A URL of it; ``tls`` gives the options of one for TLS."""
        url = self.broker.vhost_url(vhost, user=user, password=password or None)
        if tls is None:
            return url
        head, _, tail = url.removeprefix("amqp://").partition("@")
        return f"amqps://{head}@127.0.0.1:{self.tls_port}/{tail.partition('/')[2]}?{tls}"


def certified(rabbitmq: Rabbitmq, folder: Path) -> trustme.CA:
    """An authority, with a broker's certificate of it in a folder: ``ca.pem``, ``cert.pem``, ``key.pem``."""
    authority = trustme.CA(key_type=trustme.KeyType.RSA)
    certificate = authority.issue_cert("localhost", "127.0.0.1", key_type=trustme.KeyType.RSA)
    # A broker in a root folder of its own sees its files there, while what checks the configuration sees them here.
    for place in [folder, *([rabbitmq.chroot / folder.relative_to("/")] if rabbitmq.chroot else [])]:
        place.mkdir(parents=True, exist_ok=True)
        authority.cert_pem.write_to_path(str(place / "ca.pem"))
        certificate.cert_chain_pems[0].write_to_path(str(place / "cert.pem"))
        certificate.private_key_pem.write_to_path(str(place / "key.pem"))
    return authority


def tls_settings(folder: Path) -> str:
    """The lines of a broker's configuration for a certificate of :func:`certified`, and for logins by certificate."""
    return f"""
        ssl_options.cacertfile = {folder}/ca.pem
        ssl_options.certfile = {folder}/cert.pem
        ssl_options.keyfile = {folder}/key.pem
        ssl_options.verify = verify_peer
        ssl_options.fail_if_no_peer_cert = false
        ssl_cert_login_from = common_name
        auth_mechanisms.1 = PLAIN
        auth_mechanisms.2 = EXTERNAL
    """


TLS_PLUGINS: Final = (*PLUGINS, "rabbitmq_auth_mechanism_ssl")


@pytest.fixture(scope="session")
def dedicated(rabbitmq: Rabbitmq, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DedicatedBroker]:
    """A dedicated broker for tests that stop, block or kill it."""
    folder = tmp_path_factory.mktemp("tls")
    authority = certified(rabbitmq, folder)
    # While the broker starts, and each time that a test kills it, another process could take its ports.
    with held_port() as tls_port, held_port() as stream_tls_port:
        config = f"""
            max_message_size = {BODY_LIMIT}
            listeners.ssl.local = 127.0.0.1:{tls_port}
            stream.listeners.ssl.local = 127.0.0.1:{stream_tls_port}
            {tls_settings(folder)}
        """
        with rabbitmq.start(ephemeral=True, plugins=TLS_PLUGINS, extra_config=config) as broker:
            yield DedicatedBroker(
                broker=broker, tls_port=tls_port, stream_tls_port=stream_tls_port, authority=authority, folder=folder
            )
