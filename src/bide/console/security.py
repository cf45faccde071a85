"""The guard in front of every request: host, user, CSRF, read-only mode, headers."""

from __future__ import annotations

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bide.console.settings import Access

CSRF_HEADER: Final = "x-csrf-token"
SIGN_IN_PATH: Final = "/session"
API_PREFIX: Final = "/api/"

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The content security policy. It allows no script made from text, so that texts of messages cannot run."""

_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}

_SAFE_METHODS: Final = frozenset({"GET", "HEAD"})


class Guard:
    """ASGI middleware that lets a request pass only if it is allowed.

    The user is in the scope of each request of the API, as ``bide.user``.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                is_data = scope["path"].startswith(API_PREFIX) or scope["path"] == SIGN_IN_PATH
                headers["cache-control"] = "no-store" if is_data else "no-cache"
            await send(message)

        refused = self._refuse(scope)
        if refused is None:
            await self._app(scope, receive, guarded)
        else:
            status, text = refused
            answer = JSONResponse({"error": text}, status)
            await answer(scope, receive, guarded)

    def _refuse(self, scope: Scope) -> tuple[int, str] | None:
        """Why a request is refused, with the status; None if it may pass."""
        headers, access = Headers(scope=scope), self._access
        # A page that reaches this machine by DNS rebinding sends the name of its own host.
        if headers.get("host", "").lower() not in access.hosts:
            return 421, f"this console is at {access.origins[0]}"
        if scope["method"] not in _SAFE_METHODS:
            if (why := self._cross_site(headers)) is not None:
                return 403, why
            if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                return 415, "the content type of the request is not application/json: send JSON"
        if not scope["path"].startswith(API_PREFIX):
            return None
        user = identify(headers, access)
        if user is None:
            return self._refuse_user(headers)
        scope["bide.user"] = user
        if scope["method"] not in _SAFE_METHODS:
            if not hmac.compare_digest(headers.get(CSRF_HEADER, "").encode(), csrf_token(access, user).encode()):
                return 403, "the request has no valid CSRF token: load the page again"
            if access.is_read_only:
                return 403, "this console is read-only: start it without --read-only to change something"
        return None

    def _refuse_user(self, headers: Headers) -> tuple[int, str]:
        """Why a request without an allowed user is refused, with the status."""
        proxy = self._access.proxy
        if proxy is None:
            return 401, "sign in with the token that 'bide console' printed"
        users = headers.getlist(proxy.user_header)
        if not any(users):
            return 401, f"the request has no user in the header {proxy.user_header}: let the proxy set it"
        if len(users) > 1:
            return 403, (
                f"the request has {len(users)} headers {proxy.user_header}: let the proxy remove those of the browser"
            )
        return 403, f"the user {users[0]!r} may not use the console: allow this user with --allow-user"

    def _cross_site(self, headers: Headers) -> str | None:
        """Why a change may come from a page of another site; None if it does not."""
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in self._access.origins:
            return f"the request comes from a page of another site: use the page at {self._access.origins[0]}"
        if headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return f"the request comes from a page of another site: use the page at {self._access.origins[0]}"
        return None


def identify(headers: Headers, access: Access) -> str | None:
    """The user of a request; None without access. Without a proxy, a browser with the session cookie is the user ''."""
    if access.proxy is not None:
        # A second header means that the proxy passes on the one of the browser, which can name any user.
        users = headers.getlist(access.proxy.user_header)
        return users[0] if len(users) == 1 and users[0] and access.proxy.allows(users[0]) else None
    cookies: SimpleCookie = SimpleCookie()
    try:
        cookies.load(headers.get("cookie", ""))
    except CookieError:
        return None
    found = cookies.get(cookie_name(access))
    is_valid = found is not None and hmac.compare_digest(found.value.encode(), _signed(access, "session").encode())
    return "" if is_valid else None


def session_cookie(access: Access, token: str) -> str | None:
    """The session cookie for a browser that sends the token; None if the token is wrong, or behind a proxy."""
    if access.proxy is not None or not hmac.compare_digest(token.encode(errors="replace"), access.token.encode()):
        return None
    return f"{cookie_name(access)}={_signed(access, 'session')}; HttpOnly; SameSite=Strict; Path=/"


def cookie_name(access: Access) -> str:
    """The name of the session cookie. It contains the port, because browsers do not separate cookies by port."""
    return f"bide-console-{access.port}"


def csrf_token(access: Access, user: str) -> str:
    """The CSRF token of a user."""
    return _signed(access, f"csrf:{user}")


def _signed(access: Access, purpose: str) -> str:
    return hmac.new(access.secret, purpose.encode(errors="replace"), hashlib.sha256).hexdigest()
