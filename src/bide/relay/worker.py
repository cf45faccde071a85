"""The relay of a waiting hall, which consumes its messages and sends them on.

Several relays can work on one hall. A relay acknowledges a message only when the broker has confirmed its copy, so no
message is lost. If a relay stops in between, another relay sends the message again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Final

from bide.admin.declaring import is_temporary
from bide.admin.worker_topology import prepare_topology
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.consumer import MAX_PREFETCH
from bide.client.reconnecting_worker import ReconnectingWorker
from bide.delay.allowed_targets import AllowedTargets
from bide.delay.waiting_hall import WaitingHall
from bide.durations import DelayLike, parse_delay
from bide.errors import (
    AccessRefusedError,
    BrokerError,
    NotAppliedError,
    TargetNotFoundError,
)
from bide.relay.connection_loop import ConnectionLoop, Relayed
from bide.runtime.arguments import whole_number

PREFETCH: Final = 1000
GRACE: Final = timedelta(seconds=10)
"""The default time that a stopping relay waits for the confirms of its unacknowledged messages."""


class Relay:
    """Sends the messages of a waiting hall on, until :meth:`stop`.

    Args:
        url: the broker's URL; None uses ``BIDE_URL``, or RabbitMQ's default URL on this machine.
        hall: the waiting hall, with the same settings as on the broker.
        allow: patterns of the queues and exchanges that messages may name as their target: ``orders.*``; ``q:mails``
            for a queue only; ``x:shop`` for an exchange only; ``*`` for any. The relay delivers with its own
            permissions, also for senders that may not write there. The pick-up exchange is always allowed.
        prefetch: the maximum number of unacknowledged messages of each of the two queues, 1 to 65,535.
        declare: declare the hall if it is missing.
        grace: how long to wait for confirms after :meth:`stop`; messages that are not confirmed by then go back to
            their queue.

    Attributes:
        hall: the waiting hall.
        done: the counts so far.

    Raises:
        InvalidInputError: a value is invalid.
    """

    def __init__(
        self,
        url: str | BrokerUrl | None = None,
        *,
        hall: WaitingHall,
        allow: Iterable[str],
        prefetch: int = PREFETCH,
        declare: bool = True,
        grace: DelayLike = GRACE,
    ) -> None:
        self.done = Relayed()
        self.hall = hall
        self._allowed = AllowedTargets.of(allow)
        self._prefetch = whole_number("prefetch", prefetch, 1, MAX_PREFETCH)
        self._declare = declare
        self._stop_timeout = parse_delay(grace).total_seconds()
        self._on_start: Callable[[Connection], None] | None = None
        self._worker = ReconnectingWorker(
            url, role="relay", prepare=self._prepare, work=self._work, check=self._check_temporary
        )

    def stop(self) -> None:
        """Stop consuming, and end when all unacknowledged messages are sent on."""
        self._worker.stop()

    async def run(self, *, on_start: Callable[[Connection], None] | None = None) -> Relayed:
        """Relay messages until :meth:`stop`. Lost connections are opened again.

        Args:
            on_start: called when the relay starts to consume, at first and after every reconnect.

        Raises:
            NotAppliedError: the hall is not on the broker and may not be declared, or was deleted.
            DeclarationMismatchError: the hall exists with other settings.
            AccessRefusedError: this user may not read from the hall, or write to it.
            BrokerError: the broker cannot be reached at the start, or is not supported.
        """
        self._on_start = on_start
        await self._worker.run()
        return self.done

    async def _work(self, connection: Connection, stopping: asyncio.Event) -> None:
        loop = ConnectionLoop(
            connection,
            self.hall,
            self.done,
            allowed=self._allowed,
            prefetch=self._prefetch,
            grace=self._stop_timeout,
        )
        await loop.work(stopping, self._on_start)

    async def _prepare(self, connection: Connection) -> None:
        probes = self.hall.probes()
        await prepare_topology(
            connection,
            self.hall.topology(),
            last=probes,
            probes=probes,
            prefix=self.hall.base,
            declare=self._declare,
            missing=NotAppliedError(
                f"the waiting hall {self.hall.base!r} is not on the virtual host {connection.url.vhost!r} of "
                f"{connection.address}: call bide.admin.infrastructure.install(...) for the layout {self.hall.name!r}, "
                "with the same settings"
            ),
        )

    def _check_temporary(self, error: BrokerError) -> None:
        """Ignore errors that may be temporary, such as a queue without a leader, or one that is being deleted.

        Raises:
            BrokerError: the error is permanent: the user lacks a permission, or the hall was deleted.
        """
        if isinstance(error, AccessRefusedError):
            raise error
        if isinstance(error, TargetNotFoundError) and not is_temporary(error):
            raise NotAppliedError(
                f"the waiting hall {self.hall.base!r} was deleted ({error}): start the relay again to declare it",
                reply_code=error.reply_code,
            ) from error
