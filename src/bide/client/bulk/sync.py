"""Bulk publishing without an event loop, for scripts and Spark executors."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType
from typing import Self

from bide.amqp.url import BrokerUrl
from bide.client.bulk.batches import BatchPublisher
from bide.client.bulk.publish import KEPT_FAILURES
from bide.client.client import connect
from bide.client.publisher import OnLost
from bide.client.sync import SyncClient
from bide.delay.protocol import DelayInfrastructure
from bide.durations import DelayLike
from bide.runtime.arguments import whole_number


class BulkPublisher(BatchPublisher):
    """Publishes many messages, each confirmed, while the caller creates the next ones.

    ::

        with bide.BulkPublisher("amqp://localhost") as publisher:
            publisher.put(bide.OutgoingMessage(b"...", to="orders"))

    A separate thread sends the messages. It gets them in batches of 1,000, or 4 MB of bodies, and the rest at the end
    of the block. Besides the window, at most six batches are in memory. :meth:`flush` and the end of the block report
    messages that cannot be sent or that the broker does not accept. If an exception ends the block, unconfirmed
    messages are abandoned.

    Use it in one thread. A process that forks has to create it after the fork. The arguments are those of
    :func:`bide.connect`, and:

    Args:
        window: the maximum number of unconfirmed messages.
        keep: the number of failures that a summary keeps; further failures are only counted.

    Raises:
        InvalidInputError: a value is invalid.
        BrokerError: the broker cannot be reached, or refuses.
    """

    def __init__(
        self,
        url: str | BrokerUrl | None = None,
        *,
        infrastructure: DelayInfrastructure | None = None,
        declare: bool = True,
        timeout: DelayLike = timedelta(seconds=30),
        on_lost: OnLost = "repeat",
        window: int = 10_000,
        keep: int = KEPT_FAILURES,
    ) -> None:
        keep = whole_number("keep", keep, 1, 10_000_000)
        connecting = connect(
            url,
            infrastructure=infrastructure,
            declare=declare,
            timeout=timeout,
            on_lost=on_lost,
            max_in_flight=whole_number("window", window, 1, 1_000_000),
        )
        self._sync = SyncClient(connecting)
        super().__init__(self._sync._thread, self._sync.client, keep=keep)  # noqa: SLF001 (no method for callers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection. Unconfirmed messages are abandoned."""
        self._abandon()
        self._sync.close()
