"""Names of the exchanges and queues of the schedule log, and the partition of a key."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bide.delay.protocol import check_name, check_prefix
from bide.errors import InvalidNameError
from bide.topology import Argument, Binding, Exchange, Queue, Topology

PARTITIONS: Final = 8
"""The number of partitions of the log. It is part of the layout version, so that all clients agree on it."""

LOG_BYTES: Final = 2_000_000_000
"""Retention of a partition in bytes. The broker removes whole segments once the stream is larger."""

SEGMENT_BYTES: Final = 64_000_000

MAX_RESERVATIONS: Final = 8_192
"""The number of reservations that a room queue accepts. Each stands for :data:`RESERVATION_BYTES` of records, so that
applications append at most a quarter of the retention. Gates leave them that quarter."""

RESERVATION_BYTES: Final = 64_000

RECORD_OVERHEAD: Final = 250
"""Bytes that a record takes in the stream beside its body, at most: names of exchange and key, properties, and the
header of a chunk."""

MAX_KEY_BYTES: Final = 255

_LAYOUT_VERSION: Final = "v1"
CONTROL: Final = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleNames:
    """Names of one schedule log.

    Attributes:
        prefix: starts every name, as that of the delay infrastructure.
    """

    prefix: str = "bide"

    def __post_init__(self) -> None:
        check_prefix(self.prefix)

    @property
    def operations(self) -> str:
        """The exchange for everything that applications send. The routing key of a partition's log is its number; the
        queues beside the log have ``queries.<number>`` and ``room.<number>``."""
        return f"{self.prefix}.{_LAYOUT_VERSION}.schedule"

    @property
    def gates(self) -> str:
        """The exchange for records of gates. Applications must not have write permission for it."""
        return f"{self.operations}.gates"

    @property
    def undeliverable(self) -> str:
        """The queue for scheduled messages whose target does not exist, or is not on the allow-list."""
        return f"{self.operations}.undeliverable"

    def owns(self, name: str) -> bool:
        """Whether an exchange or queue of this name is part of the schedule log. Such a name cannot be a target,
        because a gate may write where applications may not."""
        return name == self.operations or name.startswith(f"{self.operations}.")

    def log(self, partition: int) -> str:
        """The stream of a partition."""
        return f"{self.operations}.{partition}"

    def queries(self, partition: int) -> str:
        """The queue for questions to the leading gate of a partition, which is its consumer."""
        return f"{self.operations}.{partition}.queries"

    def room(self, partition: int) -> str:
        """The queue whose length limits how much is appended while no gate carries the state forward."""
        return f"{self.operations}.{partition}.room"

    def topology(self, *, partitions: int = PARTITIONS) -> Topology:
        """Exchanges, streams, queues and bindings."""
        streams = [Queue(self.log(one), arguments=_LOG_ARGUMENTS) for one in range(partitions)]
        queries = [Queue(self.queries(one), arguments=_QUERY_ARGUMENTS) for one in range(partitions)]
        rooms = [Queue(self.room(one), arguments=_ROOM_ARGUMENTS) for one in range(partitions)]
        return Topology(
            [Exchange(self.operations, "direct"), Exchange(self.gates, "direct")],
            [*streams, *queries, *rooms, Queue(self.undeliverable, arguments={"x-queue-type": "quorum"})],
            [
                binding
                for one in range(partitions)
                for binding in (
                    Binding(self.operations, self.log(one), str(one)),
                    Binding(self.gates, self.log(one), str(one)),
                    Binding(self.operations, self.queries(one), f"queries.{one}"),
                    Binding(self.operations, self.room(one), f"room.{one}"),
                )
            ],
        )


_LOG_ARGUMENTS: Final[Mapping[str, Argument]] = {
    "x-queue-type": "stream",
    "x-max-length-bytes": LOG_BYTES,
    "x-stream-max-segment-size-bytes": SEGMENT_BYTES,
    "x-queue-leader-locator": "balanced",
}
# A classic queue would be unavailable while its node is down.
_QUERY_ARGUMENTS: Final[Mapping[str, Argument]] = {"x-queue-type": "quorum", "x-message-ttl": 30_000}
_ROOM_ARGUMENTS: Final[Mapping[str, Argument]] = {
    "x-queue-type": "quorum",
    "x-max-length": MAX_RESERVATIONS,
    "x-overflow": "reject-publish",
}


def check_key(key: object) -> str:
    """The key, if it can be one.

    Raises:
        InvalidNameError: the key is empty, too long, holds control characters, or is not text that UTF-8 can encode.
    """
    check_name("key", key, limit=MAX_KEY_BYTES)
    assert isinstance(key, str)
    if has_control_characters(key):
        raise InvalidNameError(f"the key {key!r} holds control characters: remove them")
    return key


def has_control_characters(key: str) -> bool:
    """Whether a key holds control characters, which are six times as long in JSON: an answer may list 20,000 keys."""
    return CONTROL.search(key) is not None


def partition_of(key: str, partitions: int = PARTITIONS) -> int:
    """The partition of a key."""
    return zlib.crc32(key.encode()) % partitions
