"""The private cluster: its commands, and killed starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import bide
from bide.errors import LocalBrokerError
from bide.local_broker import LocalBroker, LocalCluster, find_running
from bide.local_broker.processes import marked
from bide.local_broker.state import State
from tests.acceptance.test_cli import COMMAND_LINE
from tests.polling import wait_until
from tests.support import Rabbitmq, flush_declarations
from tests.timeouts import TIMEOUT

NAMES = ["bide1@localhost", "bide2@localhost", "bide3@localhost"]


class Commands:
    """Runs ``bide broker`` on one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")}
        return COMMAND_LINE.run(
            ["broker", *arguments, "--folder", str(self.folder)],
            stdin=b"",
            environment={**kept, "PYTHONWARNINGS": "error"},
        )

    def ok(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def fails(self, *arguments: str, code: int = 1) -> str:
        """One line on standard error."""
        done = self.run(*arguments)
        assert done.returncode == code, done
        (line,) = done.stderr.decode().splitlines()
        return line

    def status(self) -> dict[str, Any]:
        described: dict[str, Any] = json.loads(self.ok("status", "--json"))
        return described


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    made = Commands(tmp_path / "broker")
    yield made
    made.ok("stop")


@pytest.fixture
def installed(rabbitmq: Rabbitmq) -> list[str]:
    """The options that select the RabbitMQ under test."""
    home = ["--home", str(rabbitmq.home)] if rabbitmq.home else []
    return [*home, *(["--root", str(rabbitmq.chroot)] if rabbitmq.chroot else [])]


def members(node: LocalBroker, queue: str) -> list[str]:
    found: dict[str, Any] = node.management.call("GET", "queues", "/", queue)
    return sorted(found["members"])


def test_a_node_of_a_single_broker_is_refused(broker: LocalBroker) -> None:
    single = Commands(broker.folder)
    for command in ("stop", "kill", "pause", "start"):
        assert "is a single node: start a cluster with 'bide broker start --nodes 3" in single.fails(
            "node", command, "1"
        )
    assert broker.running
    assert "has 1 node, not 3: give another folder" in single.fails("start", "--nodes", "3")
    assert "give --nodes too" in single.fails("start", "--namespaces", code=2)


def test_a_folder_without_a_cluster_is_refused(tmp_path: Path) -> None:
    nothing = Commands(tmp_path)
    assert f"bide started no broker in {tmp_path}: start a cluster" in nothing.fails("node", "kill", "1")
    with pytest.raises(LocalBrokerError, match="there is no cluster in"):
        LocalCluster(tmp_path)
    with pytest.raises(ValueError, match="a cluster cannot have 1 nodes: give 2 to 9"):
        LocalCluster.start(tmp_path, nodes=1)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_commands_stop_kill_pause_and_start_nodes(commands: Commands, installed: list[str]) -> None:
    exported = commands.ok("start", "--nodes", "3", *installed)
    described = commands.status()
    assert f"BIDE_URL={described['url']}" in exported.replace("'", "")
    assert [one["status"] for one in described["nodes"]] == ["running"] * 3
    assert described["url"].count(",") == 2
    cluster = find_running(commands.folder)
    assert isinstance(cluster, LocalCluster)

    # Quorum queues have a member on each node as soon as the start returns.
    with bide.connect_sync(described["url"], timeout=timedelta(seconds=TIMEOUT)) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        client.publish(b"kept", to="q")
        assert members(cluster.node(1), "q") == NAMES
        flush_declarations(cluster.node(1))

        commands.ok("node", "kill", "1")
        # A single broker in the folder of a node would give its data another name, outside the cluster.
        assert "has a node of a cluster: start it with 'bide broker node start'" in Commands(
            commands.folder / "n1"
        ).fails("start", *installed)
        commands.ok("node", "pause", "2")
        assert [one["status"] for one in commands.status()["nodes"]] == ["stopped", "paused", "running"]
        assert "node 1 does not run: start it with 'bide broker node start 1" in commands.fails("node", "kill", "1")
        assert "node 1 does not run" in commands.fails("node", "stop", "1")
        assert "node 2 is paused already" in commands.fails("node", "pause", "2")
        assert "node 3 runs already" in commands.fails("node", "start", "3")
        assert "has no node 4: give a number from 1 to 3" in commands.fails("node", "kill", "4")
        assert "'one' is not a valid integer" in commands.fails("node", "kill", "one", code=2)
        # The addresses of a cluster with stopped nodes are those of a node that answers.
        assert cluster.management_url == cluster.node(3).management_url

        commands.ok("node", "start", "2")
        commands.ok("node", "start", "1")
        commands.ok("node", "stop", "3")
        client.publish(b"kept too", to="q")
    text = commands.ok("status")
    assert "3 nodes" in text
    assert "node 3     stopped, bide3@localhost" in text

    commands.ok("stop")
    assert [marked(folder) for folder in (commands.folder, *(one.folder for one in cluster.nodes))] == [[]] * 4
    assert "is stopped: start it with 'bide broker start'" in commands.fails("node", "start", "1")
    # Without --nodes, it starts what the folder has.
    commands.ok("start", *installed)
    assert [one["status"] for one in commands.status()["nodes"]] == ["running"] * 3
    with bide.connect_sync(commands.status()["url"], timeout=timedelta(seconds=TIMEOUT)) as client:
        received = [client.get("q"), client.get("q")]
    assert [one.body for one in received if one] == [b"kept", b"kept too"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_failed_start_of_an_ephemeral_cluster_leaves_only_logs(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    with pytest.raises(LocalBrokerError, match="nonsense") as failed:
        LocalCluster.start(
            folder, nodes=2, ephemeral=True, extra_config="nonsense = 1", home=rabbitmq.home, chroot=rabbitmq.chroot
        )
    assert str(folder) in str(failed.value)  # it names the log
    assert {path.parent.name for path in folder.rglob("*") if path.is_file()} == {"log"}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_start_leaves_no_process_namespace_or_folder(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    source = (
        "from pathlib import Path\nfrom bide.local_broker import LocalCluster\n"
        f"LocalCluster.start(Path({str(folder)!r}), namespaces=True, ephemeral=True, {rabbitmq.arguments})\n"
        "input()"
    )
    # It does not end by itself, however late the kill comes.
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE) as starter:
        wait_until((folder / "n3" / "node.pid").exists, what="the nodes begin to start")
        state = State.load(folder)
        assert state is not None
        namespaces = [words[-1] for words in state.cleanup if "netns" in words]
        assert len(namespaces) == 3
        starter.send_signal(signal.SIGKILL)
    wait_until(lambda: not folder.exists(), what="the folder is removed")
    # The supervisor of the cluster removes the folder, and then ends itself.
    folders = (folder, *(folder / f"n{number}" for number in (1, 2, 3)))
    wait_until(lambda: not any(map(marked, folders)), what="no process is left")
    assert [name for name in namespaces if (Path("/run/netns") / name).exists()] == []
