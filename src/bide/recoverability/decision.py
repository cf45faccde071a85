"""The decisions that a retry policy can return for a failed message."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from bide.delay.protocol import check_name
from bide.durations import DelayLike, parse_delay


@dataclass(frozen=True, slots=True)
class RetryNow:
    """Requeue the message, so that the broker delivers it again at once."""


@dataclass(frozen=True, slots=True, init=False)
class RetryLater:
    """Send the message through the delay infrastructure, back to the endpoint's own queue.

    Args:
        delay: the earliest time of the retry, from now.

    Raises:
        InvalidDelayError: the value is not a delay.
    """

    delay: timedelta

    def __init__(self, delay: DelayLike) -> None:
        object.__setattr__(self, "delay", parse_delay(delay))


@dataclass(frozen=True, slots=True)
class Park:
    """Move the message to the error queue, with headers that describe the failure.

    Attributes:
        queue: a queue to use instead of the endpoint's error queue.

    Raises:
        InvalidNameError: the value cannot be the name of a queue.
    """

    queue: str | None = None

    def __post_init__(self) -> None:
        if self.queue is not None:
            check_name("queue", self.queue)


@dataclass(frozen=True, slots=True)
class Discard:
    """Acknowledge the message and drop it; only the log and the observers mention it.

    Attributes:
        reason: why the message is not needed.
    """

    reason: str


Decision = RetryNow | RetryLater | Park | Discard
