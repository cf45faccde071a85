"""Three private brokers on loopback, joined to a cluster."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bide.broker import LocalBroker
from bide.broker.configuration import LOOPBACK
from bide.broker.installation import find_installation
from bide.broker.processes import send_signal
from tests.faults.conftest import free_port
from tests.support import Rabbitmq


@dataclass(frozen=True, slots=True)
class Node:
    """One node.

    Attributes:
        name: of the Erlang node.
        credentials: of the cluster's administrator, as in a URL.
    """

    name: str
    broker: LocalBroker
    credentials: str

    @property
    def url(self) -> str:
        """The AMQP URL of this node alone."""
        return f"amqp://{self.credentials}@{self.broker.url.rpartition('@')[2]}"

    def rabbitmqctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` on this node and return what it printed."""
        return self.broker.rabbitmqctl("--node", self.name, *arguments)

    def freeze(self) -> None:
        """Stop it by SIGSTOP: its sockets stay open, and nothing is answered."""
        send_signal(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on after :meth:`freeze`."""
        send_signal(self._pid, signal.SIGCONT)

    @property
    def _pid(self) -> int:
        pid = self.broker.pid
        assert pid is not None, f"{self.name} does not run"
        return pid


@dataclass(frozen=True, slots=True)
class Cluster:
    """What :func:`cluster` makes."""

    nodes: list[Node]


@contextmanager
def cluster(rabbitmq: Rabbitmq) -> Iterator[Cluster]:
    """Run a cluster of the RabbitMQ under test: one epmd, one cookie, a broker's folder for each node."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bide-cluster-")))
        installation = find_installation(home=rabbitmq.home, chroot=rabbitmq.chroot)
        port = free_port()
        epmd = subprocess.Popen(
            installation.command(installation.epmd, "-address", LOOPBACK, "-port", str(port)), stdin=subprocess.DEVNULL
        )
        stack.callback(epmd.wait)
        stack.callback(epmd.kill)
        nodes: list[Node] = []
        for name in ("a@localhost", "b@localhost", "c@localhost"):
            # The cookie lies in the home folder.
            environment = {"HOME": str(folder), "ERL_EPMD_PORT": str(port), "RABBITMQ_NODENAME": name}
            broker = stack.enter_context(rabbitmq.start(ephemeral=True, environment=environment))
            credentials = nodes[0].credentials if nodes else f"{broker.user}:{broker.password}"
            nodes.append(Node(name, broker, credentials))
        for node in nodes[1:]:
            node.rabbitmqctl("stop_app")
            node.rabbitmqctl("join_cluster", nodes[0].name)
            node.rabbitmqctl("start_app")
        yield Cluster(nodes)
