"""Types of the fixtures in conftest.py."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from bide.local_broker import LocalBroker
from bide.local_broker.configuration import PLUGINS
from tests.timeouts import TIMEOUT

SOAK = os.environ.get("BIDE_SOAK", "") not in ("", "0")
"""Whether the tests that repeat a fault should do so for minutes."""

NUMBER = int(os.environ.get("BIDE_TEST_NUMBER", "0"))
"""Messages in the long tests that kill migrations (``make test-moving``); 0 for the numbers of the tests."""

_MEMORY = Path("/dev/shm")
_MEMORY_BYTES = 4 << 30
"""Free bytes from which on ephemeral brokers are kept there; a container often has 64 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vhost:
    """A virtual host for one test."""

    name: str
    url: str
    broker: LocalBroker

    @property
    def idle_url(self) -> str:
        """A URL without heartbeats, for a client that is blocked while a test does something else."""
        return f"{self.url}?heartbeat=0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rabbitmq:
    """The RabbitMQ under test.

    Attributes:
        chroot: the root folder that it is installed in, None for this system.
        home: its folder, None to search for it.
    """

    chroot: Path | None
    home: Path | None

    def start(
        self,
        folder: Path | None = None,
        *,
        ephemeral: bool = False,
        detached: bool = False,
        plugins: Sequence[str] = PLUGINS,
        extra_config: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> LocalBroker:
        """Start a broker that does not outlive the tests, unless *detached*.

        An ephemeral one is kept in memory if there is enough, where files take a sixth of its processor time less.
        """
        if folder is None and ephemeral and self.chroot is None and _has_memory():
            folder = Path(tempfile.mkdtemp(prefix="bide-broker-", dir=_MEMORY))
        return LocalBroker.start(
            folder,
            ephemeral=ephemeral,
            detached=detached,
            home=self.home,
            chroot=self.chroot,
            plugins=plugins,
            extra_config=extra_config,
            environment=environment,
            timeout=timedelta(seconds=TIMEOUT),
        )

    @property
    def arguments(self) -> str:
        """The arguments of ``LocalBroker.start`` that choose it, as Python source, for scripts that tests run."""
        return f"home={_source(self.home)}, chroot={_source(self.chroot)}"


def _has_memory() -> bool:
    return _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES


class RawText(str):
    """Text that pika sends as these bytes, whatever they are."""

    def __new__(cls, data: bytes) -> RawText:
        """The text shows the bytes with escapes."""
        made = super().__new__(cls, data.decode(errors="backslashreplace"))
        made.data = data
        return made

    data: bytes

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        """The bytes."""
        return self.data


def flush_declarations(broker: LocalBroker) -> None:
    """Have the node write down which quorum queues there are, before it is killed.

    RabbitMQ (3.10 to 4.3) does so 500 ms after a declaration by itself. A queue declared less than that before
    a crash comes back without its messages, confirmed ones included; that is not what a test of bide should find.
    """
    broker.rabbitmqctl("eval", "[ok = dets:sync(Table) || Table <- dets:all()].")


def apply_retention(broker: LocalBroker) -> None:
    """Wait until streams have dropped what exceeds their limits.

    A segment that is closed asks another process of the broker for that, which may do it after the last confirm.
    """
    broker.rabbitmqctl("eval", "sys:get_state(osiris_retention, infinity).")


def stream_port(broker: LocalBroker) -> int:
    """The broker's port for the stream protocol."""
    port = broker.stream_port
    assert port is not None
    return port


def _source(path: Path | None) -> str:
    return "None" if path is None else f"Path({str(path)!r})"
