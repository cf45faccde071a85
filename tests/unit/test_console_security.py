"""The guard of the console: token, proxy, other sites, read-only mode, content policy."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import httpx2
import pytest

from bide.amqp.url import BrokerUrl
from bide.console.app import CHANGES, READS, make_app
from bide.console.security import CSRF_HEADER, cookie_name
from bide.console.settings import Access, ProxyAccess
from bide.console.vhost import ConsoleVhost
from bide.delay.clock import Clock
from bide.errors import InvalidInputError

PORT = 8642
ORIGIN = f"http://127.0.0.1:{PORT}"
PROXY = ProxyAccess(origin="https://bide.example.org", user_header="X-Forwarded-User", users=("ann", "*@example.org"))
PAGE = files("bide.console") / "page"


def browser(access: Access, **headers: str) -> httpx2.AsyncClient:
    """A client of a console without a broker: the guard refuses before a broker is asked."""
    console_vhost = ConsoleVhost(url=BrokerUrl.parse("amqp://127.0.0.1:1/"), infrastructure=Clock())
    transport = httpx2.ASGITransport(app=make_app([console_vhost], access))
    return httpx2.AsyncClient(transport=transport, base_url=access.origins[0], headers=headers)


@asynccontextmanager
async def signed_in(access: Access) -> AsyncIterator[tuple[httpx2.AsyncClient, dict[str, str]]]:
    """A browser with a session, and the header of its changes."""
    async with browser(access) as client:
        answer = await client.post("/session", json={"token": access.token})
        assert answer.status_code == 200
        about = (await client.get("/api/about")).json()
        yield client, {CSRF_HEADER: about["csrf"]}


@pytest.mark.parametrize("path", [*READS, "about"])
async def test_nothing_is_read_without_a_session(path: str) -> None:
    async with browser(Access(port=PORT)) as client:
        assert (await client.get(f"/api/{path}")).status_code == 401


@pytest.mark.parametrize("path", CHANGES)
async def test_nothing_is_changed_without_a_session(path: str) -> None:
    async with browser(Access(port=PORT)) as client:
        assert (await client.post(f"/api/{path}", json={})).status_code == 401


async def test_the_token_opens_a_session_in_a_cookie_that_scripts_and_other_sites_cannot_use() -> None:
    access = Access(port=PORT)
    async with browser(access) as client:
        answer = await client.post("/session", json={"token": access.token})
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith(f"bide-console-{PORT}=")
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
        assert access.token not in cookie
        assert (await client.get("/api/about")).status_code == 200


@pytest.mark.parametrize("token", ["", "wrong", "ü", None, ["x"]])
async def test_another_token_is_refused(token: Any) -> None:
    async with browser(Access(port=PORT)) as client:
        answer = await client.post("/session", json={"token": token})
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)
        assert (await client.get("/api/about")).status_code == 401


async def test_the_session_of_another_console_is_refused() -> None:
    first, second = Access(port=PORT), Access(port=PORT)
    async with signed_in(first) as (client, _):
        value = client.cookies[cookie_name(first)]
    async with browser(second, cookie=f"{cookie_name(second)}={value}") as other:
        assert (await other.get("/api/about")).status_code == 401


@pytest.mark.parametrize("host", ["example.org", f"example.org:{PORT}", "127.0.0.1", f"127.0.0.1:{PORT + 1}", ""])
async def test_a_name_that_was_made_to_lead_here_is_refused(host: str) -> None:
    async with browser(Access(port=PORT), host=host) as client:
        assert (await client.get("/")).status_code == 421
        assert (await client.get("/api/about")).status_code == 421


@pytest.mark.parametrize("path", CHANGES)
async def test_a_change_needs_the_csrf_token(path: str) -> None:
    async with signed_in(Access(port=PORT)) as (client, _):
        assert (await client.post(f"/api/{path}", json={})).status_code == 403
        wrong = {CSRF_HEADER: "0" * 64}
        assert (await client.post(f"/api/{path}", json={}, headers=wrong)).status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://example.org"}, 403),
        ({"origin": f"http://127.0.0.1:{PORT + 1}"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        # It passes the guard, and has no id.
        ({"origin": ORIGIN, "sec-fetch-site": "same-origin"}, 400),
    ],
)
async def test_a_change_from_another_site_is_refused(headers: dict[str, str], status: int) -> None:
    async with signed_in(Access(port=PORT)) as (client, csrf):
        sent = {"content-type": "application/json", **csrf, **headers}
        answer = await client.post("/api/operations/stop", content=b"{}", headers=sent)
        assert answer.status_code == status


@pytest.mark.parametrize("path", CHANGES)
async def test_a_read_only_console_changes_nothing(path: str) -> None:
    async with signed_in(Access(port=PORT, is_read_only=True)) as (client, csrf):
        answer = await client.post(f"/api/{path}", json={}, headers=csrf)
        assert answer.status_code == 403
        assert "read-only" in answer.json()["error"]


@pytest.mark.parametrize("path", CHANGES)
async def test_a_change_is_never_a_get(path: str) -> None:
    async with signed_in(Access(port=PORT)) as (client, _):
        assert (await client.get(f"/api/{path}")).status_code == 405


@pytest.mark.parametrize(
    ("users", "status", "error"),
    [
        (["ann"], 200, ""),
        (["bob@example.org"], 200, ""),
        (["bob"], 403, "the user 'bob' may not use the console"),
        (["Ann"], 403, "the user 'Ann' may not use the console"),
        ([], 401, "no user in the header X-Forwarded-User"),
        ([""], 401, "no user in the header X-Forwarded-User"),
        (["ann", "bob"], 403, "2 headers X-Forwarded-User"),
    ],
)
async def test_behind_a_proxy_only_listed_users_have_access(users: list[str], status: int, error: str) -> None:
    async with browser(Access(port=PORT, proxy=PROXY)) as client:
        answer = await client.get("/api/about", headers=[("X-Forwarded-User", one) for one in users])
        assert answer.status_code == status
        if status == 200:
            assert answer.json()["user"] == users[0]
        else:
            assert error in answer.json()["error"]


async def test_behind_a_proxy_the_token_opens_nothing() -> None:
    access = Access(port=PORT, proxy=PROXY)
    async with browser(access) as client:
        answer = await client.post("/session", json={"token": access.token})
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)


async def test_the_csrf_token_of_another_user_is_refused() -> None:
    async with browser(Access(port=PORT, proxy=PROXY)) as client:
        about = (await client.get("/api/about", headers={"X-Forwarded-User": "ann"})).json()
        headers = {"X-Forwarded-User": "bob@example.org", CSRF_HEADER: about["csrf"]}
        assert (await client.post("/api/operations/stop", json={}, headers=headers)).status_code == 403


@pytest.mark.parametrize(
    "changed",
    [
        {"origin": "bide.example.org"},
        {"origin": "https://bide.example.org/console"},
        {"origin": "https://user@bide.example.org"},
        {"user_header": "X Forwarded"},
        {"users": ()},
        {"users": ("",)},
    ],
)
def test_a_proxy_that_cannot_work_is_refused(changed: dict[str, Any]) -> None:
    given: dict[str, Any] = {"origin": PROXY.origin, "user_header": PROXY.user_header, "users": PROXY.users}
    with pytest.raises(InvalidInputError):
        ProxyAccess(**(given | changed))


@pytest.mark.parametrize("path", ["/", "/main.js", "/console.css", "/api/about", "/nothing", "/api/nothing"])
async def test_each_answer_has_a_policy_that_allows_no_script_from_texts(path: str) -> None:
    async with browser(Access(port=PORT)) as client:
        answer = await client.get(path)
        policy = dict(one.strip().split(" ", 1) for one in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["trusted-types"] == policy["frame-ancestors"] == "'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


async def test_answers_with_data_are_not_stored() -> None:
    async with signed_in(Access(port=PORT)) as (client, _):
        assert (await client.get("/api/about")).headers["cache-control"] == "no-store"


async def test_the_body_of_a_request_has_a_limit_and_is_an_object() -> None:
    async with signed_in(Access(port=PORT)) as (client, csrf):
        headers = {"content-type": "application/json", **csrf}
        for body in (b"{" + b" " * 2_000_000, b"[]", b"{", b"[" * 100_000):
            answer = await client.post("/api/operations/stop", content=body, headers=headers)
            assert answer.status_code == 400


def pages() -> dict[str, str]:
    return {one.name: one.read_text(encoding="utf-8") for one in PAGE.iterdir()}


def test_the_page_has_no_inline_script_or_style() -> None:
    html = pages()["index.html"]
    assert re.findall(r"<script[^>]*>([^<]*)</script>", html) == [""]
    assert not re.search(r"<style|\bstyle=|\bon\w+=|javascript:", html)


def test_the_scripts_make_no_html_from_texts() -> None:
    forbidden = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc")
    assert not {name for name, text in pages().items() if name.endswith(".js") and forbidden.search(text)}


def test_the_page_asks_no_other_host() -> None:
    for name, text in pages().items():
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, name


def test_the_scripts_are_small() -> None:
    assert sum(len(text.encode()) for name, text in pages().items() if name.endswith(".js")) < 150_000
