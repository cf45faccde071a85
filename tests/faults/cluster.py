"""A RabbitMQ cluster on loopback, or in network namespaces that can be partitioned."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

from bide.local_broker.configuration import LOOPBACK, MANAGEMENT_PLUGIN, USER, Ports
from bide.local_broker.installation import find_installation, numbers
from bide.local_broker.launch import crash, is_running, kill, launch
from bide.local_broker.processes import send_signal
from bide.local_broker.settings import LocalBrokerSettings
from bide.local_broker.state import State, create_folder, create_subfolders, write_private
from tests.support import Rabbitmq
from tests.timeouts import TIMEOUT

_AMQP: Final = 5672
_MANAGEMENT: Final = 15672
"""The same ports for each node, because each has an address of its own."""
_DISTRIBUTION: Final = 17_670
"""Plus the number of the node: a node that asks epmd takes the port of another one for its own. Private brokers choose
theirs at random from 20,000 on, and RabbitMQ needs this port to be free on all addresses of the machine."""

_CLONE_NEWNET: Final = 0x40000000

_T = TypeVar("_T")


class Node:
    """One node of a :class:`Cluster`.

    Attributes:
        number: from 1 on.
        name: of the Erlang node.
        address: the IP address that it listens on, which no other node has.
        namespace: the network namespace that it runs in, or None.
    """

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._cluster = cluster
        self.number = number
        self.name = f"n{number}@n{number}"
        self.address = f"{cluster.network}.{number}"
        self.namespace = f"{cluster.tag}n{number}" if cluster.namespaces else None
        self.folder = cluster.folder / f"n{number}"
        self._owner_fd: int | None = None

    @property
    def host(self) -> str:
        """Host and port for AMQP, as in a URL."""
        return f"{self.address}:{_AMQP}"

    @property
    def url(self) -> str:
        """The AMQP URL of this node alone."""
        return self._cluster.url_of(self)

    @property
    def management_url(self) -> str:
        """The URL of this node's management API."""
        return f"http://{self.address}:{_MANAGEMENT}"

    @property
    def pid(self) -> int:
        """The process id of the node."""
        pids = self._state().pids
        assert pids is not None, f"{self.name} was never ready"
        return pids.server

    def start(self) -> None:
        """Start it, for the first time or after :meth:`kill`, and wait until it is ready."""
        self._close_owner_fd()
        self._owner_fd = self._inside(lambda: launch(self._state(), seconds=TIMEOUT, outlive=False))

    def kill(self) -> None:
        """End it by SIGKILL."""
        crash(self._state())

    def freeze(self) -> None:
        """Stop it by SIGSTOP: its sockets stay open, and nothing is answered."""
        send_signal(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on after :meth:`freeze`."""
        send_signal(self.pid, signal.SIGCONT)

    def cut_off(self, *others: Node) -> None:
        """Drop all packets to and from other nodes; clients still reach it."""
        for other in others:
            _ip("-n", _named(self.namespace), "route", "add", "blackhole", f"{other.address}/32")
            _ip("-n", _named(other.namespace), "route", "add", "blackhole", f"{self.address}/32")

    def join(self, *others: Node) -> None:
        """Undo :meth:`cut_off`."""
        for other in others:
            _ip("-n", _named(self.namespace), "route", "del", "blackhole", f"{other.address}/32")
            _ip("-n", _named(other.namespace), "route", "del", "blackhole", f"{self.address}/32")

    def unplug(self) -> None:
        """Drop all packets in both directions."""
        _ip("link", "set", self._link, "down")

    def plug(self) -> None:
        """Undo :meth:`unplug`."""
        _ip("link", "set", self._link, "up")

    def join_cluster(self, other: Node) -> None:
        """Join the cluster of another node: of a cluster that was made with ``joined=False``."""
        for arguments in (["stop_app"], ["join_cluster", other.name], ["start_app"]):
            self.rabbitmqctl(*arguments)

    def rabbitmqctl(self, *arguments: str, tool: str = "rabbitmqctl") -> str:
        """Run ``rabbitmqctl``, or another tool of its folder, on this node and return what it printed."""
        state = self._state()
        command = [one.removesuffix("rabbitmqctl") + tool for one in state.commands["rabbitmqctl"][-1:]]
        done = self._inside(
            lambda: subprocess.run(
                [*state.commands["rabbitmqctl"][:-1], *command, "--node", self.name, "--quiet", *arguments],
                env=state.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                check=False,
            )
        )
        assert done.returncode == 0, f"{tool} {arguments} failed: {done.stderr or done.stdout}"
        return done.stdout

    def running_nodes(self) -> list[str]:
        """The names of the cluster's running nodes, as this one sees it."""
        running: list[str] = json.loads(self.rabbitmqctl("cluster_status", "--formatter", "json"))["running_nodes"]
        return running

    @property
    def _link(self) -> str:
        return f"{self._cluster.tag}v{self.number}"

    def _state(self) -> State:
        state = State.load(self.folder)
        assert state is not None, f"{self.folder} has no state"
        return state

    def _inside(self, action: Callable[[], _T]) -> _T:
        """Call a function in the node's network namespace; processes that it starts stay there."""
        if self.namespace is None:
            return action()
        with ThreadPoolExecutor(1, initializer=_enter, initargs=(self.namespace,)) as thread:
            return thread.submit(action).result()

    def prepare(self, settings: LocalBrokerSettings) -> None:
        """Write its folder, and make its network namespace."""
        create_folder(self.folder)
        create_subfolders(self.folder)
        write_private(self.folder / "password", f"{self._cluster.password}\n")
        cookie = self.folder / "home" / ".erlang.cookie"
        write_private(cookie, self._cluster.cookie)
        cookie.chmod(0o400)
        state = settings.write(
            self.folder, ports=replace(self._cluster.ports, distribution=_DISTRIBUTION + self.number)
        )
        configuration = self.folder / "conf" / "rabbitmq.conf"
        write_private(configuration, configuration.read_text().replace(LOOPBACK, self.address))
        advanced = self.folder / "conf" / "advanced.config"
        detector = f"[{{aten, [{{poll_interval, {self._cluster.polling}}}]}}, "
        write_private(advanced, detector + advanced.read_text().removeprefix("["))
        hosts = "".join(
            f'{{host, {{{one.address.replace(".", ",")}}}, ["{one.name.partition("@")[2]}"]}}.\n'
            for one in self._cluster.nodes
        )
        write_private(self.folder / "conf" / "inetrc", f"{hosts}{{lookup, [file, native]}}.\n")
        interface = self.address.replace(".", ",")
        epmd = [one.replace(LOOPBACK, self.address) for one in state.commands["epmd"]]
        state = replace(
            state,
            commands={**state.commands, "epmd": epmd if self.namespace else ["sleep", "infinity"]},
            environment={
                **state.environment,
                "RABBITMQ_NODENAME": self.name,
                "ERL_EPMD_ADDRESS": self.address,
                "ERL_AFLAGS": f"-kernel inet_dist_use_interface {{{interface}}} -start_epmd false",
            },
        )
        state.save()
        if self.namespace is not None:
            _ip("netns", "add", self.namespace)
            _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
            _ip("link", "set", self._link, "master", self._cluster.bridge, "up")
            _ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
            _ip("-n", self.namespace, "link", "set", "eth0", "up")
            _ip("-n", self.namespace, "link", "set", "lo", "up")

    def remove(self) -> None:
        """End its processes, and delete its network namespace."""
        with contextlib.suppress(AssertionError):
            if is_running(self._state()):
                self.thaw()
        kill(self.folder)
        self._close_owner_fd()
        if self.namespace is not None:
            _ip("link", "del", self._link, check=False)
            _ip("netns", "del", self.namespace, check=False)

    def _close_owner_fd(self) -> None:
        if self._owner_fd is not None:
            os.close(self._owner_fd)
            self._owner_fd = None


class Cluster:
    """Nodes that are one RabbitMQ; made by :func:`cluster`."""

    def __init__(self, rabbitmq: Rabbitmq, *, count: int, joined: bool, namespaces: bool, polling: int) -> None:
        one, two = random.SystemRandom().choices(range(1, 255), k=2)
        self.joined = joined
        self.namespaces = namespaces
        self.polling = polling
        self.tag = f"b{one:02x}{two:02x}"
        self.bridge = f"{self.tag}br"
        self.network = f"{10 if namespaces else 127}.{one}.{two}"
        self.folder = Path(tempfile.mkdtemp(prefix="bide-cluster-"))
        self.password = secrets.token_hex(24)
        self.cookie = secrets.token_hex(20)
        self.ports = replace(Ports.choose(), amqp=_AMQP, management=_MANAGEMENT, stream=5552)
        self.nodes = [Node(self, number) for number in range(1, count + 1)]
        self._epmd: subprocess.Popen[bytes] | None = None
        peers = self.nodes if joined and count > 1 else []
        formation = [f"cluster_formation.classic_config.nodes.{one.number} = {one.name}" for one in peers]
        self._settings = LocalBrokerSettings(
            installation=find_installation(home=rabbitmq.home, chroot=rabbitmq.chroot),
            ephemeral=True,
            dead_letter_prefetch=1_000,
            plugins=(MANAGEMENT_PLUGIN,),
            extra_config="\n".join(["cluster_formation.peer_discovery_backend = classic_config", *formation]),
            environment={},
            stop_seconds=30.0,
        )

    @property
    def release(self) -> tuple[int, ...]:
        """The release of RabbitMQ, e.g. (4, 3, 6)."""
        return numbers(self._settings.installation.release)

    @property
    def url(self) -> str:
        """The AMQP URL with all nodes, in their order."""
        return self.url_of(*self.nodes)

    def url_of(self, *nodes: Node) -> str:
        """The AMQP URL with these nodes, in this order."""
        hosts = ",".join(one.host for one in nodes)
        return f"amqp://{USER}:{quote(self.password)}@{hosts}"

    def start(self) -> None:
        """Start all nodes, and wait until they are one cluster, unless they are to stay apart."""
        if self.namespaces:
            _ip("link", "add", self.bridge, "type", "bridge")
            _ip("link", "set", self.bridge, "up")
            _ip("addr", "add", f"{self.network}.254/24", "dev", self.bridge)
        else:
            # One for all: each epmd listens on 127.0.0.1 too, whatever address it is given.
            addresses = ",".join(one.address for one in self.nodes)
            installation = self._settings.installation
            command = installation.command(installation.epmd, "-address", addresses, "-port", str(self.ports.epmd))
            self._epmd = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        for node in self.nodes:
            node.prepare(self._settings)
        with ThreadPoolExecutor(len(self.nodes)) as threads:
            list(threads.map(Node.start, self.nodes))
        deadline = time.monotonic() + TIMEOUT
        while self.joined and len(self.nodes[0].running_nodes()) != len(self.nodes):
            assert time.monotonic() < deadline, "the nodes are no cluster"
            time.sleep(0.5)

    def remove(self) -> None:
        """End everything, and delete what was made."""
        for node in self.nodes:
            node.remove()
        if self.namespaces:
            _ip("link", "del", self.bridge, check=False)
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def cluster(
    rabbitmq: Rabbitmq, *, count: int = 3, joined: bool = True, namespaces: bool = False, polling: int = 5_000
) -> Iterator[Cluster]:
    """Run a cluster of the RabbitMQ under test.

    Args:
        count: of nodes.
        joined: make them one cluster; else each is one of its own, until :meth:`Node.join_cluster`.
        namespaces: run each node in a network namespace of its own, which takes root on Linux and iproute2. Otherwise
            each has a loopback address of its own, 127.x.y.1 and so on, which takes Linux.
        polling: milliseconds between two looks of RabbitMQ's failure detector; 5,000 is its default. Leaders of nodes
            that fail are replaced after one to two of them.
    """
    with (Path(tempfile.gettempdir()) / "bide-cluster.lock").open("w") as lock:
        # One at a time: their nodes have the same ports and names, and three brokers are enough for a machine.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from _running(rabbitmq, count=count, joined=joined, namespaces=namespaces, polling=polling)


def _running(rabbitmq: Rabbitmq, *, count: int, joined: bool, namespaces: bool, polling: int) -> Iterator[Cluster]:
    made = Cluster(rabbitmq, count=count, joined=joined, namespaces=namespaces, polling=polling)
    try:
        made.start()
        yield made
    finally:
        made.remove()


def _enter(namespace: str) -> None:
    """Move this thread into a network namespace; os.setns is only there from Python 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    finally:
        os.close(descriptor)


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=not check)


def _named(namespace: str | None) -> str:
    assert namespace is not None, "only a node in a network namespace can be cut off: cluster(namespaces=True)"
    return namespace
