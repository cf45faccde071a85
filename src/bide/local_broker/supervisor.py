"""Supervisor process of a local broker: runs epmd and the node, and ends them.

:class:`bide.local_broker.LocalBroker` runs this file as a script, so it may import only the standard library: ``python
-I -S supervisor.py STATE OWNER_FD REPORT_FD``. It becomes a daemon, starts epmd and the node as its children, and
writes JSON lines to REPORT_FD: the process ids immediately, and ``{"ready": true}`` when the node is ready. For a
cluster as a whole, it starts the epmd that the nodes share, or ``sleep``, in place of a node. Then it waits for the
first of these events:

- The node ends. The supervisor ends epmd too.
- SIGTERM. The supervisor stops the node gracefully, and kills it after ``stop_seconds``.
- The owner ends, which closes its end of the pipe OWNER_FD, even after ``kill -9``. The supervisor kills the node and
  removes the folder of an ephemeral broker. If the owner writes the byte ``k`` first, the broker outlives the owner.

The owner is watched through a pipe, because PR_SET_PDEATHSIG would send its signal when the *thread* that forked ends.
The supervisor has only one thread, so it can use PR_SET_PDEATHSIG for its own children: they end even if the supervisor
is killed with ``kill -9``.

The node reports that it is ready by systemd's protocol sd_notify(3): a datagram to the socket NOTIFY_SOCKET.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

KEEP = b"k"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Erlang allocates tables for this limit: "unlimited" would cost gigabytes.
_MAX_OPEN_FILES = 65_536
_REAP_SECONDS = 5.0


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _log(text: str) -> None:
    """Write a line to standard error, which is the supervisor's log."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    sys.stderr.flush()


class Supervisor:
    """The processes of one broker, from start to end."""

    def __init__(self, state: dict[str, Any], owner_fd: int, report_fd: int) -> None:
        self._folder: str = state["folder"]
        self._ephemeral: bool = state["ephemeral"]
        self._grace: float = state["stop_seconds"]
        self._is_cluster: bool = state["nodes"] > 0
        self._cleanup: list[list[str]] = state["cleanup"]
        self._environment: dict[str, str] = state["environment"]
        self._commands: dict[str, list[str]] = state["commands"]
        self._owner: int | None = owner_fd
        self._report_fd: int | None = report_fd
        self._owner_died = False
        self._stop_requested = False
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._exited: dict[int, int] = {}
        self._notifications = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notifications.setblocking(False)
        self._wakeup, write_end = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only the wake-up is needed

    def _on_sigterm(self, *_: object) -> None:
        self._stop_requested = True

    def start(self) -> None:
        """Start epmd and the node, and report their process ids."""
        # Orphans of the node become children of this process, so that it can wait for their end.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._environment["NOTIFY_SOCKET"] = self._bind_notifications()
        for name in ("epmd", "server"):
            if name not in self._commands:
                continue
            with open(os.path.join(self._folder, "log", f"{name}.log"), "wb") as log:
                self._children[name] = subprocess.Popen(
                    self._commands[name],
                    env=self._environment,
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                    preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
                )
        pids = {"supervisor": os.getpid(), **{name: child.pid for name, child in self._children.items()}}
        _log(f"started {pids}")
        self._report(pids)
        if self._is_cluster:  # neither epmd nor sleep notifies
            self._report_ready()

    def run(self) -> None:
        """Wait until the broker ends or must be stopped, then end all of its processes."""
        self._wait_for(lambda: self._stop_requested or self._owner_died or not self._alive("server"), seconds=None)
        if not self._alive("server"):
            _log(f"the node ended with status {self._exited[self._children['server'].pid]}")
        elif self._owner_died:
            _log("the owner has ended: killing the node")
        else:
            _log("stopping the node")
            os.kill(self._children["server"].pid, signal.SIGTERM)
            if not self._wait_for(lambda: self._owner_died or not self._alive("server"), seconds=self._grace):
                _log(f"the node did not stop within {self._grace:g} s: killing it")
        for child in self._children.values():
            self._kill_group(child.pid)
        if not self._wait_for(self._no_child_is_left, seconds=_REAP_SECONDS):
            _log("a process of the broker did not end")
        for command in self._cleanup:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
        if self._owner_died and self._ephemeral:
            # The nodes of a cluster have supervisors of their own, and may still write.
            deadline = time.monotonic() + _REAP_SECONDS
            while os.path.exists(self._folder) and time.monotonic() < deadline:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _bind_notifications(self) -> str:
        """Bind the socket for sd_notify; return its name in the form of NOTIFY_SOCKET."""
        if sys.platform == "linux":
            # Abstract sockets need no cleanup, do not depend on the length of the path, and are visible in a chroot.
            name = f"bide-{secrets.token_hex(16)}"
            self._notifications.bind(f"\0{name}")
            return f"@{name}"
        else:
            path = os.path.join(self._folder, "notify.sock")
            if os.path.exists(path):
                os.unlink(path)
            self._notifications.bind(path)
            return path

    def _alive(self, name: str) -> bool:
        return self._children[name].pid not in self._exited

    @staticmethod
    def _kill_group(group: int) -> None:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # macOS returns EPERM for a group of zombies
            pass

    def _report(self, values: dict[str, Any]) -> None:
        """Send values to the starting process, if it is still listening."""
        if self._report_fd is not None:
            try:
                os.write(self._report_fd, json.dumps(values).encode() + b"\n")
            except BrokenPipeError:
                pass

    def _reap(self) -> bool:
        """Collect all children that have ended; return whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self._exited[pid] = os.waitstatus_to_exitcode(status)

    def _no_child_is_left(self) -> bool:
        return not self._reap()

    def _wait_for(self, condition: Callable[[], bool], *, seconds: float | None) -> bool:
        """Handle events until *condition* is met (returns True) or *seconds* have passed (returns False)."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            self._reap()
            if condition():
                return True
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            watched: list[Any] = [self._wakeup, self._notifications]
            if self._owner is not None:
                watched.append(self._owner)
            readable, _, _ = select.select(watched, [], [], remaining)
            if self._wakeup in readable:
                os.read(self._wakeup, 4096)
            if self._notifications in readable:
                self._on_notification(self._notifications.recv(4096))
            if self._owner is not None and self._owner in readable:
                self._owner_died = os.read(self._owner, 1) != KEEP
                os.close(self._owner)
                self._owner = None

    def _on_notification(self, datagram: bytes) -> None:
        if b"READY=1" in datagram.split(b"\n"):
            self._report_ready()

    def _report_ready(self) -> None:
        if self._report_fd is not None:
            self._report({"ready": True})
            os.close(self._report_fd)
            self._report_fd = None


def main(state_path: str, owner_fd: int, report_fd: int) -> None:
    """Become a daemon and supervise the broker described in the file *state_path*."""
    with open(state_path, encoding="utf-8") as file:
        state = json.load(file)
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    os.umask(0o077)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    supervisor = Supervisor(state, owner_fd, report_fd)
    supervisor.start()
    supervisor.run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
