"""The command line in processes that fork from one that has imported bide.

A Python that imports bide takes up to half a second of processor time. A fork takes 20 ms, because it neither looks at
the imported objects for garbage nor clears them at its end: both would copy them first, which takes 0.4 s.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import bide
from tests.timeouts import TIMEOUT

WARNINGS: Final = "error"
"""PYTHONWARNINGS of the commands."""

_NOT_IMPORTED: Final = (
    "bide.__main__",
    "bide.check",
    "bide.console",
    "bide.demo",
    "bide.observability",
    "bide.pipelines",
    "bide.spark",
    "bide.testing",
)
"""What few commands use, or what needs more packages."""


class CommandLine:
    """Runs ``bide`` as ``python -m bide`` does, one process at a time."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(
        self, arguments: Sequence[str], *, stdin: bytes, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command to its end."""
        with (
            self._lock,
            tempfile.TemporaryFile("w+") as request,
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as errors,
        ):
            json.dump([list(arguments), dict(environment), str(Path.cwd())], request)
            given.write(stdin)
            for file in (request, given):
                file.seek(0)
            try:
                if self._server is None:
                    self._start()
                files = [one.fileno() for one in (request, given, output, errors)]
                socket.send_fds(self._socket, [b"x"], files)
                answer = self._socket.recv(100)
                assert answer, "the process that forks has ended"
            except BaseException:
                self.close()
                raise
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(["bide", *arguments], int(answer), output.read(), errors.read())

    def _start(self) -> None:
        self._socket, other_end = socket.socketpair()
        self._socket.settimeout(TIMEOUT)
        with other_end:
            self._server = subprocess.Popen(
                [sys.executable, "-m", __name__, str(other_end.fileno())],
                # Pipes, as the commands had: Python chooses its buffers by the kind of file when it starts.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONWARNINGS": WARNINGS},
                pass_fds=[other_end.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)

    def close(self) -> None:
        """Kill the process, with a command that is running."""
        if self._server is not None:
            with self._server as server, self._socket:
                self._server = None
                if server.poll() is None:
                    os.killpg(server.pid, signal.SIGKILL)
            atexit.unregister(self.close)


def _import_commands() -> None:
    for module in pkgutil.walk_packages(bide.__path__, "bide."):
        if not module.name.startswith(_NOT_IMPORTED):
            importlib.import_module(module.name)
    gc.collect()
    gc.freeze()


def _become_command(files: Sequence[int]) -> None:
    """Take over the arguments, environment, folder and standard streams of a request."""
    with os.fdopen(files[0]) as request:
        arguments, environment, folder = json.load(request)
    for number, file in enumerate(files[1:]):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(folder)
    sys.argv = ["bide", *arguments]


def _end(code: int) -> None:
    """Do what Python does at its end, except for clearing the modules."""
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    # What the command left open is an error, as usual.
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _serve(requests: socket.socket) -> bool:
    """Fork for each request. Return True in a fork, and False at the end of the requests."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1, 4)
        if not message:
            return False
        if (pid := os.fork()) == 0:
            requests.close()
            _become_command(files)
            return True
        for file in files:
            os.close(file)
        _, status = os.waitpid(pid, 0)
        requests.send(str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    _import_commands()
    if _serve(socket.socket(fileno=int(sys.argv[1]))):
        from bide.cli import main

        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        # Not above, where the exception would keep what the command left open.
        _end(code)
