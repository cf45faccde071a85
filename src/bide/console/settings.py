"""Access settings of the console: port, token, read-only mode, proxy."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final
from urllib.parse import urlsplit

from bide.errors import InvalidInputError, InvalidUrlError

DEFAULT_PORT: Final = 8642

_HEADER: Final = re.compile(r"[A-Za-z0-9-]{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyAccess:
    """Access through a proxy that signs users in.

    Attributes:
        origin: the address in the browser: ``https://bide.example.org``.
        user_header: the header in which the proxy sends the user.
        users: the names of the users who may use the console; patterns such as ``*@example.org`` are allowed.
    """

    origin: str
    user_header: str
    users: tuple[str, ...]

    def __post_init__(self) -> None:
        parts = urlsplit(self.origin)
        is_origin = (
            parts.scheme in ("http", "https") and parts.netloc and self.origin == f"{parts.scheme}://{parts.netloc}"
        )
        if not is_origin or "@" in parts.netloc:
            raise InvalidUrlError(
                f"the origin {self.origin!r} is not a scheme and a host: give it as the browser shows it, such as "
                "https://bide.example.org"
            )
        if not _HEADER.fullmatch(self.user_header):
            raise InvalidInputError(
                f"{self.user_header!r} is not the name of a header: give one such as X-Forwarded-User"
            )
        if not self.users or "" in self.users:
            raise InvalidInputError("no user may use the console: give users=[...]")

    def allows(self, user: str) -> bool:
        """Whether a user may use the console."""
        return any(fnmatchcase(user, one) for one in self.users)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may use a console, and whether they may change anything.

    Attributes:
        port: the port on this machine, which is part of the addresses in the browser.
        is_read_only: whether nothing can be changed.
        proxy: access through a proxy instead of the token.
        token: a browser that sends it gets the session cookie, unless there is a proxy.
        secret: the key that signs the session cookie and the CSRF tokens.
    """

    port: int
    is_read_only: bool = False
    proxy: ProxyAccess | None = None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @property
    def origins(self) -> tuple[str, ...]:
        """The addresses in the browser, without a path."""
        if self.proxy is not None:
            return (self.proxy.origin,)
        return tuple(f"http://{host}:{self.port}" for host in ("127.0.0.1", "localhost"))

    @property
    def hosts(self) -> frozenset[str]:
        """The values of the header ``Host`` that are accepted."""
        return frozenset(urlsplit(one).netloc.lower() for one in self.origins)

    @property
    def url(self) -> str:
        """The address to open. Browsers do not send the part behind ``#``, so the token is in no log."""
        return f"{self.origins[0]}/" + ("" if self.proxy else f"#token={self.token}")
