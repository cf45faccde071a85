"""Bulk publishing for code without an event loop: scripts, and the executors of Spark."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import Final, Self

from bide.amqp.url import BrokerUrl
from bide.arguments import whole_number
from bide.client.bulk.input import body_bytes
from bide.client.bulk.publish import KEPT_FAILURES
from bide.client.bulk.thread_feed import ThreadFeed
from bide.client.client import connect
from bide.client.publish_result import PublishSummary, Tally, not_taken, with_unsent
from bide.client.publisher import OnLost
from bide.client.sync import SyncClient
from bide.delay.protocol import DelayInfrastructure
from bide.durations import DelayLike
from bide.errors import BideError, BulkInDoubtError, ClosedError
from bide.messages.outgoing import OutgoingMessage

_BATCH: Final = 1_000
"""Messages that go from one thread to the other together, which costs as much as a few messages do."""

_BATCH_BYTES: Final = 4 << 20
"""Bytes of bodies with which a batch goes though it has fewer messages."""


class BulkPublisher:
    """Publishes many messages, each confirmed, while the caller makes the next ones.

    ::

        with bide.BulkPublisher("amqp://localhost") as publisher:
            publisher.put(bide.OutgoingMessage(b"...", to="orders"))

    A thread of its own sends them, and is given them in batches of 1,000, or 4 MB of bodies; at the end of the block,
    the rest. Besides the window it holds at most six batches in memory. What cannot be sent, and what the broker does
    not take, is reported by :meth:`flush` and at the end of the block; a block that is left by an exception abandons
    what is not confirmed.

    For one thread. A process that forks makes it after the fork. The arguments are those of :func:`bide.connect`, and:

    Args:
        window: messages sent and not yet confirmed.
        keep: failures that a report holds; more are only counted.

    Raises:
        InvalidInputError: a value cannot be used.
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
        self._keep = whole_number("keep", keep, 1, 10_000_000)
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
        self._batch: list[OutgoingMessage] = []
        self._bytes = 0
        self._feed: ThreadFeed | None = None
        self._sending: concurrent.futures.Future[None] | None = None
        self._taken = 0
        self._tally = Tally(keep=self._keep)

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

    def put(self, message: OutgoingMessage) -> None:
        """Publish a message, some time before the end of the next :meth:`flush`. Waits where the broker is slower.

        Raises:
            BulkInDoubtError: the publishing ended early. It names what is in doubt and what was not sent, this message
                included, and has the report of all others since the last flush.
        """
        self._batch.append(message)
        self._bytes += body_bytes(message)
        if len(self._batch) >= _BATCH or self._bytes >= _BATCH_BYTES:
            self._send()

    def publish_many(self, messages: Iterable[OutgoingMessage]) -> PublishSummary:
        """Publish messages and wait until all of them are confirmed; :meth:`put` for each, then :meth:`flush`."""
        for one in messages:
            self.put(one)
        return self.flush()

    def flush(self) -> PublishSummary:
        """Wait until every message is confirmed that was put since the last flush.

        Raises:
            BulkPublishError: some were not taken. It has the report; all others are on the broker.
            BulkInDoubtError: it ended early: it is not known of some whether the broker has them, and others were not
                sent, both of which it names. It has the report of all others. Its cause says why.
            ClosedError: it was closed, or made by a process that forked this one.
        """
        self._check_process()
        if self._batch:
            self._send()
        if self._feed is not None:
            self._feed.end()
            self._wait()
        report, self._tally = self._tally.report(), Tally(keep=self._keep)
        if report.failures:
            raise not_taken(report)
        return report

    def close(self) -> None:
        """Close the connection; what is not confirmed is abandoned."""
        if self._sending is not None and os.getpid() == self._pid:
            self._sending.cancel()
        self._sending = self._feed = None
        self._client.close()

    def _check_process(self) -> None:
        # The thread that sends is the parent's: one that waits for it here waits for ever.
        if os.getpid() != self._pid:
            raise ClosedError("this publisher was made before a fork: make it after that")

    def _send(self) -> None:
        """Give the batch to the thread that sends."""
        self._check_process()
        if self._feed is not None and self._feed.has_ended:
            # A signal's exception ended the flush.
            self._wait()
        if self._feed is None or self._sending is None:
            feed = ThreadFeed(self._client.call)
            self._sending = self._client.submit(self._publish(feed, self._taken))
            self._feed = feed
        # Where a signal's exception ends the waiting, the batch goes with the next message.
        self._feed.wait_for_room()
        if self._feed.is_abandoned:
            # It ends, or has ended, with an error.
            self._wait()
        batch, self._batch, self._bytes = self._batch, [], 0
        self._taken += len(batch)
        self._feed.add(batch)

    def _wait(self) -> None:
        """Wait until everything is confirmed that was given to the thread, and nothing more will be."""
        sending, feed = self._sending, self._feed
        assert sending is not None
        assert feed is not None
        try:
            # A signal's exception leaves it to the next who waits.
            sending.result()
        except concurrent.futures.CancelledError:
            self._sending = self._feed = None
            raise ClosedError("the publisher was closed") from None
        except BideError as error:
            left = feed.left()
            named = with_unsent(error, [*left, *self._batch], first=self._taken - len(left))
            self._taken += len(self._batch)
            self._batch, self._bytes, self._sending, self._feed = [], 0, None, None
            if not isinstance(named, BulkInDoubtError):
                named = BulkInDoubtError(str(error))
                named.__cause__ = error
            named.report, self._tally = self._tally.report(), Tally(keep=self._keep)
            raise named from named.__cause__
        self._sending = self._feed = None

    async def _publish(self, feed: ThreadFeed, first: int) -> None:
        try:
            async for report in self._client.client.publish_many(feed).count_from(first).batches():
                self._tally.add(report)
        finally:
            feed.abandon()
