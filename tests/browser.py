"""A headless Chromium, controlled through the DevTools protocol over a pipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import F_DUPFD, fcntl
from pathlib import Path
from select import select
from time import monotonic
from typing import Any, Final

from tests.timeouts import TIMEOUT

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_QUIET: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
)
_START: Final = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads from file 3 and writes to file 4."""

_ABOVE: Final = 10
"""The first file descriptor that is certainly unused."""


class Browser:
    """One page of a browser.

    Attributes:
        requests: addresses that the page asked for, itself included.
        complaints: what the browser wrote into its console.
    """

    def __init__(self, send: int, receive: int) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._send, self._receive = send, receive
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = set[str]()

    def begin(self) -> None:
        """Open an empty page and watch it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def open(self, page: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a file, as a window of this size shows it."""
        self.visit(page.absolute().as_uri(), width=width, height=height, dark=dark)

    def visit(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page, as a window of this size shows it."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.requests.clear()
        self.complaints.clear()
        self._loaded.clear()
        page = self.call("Page.navigate", url=url)["loaderId"]
        deadline = monotonic() + TIMEOUT
        # The page before it may be reported as loaded only now.
        while page not in self._loaded:
            self._handle(self._next(deadline))

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window another size."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def address(self) -> str:
        """The address of the page, also while another one replaces it: then calls that need a page fail."""
        address: str = self.call("Target.getTargetInfo")["targetInfo"]["url"]
        return address

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self) -> bytes:
        """All of the page, as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        return b64decode(found["data"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        deadline = monotonic() + TIMEOUT
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._handle(answer)

    def _handle(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        method = event.get("method")
        if method == "Page.lifecycleEvent":
            if parameters["name"] == "load":
                self._loaded.add(parameters["loaderId"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(parameters["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select([self._receive], [], [], max(deadline - monotonic(), 0))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._receive, 1 << 16)
            if not data:
                raise ConnectionError("the browser is gone")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def start(profile: Path) -> Iterator[Browser]:
    """A browser that ends with the block.

    Args:
        profile: an empty folder for it.
    """
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    assert program is not None, "there is no Chromium: run scripts/install-chromium.sh"
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    pair = [fcntl(end, F_DUPFD, _ABOVE) for end in (their_in, their_out)]
    options = [*_QUIET, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", _START, *map(str, pair), program, *options],
        pass_fds=pair,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (their_in, their_out, *pair):
        os.close(end)
    try:
        browser = Browser(our_out, our_in)
        browser.begin()
        yield browser
    finally:
        # The browser exits when its input pipe is closed.
        os.close(our_out)
        os.close(our_in)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
