"""AMQP URLs: hosts, credentials, virtual host and options."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final
from urllib.parse import parse_qs, quote, unquote, urlsplit

from bide.amqp.transport import TCP, Transport
from bide.errors import InvalidUrlError

DEFAULT_URL: Final = "amqp://guest:guest@localhost:5672/"
ENVIRONMENT_VARIABLE: Final = "BIDE_URL"
"""The environment variable with the broker's URL, used if a program or a command gives none; its default is
``amqp://guest:guest@localhost``."""

DEFAULT_HEARTBEAT: Final = 10
"""Seconds."""

_PORTS: Final = {"amqp": 5672, "amqps": 5671, "pyamqp": 5672}
"""Default ports by scheme. ``pyamqp`` is Celery's name for ``amqp``."""

_NEXT_URL: Final = re.compile(r";(?=(?:amqps?|pyamqp)://)", re.IGNORECASE)
"""The separator of Celery's URLs with several brokers."""

_WAIT: Final = "connect with wait='60s', which tries the first connection again for that long"
_TIMEOUT: Final = "give timeout=10, the limit in seconds for opening a connection"
_NEGOTIATED: Final = "leave it out, the value of the broker applies"
_REPLACED_OPTIONS: Final = {
    "blocked_connection_timeout": "connect with timeout='30s', after which a publish fails, whatever holds it up",
    "channel_max": _NEGOTIATED,
    "client_properties": "give name=..., the name of the connection",
    "connection_attempts": _WAIT,
    "frame_max": _NEGOTIATED,
    "locale": "leave it out",
    "retry_delay": _WAIT,
    "socket_timeout": _TIMEOUT,
    "ssl_options": "give cafile=, certfile= and keyfile=, or connect with ssl_context=",
    "stack_timeout": _TIMEOUT,
    "tcp_options": "leave it out, heartbeats find broken connections",
}
"""Options of pika's URLs, and what replaces them."""

_OPTIONS: Final = frozenset(
    {"heartbeat", "timeout", "cafile", "certfile", "keyfile", "verify", "auth", "name", "order"}
)
_EXPECTED_FORM: Final = "give amqp://user:password@host:port/vhost, with a port from 1 to 65535 or none"
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PRINTABLE_PART: Final = re.compile(r"(?:[^:\[]|\[[^\]]*\]|:\d{1,5}(?![^,/?]))*")
"""The part of an address that is safe to print: up to a colon without a port, because a password may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerUrl:
    """A broker's address, read from ``amqp[s]://user:password@host:port/vhost?option=value``.

    Several hosts, separated by commas, are tried in random order until one accepts, so that many clients spread over
    the nodes of a cluster; ``order=given`` tries them in the order of the URL. User, password and virtual host are
    percent-encoded; an empty virtual host means ``/``. The URL is always printed without its password.

    Celery's URLs are read too: ``pyamqp://``, ``//`` at the end for the virtual host ``/``, and several URLs separated
    by semicolons, which may differ in their hosts only.

    Attributes:
        hosts: host and port, in the order given.
        heartbeat: the requested heartbeat interval in seconds, 0 to 65,535; 0 disables heartbeats. The connection to a
            broker that sends nothing for two intervals is closed.
        timeout: the limit for opening a connection, per host; 1 to 3,600 seconds.
        verify: whether the server's certificate is checked; off with ``verify=false``.
        external: whether to log in by client certificate (``auth=external``) instead of a password.
        name: the connection's name in RabbitMQ's management UI.
        shuffle: whether hosts are tried in random order; off with ``order=given``.
        transport: the transport of connections; not part of the URL's text.
        context: TLS settings instead of those of the URL, from ``ssl_context=`` of :func:`bide.connect`; not part of
            the URL's text.
    """

    hosts: tuple[tuple[str, int], ...]
    user: str = "guest"
    password: str = field(default="guest", repr=False)
    vhost: str = "/"
    tls: bool = False
    heartbeat: int = DEFAULT_HEARTBEAT
    timeout: timedelta = timedelta(seconds=10)
    cafile: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    verify: bool = True
    external: bool = False
    name: str = "bide"
    shuffle: bool = True
    transport: Transport = field(default=TCP, repr=False, compare=False)
    context: ssl.SSLContext | None = field(default=None, repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> BrokerUrl:
        """Parse a URL.

        Raises:
            InvalidUrlError: the text is not such a URL; the error never shows the password.
        """
        if not isinstance(text, str):
            raise InvalidUrlError(
                f"the broker URL {text!r} is of type {type(text).__name__}, not text: {_EXPECTED_FORM}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            # Python reads other bytes of an environment variable or an argument as such characters.
            raise InvalidUrlError(
                f"the broker URL {_censored(text)!r} holds characters that UTF-8 cannot encode: write such bytes "
                "percent-encoded"
            ) from None
        try:
            return cls._joined([cls._parse(one) for one in _NEXT_URL.split(text)])
        except InvalidUrlError:
            raise
        except ValueError:
            # "from None", because the original error may quote the password.
            raise InvalidUrlError(f"the broker URL {_censored(text)!r} cannot be read: {_EXPECTED_FORM}") from None

    @classmethod
    def _joined(cls, urls: Sequence[BrokerUrl]) -> BrokerUrl:
        """One URL with the hosts of several."""
        first = urls[0]
        for one in urls[1:]:
            if replace(one, hosts=first.hosts) != first:
                raise InvalidUrlError(
                    f"the broker URLs {first} and {one} differ in more than their hosts: give all hosts of one cluster "
                    "the same user, password, virtual host and options"
                )
        return replace(first, hosts=tuple(host for one in urls for host in one.hosts))

    @classmethod
    def _parse(cls, text: str) -> BrokerUrl:
        parts = urlsplit(text)
        if parts.scheme not in _PORTS:
            raise InvalidUrlError(
                f"the broker URL {_censored(text)!r} does not start with amqp:// or amqps://: {_EXPECTED_FORM}"
            )
        if parts.fragment or "@" in parts.path + parts.query:
            # Most likely part of a password. Without this check, the start of the password would be read as the host.
            raise InvalidUrlError(
                f"the broker URL {_censored(text)!r} has an unexpected '/', '?', '#' or '@': write them as %2F, %3F, "
                "%23 and %40 in user name, password and virtual host"
            )
        credentials, _, addresses = parts.netloc.rpartition("@")
        user, separator, password = credentials.partition(":")
        if ";" in addresses:
            raise InvalidUrlError(
                f"the broker URL {_censored(text)!r} has a semicolon between its hosts: separate them with commas"
            )
        hosts = tuple(_address(one, _PORTS[parts.scheme], text) for one in addresses.split(","))
        options = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        for name in sorted(options.keys() & _REPLACED_OPTIONS.keys()):
            raise InvalidUrlError(f"the broker URL has the option {name!r} of pika: {_REPLACED_OPTIONS[name]}")
        unknown = sorted(options.keys() - _OPTIONS)
        if unknown:
            raise InvalidUrlError(
                f"the broker URL has the unknown option {unknown[0]!r}: known are {', '.join(sorted(_OPTIONS))}"
            )
        path = parts.path.removeprefix("/")
        # Celery writes the virtual host "/" as an empty name between two slashes.
        if "/" in path and path != "/":
            raise InvalidUrlError(f"the virtual host {path!r} in the broker URL holds a slash: write it as %2F")
        return cls(
            hosts=hosts,
            user=unquote(user) if user else "guest",
            password=unquote(password) if separator else "guest",
            vhost=unquote(path) or "/",
            tls=parts.scheme == "amqps",
            heartbeat=_seconds(options, "heartbeat", DEFAULT_HEARTBEAT, 0, 65535),
            timeout=timedelta(seconds=_seconds(options, "timeout", 10, 1, 3600)),
            cafile=options.get("cafile"),
            certfile=options.get("certfile"),
            keyfile=options.get("keyfile"),
            verify=_choice(
                options, "verify", {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
            ),
            external=_choice(options, "auth", {"plain": False, "external": True}),
            name=options.get("name", "bide"),
            shuffle=_choice(options, "order", {"random": True, "given": False}),
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> BrokerUrl:
        """The URL in ``BIDE_URL``, or RabbitMQ's default URL on this machine."""
        environment = os.environ if environment is None else environment
        return cls.parse(environment.get(ENVIRONMENT_VARIABLE) or DEFAULT_URL)

    def with_context(self, context: ssl.SSLContext) -> BrokerUrl:
        """This URL with TLS settings that the caller has made.

        Raises:
            InvalidUrlError: the URL is without TLS, or has TLS settings of its own.
        """
        if not self.tls:
            raise InvalidUrlError(f"ssl_context= is given, but the broker URL {self} is without TLS: give amqps://")
        if self.cafile or self.certfile or self.keyfile or not self.verify:
            raise InvalidUrlError(
                "ssl_context= is given, and the broker URL has cafile, certfile, keyfile or verify too: put these "
                "settings into the context, and remove them from the URL"
            )
        return replace(self, context=context, verify=context.verify_mode != ssl.CERT_NONE)

    def ssl_context(self) -> ssl.SSLContext | None:
        """The TLS settings, or None for a plain connection.

        Raises:
            InvalidUrlError: a certificate or key file cannot be read.
        """
        if not self.tls or self.context is not None:
            return self.context
        try:
            context = ssl.create_default_context(cafile=self.cafile)
            if self.certfile:
                context.load_cert_chain(self.certfile, self.keyfile)
        except (OSError, ValueError) as error:
            files = ", ".join(one for one in (self.cafile, self.certfile, self.keyfile) if one)
            raise InvalidUrlError(
                f"the certificate files of the broker URL cannot be used ({files}): {error}"
            ) from error
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def __str__(self) -> str:
        """The URL without its password."""
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        scheme = "amqps" if self.tls else "amqp"
        return (
            f"{scheme}://{quote(self.user, safe='')}@{hosts}/{quote(self.vhost, safe='') if self.vhost != '/' else ''}"
        )


def address_of(host: str, port: int) -> str:
    """Host and port, in the form of :attr:`bide.amqp.connection.Connection.address`."""
    return f"{host}:{port}"


def _address(text: str, default_port: int, url: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    host, port = parts.hostname, parts.port
    if not host:
        raise InvalidUrlError(f"the broker URL {_censored(url)!r} names no host: {_EXPECTED_FORM}")
    if port == 0:
        raise InvalidUrlError(f"the broker URL {_censored(url)!r} has the port 0: {_EXPECTED_FORM}")
    if not host.isprintable() or " " in host:
        raise InvalidUrlError(f"the host {host!r} in the broker URL has invalid characters: {_EXPECTED_FORM}")
    host.encode("idna")  # fail here with a ValueError, not when the host is looked up
    return host, default_port if port is None else port


def _seconds(options: Mapping[str, str], name: str, default: int, lowest: int, highest: int) -> int:
    text = options.get(name)
    if text is None:
        return default
    if not re.fullmatch("[0-9]{1,9}", text) or not lowest <= int(text) <= highest:
        raise InvalidUrlError(
            f"{name}={text!r} in the broker URL is not a whole number of seconds from {lowest} to {highest}"
        )
    return int(text)


def _choice(options: Mapping[str, str], name: str, choices: Mapping[str, bool]) -> bool:
    """The value of an option with a few choices; the first is the default."""
    text = options.get(name, next(iter(choices))).lower()
    if text not in choices:
        raise InvalidUrlError(f"{name}={text!r} in the broker URL: give one of {', '.join(choices)}")
    return choices[text]


def _censored(text: str) -> str:
    """The text without anything that may be a password."""
    found = _SCHEME.match(text)
    scheme = found[0] if found else ""
    credentials, at, address = text.removeprefix(scheme).rpartition("@")
    if at:
        return f"{scheme}{credentials.partition(':')[0]}@{address}"
    found = _PRINTABLE_PART.match(address)
    shown = found[0] if found else ""
    return f"{scheme}{shown}{'...' if shown != address else ''}"
