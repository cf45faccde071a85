"""Settings of a local broker, and the configuration files written from them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from bide.local_broker.configuration import (
    MANAGEMENT_PLUGIN,
    SINGLE_NODE,
    BrokerNode,
    Ports,
    advanced_config,
    enabled_plugins,
    environment,
    inetrc,
    rabbitmq_conf,
)
from bide.local_broker.installation import Installation, find_installation
from bide.local_broker.state import State, password_of, write_private

START_TIMEOUT = timedelta(minutes=3)
STOP_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBrokerSettings:
    """The settings of a start, from the arguments of :meth:`bide.local_broker.LocalBroker.start`."""

    installation: Installation
    ephemeral: bool
    dead_letter_prefetch: int
    plugins: tuple[str, ...]
    extra_config: str
    environment: Mapping[str, str]
    stop_seconds: float

    def write(
        self, folder: Path, *, ports: Ports, node: BrokerNode = SINGLE_NODE, cluster: Sequence[BrokerNode] = ()
    ) -> State:
        """Write the node's configuration; return its state, with the commands that run it.

        Args:
            folder: where the node keeps its files.
            ports: the ports of the node.
            node: the name and address of the node.
            cluster: all nodes of its cluster; empty for a single node.
        """
        configuration = folder / "conf"
        main = rabbitmq_conf(
            ports=ports,
            address=node.address,
            password=password_of(folder),
            plugins=self.plugins,
            extra=self.extra_config,
        )
        advanced = advanced_config(dead_letter_prefetch=self.dead_letter_prefetch)
        write_private(configuration / "rabbitmq.conf", main)
        write_private(configuration / "advanced.config", advanced)
        write_private(configuration / "enabled_plugins", enabled_plugins(self.plugins))
        write_private(configuration / "inetrc", inetrc(cluster or [node]))
        # An empty file, so that the system's own file of this name is not read.
        write_private(configuration / "rabbitmq-env.conf", "")
        command, sbin = self.installation.command, self.installation.home / "sbin"
        # Files that extra_config refers to, such as certificates, can be in the temporary folder.
        visible = sorted({Path(tempfile.gettempdir()).resolve(), folder})
        commands = {
            "server": command(sbin / "rabbitmq-server", visible=visible),
            "rabbitmqctl": command(sbin / "rabbitmqctl", visible=visible),
        }
        # Nodes that share an address share an epmd, which the cluster runs.
        if node.namespace or not cluster:
            commands["epmd"] = self.epmd_command(node.address, ports.epmd)
        return State(
            folder=folder,
            node=node,
            ephemeral=self.ephemeral,
            release=self.installation.release,
            ports=ports,
            plugins=self.plugins,
            commands=commands,
            environment=environment(
                folder=folder, ports=ports, node=node, path=self.installation.path, more=self.environment
            ),
            stop_seconds=self.stop_seconds,
        )

    def epmd_command(self, address: str, port: int) -> list[str]:
        """Return the command line that runs epmd."""
        return self.installation.command(self.installation.epmd, "-address", address, "-port", str(port))


def make_settings(
    *,
    home: Path | None,
    chroot: Path | None,
    ephemeral: bool,
    dead_letter_prefetch: int,
    plugins: Sequence[str],
    extra_config: str,
    environment: Mapping[str, str] | None,
) -> LocalBrokerSettings:
    """Find the RabbitMQ, and return the settings of a start; see :meth:`bide.local_broker.LocalBroker.start`."""
    if MANAGEMENT_PLUGIN not in plugins:
        raise ValueError(f"plugins must include {MANAGEMENT_PLUGIN}, because the start waits for its API: add it")
    return LocalBrokerSettings(
        installation=find_installation(home=home, chroot=chroot),
        ephemeral=ephemeral,
        dead_letter_prefetch=dead_letter_prefetch,
        plugins=tuple(plugins),
        extra_config=extra_config,
        environment=environment or {},
        stop_seconds=STOP_TIMEOUT.total_seconds(),
    )
