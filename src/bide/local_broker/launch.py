"""Start and stop of the processes of a local broker."""

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
from bide.local_broker.processes import FOLDER_MARK, is_marked, is_paused, marked, send_signal, wait_until_gone
from bide.local_broker.state import STATE_FILE, Pids, State

# Time for the kernel to close files and notify the parent after SIGKILL.
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.02
"""Seconds between two checks of a process, because the system reports no event when it pauses or continues."""


def is_running(state: State) -> bool:
    """Return whether the broker became ready and its processes are still running."""
    return state.pids is not None and all(
        is_marked(pid, state.folder) for pid in (state.pids.supervisor, state.pids.server)
    )


def launch(state: State, *, seconds: float, outlive: bool) -> int | None:
    """Start epmd and the node, and wait until the node is ready.

    Args:
        state: the broker to start. The file is saved twice: without process ids at first, and with them when the
            broker is ready.
        seconds: how long the start may take.
        outlive: whether the broker continues when this process ends. A broker that is not ready yet ends in any case.

    Returns:
        A file descriptor: the broker ends when this process closes it. None if the broker outlives this process.

    Raises:
        LocalBrokerError: the broker did not become ready; all of its processes were ended.
    """
    deadline = time.monotonic() + seconds
    state = state.with_pids(None)
    state.save()
    # The log of an earlier start would be mistaken for the log of this start.
    (state.folder / "log" / "server.log").unlink(missing_ok=True)
    child_end, parent_end = os.pipe()
    try:
        try:
            report = _run_supervisor(state, child_end)
        finally:
            os.close(child_end)
        try:
            pids = _wait_until_ready(report, state, deadline=deadline, seconds=seconds)
        finally:
            os.close(report)
        state.with_pids(pids).save()
        if not outlive:
            return parent_end
    except BaseException:
        os.close(parent_end)
        kill(state.folder)
        raise
    let_outlive(parent_end)
    return None


def let_outlive(owner_fd: int) -> None:
    """Let the broker continue when this process ends."""
    os.write(owner_fd, supervisor.KEEP)
    os.close(owner_fd)


def _run_supervisor(state: State, owner_fd: int) -> int:
    """Start the supervisor; return the file descriptor for reading its reports."""
    report, child_end = os.pipe()
    log = os.open(state.folder / "log" / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    # Isolated and without site-packages, which makes Python start faster.
    command = state.node.inside(sys.executable, "-I", "-S", supervisor.__file__)
    try:
        subprocess.run(
            [*command, str(state.folder / STATE_FILE), str(owner_fd), str(child_end)],
            env={FOLDER_MARK: str(state.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(owner_fd, child_end),
            check=False,  # errors are in the supervisor's log
        )
    except BaseException:
        os.close(report)
        raise
    finally:
        os.close(log)
        os.close(child_end)
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
    """Yield the supervisor's messages until it closes the pipe or the deadline passes."""
    buffer = b""
    while select.select([report], [], [], max(0.0, deadline - time.monotonic()))[0]:
        data = os.read(report, 4096)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        yield from map(json.loads, lines)


def halt(state: State, *, seconds: float) -> None:
    """Stop a broker gracefully, and kill it after *seconds*. An ephemeral broker is killed immediately.

    Raises:
        LocalBrokerError: a process does not end even after SIGKILL.
    """
    if state.ephemeral:
        crash(state)
    elif state.pids is not None and is_marked(state.pids.supervisor, state.folder):
        resume(state)
        send_signal(state.pids.supervisor, signal.SIGTERM)
        wait_until_gone(state.folder, seconds=seconds)
    kill(state.folder)


def pause(state: State) -> None:
    """Stop the node with SIGSTOP: its sockets stay open, and it does not answer."""
    _signal_until_paused(state, signal.SIGSTOP, paused=True)


def resume(state: State) -> None:
    """Let the node continue after :func:`pause`."""
    _signal_until_paused(state, signal.SIGCONT, paused=False)


def _signal_until_paused(state: State, number: int, *, paused: bool) -> None:
    """Send a signal to the node, and wait for its effect, which is delayed on a busy machine."""
    if state.pids is not None and is_running(state):
        send_signal(state.pids.server, number)
        while is_running(state) and is_paused(state.pids.server) != paused:
            time.sleep(_POLL_SECONDS)


def crash(state: State) -> None:
    """Kill the node with SIGKILL; its supervisor then ends the other processes."""
    if state.pids is not None and is_running(state):
        send_signal(state.pids.server, signal.SIGKILL)
        wait_until_gone(state.folder, seconds=_KILL_SECONDS)
    kill(state.folder)


def kill(folder: Path) -> None:
    """Kill every process of the broker in *folder*, including those of an interrupted start.

    Raises:
        LocalBrokerError: a process does not end.
    """
    for pid in marked(folder):
        send_signal(pid, signal.SIGKILL)
    if left := wait_until_gone(folder, seconds=_KILL_SECONDS):
        raise LocalBrokerError(f"processes of the broker in {folder} did not end after SIGKILL: end {left} yourself")
