"""Warnings about passwords sent without TLS, or without checking the certificate."""

from __future__ import annotations

from ipaddress import ip_address
from ssl import SSLSocket
from typing import Any, Final, Protocol

from bide.amqp.transport import TCP
from bide.amqp.url import BrokerUrl
from bide.runtime.logs import logger

log = logger(__name__)

_warned: Final[set[str]] = set()
"""Warnings that this process has logged. Each is logged once."""


class SocketAddresses(Protocol):
    """The two addresses of a connected socket."""

    def getpeername(self) -> Any:
        """The remote address."""

    def getsockname(self) -> Any:
        """The local address."""


def warn_about_broker(url: BrokerUrl, socket: SocketAddresses) -> None:
    """Warn, once per process and address, if the password can be read on the network.

    Args:
        url: the URL of the connection.
        socket: a socket connected to one of its hosts.
    """
    addresses = _addresses(socket) if url.transport is TCP else None
    if addresses is None:
        return
    peer, own = addresses
    address = f"[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"{peer[0]}:{peer[1]}"
    if url.tls and not url.verify:
        _warn_once(
            f"the certificate of the broker at {address} is not checked (verify=false), so another server can pose as "
            "it and read the password and all messages: give the authority with cafile in the URL instead"
        )
    elif not url.tls and not url.external and _is_remote(peer, own):
        _warn_once(
            f"the password of the user {url.user!r} is sent to the broker at {address} without TLS, and can be read on "
            "the network: use amqps:// and the broker's TLS port"
        )


def warn_about_http(base: str, user: str, socket: SocketAddresses) -> None:
    """Warn, once per process and address, if the password for a management API can be read on the network.

    Args:
        base: the start of the URL of the management API.
        user: the user whose password is sent.
        socket: a socket connected to the management API.
    """
    addresses = _addresses(socket)
    if addresses is not None and base.startswith("http:") and _is_remote(*addresses):
        _warn_once(
            f"the password of the user {user!r} is sent to the management API at {base} without TLS, and can be read "
            "on the network: name an https:// address with management_url=..."
        )


def warn_about_database(user: str, socket: SocketAddresses, way_out: str) -> None:
    """Warn, once per process and address, if the password for a database can be read on the network.

    Args:
        user: the user whose password is sent.
        socket: a socket connected to the database: without TLS, or with TLS that does not check the certificate.
        way_out: how to use TLS, as the end of a sentence.
    """
    addresses = _addresses(socket)
    # The addresses of a Unix socket are texts.
    if addresses is not None and not isinstance(addresses[0], str) and _is_remote(*addresses):
        host, port = addresses[0][:2]
        if isinstance(socket, SSLSocket):
            risk = "without checking its certificate, so another server can pose as it and read"
        else:
            risk = "without TLS, so machines on the network can read"
        _warn_once(
            f"the user {user!r} logs in to the database at {host}:{port} {risk} the rows and, with some methods, the "
            f"password: {way_out}"
        )


def _addresses(socket: SocketAddresses) -> tuple[Any, Any] | None:
    """The remote and the local address, or None if the peer has closed the connection already."""
    try:
        return socket.getpeername(), socket.getsockname()
    except OSError:
        return None


def _is_remote(peer: Any, own: Any) -> bool:
    """Whether the other end of a connection is another machine."""
    return peer[0] != own[0] and not ip_address(peer[0].partition("%")[0]).is_loopback


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)
