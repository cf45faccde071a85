"""Address and user of a management API, and its answers as errors."""

from __future__ import annotations

import html
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote, urlencode, urlsplit

from bide.amqp.exposure import warn_about_http
from bide.amqp.url import BrokerUrl
from bide.errors import InvalidUrlError, ManagementApiError

if TYPE_CHECKING:
    import httpx2

MANAGEMENT_VARIABLE: Final = "BIDE_MANAGEMENT_URL"

PORTS: Final = {"http": 15672, "https": 15671}

_ENABLE: Final = (
    "enable it with 'rabbitmq-plugins enable rabbitmq_management', or name its address with --management-url or "
    f"{MANAGEMENT_VARIABLE}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementEndpoint:
    """Where a management API is, and who asks. Printing it never shows the password.

    Attributes:
        base: scheme, host and port, and a path where a proxy adds one: ``http://localhost:15672``.
        tls: settings for https; None for the system's.
        timeout: for one call.
    """

    base: str
    user: str
    password: str = field(repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    timeout: timedelta = timedelta(seconds=30)

    def url(self, *parts: str, query: Mapping[str, str | int] | None = None) -> str:
        """The URL of ``/api/<part>/<part>...``, each part percent-encoded."""
        path = "/".join(quote(part, safe="") for part in parts)
        return f"{self.base}/api/{path}" + (f"?{urlencode(query)}" if query else "")

    def options(self) -> dict[str, Any]:
        """How to make an HTTP client for it.

        Proxies and passwords that the environment names are for other servers: AMQP does not heed them either.
        """
        # Without TLS a bare context does: loading the system's certificates takes 40 ms.
        tls = self.tls or (ssl.create_default_context() if self.base.startswith("https:") else _bare())
        return {
            "auth": (self.user, self.password),
            "verify": tls,
            "timeout": self.timeout.total_seconds(),
            "trust_env": False,
        }

    async def trace(self, event: str, details: Mapping[str, Any]) -> None:
        """Warn about a password that others can read, before it is sent: the HTTP client reports its steps here."""
        if event == "connection.connect_tcp.complete":
            warn_about_http(self.base, self.user, details["return_value"].get_extra_info("socket"))

    def read(self, response: httpx2.Response, *, missing_ok: bool = False) -> Any:
        """The decoded answer; None where the API has nothing to say.

        Args:
            response: to a call of this API.
            missing_ok: return None too where what the call names does not exist.

        Raises:
            ManagementApiError: the answer is a refusal, or none of this API's.
        """
        try:
            answer = json.loads(response.content) if response.content else None
        except (ValueError, RecursionError) as error:
            raise self._alien(response.status_code) from error
        if response.is_success:
            return answer
        reason = ""
        if isinstance(answer, dict):
            reason = html.unescape(str(answer.get("reason") or answer.get("error") or ""))
            reason = " ".join(reason.split())
        match response.status_code:
            case 401 | 403:
                raise self._refused(f"{response.request.method} {response.request.url.path}", reason)
            case 404 if missing_ok and answer is not None:
                return None
            case status if reason:
                what = f"{response.request.method} {response.request.url.path}"
                raise ManagementApiError(f"the management API at {self.base} refuses {what}: {reason} ({status})")
            case status:
                raise self._alien(status)

    def unreachable(self, error: httpx2.HTTPError) -> ManagementApiError:
        """The error for a call that got no answer."""
        reason = str(error) or f"no answer within {self.timeout.total_seconds():g} s"
        return ManagementApiError(f"no management API answers at {self.base} ({reason}): {_ENABLE}")

    def _alien(self, status: int) -> ManagementApiError:
        return ManagementApiError(
            f"what answers at {self.base} is not RabbitMQ's management API (status {status}): {_ENABLE}"
        )

    def _refused(self, what: str, reason: str) -> ManagementApiError:
        if "management user" in reason:
            return ManagementApiError(
                f"the user {self.user!r} may not use the management API at {self.base}: tag it with "
                f"'rabbitmqctl set_user_tags {self.user} management', or name another user with --management-url"
            )
        if "authorised to access" in reason or "administrator" in reason or "monitor user" in reason:
            return ManagementApiError(
                f"the user {self.user!r} may not do this in the management API at {self.base}: {what}; it takes "
                "permissions in the virtual host, and the tag policymaker for policies"
            )
        return ManagementApiError(
            f"the management API at {self.base} does not accept the user {self.user!r} with this password: check "
            "both, or name another user with --management-url"
        )


def parse_management_url(text: str, url: BrokerUrl) -> ManagementEndpoint:
    """Read ``http[s]://user:password@host:port``; what it leaves out is the AMQP URL's.

    Raises:
        InvalidUrlError: it is not of that form; the message never shows the password.
    """
    form = "give http://user:password@host:15672, or leave out the user to take the AMQP URL's"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        # Not from the error, which may quote the password.
        raise InvalidUrlError(
            f"the management URL has a host that is not one, or a port that is not a number from 0 to 65535: {form}"
        ) from None
    if parts.scheme not in PORTS or not host:
        raise InvalidUrlError(f"the management URL does not start with http:// or https:// and a host: {form}")
    # What people copy from a browser ends in "/#/queues", what they copy from a script in "/api".
    path = parts.path.rstrip("/").removesuffix("/api").rstrip("/")
    endpoint = endpoint_at(url, parts.scheme, host, port or PORTS[parts.scheme], path)
    if parts.username is None:
        return endpoint
    return replace(endpoint, user=unquote(parts.username), password=unquote(parts.password or ""))


def endpoint_at(url: BrokerUrl, scheme: str, host: str, port: int, path: str = "") -> ManagementEndpoint:
    name = f"[{host}]" if ":" in host else host
    tls = replace(url, tls=True).ssl_context() if scheme == "https" else None
    return ManagementEndpoint(base=f"{scheme}://{name}:{port}{path}", user=url.user, password=url.password, tls=tls)


def _bare() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
