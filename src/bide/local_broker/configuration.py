"""Ports, configuration files and environment of a private broker."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self
from urllib.parse import quote

from bide.errors import LocalBrokerError
from bide.local_broker.processes import FOLDER_MARK

LOOPBACK = "127.0.0.1"
USER = "bide"
MANAGEMENT_PLUGIN = "rabbitmq_management"
STREAM_PLUGIN = "rabbitmq_stream"
PLUGINS = (MANAGEMENT_PLUGIN, STREAM_PLUGIN, "rabbitmq_consistent_hash_exchange")

# Below the range from which the system takes ports for outgoing connections. In that range, a client that keeps
# connecting to the port of a stopped broker can end up connected to itself, which occupies the port.
_FIRST_PORT, _LAST_PORT = 20_000, 32_767


_RETRY_MS = 20_000
"""Time after which an unconfirmed dead letter is sent again: long enough for a target that is only busy."""


@dataclass(frozen=True, slots=True)
class BrokerNode:
    """Name, address and network namespace of a node.

    Attributes:
        name: the name of the Erlang node.
        address: the IP address that it listens on.
        namespace: the network namespace that it runs in, or None.
    """

    name: str = "bide@localhost"
    address: str = LOOPBACK
    namespace: str | None = None

    @property
    def host(self) -> str:
        """The host in the node's name."""
        return self.name.partition("@")[2]

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs *command* in the node's network namespace."""
        return [*(["nsenter", f"--net=/run/netns/{self.namespace}"] if self.namespace else []), *command]


SINGLE_NODE = BrokerNode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The ports of a broker, on loopback or in the node's network namespace."""

    amqp: int
    management: int
    stream: int
    distribution: int
    epmd: int

    @classmethod
    def choose(cls, *, before: Self | None = None, exclude: Iterable[int] = ()) -> Self:
        """Return free ports that are not in *exclude*: those of *before* if possible, otherwise random ones."""
        excluded = set(exclude)
        chosen: dict[str, int] = {}
        for field in fields(cls):
            port: int | None = getattr(before, field.name) if before else None
            if port is None or port in excluded or not is_free(port):
                port = _random_free_port(exclude=excluded | set(chosen.values()))
            chosen[field.name] = port
        return cls(**chosen)

    def taken(self) -> list[int]:
        """Return the ports that a program listens on."""
        return [port for port in asdict(self).values() if not is_free(port)]


def is_free(port: int) -> bool:
    """Return whether a server can listen on this loopback port now."""
    with socket.socket() as probe:
        # Like Erlang, ignore connections of an earlier server that are in TIME_WAIT.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _random_free_port(*, exclude: set[int]) -> int:
    generator = random.SystemRandom()  # not seeded: brokers that start at the same time must choose different ports
    for _ in range(1_000):
        port = generator.randint(_FIRST_PORT, _LAST_PORT)
        if port not in exclude and is_free(port):
            return port
    raise LocalBrokerError(
        f"no free loopback port found between {_FIRST_PORT} and {_LAST_PORT} in 1,000 attempts: end programs that "
        "listen on ports in this range"
    )


def rabbitmq_conf(*, ports: Ports, address: str, password: str, plugins: Iterable[str], extra: str) -> str:
    """Return ``rabbitmq.conf``. It contains the password, so only the owner may read the file."""
    lines = [
        f"listeners.tcp.local = {address}:{ports.amqp}",
        f"default_user = {USER}",
        f"default_pass = {password}",
        "log.console = false",
        "log.file = rabbitmq.log",
        "log.file.level = info",
        "log.file.rotation.size = 10485760",
        "log.file.rotation.count = 2",
    ]
    if MANAGEMENT_PLUGIN in plugins:
        lines += [f"management.tcp.ip = {address}", f"management.tcp.port = {ports.management}"]
    if STREAM_PLUGIN in plugins:
        lines += [
            f"stream.listeners.tcp.local = {address}:{ports.stream}",
            f"stream.advertised_host = {address}",
            f"stream.advertised_port = {ports.stream}",
        ]
    return "\n".join([*lines, extra.strip(), ""])


def advanced_config(*, dead_letter_prefetch: int) -> str:
    """Return ``advanced.config``, for settings that ``rabbitmq.conf`` has no key for.

    By default, the dead-letter worker of a quorum queue has up to 32 unconfirmed messages, which limits a delay queue
    that releases many messages at once to about 8,000 per second. It waits 180 s before it resends a message that no
    queue confirmed, which happens to messages that are due while the broker starts.
    """
    return (
        f"[{{rabbit, [{{dead_letter_worker_consumer_prefetch, {dead_letter_prefetch}}}, "
        f"{{dead_letter_worker_publisher_confirm_timeout, {_RETRY_MS}}}]}}].\n"
    )


def enabled_plugins(plugins: Iterable[str]) -> str:
    """Return the ``enabled_plugins`` file: an Erlang list."""
    return f"[{','.join(plugins)}].\n"


def inetrc(nodes: Iterable[BrokerNode]) -> str:
    """Return the ``inetrc`` file, in which Erlang looks up the addresses of the nodes' hosts.

    Some containers have no ``/etc/hosts``, and in others ``localhost`` is ``::1`` first, where nothing listens.
    """
    addresses = {node.host: _erlang_address(node.address) for node in nodes}
    hosts = [f'{{host, {address}, ["{host}"]}}.\n' for host, address in addresses.items()]
    return "".join([*hosts, "{lookup, [file, native]}.\n"])


def _erlang_address(address: str) -> str:
    return f"{{{address.replace('.', ',')}}}"


def environment(*, folder: Path, ports: Ports, node: BrokerNode, path: str, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the node and its tools.

    Nothing is inherited from this process, because its RABBITMQ_* and ERL_* variables can belong to another node.
    """
    configuration, log = folder / "conf", folder / "log"
    return {
        FOLDER_MARK: str(folder),
        "PATH": path,
        # The home folder has the Erlang cookie, with which tools authenticate to the node.
        "HOME": str(folder / "home"),
        "LC_ALL": "en_US.UTF-8" if sys.platform == "darwin" else "C.UTF-8",
        "ERL_EPMD_ADDRESS": node.address,
        "ERL_EPMD_PORT": str(ports.epmd),
        # For every Erlang program started here, including rabbitmqctl: distribution listens on this address only, and
        # no second epmd is started. (The scripts of RabbitMQ 4 set ERL_FLAGS themselves.)
        "ERL_AFLAGS": f"-kernel inet_dist_use_interface {_erlang_address(node.address)} -start_epmd false",
        "ERL_INETRC": str(configuration / "inetrc"),
        "ERL_CRASH_DUMP": str(log / "erl_crash.dump"),
        "RABBITMQ_NODENAME": node.name,
        "RABBITMQ_DIST_PORT": str(ports.distribution),
        "RABBITMQ_CONF_ENV_FILE": str(configuration / "rabbitmq-env.conf"),
        "RABBITMQ_CONFIG_FILE": str(configuration / "rabbitmq.conf"),
        "RABBITMQ_CONFIG_FILES": str(configuration / "conf.d"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(configuration / "advanced.config"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(configuration / "enabled_plugins"),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(log),
        "RABBITMQ_PID_FILE": str(folder / "node.pid"),
        **more,
    }


def amqp_url(hosts: Iterable[str], vhost: str, *, user: str, password: str) -> str:
    """Return the AMQP URL of a virtual host.

    The URL of ``/`` has no path, because librabbitmq and others read a single slash as the virtual host with the empty
    name.
    """
    path = "" if vhost == "/" else f"/{quote(vhost, safe='')}"
    return f"amqp://{quote(user, safe='')}:{quote(password, safe='')}@{','.join(hosts)}{path}"
