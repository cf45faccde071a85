"""The work of a gate on one connection: all its partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from bide.amqp.connection import Connection
from bide.client.first_failure import FirstFailure
from bide.delay.allowed_targets import AllowedTargets
from bide.errors import BrokerError, ClosedError, ScheduleIndexError
from bide.gate.partition import RETRY_PAUSE, PartitionGate
from bide.gate.partition_session import PartitionSession
from bide.gate.publisher import GatePublisher
from bide.gate.scheduled_delivery import DeliveryRules
from bide.gate.spread import LeadershipSpread
from bide.runtime.logs import logger
from bide.schedules.names import ScheduleNames

log = logger(__name__)


class GateConnectionLoop:
    """Follows the logs of all partitions on one connection.

    Args:
        grace: seconds to wait for messages in flight after a stop.
    """

    def __init__(
        self,
        connection: Connection,
        partitions: Sequence[PartitionGate],
        spread: LeadershipSpread,
        names: ScheduleNames,
        *,
        allowed: AllowedTargets,
        grace: float,
    ) -> None:
        self._connection = connection
        self._partitions = partitions
        self._spread = spread
        self._rules = DeliveryRules(names, allowed, connection.url.user)
        self._stop_timeout = grace
        self._failure = FirstFailure(connection)
        self._publisher = GatePublisher(connection, names, self._failure.report)

    async def work(self, stopping: asyncio.Event, on_start: Callable[[Connection], None] | None) -> None:
        """Work until *stopping* is set, or until an error.

        Raises:
            BideError: the connection or a channel failed, or the log cannot be used.
        """
        stop = asyncio.create_task(stopping.wait())
        tasks = [asyncio.create_task(self._follow(one)) for one in self._partitions]
        try:
            if on_start is not None:
                on_start(self._connection)
            await self._failure.wait((stop, *tasks))
            self._failure.check()
            for task in tasks:
                if task.done():
                    task.result()
            if stopping.is_set():
                await self._finish(tasks)
        finally:
            for one in (stop, *tasks):
                one.cancel()
            await asyncio.gather(stop, *tasks, return_exceptions=True)
            self._publisher.close()

    async def _finish(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Let all partitions finish their messages in flight, and leave the partitions to other gates."""
        for one in self._partitions:
            one.is_stopping = True
            one.wake.set()
        finishing = asyncio.gather(*tasks)
        # The tasks are cancelled if the connection is lost meanwhile, and nothing awaits this future then.
        finishing.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A broker that blocks publishers (an alarm) answers nothing at all on this connection.
        await self._failure.wait([finishing], seconds=self._stop_timeout)
        if not finishing.done():
            finishing.cancel()
            await asyncio.gather(finishing, return_exceptions=True)
            log.warning(
                "the gate ended before its log had answered: another gate takes over and delivers unconfirmed messages"
            )
            # Close without the handshake, which would wait for an answer of the broker.
            self._connection.give_up(ClosedError("the gate was stopped"))
        else:
            finishing.result()

    async def _follow(self, partition: PartitionGate) -> None:
        """Work in one partition. Errors that concern it alone do not end the work in the others."""
        while not partition.was_let_go:
            try:
                await PartitionSession(partition, self._publisher, self._spread, self._rules).run()
            except ScheduleIndexError as error:
                pause = partition.rebuild_pause(self._connection.monotonic())
                log.warning(
                    "the index of %s is built anew%s: %s. If this repeats, compare --retention (%d bytes) with "
                    "'max-length-bytes' of the policies for the stream",
                    *(partition.log, f" in {pause:g} s" if pause else "", error, partition.room.retention),
                )
                await partition.index.recreate()
                await asyncio.sleep(pause)  # longer after each rebuild
            except BrokerError as error:
                if not self._connection.is_open:
                    raise
                partition.check_temporary(error)
                log.warning("the gate pauses at %s: %s", partition.log, error)
                await asyncio.sleep(RETRY_PAUSE)  # until the partition is tried again
