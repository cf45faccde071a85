"""The gate of a schedule log, which delivers its messages.

Several gates can work on one log. They share its partitions, and take over from each other. A gate claims a message in
the log before it delivers it, and reports it in the log afterwards, so no message is lost and none is delivered that
was cancelled before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from datetime import timedelta
from pathlib import Path
from typing import Final

from bide.admin.schedule_log import schedule_log_mark
from bide.admin.worker_topology import prepare_topology
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.reconnecting_worker import ReconnectingWorker
from bide.delay.allowed_targets import AllowedTargets
from bide.durations import DelayLike, parse_delay
from bide.errors import BrokerError, InvalidInputError, NotAppliedError
from bide.gate.connection_loop import GateConnectionLoop
from bide.gate.observer import GateObserver, GateObservers, PartitionStatus
from bide.gate.partition import Gated, PartitionGate
from bide.gate.spread import GateTime, LeadershipSpread, new_gate_name
from bide.runtime.arguments import whole_number
from bide.schedules.names import LOG_BYTES, PARTITIONS, ScheduleNames

GRACE: Final = timedelta(seconds=10)
"""The default time that a stopping gate waits for the confirms of its messages in flight."""

_LEAST_RETENTION: Final = 1_000_000
_MOST_RETENTION: Final = 10**15


class Gate:
    """Delivers the messages of a schedule log, until :meth:`stop`.

    Run two or more, each with a folder of its own: one leads a partition, and another one takes over when it ends.

    Args:
        url: the broker's URL; None uses ``BIDE_URL``, or RabbitMQ's default URL on this machine.
        allow: patterns of the queues and exchanges that messages may name as their target: ``orders.*``; ``q:mails``
            for a queue only; ``x:shop`` for an exchange only; ``*`` for any. The gate delivers with its own
            permissions, also for senders that may not write there.
        state: the folder for the index, created if it is missing. A gate builds the index from the log if it is
            deleted.
        retention: the bytes that each stream of the log keeps. Give it if a policy overrides the default.
        declare: declare the schedule log if it is missing.
        observers: receive the events of the gate; see :mod:`bide.observability.metrics` and
            :mod:`bide.observability.tracing`.
        grace: how long to wait for confirms after :meth:`stop`. Another gate delivers unconfirmed messages again.

    Attributes:
        name: the name of this gate in the log, different for each instance.
        done: the counts so far.

    Raises:
        InvalidInputError: a value is invalid.
    """

    def __init__(
        self,
        url: str | BrokerUrl | None = None,
        *,
        allow: Iterable[str],
        state: Path | str,
        retention: int = LOG_BYTES,
        declare: bool = True,
        observers: Sequence[GateObserver] = (),
        grace: DelayLike = GRACE,
    ) -> None:
        self.name = new_gate_name()
        self.done = Gated()
        self._names = ScheduleNames()
        self._allowed = AllowedTargets.of(allow)
        self._folder = _checked_folder(state)
        self._retention = whole_number("retention", retention, _LEAST_RETENTION, _MOST_RETENTION)
        self._declare = declare
        self._stop_timeout = parse_delay(grace).total_seconds()
        self._observers = GateObservers(_checked_observers(observers))
        self._time = GateTime(self.name)
        self._partitions: list[PartitionGate] = []
        self._spread: LeadershipSpread | None = None
        self._on_start: Callable[[Connection], None] | None = None
        self._worker = ReconnectingWorker(
            url, role="gate", prepare=self._prepare, work=self._work, check=self._check_temporary
        )

    @property
    def leads(self) -> list[int]:
        """The partitions that this gate leads at the moment."""
        return [] if self._spread is None else self._spread.led()

    @property
    def status(self) -> list[PartitionStatus]:
        """The state of each partition, as this gate knows it; empty while the gate does not run."""
        return [] if self._spread is None else [one.status(self._monotonic()) for one in self._partitions]

    def stop(self) -> None:
        """Claim nothing more. End when the messages in flight are finished and other gates may take the partitions."""
        self._worker.stop()

    async def run(self, *, on_start: Callable[[Connection], None] | None = None) -> Gated:
        """Deliver messages until :meth:`stop`. Lost connections are opened again.

        Args:
            on_start: called when the gate begins to read the log, at first and after every reconnect.

        Raises:
            NotAppliedError: the log is not on the broker and may not be declared, or was deleted.
            DeclarationMismatchError: the log exists with other settings.
            ScheduleLogError: records of the log were lost, or the log is full.
            NewerRecordError: a later release of bide wrote to the log.
            AccessRefusedError: this user may not use the log.
            FolderInUseError: another gate uses the folder.
            InvalidInputError: the folder cannot be used.
            BrokerError: the broker cannot be reached at the start, or is not supported.
        """
        self._on_start = on_start
        try:
            await self._worker.run()
        finally:
            await asyncio.gather(*(one.index.close() for one in self._partitions))
            self._spread = None
            self._partitions.clear()
        return self.done

    async def _work(self, connection: Connection, stopping: asyncio.Event) -> None:
        assert self._spread is not None
        loop = GateConnectionLoop(
            connection, self._partitions, self._spread, self._names, allowed=self._allowed, grace=self._stop_timeout
        )
        await loop.work(stopping, self._on_start)

    async def _prepare(self, connection: Connection) -> None:
        topology = self._names.topology()
        await prepare_topology(
            connection,
            topology,
            last=schedule_log_mark(self._names),
            probes=topology,
            prefix=self._names.operations,
            declare=self._declare,
            missing=NotAppliedError(
                f"the schedule log {self._names.operations!r} is not on the virtual host {connection.url.vhost!r} of "
                f"{connection.address}: start a gate that may declare it"
            ),
        )
        await self._open_indexes(connection)

    async def _open_indexes(self, connection: Connection) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInputError(
                f"the folder {self._folder} cannot be created: {error.strerror}; name another folder"
            ) from error
        for number in range(PARTITIONS):
            partition = PartitionGate(
                number,
                gate=self.name,
                names=self._names,
                folder=self._folder,
                retention=self._retention,
                time=self._time,
                counts=self.done,
                observers=self._observers,
                now=connection.monotonic(),
                executor=self._make_executor(),
            )
            self._partitions.append(partition)
            await partition.index.open()
        leaderships = [one.leadership for one in self._partitions]
        self._monotonic = connection.url.transport.monotonic
        self._spread = LeadershipSpread(self.name, leaderships, self._monotonic)

    def _make_executor(self) -> Executor | None:
        """The executor of the index of one partition; None for a thread of its own."""
        return None

    def _check_temporary(self, error: BrokerError) -> None:
        """Raise a permanent error of the log. Temporary errors are handled in their partition."""
        for one in self._partitions[:1]:
            one.check_temporary(error)


def _checked_folder(folder: object) -> Path:
    # An empty path would be the current folder.
    if not isinstance(folder, str | Path) or not folder:
        raise InvalidInputError(f"the state folder {folder!r} is not a path: name a folder, one for each gate")
    return Path(folder)


def _checked_observers(observers: object) -> tuple[GateObserver, ...]:
    given = tuple(observers) if isinstance(observers, Sequence) else (observers,)
    if not isinstance(observers, Sequence) or not all(isinstance(one, GateObserver) for one in given):
        raise InvalidInputError(
            f"observers={observers!r}: give a list of bide.gate.GateObserver, such as "
            "[bide.observability.metrics.Metrics()]. A bide.EventStream is not one, because the schedule log is itself "
            "a stream of what happens to schedules, see docs/observability.md; client.list_scheduled() lists what waits"
        )
    return given
