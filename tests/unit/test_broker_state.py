"""The state files of a private broker, and the identity of its processes."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bide.errors import LocalBrokerError
from bide.local_broker.configuration import BrokerNode, Ports
from bide.local_broker.processes import is_marked, is_paused, marked, wait_until_gone
from bide.local_broker.state import (
    Pids,
    State,
    create_folder,
    create_subfolders,
    default_folder,
    locked,
    password_of,
    write_private,
)
from tests.polling import wait_until
from tests.timeouts import TIMEOUT


def a_state(folder: Path) -> State:
    return State(
        folder=folder,
        ephemeral=True,
        release="4.3.6",
        ports=Ports(amqp=1, management=2, stream=3, distribution=4, epmd=5),
        plugins=("rabbitmq_management",),
        commands={"epmd": ["epmd", "-port", "5"]},
        environment={"HOME": "/b/home"},
        stop_seconds=30.0,
        node=BrokerNode("bide1@n1", "10.1.2.1", "x1"),
        nodes=3,
        cleanup=(["ip", "netns", "del", "x1"],),
        pids=Pids(supervisor=10, epmd=11, server=12),
    )


def test_a_state_reads_back_as_written(tmp_path: Path) -> None:
    state = a_state(tmp_path)
    state.save()
    assert State.load(tmp_path) == state
    assert stat.S_IMODE((tmp_path / "broker.json").stat().st_mode) == 0o600
    state.with_pids(None).save()
    assert State.load(tmp_path) == replace(state, pids=None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["broker.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"format": 2}',
        '{"format": 1}',
        '{"format": 1, "ports": {}, "plugins": [], "pids": 1}',
    ],
)
def test_an_unreadable_state_loads_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "broker.json").write_text(text, encoding="utf-8")
    assert State.load(tmp_path) is None


def test_a_state_loads_from_a_moved_folder(tmp_path: Path) -> None:
    a_state(tmp_path).save()
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    state = State.load(moved)
    assert state is not None
    assert state.folder == moved


def test_a_private_file_replaces_an_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("old", encoding="ascii")
    path.chmod(0o644)
    write_private(path, "new")
    assert path.read_text(encoding="ascii") == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_only_the_owner_can_read_a_new_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    create_folder(folder)
    create_subfolders(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "home" / ".erlang.cookie").stat().st_mode) == 0o400
    password = password_of(folder)
    assert len(password) == 48
    assert password_of(folder) == password
    create_folder(folder)
    create_subfolders(folder)
    assert password_of(folder) == password


def test_a_subfolder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    create_folder(tmp_path / "b")
    (tmp_path / "b" / "log").touch()
    with pytest.raises(LocalBrokerError, match=r"cannot be used for a broker: .*/log: File exists"):
        create_subfolders(tmp_path / "b")


def test_only_one_process_holds_the_lock(tmp_path: Path) -> None:
    with locked(tmp_path, seconds=1.0):
        started = time.monotonic()
        with (
            pytest.raises(LocalBrokerError, match=r"another process has been starting or stopping .* for 0\.1 s"),
            locked(tmp_path, seconds=0.1),
        ):
            pass
        assert time.monotonic() - started >= 0.1
    with locked(tmp_path, seconds=0.0):
        pass


def test_the_default_folder_follows_the_xdg_specification(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "bide" / "broker"
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_STATE_HOME", ignored)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert default_folder() == tmp_path / ".local" / "state" / "bide" / "broker"


def waiting_program(**environment: str) -> subprocess.Popen[bytes]:
    source = "import sys; print(flush=True); sys.stdin.read()"
    return subprocess.Popen(
        [sys.executable, "-c", source], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def test_processes_are_recognised_by_an_environment_variable(tmp_path: Path) -> None:
    """Not by their ids, and not by a folder that merely begins alike."""
    folder, longer = tmp_path / "b", tmp_path / "b2"
    with (
        waiting_program(BIDE_BROKER_FOLDER=str(folder)) as ours,
        waiting_program(BIDE_BROKER_FOLDER=str(longer)) as theirs,
    ):
        for process in (ours, theirs):
            assert process.stdout is not None
            process.stdout.readline()  # from here on it is the program that was asked for
        assert marked(folder) == [ours.pid]
        assert marked(longer) == [theirs.pid]
        assert not is_marked(theirs.pid, folder)
        assert wait_until_gone(folder, seconds=0.1) == [ours.pid]
        ours.kill()
        # It is a zombie until we wait for it, and counts as gone.
        assert wait_until_gone(folder, seconds=TIMEOUT) == []
        assert not is_marked(ours.pid, folder)
        theirs.kill()


def test_a_process_is_paused_between_sigstop_and_sigcont() -> None:
    with waiting_program() as program:
        assert not is_paused(program.pid)
        program.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_paused(program.pid), "SIGSTOP takes effect")
        program.send_signal(signal.SIGCONT)
        wait_until(lambda: not is_paused(program.pid), "SIGCONT takes effect")
        program.kill()
        program.wait(timeout=TIMEOUT)
        assert not is_paused(program.pid)
