"""A private RabbitMQ node: start, stop, URLs, users and virtual hosts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from bide.errors import LocalBrokerError
from bide.local_broker.configuration import PLUGINS, SINGLE_NODE, STREAM_PLUGIN, USER, Ports, amqp_url
from bide.local_broker.launch import crash, halt, is_running, kill, launch, pause, resume
from bide.local_broker.management import Management
from bide.local_broker.processes import is_paused, marked
from bide.local_broker.settings import START_TIMEOUT, STOP_TIMEOUT, LocalBrokerSettings, make_settings
from bide.local_broker.state import (
    State,
    choose_folder,
    create_folder,
    create_subfolders,
    locked,
    password_of,
    remove_folder,
)

_TOOL_TIMEOUT = timedelta(minutes=5)
_CLEAR_TIMEOUT = timedelta(minutes=5)
_PORT_TRIES = 3


@final
class LocalBroker:
    """A RabbitMQ node started by bide. Create it with :meth:`start` or :func:`bide.local_broker.find_running`.

    The nodes of a :class:`bide.local_broker.LocalCluster` are local brokers too.

    The properties read the folder each time, so they stay correct if another process restarts the broker.
    """

    def __init__(self, folder: Path, *, owner_fd: int | None = None) -> None:
        """Attach to the broker in *folder*; use :meth:`start` or ``find_running`` instead."""
        self._folder = folder
        self._owner_fd = owner_fd
        self._outlives = owner_fd is None

    @classmethod
    def start(
        cls,
        folder: Path | None = None,
        *,
        ephemeral: bool = False,
        detached: bool | None = None,
        home: Path | None = None,
        chroot: Path | None = None,
        dead_letter_prefetch: int = 1_000,
        plugins: Sequence[str] = PLUGINS,
        extra_config: str = "",
        environment: Mapping[str, str] | None = None,
        timeout: timedelta = START_TIMEOUT,
    ) -> Self:
        """Start a broker and wait until it is ready. If one is running in *folder*, it is returned unchanged.

        A broker that was started in the folder before keeps its data and password, and the ports that are still free.

        Args:
            folder: where the broker keeps its files; by default :func:`default_folder`, or a new temporary folder for
                an ephemeral broker.
            ephemeral: remove the folder when the broker stops.
            detached: let the broker continue when this process ends. Otherwise the end of this process, even by ``kill
                -9``, kills the broker, unless a fork of this process is alive. True by default, except for ephemeral
                brokers.
            home: the RabbitMQ to run, see :func:`bide.local_broker.installation.find_installation`.
            chroot: run the RabbitMQ that is installed in this root folder of another system.
            dead_letter_prefetch: how many unconfirmed messages the dead-letter worker of a quorum queue may have.
            plugins: the plugins to enable, including rabbitmq_management.
            extra_config: more lines for ``rabbitmq.conf``.
            environment: more environment variables for the node and its tools.
            timeout: how long the start may take.

        Raises:
            BrokerNotFoundError: no RabbitMQ is installed.
            LocalBrokerError: the broker did not start (with the last lines of its log), or the folder cannot be used.
            ValueError: rabbitmq_management is not in *plugins*.
        """
        settings = make_settings(
            home=home,
            chroot=chroot,
            ephemeral=ephemeral,
            dead_letter_prefetch=dead_letter_prefetch,
            plugins=plugins,
            extra_config=extra_config,
            environment=environment,
        )
        outlive = not ephemeral if detached is None else detached
        seconds = timeout.total_seconds()
        folder = choose_folder(folder, ephemeral=ephemeral)
        create_folder(folder)
        with locked(folder, seconds=seconds):
            state = State.load(folder)
            if state is not None and state.nodes:
                raise LocalBrokerError(
                    f"the folder {folder} has a cluster of {state.nodes} nodes: give the folder of a single broker, or "
                    "start it as a cluster"
                )
            if state is not None and state.node != SINGLE_NODE:
                raise LocalBrokerError(
                    f"the folder {folder} has a node of a cluster: start it with LocalBroker.restart(), or give "
                    "another folder"
                )
            if state is not None and is_running(state):
                return cls(folder)
            kill(folder)
            create_subfolders(folder)
            before = state.ports if state else None
            try:
                owner_fd = _launch_on_free_ports(folder, settings, before=before, seconds=seconds, outlive=outlive)
            except BaseException:
                if ephemeral:
                    remove_folder(folder, keep="log")
                raise
        return cls(folder, owner_fd=owner_fd)

    @property
    def folder(self) -> Path:
        """The folder with all files of this broker."""
        return self._folder

    @property
    def running(self) -> bool:
        """Whether the node is running."""
        state = State.load(self._folder)
        return state is not None and is_running(state)

    @property
    def release(self) -> str:
        """The release of RabbitMQ, for example ``"3.10.8"``."""
        return self._state().release

    @property
    def pid(self) -> int | None:
        """The process id of the node, or None if it is not running."""
        state = self._state()
        return state.pids.server if state.pids and is_running(state) else None

    @property
    def pids(self) -> list[int]:
        """The ids of all running processes of this broker: supervisor, epmd, node and its helpers, and tools."""
        return marked(self._folder)

    @property
    def paused(self) -> bool:
        """Whether :meth:`pause` has stopped the node."""
        pid = self.pid
        return pid is not None and is_paused(pid)

    @property
    def name(self) -> str:
        """The name of the Erlang node."""
        return self._state().node.name

    @property
    def host(self) -> str:
        """Host and port for AMQP, as in a URL."""
        state = self._state()
        return f"{state.node.address}:{state.ports.amqp}"

    @property
    def user(self) -> str:
        """The name of the administrator, at first the broker's only user."""
        return USER

    @property
    def password(self) -> str:
        """The administrator's password."""
        return password_of(self._folder)

    @property
    def url(self) -> str:
        """The AMQP URL of the virtual host ``/``, with the password."""
        return self.vhost_url("/")

    @property
    def management_url(self) -> str:
        """The base URL of the management API and UI, with the password."""
        state = self._state()
        return f"http://{self.user}:{self.password}@{state.node.address}:{state.ports.management}/"

    @property
    def management(self) -> Management:
        """The management API, for calls as the administrator."""
        state = self._state()
        return Management(host=state.node.address, port=state.ports.management, user=self.user, password=self.password)

    @property
    def stream_url(self) -> str | None:
        """The URL of the stream protocol for the virtual host ``/``, with the password; None without its plugin."""
        port = self.stream_port
        address = self._state().node.address
        return None if port is None else f"rabbitmq-stream://{self.user}:{self.password}@{address}:{port}"

    @property
    def stream_port(self) -> int | None:
        """The port of the stream protocol; None without its plugin."""
        state = self._state()
        return state.ports.stream if STREAM_PLUGIN in state.plugins else None

    def vhost_url(self, vhost: str, *, user: str | None = None, password: str | None = None) -> str:
        """Return the AMQP URL of a virtual host, for the administrator or for another user."""
        return amqp_url([self.host], vhost, user=user or self.user, password=password or self.password)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``bide broker status --json``, including passwords in URLs."""
        return {
            "url": self.url,
            "management_url": self.management_url,
            "stream_url": self.stream_url,
            "release": self.release,
            "folder": str(self._folder),
            "pid": self.pid,
            "running": self.running,
        }

    def stop(self, *, timeout: timedelta = STOP_TIMEOUT) -> None:
        """Stop the broker gracefully, and kill it after *timeout*. Kill an ephemeral broker and remove its folder.

        If the broker is not running, this ends processes that a crash left behind.

        Raises:
            LocalBrokerError: another process holds the broker's lock, or a process does not end.
        """
        if self._folder.exists():
            with locked(self._folder, seconds=timeout.total_seconds()):
                state = State.load(self._folder)
                if state is None:
                    kill(self._folder)
                else:
                    halt(state, seconds=timeout.total_seconds())
                    if state.ephemeral:
                        remove_folder(self._folder)
        self._close_owner_fd()

    def kill(self) -> None:
        """Kill the node with SIGKILL, like a crash. The folder stays, for :meth:`restart`."""
        crash(self._state())

    def pause(self) -> None:
        """Stop the node with SIGSTOP until :meth:`resume`: its sockets stay open, and it does not answer."""
        pause(self._state())

    def resume(self) -> None:
        """Let the node continue after :meth:`pause`."""
        resume(self._state())

    def restart(self, *, timeout: timedelta = START_TIMEOUT) -> None:
        """Start the broker after :meth:`kill`, or stop and start a running broker, with the same data and ports.

        Raises:
            LocalBrokerError: the broker did not start, or another program listens on one of its ports; or it is a node
                of a cluster that is stopped as a whole.
        """
        seconds = timeout.total_seconds()
        with locked(self._folder, seconds=seconds):
            state = self._state()
            if state.node != SINGLE_NODE:
                _check_cluster(self._folder.parent)
            halt(state, seconds=seconds)
            self._close_owner_fd()
            if taken := state.taken_ports():
                raise LocalBrokerError(
                    f"another program listens on port {', '.join(map(str, taken))} of the broker in {self._folder}: "
                    "end that program, or start the broker again, which chooses other ports"
                )
            self._owner_fd = launch(state, seconds=seconds, outlive=self._outlives)

    def rabbitmqctl(self, *arguments: str, tool: str = "rabbitmqctl", timeout: timedelta = _TOOL_TIMEOUT) -> str:
        """Run ``rabbitmqctl --quiet``, or another tool of RabbitMQ, on this broker; return its output.

        Raises:
            LocalBrokerError: the command failed, or took longer than *timeout*.
        """
        state = self._state()
        *before, program = state.commands["rabbitmqctl"]
        command = state.node.inside(*before, str(Path(program).with_name(tool)))
        try:
            done = subprocess.run(
                [*command, "--node", state.node.name, "--quiet", *arguments],
                env=state.environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout.total_seconds(),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LocalBrokerError(
                f"{tool} {arguments[0]} did not end within {timeout.total_seconds():g} s: give a longer timeout"
            ) from None
        if done.returncode != 0:
            output = (done.stderr.strip() or done.stdout.strip()) or "(no output)"
            raise LocalBrokerError(f"{tool} {arguments[0]} failed with status {done.returncode}: {output}")
        return done.stdout

    def add_vhost(self, name: str) -> str:
        """Add a virtual host that the administrator can use; return its AMQP URL."""
        self.management.call("PUT", "vhosts", name)
        self.set_permissions(name, self.user)
        return self.vhost_url(name)

    def delete_vhost(self, name: str, *, timeout: timedelta = _CLEAR_TIMEOUT) -> None:
        """Delete a virtual host and everything in it, which can take minutes for a large one."""
        replace(self.management, timeout=timeout).call("DELETE", "vhosts", name)

    def add_user(self, name: str, password: str, *, tags: Sequence[str] = ()) -> None:
        """Add a user without permissions, or change the password and tags of an existing user."""
        self.management.call("PUT", "users", name, body={"password": password, "tags": ",".join(tags)})

    def delete_user(self, name: str) -> None:
        """Delete a user."""
        self.management.call("DELETE", "users", name)

    def set_permissions(
        self, vhost: str, user: str, *, configure: str = ".*", write: str = ".*", read: str = ".*"
    ) -> None:
        """Set a user's permissions in a virtual host: a regular expression of names for each kind of operation."""
        body = {"configure": configure, "write": write, "read": read}
        self.management.call("PUT", "permissions", vhost, user, body=body)

    def _state(self) -> State:
        state = State.load(self._folder)
        if state is None:
            raise LocalBrokerError(f"there is no broker in {self._folder} any more: start it again")
        return state

    def _close_owner_fd(self) -> None:
        if self._owner_fd is not None:
            os.close(self._owner_fd)
            self._owner_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"LocalBroker({str(self._folder)!r})"


def _check_cluster(folder: Path) -> None:
    """Check that the epmd or the network that the nodes share is running."""
    state = State.load(folder)
    if state is None or not is_running(state):
        raise LocalBrokerError(f"the cluster in {folder} is stopped: start it with LocalCluster.start(...)")


def _launch_on_free_ports(
    folder: Path, settings: LocalBrokerSettings, *, before: Ports | None, seconds: float, outlive: bool
) -> int | None:
    """Configure and launch the broker. If another program takes one of its ports first, try again with other ports."""
    tries = _PORT_TRIES
    while True:
        tries -= 1
        ports = Ports.choose(before=before)
        try:
            return launch(settings.write(folder, ports=ports), seconds=seconds, outlive=outlive)
        except LocalBrokerError:
            if tries == 0 or not ports.taken():
                raise
