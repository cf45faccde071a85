"""The handshake that opens a connection."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from typing import Any

from bide.amqp import codec
from bide.amqp.tls_warnings import warn_about_broker
from bide.amqp.url import BrokerUrl
from bide.errors import AuthenticationError, BrokerError, BrokerUnreachableError, ConnectionLostError, TlsError
from bide.foreign_text import visible
from bide.version import VERSION


def release_of(properties: Mapping[str, Any]) -> tuple[int, ...]:
    """The release in the server's properties as numbers: ``(3, 10, 8)``. A pre-release suffix is dropped."""
    text = str(properties.get("version", ""))
    numbers = []
    for part in text.split("-")[0].split("+")[0].split("."):
        if not re.fullmatch("[0-9]{1,9}", part):
            break
        numbers.append(int(part))
    return tuple(numbers)


def start_ok(url: BrokerUrl, offered: str, transport: asyncio.BaseTransport | None = None) -> bytes:
    """The answer to ``connection.start``: login and client properties.

    Args:
        offered: the authentication mechanisms that the server offers, separated by spaces.
        transport: the connection's transport; a warning is logged if the password can be read on the network.

    Raises:
        AuthenticationError: the server does not offer the mechanism of the URL; no user name or password is sent.
    """
    mechanism, response = ("EXTERNAL", b"") if url.external else ("PLAIN", f"\0{url.user}\0{url.password}".encode())
    if mechanism not in offered.split():
        raise AuthenticationError(
            f"the broker offers {visible(offered).replace(' ', ', ') or 'no mechanism'} to log in, not {mechanism}: "
            + (
                "give a client certificate with certfile and keyfile in the URL, and enable the plugin "
                "rabbitmq_auth_mechanism_ssl on the broker"
                if url.external
                else "use auth=external with a client certificate, or add PLAIN to the broker's auth_mechanisms"
            )
        )
    if transport is not None:
        warn_about_broker(url, transport.get_extra_info("socket"))
    properties = {
        "product": "bide",
        "version": VERSION,
        "platform": "Python",
        "connection_name": url.name,
        "capabilities": {
            "authentication_failure_close": True,
            "publisher_confirms": True,
            "exchange_exchange_bindings": True,
            "basic.nack": True,
            "connection.blocked": True,
            "consumer_cancel_notify": True,
        },
    }
    return codec.method(
        10,
        11,
        codec.table(properties),
        codec.short_string(mechanism),
        codec.long_string(response),
        codec.short_string("en_US"),
    )


def tune_ok(channel_max: int, frame_max: int, heartbeat: int) -> bytes:
    """The answer to ``connection.tune``: the limits of the connection."""
    return codec.method(10, 31, codec.short(channel_max), codec.long(frame_max), codec.short(heartbeat))


def open_vhost(vhost: str) -> bytes:
    """The method that opens a virtual host."""
    return codec.method(10, 40, codec.short_string(vhost), b"\x00", b"\x00")


def close_connection() -> bytes:
    """The method that closes a connection."""
    return codec.method(10, 50, codec.short(200), codec.short_string("closed"), b"\0\0\0\0")


def lost_error(error: Exception | None, url: BrokerUrl, address: str, *, is_open: bool) -> BrokerError:
    """The error for a connection whose socket was closed.

    Args:
        error: the error of the socket, if there was one.
        is_open: whether the handshake was complete.
    """
    if isinstance(error, ssl.SSLError):
        return TlsError(f"TLS with {address} failed: {tls_reason(error)}")
    reason = f" ({error})" if error else ""
    if is_open:
        return ConnectionLostError(f"the connection to the broker at {address} was lost{reason}")
    if url.certfile and isinstance(error, ConnectionResetError):
        # Since TLS 1.3 a certificate is rejected after the handshake, and a TCP reset can overtake the alert.
        return TlsError(f"TLS with {address} failed: {refused_certificate(str(error))}")
    return BrokerUnreachableError(
        f"the broker at {address} closed the connection during the handshake{reason}: does this port speak "
        f"{'AMQP over TLS' if url.tls else 'plain AMQP, or does it want TLS (amqps://)'}?"
    )


def tls_reason(error: ssl.SSLError) -> str:
    """The reason text for a failed TLS handshake, with a fix."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate is not trusted ({error.verify_message}): give the right authority with cafile in the URL"
        )
    if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        return "the port does not speak TLS: use amqp://, or the broker's TLS port"
    if "ALERT" in (error.reason or "") and re.search("CERT|UNKNOWN_CA", error.reason):
        return refused_certificate(error.reason.lower())
    return str(error.reason or error)


def refused_certificate(reason: str) -> str:
    """The reason text for a client certificate that the broker rejected, with a fix."""
    return (
        f"the broker does not accept the client certificate ({reason}): give one that it trusts with certfile and "
        "keyfile in the URL"
    )
