"""Bulk publishing without an event loop, for scripts and Spark executors."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import Final, Self

from bide.amqp.url import BrokerUrl
from bide.client.bulk.input import body_bytes
from bide.client.bulk.publish import KEPT_FAILURES
from bide.client.bulk.thread_feed import ThreadFeed
from bide.client.client import connect
from bide.client.publish_result import PublishSummary, Tally, failures_error, with_unsent
from bide.client.publisher import OnLost
from bide.client.sync import SyncClient
from bide.delay.protocol import DelayInfrastructure
from bide.durations import DelayLike
from bide.errors import BideError, BulkInDoubtError, ClosedError
from bide.messages.outgoing import OutgoingMessage
from bide.runtime.arguments import whole_number
from bide.schedules.outgoing import OutgoingSchedule

_BATCH: Final = 1_000
"""The number of messages per batch. Passing a batch to the other thread costs as much as a few messages."""

_BATCH_BYTES: Final = 4 << 20
"""The maximum size of a batch's bodies in bytes."""


class BulkPublisher:
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
        self._max_failures = whole_number("keep", keep, 1, 10_000_000)
        connecting = connect(
            url,
            infrastructure=infrastructure,
            declare=declare,
            timeout=timeout,
            on_lost=on_lost,
            max_in_flight=whole_number("window", window, 1, 1_000_000),
        )
        self._client = SyncClient(connecting)
        self._pid = os.getpid()
        self._batch: list[OutgoingMessage | OutgoingSchedule] = []
        self._batch_bytes = 0
        self._feed: ThreadFeed | None = None
        self._sending: concurrent.futures.Future[None] | None = None
        self._next_position = 0
        self._tally = Tally(keep=self._max_failures)

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

    def put(self, message: OutgoingMessage | OutgoingSchedule) -> None:
        """Queue a message, which is sent at the latest by the next :meth:`flush`. Waits if the broker is slower.

        Raises:
            BulkInDoubtError: the publish ended early. The error lists the messages in doubt and those not sent,
                including this one, and has the summary of all others since the last flush.
        """
        self._batch.append(message)
        self._batch_bytes += body_bytes(message)
        if len(self._batch) >= _BATCH or self._batch_bytes >= _BATCH_BYTES:
            self._send()

    def publish_many(self, messages: Iterable[OutgoingMessage | OutgoingSchedule]) -> PublishSummary:
        """Publish messages and wait until all of them are confirmed: :meth:`put` each, then :meth:`flush`."""
        for one in messages:
            self.put(one)
        return self.flush()

    def flush(self) -> PublishSummary:
        """Wait until all messages since the last flush are confirmed.

        Raises:
            BulkPublishError: some messages were not accepted. The error has the summary; all others are on the broker.
            BulkInDoubtError: the publish ended early. The error lists the messages in doubt and those not sent, and has
                the summary of all others. Its cause says why.
            ClosedError: the publisher was closed, or belongs to the parent process.
        """
        self._check_process()
        if self._batch:
            self._send()
        if self._feed is not None:
            self._feed.end()
            self._end_publish()
        report, self._tally = self._tally.report(), Tally(keep=self._max_failures)
        if report.failures:
            raise failures_error(report)
        return report

    def close(self) -> None:
        """Close the connection. Unconfirmed messages are abandoned."""
        if self._sending is not None and os.getpid() == self._pid:
            self._sending.cancel()
        self._sending = self._feed = None
        self._client.close()

    def _check_process(self) -> None:
        # The sending thread exists only in the parent process: waiting for it here would never end.
        if os.getpid() != self._pid:
            raise ClosedError("this publisher belongs to the parent process: create another one after the fork")

    def _send(self) -> None:
        """Pass the batch to the sending thread."""
        self._check_process()
        if self._feed is not None and self._feed.has_ended:
            # An exception from a signal handler ended the flush.
            self._end_publish()
        if self._feed is None or self._sending is None:
            feed = ThreadFeed(self._client.call)
            self._sending = self._client.submit(self._publish(feed, self._next_position))
            self._feed = feed
        # If an exception from a signal handler ends the wait, the batch is passed with the next message.
        self._feed.wait_for_room()
        if self._feed.is_abandoned:
            # The publish ends, or has ended, with an error.
            self._end_publish()
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        self._next_position += len(batch)
        self._feed.add(batch)

    def _end_publish(self) -> None:
        """End the input of the thread, and wait until all its messages are confirmed."""
        sending, feed = self._sending, self._feed
        assert sending is not None
        assert feed is not None
        try:
            # After an exception from a signal handler, the next call waits again.
            sending.result()
        except concurrent.futures.CancelledError:
            self._sending = self._feed = None
            raise ClosedError("the publisher was closed") from None
        except BideError as error:
            left = feed.left()
            named = with_unsent(error, [*left, *self._batch], first=self._next_position - len(left))
            self._next_position += len(self._batch)
            self._batch, self._batch_bytes, self._sending, self._feed = [], 0, None, None
            if not isinstance(named, BulkInDoubtError):
                named = BulkInDoubtError(str(error))
                named.__cause__ = error
            named.report, self._tally = self._tally.report(), Tally(keep=self._max_failures)
            raise named from named.__cause__
        self._sending = self._feed = None

    async def _publish(self, feed: ThreadFeed, first: int) -> None:
        try:
            async for report in self._client.client.publish_many(feed).count_from(first).batches():
                self._tally.add(report)
        finally:
            feed.abandon()
