"""Results of publishing many messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Literal

from bide.errors import (
    BideError,
    BulkInDoubtError,
    BulkPublishError,
    InvalidInputError,
    MessageTooLargeError,
    PublishInDoubtError,
    PublishRefusedError,
    UnroutableError,
    UnsentError,
)
from bide.messages.outgoing import OutgoingMessage
from bide.schedules.outgoing import OutgoingSchedule

Status = Literal["confirmed", "returned", "refused", "invalid", "failed", "in doubt", "unsent"]

_STATUSES: Final[Mapping[type[BideError], Status]] = {
    # Only the broker knows its limit, and reports it after a body has exceeded it.
    MessageTooLargeError: "failed",
    UnroutableError: "returned",
    PublishRefusedError: "refused",
    InvalidInputError: "invalid",
    PublishInDoubtError: "in doubt",
    UnsentError: "unsent",
}


# Not frozen: see OutgoingMessage.
@dataclass(slots=True)
class PublishResult:
    """The result of publishing one message.

    Attributes:
        message: the message as given.
        position: its position in the input, from 0.
        message_id: its message id, given or generated; None if the message could not be read.
        due: its due time; None if it is not delayed, or was not sent.
        attempts: the number of times it was sent; with more than one it may arrive more than once.
        error: why it is not on the broker, or None if it is.
        schedule_id: of a schedule that is on the broker, its id, which is also its version; otherwise None.
    """

    message: OutgoingMessage | OutgoingSchedule
    position: int
    message_id: str | None
    due: datetime | None
    attempts: int
    error: BideError | None
    schedule_id: str | None = None

    @property
    def status(self) -> Status:
        """The status as one word.

        ``confirmed``: the broker has the message. ``returned``: no queue takes it. ``refused``: no queue stored it.
        ``invalid``: it cannot be sent. ``failed``: the broker, or something that the message needs, refuses it for
        another reason. ``in doubt``: the broker may have it, because it was sent and not confirmed. ``unsent``: the
        bulk publish ended before it was sent.
        """
        error = self.error
        if error is None:
            return "confirmed"
        return next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), "failed")

    def again(self) -> OutgoingMessage | OutgoingSchedule:
        """The message to send again: with the same message id and the same due time. For a schedule this is a new
        operation, which replaces the first schedule if that still waits."""
        is_recurring = isinstance(self.message, OutgoingSchedule) and self.message.every is not None
        if self.due is None or is_recurring:
            return replace(self.message, message_id=self.message_id)
        return replace(self.message, message_id=self.message_id, delay=None, deliver_at=self.due)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSummary:
    """The results of several messages, as counts.

    Attributes:
        confirmed: messages that are on the broker.
        returned: messages that no queue takes.
        refused: messages that no queue stored.
        invalid: messages that cannot be sent.
        failed: messages that were refused for another reason.
        in_doubt: messages that the broker may or may not have: they were sent and not confirmed, and refused when sent
            again.
        failures: the results of messages that are not confirmed; for a whole bulk publish, the first 1,000 of them.
    """

    confirmed: int = 0
    returned: int = 0
    refused: int = 0
    invalid: int = 0
    failed: int = 0
    in_doubt: int = 0
    failures: tuple[PublishResult, ...] = field(default=(), repr=False)

    @property
    def total(self) -> int:
        """The number of messages."""
        return self.confirmed + self.returned + self.refused + self.invalid + self.failed + self.in_doubt

    def __str__(self) -> str:
        counts = (
            (self.confirmed, "confirmed"),
            (self.returned, "returned"),
            (self.refused, "refused"),
            (self.invalid, "invalid"),
            (self.failed, "failed"),
            (self.in_doubt, "in doubt"),
        )
        return ", ".join(f"{count} {what}" for count, what in counts if count) or "nothing"


class Tally:
    """Counts results.

    Args:
        keep: the maximum number of failures to keep.
    """

    def __init__(self, *, keep: int) -> None:
        self._max_failures = keep
        self._counts = Counter[Status]()
        self._failures: list[PublishResult] = []

    def add(self, report: PublishSummary) -> None:
        """Add a summary that has all its failures."""
        self.confirm(report.confirmed)
        self.fail(report.failures)

    @property
    def has_failures(self) -> bool:
        """Whether any message was not confirmed."""
        return bool(self._failures)

    def confirm(self, number: int) -> None:
        """Count confirmed messages."""
        self._counts["confirmed"] += number

    def fail(self, results: Iterable[PublishResult]) -> None:
        """Count results of failures."""
        for result in results:
            self._counts[result.status] += 1
            if len(self._failures) < self._max_failures:
                self._failures.append(result)

    def summary(self) -> PublishSummary:
        """The summary of everything counted."""
        counts = self._counts
        return PublishSummary(
            confirmed=counts["confirmed"],
            returned=counts["returned"],
            refused=counts["refused"],
            invalid=counts["invalid"],
            failed=counts["failed"],
            in_doubt=counts["in doubt"],
            failures=tuple(self._failures),
        )


def failures_error(report: PublishSummary) -> BulkPublishError:
    """The error for a summary with failures."""
    return BulkPublishError(
        f"{report.total - report.confirmed} of {report.total} messages were not accepted ({report}); the first: "
        f"{report.failures[0].error}",
        report=report,
    )


def in_doubt(message_id: str, reason: str) -> PublishInDoubtError:
    """The error for a message that was sent and not confirmed."""
    return PublishInDoubtError(
        f"it is not known whether the broker has the message {message_id!r}: {reason}; send it again with the same "
        "message id",
        message_id=message_id,
    )


def in_doubt_after(message_id: str, error: BideError) -> PublishInDoubtError:
    """The error for a message that was sent and not confirmed, and failed with this error when it was sent again."""
    doubt = in_doubt(message_id, f"it was sent, and not confirmed, and then: {error}")
    doubt.__cause__ = error
    return doubt


def unsent_error(message_id: str | None, reason: str) -> UnsentError:
    """The error for a message that was taken from the input and not sent."""
    return UnsentError(f"it was not sent: {reason}", message_id=message_id)


def _unsent_result(outgoing: Any, position: int, reason: str) -> PublishResult:
    """The result of a message that was taken from the input and not sent."""
    message_id = getattr(outgoing, "message_id", None)
    return PublishResult(outgoing, position, message_id, None, 0, unsent_error(message_id, reason))


def with_unsent(error: BideError, messages: Iterable[Any], *, first: int) -> BideError:
    """Add unsent messages to an error: a BulkInDoubtError that lists them, or the error itself if there are none.

    Args:
        first: the position of the first of these messages.
    """
    doubt = error if isinstance(error, BulkInDoubtError) else None
    reason = str(error) if doubt is None else doubt.reason
    more = tuple(_unsent_result(outgoing, position, reason) for position, outgoing in enumerate(messages, first))
    if not more:
        return error
    known, before = ((), ()) if doubt is None else (doubt.in_doubt, doubt.unsent)
    extended = BulkInDoubtError(reason, in_doubt=known, unsent=(*before, *more), report=doubt and doubt.report)
    extended.__cause__ = error if doubt is None else doubt.__cause__
    return extended
