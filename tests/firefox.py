"""A headless Firefox, controlled through WebDriver BiDi over a WebSocket."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.polling import wait_while_running
from tests.timeouts import TIMEOUT

_NAMES: Final = ("firefox-esr", "firefox")
_LISTENING: Final = re.compile(r"WebDriver BiDi listening on ws://127\.0\.0\.1:(\d+)\s")
_EVENTS: Final = ("log.entryAdded", "network.beforeRequestSent")

_TEXT: Final = 1
_CLOSE: Final = 8


class Firefox:
    """One page of a browser.

    Attributes:
        requests: addresses that the page asked for, itself included.
        complaints: what the page wrote into the console of the browser, and its errors.
    """

    def __init__(self, link: _WebSocket) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._link = link
        self._number = 0
        self.call("session.new", capabilities={})
        self.call("session.subscribe", events=list(_EVENTS))
        self._context = self.call("browsingContext.getTree")["contexts"][0]["context"]

    def visit(self, url: str, *, width: int = 1200, height: int = 900) -> None:
        """Load a page, as a window of this size shows it."""
        self.requests.clear()
        self.complaints.clear()
        size = {"width": width, "height": height}
        self.call("browsingContext.setViewport", context=self._context, viewport=size)
        self.call("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page."""
        found = self.call(
            "script.evaluate",
            expression=f"JSON.stringify({expression})",
            target={"context": self._context},
            awaitPromise=False,
        )
        assert found["type"] == "success", found["exceptionDetails"]
        result = found["result"]
        return None if result["type"] == "undefined" else json.loads(result["value"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        self._link.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._link.receive())
            if answer.get("id") == self._number:
                assert answer["type"] == "success", answer
                result: dict[str, Any] = answer["result"]
                return result
            self._handle(answer)

    def _handle(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "network.beforeRequestSent":
            self.requests.append(parameters["request"]["url"])
        elif event.get("method") == "log.entryAdded":
            self.complaints.append(str(parameters["text"]))


class _WebSocket:
    """The client's side of a WebSocket (RFC 6455), for texts."""

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
        self._file = self._socket.makefile("rb")
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        status = self._file.readline()
        assert b" 101 " in status, status
        while self._file.readline().strip():
            pass

    def send(self, text: str) -> None:
        data, mask = text.encode(), os.urandom(4)
        if len(data) < 126:
            length = bytes([0x80 | len(data)])
        elif len(data) < 1 << 16:
            length = struct.pack("!BH", 0x80 | 126, len(data))
        else:
            length = struct.pack("!BQ", 0x80 | 127, len(data))
        masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))
        self._socket.sendall(bytes([0x80 | _TEXT]) + length + mask + masked)

    def receive(self) -> str:
        """The next text."""
        message = b""
        while True:
            head, length = self._read(2)
            if length == 126:
                (length,) = struct.unpack("!H", self._read(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", self._read(8))
            data = self._read(length)
            if head & 0x0F == _CLOSE:
                raise ConnectionError("the browser closes the connection")
            if head & 0x0F > _CLOSE:
                continue  # a ping, which this browser does not send
            message += data
            if head & 0x80:
                return message.decode()

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise ConnectionError("the browser is gone")
        return data


@contextmanager
def start(folder: Path) -> Iterator[Firefox]:
    """A browser that ends with the block.

    Args:
        folder: an empty folder for its profile, log and home.
    """
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    assert program is not None, "there is no Firefox: run scripts/install-firefox.sh"
    profile, log = folder / "profile", folder / "log"
    profile.mkdir()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "--headless", "--no-remote", "--profile", str(profile), "--remote-debugging-port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # As root, it refuses a home of another user.
            env={**os.environ, "HOME": str(folder), "MOZ_CRASHREPORTER_DISABLE": "1"},
        )
    try:
        wait_while_running(process, lambda: _port(log), "the browser listens")
        link = _WebSocket(_port(log), "/session")
        try:
            yield (browser := Firefox(link))
            browser.call("browser.close")
        finally:
            link.close()
        process.wait(TIMEOUT)
    finally:
        process.kill()
        process.wait()


def _port(log: Path) -> int:
    """The port of a browser; 0 before it listens."""
    found = _LISTENING.search(log.read_text(encoding="utf-8"))
    return int(found[1]) if found else 0
