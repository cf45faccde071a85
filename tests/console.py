"""A running ``bide console``, its page in a browser, and schedules to show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx2

import bide
from tests.browser import Browser
from tests.firefox import Firefox
from tests.support import Vhost, stream_port
from tests.timeouts import TIMEOUT

NASTY: Final = "<script>document.title='taken'</script><img src='//example.org/x.png' onerror='alert(1)'>"
BUTTON: Final = "[...document.querySelectorAll('main button')].find(one => one.innerText.trim() === '{}')"
KEYS: Final = {"Tab": 9, "Enter": 13, "Escape": 27, "PageDown": 34, "+": 187, "-": 189}
READY: Final = "document.querySelector('.view')?.dataset.ready === 'true'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """A console that runs.

    Attributes:
        url: the address that it printed.
    """

    url: str
    process: subprocess.Popen[str]

    @property
    def origin(self) -> str:
        return self.url.partition("/#")[0]

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A client that has signed in."""
        async with httpx2.AsyncClient(base_url=self.origin, timeout=TIMEOUT, trust_env=False) as http:
            token = self.url.partition("#token=")[2]
            assert (await http.post("/session", json={"token": token})).status_code == 200
            about = (await http.get("/api/about")).json()
            yield Client(http, about["csrf"])


class Client:
    """Calls the console as its page does."""

    def __init__(self, http: httpx2.AsyncClient, csrf: str) -> None:
        self._http = http
        self._headers = {"x-csrf-token": csrf}

    async def get(self, path: str, status: int = 200, **values: Any) -> dict[str, Any]:
        answer = await self._http.get(f"/api/{path}", params=values)
        assert answer.status_code == status, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def post(self, path: str, status: int = 200, **values: Any) -> dict[str, Any]:
        answer = await self._http.post(f"/api/{path}", json=values, headers=self._headers)
        assert answer.status_code == status, answer.text
        found: dict[str, Any] = answer.json()
        return found


@contextmanager
def console(
    vhost: Vhost, *options: str, environment: Mapping[str, str] | None = None, has_gate: bool = False
) -> Iterator[Console]:
    """A console that ends with the block: SIGTERM ends it with the exit code 0 and without a word.

    Args:
        has_gate: the test runs a gate.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "bide", "console", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "BIDE_URL": vhost.url,
            "BIDE_MANAGEMENT_URL": vhost.broker.management_url,
            "BIDE_STREAM_PORT": str(stream_port(vhost.broker)),
            **(environment or {}),
        },
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, process.communicate(timeout=TIMEOUT)
        yield Console(url=line.split(" on ")[1].strip(), process=process)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=TIMEOUT)
        # On a busy machine, the console assumes the default delivery limit, or finds a gate silent, and says so.
        busy = ["its management API is too slow"] + ["no gate reads the queue"] * has_gate
        unexpected = [one for one in errors.splitlines() if not any(text in one for text in busy)]
        assert (output, unexpected, process.returncode) == ("", [], 0)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


class Window:
    """The page of a console in a browser."""

    def __init__(self, browser: Browser | Firefox, url: str) -> None:
        self._browser = browser
        self._url = url

    def sign_in(self) -> None:
        self._browser.visit("about:blank")
        self._browser.visit(self._url)
        self.wait(READY)

    def open(self, view: str, *, width: int = 1200, dark: bool = False) -> None:
        url = f"{self._url.partition('/#')[0]}/#/{view}"
        self._browser.visit("about:blank")
        if isinstance(self._browser, Browser):
            self._browser.visit(url, width=width, dark=dark)
        else:
            # WebDriver BiDi of Firefox 153 has no command for the colour scheme.
            self._browser.visit(url, width=width)
        self.wait(READY)

    def wait(self, expression: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not self._browser.evaluate(expression):
            assert time.monotonic() < deadline, (expression, self.text, self._browser.complaints)
            time.sleep(0.05)  # a page gives no event for an expression

    @property
    def text(self) -> str:
        return str(self._browser.evaluate("document.body.innerText"))

    def click(self, text: str, within: str = "main") -> None:
        buttons = f"[...document.querySelectorAll('{within} button')]"
        found = f"{buttons}.find(one => one.innerText.trim() === {json.dumps(text)})"
        # In one step: the page may be drawn again between two.
        self.wait(f"(one => !!one && (one.click(), true))({found})")


def press(chromium: Browser, key: str) -> None:
    values = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
    text = {"text": "\r"} if key == "Enter" else {}
    chromium.call("Input.dispatchKeyEvent", type="keyDown", **values, **text)
    chromium.call("Input.dispatchKeyEvent", type="keyUp", **values)


async def fill(client: bide.Client) -> None:
    """Schedules, one with hostile texts."""
    await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders"), bide.Queue.quorum("mail")]))
    for number in range(20):
        await client.schedule(json={"n": number}, key=f"invoice:{number:02}", to="reminders", delay="3d")
    await client.schedule(NASTY, key=NASTY, to="mail", delay="2d", headers={"h": NASTY})
    await client.schedule(json={}, key="digest", to="mail", every="0 8 * * MON-FRI", time_zone="Europe/Berlin")
