"""Supervisor of a private broker: epmd, the node, and the program that started them.

:class:`bide.local_broker.LocalBroker` runs this file as a script, so it imports the standard library only: ``python -I
-S supervisor.py STATE OWNER_FD REPORT_FD``. It makes itself a daemon, starts epmd and the node as its children, and
writes JSON lines to REPORT_FD: their process ids at once, ``{"ready": true}`` when the node says so. Then it waits for
whatever comes first:

- the node ends: epmd is ended too;
- SIGTERM: the node is stopped gracefully, by force when the time for that is over;
- the owner is gone (its end of the pipe OWNER_FD closes, which happens even after ``kill -9``): the node is killed, and
  an ephemeral broker's folder removed. An owner that writes the byte ``k`` first lets the broker outlive it.

A pipe rather than PR_SET_PDEATHSIG, because that signal comes when the *thread* that forked ends. This process has
one thread only, so for its own children PR_SET_PDEATHSIG is right: they do not survive its ``kill -9``.

The node reports that it is ready by the protocol of systemd's sd_notify(3): a datagram to the socket NOTIFY_SOCKET.
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
# Erlang sizes tables by this limit: "unlimited" would cost it gigabytes.
_MAX_OPEN_FILES = 65_536
_REAP_SECONDS = 5.0


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _say(text: str) -> None:
    """Write a line to standard error, which is the supervisor's log."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    sys.stderr.flush()


class Supervisor:
    """One broker's processes, from start to end."""

    def __init__(self, state: dict[str, Any], owner_fd: int, report_fd: int) -> None:
        self._folder: str = state["folder"]
        self._ephemeral: bool = state["ephemeral"]
        self._grace: float = state["stop_seconds"]
        self._environment: dict[str, str] = state["environment"]
        self._commands: dict[str, list[str]] = state["commands"]
        self._owner: int | None = owner_fd
        self._report_fd: int | None = report_fd
        self._owner_died = False
        self._told_to_stop = False
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._exited: dict[int, int] = {}
        self._notifications = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notifications.setblocking(False)
        self._wakeup, write_end = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up is all that is wanted

    def _on_sigterm(self, *_: object) -> None:
        self._told_to_stop = True

    def start(self) -> None:
        """Start epmd and the node, and report their process ids."""
        # Processes that the node leaves behind become our children, so that the end is known for certain.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._environment["NOTIFY_SOCKET"] = self._bind_notifications()
        for name in ("epmd", "server"):
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
        _say(f"started {pids}")
        self._report(pids)

    def run(self) -> None:
        """Wait until the broker ends or has to; leave no process behind."""
        self._wait_for(lambda: self._told_to_stop or self._owner_died or not self._alive("server"), seconds=None)
        if not self._alive("server"):
            _say(f"the node ended by itself, status {self._exited[self._children['server'].pid]}")
        elif self._owner_died:
            _say("the owner is gone: killing the node")
        else:
            _say("stopping the node")
            os.kill(self._children["server"].pid, signal.SIGTERM)
            if not self._wait_for(lambda: self._owner_died or not self._alive("server"), seconds=self._grace):
                _say(f"the node did not stop within {self._grace:g} s: killing it")
        for name in ("server", "epmd"):
            self._kill_group(self._children[name].pid)
        if not self._wait_for(self._no_child_is_left, seconds=_REAP_SECONDS):
            _say("a process of the broker did not end")
        if self._owner_died and self._ephemeral:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _bind_notifications(self) -> str:
        """Bind the socket for sd_notify; return its name as NOTIFY_SOCKET has it."""
        if sys.platform == "linux":
            # Abstract: nothing to remove, no limit to the length of the folder's path, and seen from inside a chroot.
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
        except (ProcessLookupError, PermissionError):  # macOS says EPERM for a group of zombies
            pass

    def _report(self, values: dict[str, Any]) -> None:
        """Tell the starter, unless it has stopped listening."""
        if self._report_fd is not None:
            try:
                os.write(self._report_fd, json.dumps(values).encode() + b"\n")
            except BrokenPipeError:
                pass

    def _reap(self) -> bool:
        """Collect every child that has ended; return whether one is left."""
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
        """Handle events until *condition* holds (return true) or *seconds* are over (return false)."""
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
        if b"READY=1" in datagram.split(b"\n") and self._report_fd is not None:
            self._report({"ready": True})
            os.close(self._report_fd)
            self._report_fd = None


def main(state_path: str, owner_fd: int, report_fd: int) -> None:
    """Become a daemon and supervise the broker that the file *state_path* describes."""
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
