"""An endpoint whose handlers fail and kill its process, and which records what it handles.

Every line is on the disk before the handler returns, so that the account survives the process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import bide
from bide.endpoint import Event

CLOCK = bide.Clock(max_delay=timedelta(seconds=20), resolution=timedelta(milliseconds=50))
QUEUE, ERROR = "night", "night.error"
POISON_AFTER = 5


class Account(bide.Observer):
    """Appends lines of JSON to a file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, what: str, message_id: str | None) -> None:
        """One line, for good."""
        line = {"what": what, "id": message_id, "pid": os.getpid(), "at": time.time()}
        os.write(self._file, json.dumps(line).encode() + b"\n")
        os.fsync(self._file)

    async def started(self, client: bide.Client) -> None:
        """Record the start."""
        self.write("started", None)

    async def happened(self, event: Event) -> None:
        """Record the event."""
        self.write(event.kind, event.message_id)


def main() -> None:
    """Run until SIGTERM."""
    account = Account(Path(sys.argv[1]))
    app = bide.Endpoint(
        QUEUE,
        error_queue=ERROR,
        retry=bide.Retry(immediate=1, delays=["100ms"], jitter=0.2),
        poison_after=POISON_AFTER,
        slow_down_after=None,
        observers=[account],
        concurrency=5,
    )

    @app.handler(type="twice")
    async def fail_twice(message: bide.Message) -> None:
        if message.history.attempts + message.delivery_count < 2:
            raise ConnectionError("not yet")
        account.write("done", message.message_id)

    @app.handler(type="always")
    def fail(message: bide.Message) -> None:
        raise ValueError(f"{message.message_id} is invalid")

    @app.handler(type="killer")
    async def kill(message: bide.Message) -> None:
        account.write("kill", message.message_id)
        os.kill(os.getpid(), signal.SIGKILL)

    app.serve(infrastructure=CLOCK)


if __name__ == "__main__":
    main()
