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

Status = Literal["confirmed", "returned", "refused", "invalid", "failed", "in doubt", "unsent"]

_STATUSES: Final[Mapping[type[BideError], Status]] = {
    # Only the broker knows its limit, and it is told once a body was over it.
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
        message: as it was given.
        position: its place in the input, from 0 on.
        message_id: its message id, given or made; None where the message could not be read.
        due: when it will be delivered; None for one that is not delayed, or was not sent.
        attempts: how often it was sent; more than one may mean that it arrives more than once.
        error: why it is not on the broker, or None if it is.
    """

    message: OutgoingMessage
    position: int
    message_id: str | None
    due: datetime | None
    attempts: int
    error: BideError | None

    @property
    def status(self) -> Status:
        """In one word.

        ``confirmed``: the broker has it. ``returned``: no queue takes it. ``refused``: no queue stored it. ``invalid``:
        it cannot be sent. ``failed``: the broker, or what it has to pass, refuses it for another reason. ``in doubt``:
        the broker may have it, from a sending that was not confirmed. ``unsent``: the publishing ended before it was
        sent.
        """
        error = self.error
        if error is None:
            return "confirmed"
        return next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), "failed")

    def again(self) -> OutgoingMessage:
        """The message to send again: with the same message id, and due when it was due the first time."""
        if self.due is None:
            return replace(self.message, message_id=self.message_id)
        return replace(self.message, message_id=self.message_id, delay=None, deliver_at=self.due)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSummary:
    """What became of several messages.

    Attributes:
        confirmed: how many are on the broker.
        returned: how many no queue takes.
        refused: how many no queue stored.
        invalid: how many cannot be sent.
        failed: how many were refused for another reason.
        in_doubt: how many the broker may have or not: they were sent and not confirmed, and refused when sent again.
        failures: the outcomes of those that are not confirmed; of a whole publishing, the first 1,000 of them.
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
        """How many messages there were."""
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
    """Counts outcomes.

    Args:
        keep: at most so many failures.
    """

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._counts = Counter[Status]()
        self._failures: list[PublishResult] = []

    def add(self, report: PublishSummary) -> None:
        """Count what is in a report that has all its failures."""
        self.confirm(report.confirmed)
        self.fail(report.failures)

    def confirm(self, number: int) -> None:
        """Count so many successes."""
        self._counts["confirmed"] += number

    def fail(self, outcomes: Iterable[PublishResult]) -> None:
        """Count outcomes that are no successes."""
        for outcome in outcomes:
            self._counts[outcome.status] += 1
            if len(self._failures) < self._keep:
                self._failures.append(outcome)

    def report(self) -> PublishSummary:
        """What was counted."""
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


def not_taken(report: PublishSummary) -> BulkPublishError:
    """The error for a report with failures."""
    return BulkPublishError(
        f"of {report.total} messages {report.total - report.confirmed} were not taken ({report}); the first: "
        f"{report.failures[0].error}",
        report=report,
    )


def in_doubt(message_id: str, reason: str) -> PublishInDoubtError:
    """The error of a message that was sent and not confirmed."""
    return PublishInDoubtError(
        f"it is not known whether the broker has the message {message_id!r}: {reason}; send it again with the same "
        "message id",
        message_id=message_id,
    )


def denied(message_id: str, error: BideError) -> PublishInDoubtError:
    """The error of a message that was sent and not confirmed, and with which the broker then said this."""
    doubt = in_doubt(message_id, f"it was sent, and not confirmed, and then: {error}")
    doubt.__cause__ = error
    return doubt


def not_sent(message_id: str | None, reason: str) -> UnsentError:
    """The error of a message that was taken and not sent."""
    return UnsentError(f"it was not sent: {reason}", message_id=message_id)


def _unsent(outgoing: Any, position: int, reason: str) -> PublishResult:
    """The outcome of a message that was taken and not sent."""
    message_id = getattr(outgoing, "message_id", None)
    return PublishResult(outgoing, position, message_id, None, 0, not_sent(message_id, reason))


def with_unsent(error: BideError, messages: Iterable[Any], *, first: int) -> BideError:
    """The same error, or a BulkInDoubtError for it, with more messages that were not sent; itself if there are none.

    Args:
        first: the position of the first of them.
    """
    doubt = error if isinstance(error, BulkInDoubtError) else None
    reason = str(error) if doubt is None else doubt.reason
    more = tuple(_unsent(outgoing, position, reason) for position, outgoing in enumerate(messages, first))
    if not more:
        return error
    known, before = ((), ()) if doubt is None else (doubt.in_doubt, doubt.unsent)
    extended = BulkInDoubtError(reason, in_doubt=known, unsent=(*before, *more), report=doubt and doubt.report)
    extended.__cause__ = error if doubt is None else doubt.__cause__
    return extended
