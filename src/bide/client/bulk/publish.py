"""The bulk publish of a client: results one by one, in summaries, or as one summary."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from typing import Final, Self

from bide.client.bulk.in_flight import InFlightMessage
from bide.client.bulk.sender import BulkSender
from bide.client.publish_result import PublishResult, PublishSummary, Tally, failures_error
from bide.errors import BulkInDoubtError, ClosedError

KEPT_FAILURES: Final = 1_000
"""The number of failures that the summary of a whole bulk publish keeps."""


class BulkPublish:
    """A bulk publish of :meth:`bide.Client.publish_many`. Use it once, in one of three ways.

    ``async for result in publish`` returns the :class:`PublishResult` of every message, as soon as it is known;
    ``async for summary in publish.batches()`` returns a :class:`PublishSummary` of the results since the previous one;
    ``summary = await publish`` returns one at the end.

    It sends only while you ask for results. If you stop iterating early, unconfirmed messages are abandoned.
    """

    def __init__(self, run: BulkSender) -> None:
        self._sender = run
        self._is_used = False

    def count_from(self, position: int) -> Self:
        """Give the first message this position instead of 0, for an input in several parts."""
        self._sender.count_from(position)
        return self

    def __aiter__(self) -> AsyncGenerator[PublishResult, None]:
        return self._results(self._use())

    def batches(self) -> AsyncGenerator[PublishSummary, None]:
        """Summaries of new results, each with all its failures.

        Raises:
            BulkInDoubtError: see :meth:`bide.Client.publish_many`.
        """
        return self._summaries(self._use())

    def __await__(self) -> Generator[None, None, PublishSummary]:
        return self._whole_summary(self._use()).__await__()

    def _use(self) -> BulkSender:
        if self._is_used:
            raise ClosedError("these messages were published already: call publish_many again with others")
        self._is_used = True
        return self._sender

    @staticmethod
    async def _results(run: BulkSender) -> AsyncGenerator[PublishResult, None]:
        async with aclosing(run.rounds()) as rounds:
            async for settled in rounds:
                for one in settled:
                    yield one.result()

    @staticmethod
    async def _summaries(run: BulkSender) -> AsyncGenerator[PublishSummary, None]:
        async with aclosing(run.rounds()) as rounds:
            async for settled in rounds:
                tally = Tally(keep=len(settled))
                _count(settled, tally)
                yield tally.summary()

    @staticmethod
    async def _whole_summary(run: BulkSender) -> PublishSummary:
        tally = Tally(keep=KEPT_FAILURES)
        try:
            async with aclosing(run.rounds()) as rounds:
                async for settled in rounds:
                    _count(settled, tally)
        except BulkInDoubtError as error:
            error.report = tally.summary()
            raise
        except Exception as error:
            error.add_note(f"until then: {tally.summary()}")
            raise
        report = tally.summary()
        if report.failures:
            raise failures_error(report)
        return report


def _count(settled: list[InFlightMessage], tally: Tally) -> None:
    failed = [one for one in settled if one.error is not None]
    tally.confirm(len(settled) - len(failed))
    if failed:
        tally.fail(one.result() for one in failed)
