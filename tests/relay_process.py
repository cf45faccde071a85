"""``bide relay`` and ``bide gate`` as processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.support import Vhost
from tests.timeouts import TIMEOUT


class Process:
    """One ``bide relay``, or ``bide gate``."""

    def __init__(self, vhost: Vhost, *options: str, command: str = "relay") -> None:
        allowed = () if "--allow" in options else ("--allow", "*")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bide", command, *allowed, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # The broker closes a connection whose client is frozen for 20 s, unless it has no heartbeats.
            env={**environment, "BIDE_URL": vhost.idle_url},
        )

    def wait_until_it_says(self, words: bytes) -> bytes:
        """Read its standard error until these words appear, and return all of it."""
        assert self.process.stderr is not None
        output = b""
        deadline = time.monotonic() + TIMEOUT
        while words not in output:
            readable, _, _ = select.select([self.process.stderr], [], [], max(deadline - time.monotonic(), 0))
            assert readable, f"the process did not say {words!r}: {output.decode()}"
            part = os.read(self.process.stderr.fileno(), 4096)
            assert part, f"the process ended: {output.decode()}"
            output += part
        return output

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self.process.kill()
        self.process.communicate(timeout=TIMEOUT)

    def stop(self) -> dict[str, Any]:
        """Stop it with SIGTERM, and return the summary that it prints."""
        self.process.terminate()
        out, err = self.process.communicate(timeout=TIMEOUT)
        assert self.process.returncode == 0, err.decode()
        done: dict[str, Any] = json.loads(out)
        return done


def relay(vhost: Vhost, *options: str) -> AbstractContextManager[Process]:
    """A relay at work, which does not outlive the test."""
    return _at_work(vhost, b"relaying bide.hall", *options, command="relay")


def gate(vhost: Vhost, state: Path, *options: str) -> AbstractContextManager[Process]:
    """A gate at work, which does not outlive the test."""
    return _at_work(vhost, b"following bide.v1.schedule", "--state", str(state), *options, command="gate")


@contextmanager
def _at_work(vhost: Vhost, words: bytes, *options: str, command: str) -> Iterator[Process]:
    process = Process(vhost, "--json", *options, command=command)
    try:
        process.wait_until_it_says(words)
        yield process
    finally:
        if process.process.poll() is None:
            process.kill()
