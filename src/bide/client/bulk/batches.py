"""Bulk publishing in batches that one thread makes and another one sends."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from typing import Final

from bide.client.bulk.input import body_bytes
from bide.client.bulk.publish import KEPT_FAILURES
from bide.client.bulk.thread_feed import ThreadFeed
from bide.client.client import Client
from bide.client.client_thread import ClientThread
from bide.client.publish_result import PublishSummary, Tally, failures_error, with_unsent
from bide.client.publisher import OnLost, checked_on_lost
from bide.errors import BideError, BulkInDoubtError, BulkPublishError, ClosedError
from bide.messages.outgoing import OutgoingMessage
from bide.runtime.arguments import whole_number
from bide.schedules.outgoing import OutgoingSchedule

_BATCH: Final = 1_000
"""The number of messages per batch. Passing a batch to the other thread costs as much as a few messages."""

_BATCH_BYTES: Final = 4 << 20
"""The maximum size of a batch's bodies in bytes."""


class BatchPublisher:
    """Publishes messages of one thread in batches through a synchronous client.

    Args:
        thread: the thread of the client.
        client: sends the messages.
        keep: the number of failures that a summary keeps.
        window, on_lost: as for :meth:`bide.Client.publish_many`.
    """

    def __init__(
        self,
        thread: ClientThread,
        client: Client,
        *,
        keep: int,
        window: int | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        self._thread = thread
        self._client = client
        self._max_failures = keep
        self._window = window
        self._on_lost = on_lost
        self._batch: list[OutgoingMessage | OutgoingSchedule] = []
        self._batch_bytes = 0
        self._feed: ThreadFeed | None = None
        self._sending: concurrent.futures.Future[None] | None = None
        self._next_position = 0
        self._tally = Tally(keep=keep)

    def put(self, message: OutgoingMessage | OutgoingSchedule) -> None:
        """Queue a message, which is sent at the latest by the next :meth:`flush`. Wait if the broker is slower.

        Raises:
            BulkInDoubtError: the publish ended early. The error lists the messages in doubt and those not sent,
                including this one, and has the summary of all others since the last flush.
        """
        self._batch.append(message)
        self._batch_bytes += body_bytes(message)
        if len(self._batch) >= _BATCH or self._batch_bytes >= _BATCH_BYTES:
            self._send()

    def publish_many(self, messages: Iterable[OutgoingMessage | OutgoingSchedule]) -> PublishSummary:
        """Publish messages and wait until all of them are confirmed: :meth:`put` each, then :meth:`flush`.

        Raises:
            BideError: as :meth:`flush`.
        """
        for one in messages:
            self.put(one)
        return self.flush()

    @property
    def has_failures(self) -> bool:
        """Whether messages since the last flush are known to have failed; :meth:`flush` names them."""
        return self._tally.has_failures

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
        report, self._tally = self._tally.summary(), Tally(keep=self._max_failures)
        if report.failures:
            raise failures_error(report)
        return report

    def _abandon(self) -> None:
        """End a publish that runs. Its unconfirmed messages are abandoned."""
        if self._sending is not None and not self._thread.belongs_to_parent:
            self._sending.cancel()
        self._sending = self._feed = None

    def _check_process(self) -> None:
        # The sending thread exists only in the parent process: waiting for it here would never end.
        if self._thread.belongs_to_parent:
            raise ClosedError("this publisher belongs to the parent process: create another one after the fork")

    def _send(self) -> None:
        """Pass the batch to the sending thread."""
        self._check_process()
        if self._feed is not None and self._feed.has_ended:
            # An exception from a signal handler ended the flush.
            self._end_publish()
        if self._feed is None or self._sending is None:
            feed = ThreadFeed(self._thread.call)
            self._sending = self._thread.submit(self._publish(feed, self._next_position))
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
        """Wait until all messages of the running publish are confirmed, and raise its error."""
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
            named.report, self._tally = self._tally.summary(), Tally(keep=self._max_failures)
            raise named from named.__cause__
        self._sending = self._feed = None

    async def _publish(self, feed: ThreadFeed, first: int) -> None:
        try:
            publish = self._client.publish_many(feed, window=self._window, on_lost=self._on_lost)
            async for report in publish.count_from(first).batches():
                self._tally.add(report)
        finally:
            feed.abandon()


def publish_all(
    thread: ClientThread,
    client: Client,
    messages: Iterable[OutgoingMessage | OutgoingSchedule],
    *,
    window: int | None,
    on_lost: OnLost | None,
) -> PublishSummary:
    """Publish messages, which are read in this thread, and wait until all of them are confirmed.

    Raises:
        BideError: as :meth:`bide.SyncClient.publish_many`.
    """
    if window is not None:
        whole_number("window", window, 1, 1_000_000)
    if on_lost is not None:
        checked_on_lost(on_lost)
    return _SinglePublish(thread, client, keep=KEPT_FAILURES, window=window, on_lost=on_lost).publish_all(messages)


class _SinglePublish(BatchPublisher):
    """Publishes one input, with the errors of ``await client.publish_many(...)``."""

    def publish_all(self, messages: Iterable[OutgoingMessage | OutgoingSchedule]) -> PublishSummary:
        source = iter(messages)
        try:
            while True:
                try:
                    message = next(source)
                except StopIteration:
                    return self.flush()
                except Exception as error:
                    error.add_note(f"until then: {self._flush_earlier()}")
                    raise
                self.put(message)
        finally:
            self._abandon()

    def _flush_earlier(self) -> PublishSummary:
        try:
            return self.flush()
        except BulkPublishError as error:
            report: PublishSummary = error.report
            return report
