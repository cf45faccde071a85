"""Starting and stopping the processes of a broker."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bide.errors import LocalBrokerError
from bide.local_broker import supervisor
from bide.local_broker.logs import explain_failed_start
from bide.local_broker.processes import FOLDER_MARK, is_marked, marked, send_signal, wait_until_gone
from bide.local_broker.state import STATE_FILE, Pids, State

# What SIGKILL leaves to do: closing files and telling the parent.
_KILL_SECONDS = 10.0


def is_running(state: State) -> bool:
    """Return whether the broker got ready and its processes are still there."""
    return state.pids is not None and all(
        is_marked(pid, state.folder) for pid in (state.pids.supervisor, state.pids.server)
    )


def launch(state: State, *, seconds: float, outlive: bool) -> int | None:
    """Start epmd and the node, and wait until the node is ready.

    Args:
        state: what to start; saved, first without process ids and with them at the end.
        seconds: how long the start may take.
        outlive: whether the broker goes on when this process ends. It does not before it is ready.

    Returns:
        The file descriptor that the broker's life hangs on, None if it is to outlive this process.

    Raises:
        LocalBrokerError: it did not get ready; no process of it is left.
    """
    deadline = time.monotonic() + seconds
    state = state.with_pids(None)
    state.save()
    # What is there later is of this start.
    (state.folder / "log" / "server.log").unlink(missing_ok=True)
    theirs, ours = os.pipe()
    try:
        try:
            report = _run_supervisor(state, theirs)
        finally:
            os.close(theirs)
        try:
            pids = _wait_until_ready(report, state, deadline=deadline, seconds=seconds)
        finally:
            os.close(report)
        state.with_pids(pids).save()
        if not outlive:
            return ours
        os.write(ours, supervisor.KEEP)
    except BaseException:
        os.close(ours)
        kill(state.folder)
        raise
    os.close(ours)
    return None


def _run_supervisor(state: State, owner_fd: int) -> int:
    """Start the supervisor; return the file descriptor that it reports to."""
    report, theirs = os.pipe()
    log = os.open(state.folder / "log" / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    # Isolated and without site-packages: it is quicker so, and needs neither.
    command = [sys.executable, "-I", "-S", supervisor.__file__]
    try:
        subprocess.run(
            [*command, str(state.folder / STATE_FILE), str(owner_fd), str(theirs)],
            env={FOLDER_MARK: str(state.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(owner_fd, theirs),
            check=False,  # what went wrong is in its log
        )
    except BaseException:
        os.close(report)
        raise
    finally:
        os.close(log)
        os.close(theirs)
    return report


def _wait_until_ready(report: int, state: State, *, deadline: float, seconds: float) -> Pids:
    pids = None
    for message in _read_report(report, deadline=deadline):
        if "ready" in message and pids is not None:
            return pids
        pids = Pids(**message)
    if time.monotonic() >= deadline:
        raise LocalBrokerError(
            f"RabbitMQ {state.release} was not ready after {seconds:g} s. {explain_failed_start(state.folder)}"
        )
    raise LocalBrokerError(f"RabbitMQ {state.release} ended while it started. {explain_failed_start(state.folder)}")


def _read_report(report: int, *, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield the supervisor's messages until it closes the pipe or the deadline is over."""
    buffer = b""
    while select.select([report], [], [], max(0.0, deadline - time.monotonic()))[0]:
        data = os.read(report, 4096)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        yield from map(json.loads, lines)


def halt(state: State, *, seconds: float) -> None:
    """Stop a broker: gracefully, and by force when that takes longer than *seconds*; an ephemeral one by force at once.

    Raises:
        LocalBrokerError: a process does not even react to SIGKILL.
    """
    if state.ephemeral:
        crash(state)
    elif state.pids is not None and is_marked(state.pids.supervisor, state.folder):
        send_signal(state.pids.supervisor, signal.SIGTERM)
        wait_until_gone(state.folder, seconds=seconds)
    kill(state.folder)


def crash(state: State) -> None:
    """End the node by SIGKILL; its supervisor then ends the rest."""
    if state.pids is not None and is_running(state):
        send_signal(state.pids.server, signal.SIGKILL)
        wait_until_gone(state.folder, seconds=_KILL_SECONDS)
    kill(state.folder)


def kill(folder: Path) -> None:
    """Kill every process of the broker in *folder*, such as a start that was broken off has left."""
    for pid in marked(folder):
        send_signal(pid, signal.SIGKILL)
    if left := wait_until_gone(folder, seconds=_KILL_SECONDS):
        raise LocalBrokerError(f"processes of the broker in {folder} do not end, even by SIGKILL: {left}")
