"""Settings of a local broker, and the configuration files written from them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bide.local_broker.configuration import (
    LOOPBACK,
    Ports,
    advanced_config,
    enabled_plugins,
    environment,
    inetrc,
    rabbitmq_conf,
)
from bide.local_broker.installation import Installation
from bide.local_broker.state import State, password_of, write_private


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBrokerSettings:
    """The arguments of :meth:`bide.local_broker.LocalBroker.start`."""

    installation: Installation
    ephemeral: bool
    dead_letter_prefetch: int
    plugins: tuple[str, ...]
    extra_config: str
    environment: Mapping[str, str]
    stop_seconds: float

    def write(self, folder: Path, *, ports: Ports) -> State:
        """Write the node's configuration; return its state, with the commands that run it."""
        configuration = folder / "conf"
        main = rabbitmq_conf(ports=ports, password=password_of(folder), plugins=self.plugins, extra=self.extra_config)
        advanced = advanced_config(dead_letter_prefetch=self.dead_letter_prefetch)
        write_private(configuration / "rabbitmq.conf", main)
        write_private(configuration / "advanced.config", advanced)
        write_private(configuration / "enabled_plugins", enabled_plugins(self.plugins))
        write_private(configuration / "inetrc", inetrc())
        # An empty file, so that the system's own file of this name is not read.
        write_private(configuration / "rabbitmq-env.conf", "")
        command, sbin = self.installation.command, self.installation.home / "sbin"
        # Files that extra_config refers to, such as certificates, can be in the temporary folder.
        visible = sorted({Path(tempfile.gettempdir()).resolve(), folder})
        return State(
            folder=folder,
            ephemeral=self.ephemeral,
            release=self.installation.release,
            ports=ports,
            plugins=self.plugins,
            commands={
                "epmd": command(self.installation.epmd, "-address", LOOPBACK, "-port", str(ports.epmd)),
                "server": command(sbin / "rabbitmq-server", visible=visible),
                "rabbitmqctl": command(sbin / "rabbitmqctl", visible=visible),
            },
            environment=environment(folder=folder, ports=ports, path=self.installation.path, more=self.environment),
            stop_seconds=self.stop_seconds,
        )
