"""Address and credentials of a management API, and errors from its answers."""

from __future__ import annotations

import html
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote, urlencode, urlsplit

from bide.amqp.tls_warnings import warn_about_http
from bide.amqp.url import BrokerUrl
from bide.errors import InvalidUrlError, ManagementApiError

if TYPE_CHECKING:
    import httpx2

MANAGEMENT_VARIABLE: Final = "BIDE_MANAGEMENT_URL"
"""URL of the management API. The default has the user and host of ``BIDE_URL``, and port 15672, or 15671 with TLS."""

PORTS: Final = {"http": 15672, "https": 15671}

_ENABLE: Final = (
    "enable it with 'rabbitmq-plugins enable rabbitmq_management', or give its address with management_url=... or "
    f"{MANAGEMENT_VARIABLE}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How to wait for a call that may take long.

    Attributes:
        timeout: how long to wait for the answer.
        advice: the end of the error if the API accepts the call and does not answer: why it takes long, what to do.
    """

    timeout: timedelta
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementEndpoint:
    """Address and credentials of a management API. Its representation does not show the password.

    Attributes:
        base: scheme, host and port, and the path of a proxy: ``http://localhost:15672``.
        user: the name of the user.
        password: the password of the user.
        tls: TLS settings for https; None trusts the certificate authorities of the system.
        timeout: the timeout of one call.
        variable: the environment variable that the address is from, if any.
    """

    base: str
    user: str
    password: str = field(repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    timeout: timedelta = timedelta(seconds=30)
    variable: str | None = None

    def url(self, *parts: str, query: Mapping[str, str | int] | None = None) -> str:
        """The URL of ``/api/<part>/<part>...``, each part percent-encoded."""
        path = "/".join(quote(part, safe="") for part in parts)
        return f"{self.base}/api/{path}" + (f"?{urlencode(query)}" if query else "")

    def options(self) -> dict[str, Any]:
        """The arguments of an HTTP client for this API.

        Proxies and passwords from the environment are ignored, as in AMQP connections: they belong to other servers.
        """
        # For http an empty context is enough: loading the system's certificates takes 40 ms.
        tls = self.tls or (ssl.create_default_context() if self.base.startswith("https:") else _empty_context())
        return {
            "auth": (self.user, self.password),
            "verify": tls,
            "timeout": self.timeout.total_seconds(),
            "trust_env": False,
        }

    async def trace(self, event: str, details: Mapping[str, Any]) -> None:
        """Handle an event of the HTTP client: log a warning before it sends a password unencrypted."""
        if event == "connection.connect_tcp.complete":
            warn_about_http(self.base, self.user, details["return_value"].get_extra_info("socket"))

    def read(self, response: httpx2.Response, *, missing_ok: bool = False) -> Any:
        """Decode a response; None if it is empty.

        Args:
            response: the response to a call of this API.
            missing_ok: return None if the requested object does not exist.

        Raises:
            ManagementApiError: the API refused, or the response is not from a management API.
        """
        try:
            answer = json.loads(response.content) if response.content else None
        except (ValueError, RecursionError) as error:
            raise self._not_an_api(response.status_code) from error
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
                raise self._not_an_api(status)

    def unreachable(self, error: httpx2.HTTPError, patience: Patience | None = None) -> ManagementApiError:
        """The error for a call without a response."""
        import httpx2

        if not isinstance(error, httpx2.ReadTimeout | httpx2.ReadError | httpx2.RemoteProtocolError):
            # The API did not accept the call.
            patience = None
        timeout = self.timeout if patience is None else patience.timeout
        reason = str(error) or f"no answer within {timeout.total_seconds():g} s"
        if patience is not None:
            return ManagementApiError(f"the management API at {self.base} did not answer ({reason}): {patience.advice}")
        if self.variable is not None:
            return ManagementApiError(
                f"no management API answers at {self.base}, the address in {self.variable} ({reason}): unset "
                f"{self.variable} if it belongs to another broker, or enable the API with 'rabbitmq-plugins enable "
                "rabbitmq_management'"
            )
        return ManagementApiError(f"no management API answers at {self.base} ({reason}): {_ENABLE}")

    def _not_an_api(self, status: int) -> ManagementApiError:
        return ManagementApiError(
            f"the server at {self.base} is not RabbitMQ's management API (status {status}): {_ENABLE}"
        )

    def _refused(self, what: str, reason: str) -> ManagementApiError:
        if "management user" in reason:
            return ManagementApiError(
                f"the user {self.user!r} may not use the management API at {self.base}: tag it with "
                f"'rabbitmqctl set_user_tags {self.user} management', or give another user with management_url=..."
            )
        if "authorised to access" in reason or "administrator" in reason or "monitor user" in reason:
            return ManagementApiError(
                f"the user {self.user!r} may not do this in the management API at {self.base}: {what}; grant it "
                "permissions in the virtual host, and the tag policymaker for policies"
            )
        return ManagementApiError(
            f"the management API at {self.base} does not accept the user {self.user!r} with this password: check "
            "both, or give another user with management_url=..."
        )


def parse_management_url(text: str, url: BrokerUrl) -> ManagementEndpoint:
    """Parse ``http[s]://user:password@host:port``; missing parts are taken from the AMQP URL.

    Raises:
        InvalidUrlError: the text does not have that form; the error never shows the password.
    """
    form = "give http://user:password@host:15672, or leave out the user to use that of the AMQP URL"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        # The original error is not used, because it can contain the password.
        raise InvalidUrlError(
            f"the management URL has an invalid host, or a port that is not a number from 0 to 65535: {form}"
        ) from None
    if parts.scheme not in PORTS or not host:
        raise InvalidUrlError(f"the management URL does not start with http:// or https:// and a host: {form}")
    # URLs copied from a browser end in "/#/queues", URLs from scripts in "/api".
    path = parts.path.rstrip("/").removesuffix("/api").rstrip("/")
    endpoint = endpoint_at(url, parts.scheme, host, port or PORTS[parts.scheme], path)
    if parts.username is None:
        return endpoint
    return replace(endpoint, user=unquote(parts.username), password=unquote(parts.password or ""))


def endpoint_at(url: BrokerUrl, scheme: str, host: str, port: int, path: str = "") -> ManagementEndpoint:
    name = f"[{host}]" if ":" in host else host
    tls = replace(url, tls=True).ssl_context() if scheme == "https" else None
    return ManagementEndpoint(base=f"{scheme}://{name}:{port}{path}", user=url.user, password=url.password, tls=tls)


def _empty_context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
