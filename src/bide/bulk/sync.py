"""Bulk publishing for code without an event loop: scripts, and the executors of Spark."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import Final, Self

from bide.amqp.url import BrokerUrl
from bide.bulk.publish import KEPT_FAILURES
from bide.bulk.source import body_bytes
from bide.checks import whole_number
from bide.client import connect
from bide.delay.infrastructure import DelayInfrastructure
from bide.duration import DelayLike
from bide.errors import BideError, BulkInDoubtError, ClosedError
from bide.letter import Letter
from bide.outcome import Report, Tally, not_taken, with_unsent
from bide.publisher import OnLost
from bide.sync import SyncClient

_BATCH: Final = 5_000

_BATCH_BYTES: Final = 16 << 20
"""Bytes of bodies with which a batch is sent though it has fewer letters."""


class BulkPublisher:
    """Publishes many messages, each confirmed, while the caller makes the next ones.

    ``with bide.BulkPublisher("amqp://localhost") as publisher: publisher.put(bide.Letter(b"...", to="orders"))``

    Messages go out in batches (of 5,000, or 16 MB of bodies), from a thread of its own; at the end of the block, the
    rest. It holds at most two batches in memory. What cannot be sent, and what the broker does not take, is reported by
    :meth:`flush` and at the end of the block; a block that is left by an exception abandons what is not confirmed.

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
        self._batch: list[Letter] = []
        self._bytes = 0
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

    def put(self, letter: Letter) -> None:
        """Publish a message, some time before the end of the next :meth:`flush`. Waits while the batch before is sent.

        Raises:
            BulkInDoubtError: the batch before ended early. It names what is in doubt and what was not sent, this
                letter and those in the batch with it included, and has the report of all others since the last flush.
        """
        self._batch.append(letter)
        self._bytes += body_bytes(letter)
        if len(self._batch) >= _BATCH or self._bytes >= _BATCH_BYTES:
            self._send()

    def publish_many(self, letters: Iterable[Letter]) -> Report:
        """Publish messages and wait until all of them are confirmed; :meth:`put` for each, then :meth:`flush`."""
        for letter in letters:
            self.put(letter)
        return self.flush()

    def flush(self) -> Report:
        """Wait until every message is confirmed that was put since the last flush.

        Raises:
            BulkPublishError: some were not taken. It has the report; all others are on the broker.
            BulkInDoubtError: it ended early: it is not known of some whether the broker has them, and others were not
                sent, both of which it names. It has the report of all others. Its cause says why.
        """
        if self._batch:
            self._send()
        self._wait()
        report, self._tally = self._tally.report(), Tally(keep=self._keep)
        if report.failures:
            raise not_taken(report)
        return report

    def close(self) -> None:
        """Close the connection; what is not confirmed is abandoned."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        self._client.close()

    def _send(self) -> None:
        self._wait()
        batch, self._batch, self._bytes = self._batch, [], 0
        self._sending = self._client.submit(self._publish(batch, self._taken))
        self._taken += len(batch)

    def _wait(self) -> None:
        """Wait for the batch before."""
        sending = self._sending
        if sending is None:
            return
        try:
            # A signal's exception leaves the batch to the next who waits.
            sending.result()
        except BideError as error:
            batch, self._batch, self._bytes, self._sending = self._batch, [], 0, None
            named = with_unsent(error, batch, first=self._taken)
            self._taken += len(batch)
            if isinstance(named, BulkInDoubtError):
                named.report, self._tally = self._tally.report(), Tally(keep=self._keep)
            if named is error:
                raise
            raise named from named.__cause__
        except concurrent.futures.CancelledError:
            self._sending = None
            raise ClosedError("the publisher was closed") from None
        self._sending = None

    async def _publish(self, batch: list[Letter], first: int) -> None:
        rest = iter(batch)
        publishing = self._client.client.publish_many(rest).count_from(first)
        try:
            async for report in publishing.batches():
                self._tally.add(report)
        except BideError as error:
            left = list(rest)
            named = with_unsent(error, left, first=first + len(batch) - len(left))
            if named is error:
                raise
            raise named from named.__cause__
