"""What a retry policy may decide about a failed message."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from bide.delay.protocol import check_name
from bide.durations import DelayLike, parse_delay


@dataclass(frozen=True, slots=True)
class RetryNow:
    """Back to the queue, to be delivered again at once."""


@dataclass(frozen=True, slots=True, init=False)
class RetryLater:
    """Through the delay infrastructure, back to the endpoint's own queue.

    Args:
        delay: at least this long from now.

    Raises:
        InvalidDelayError: it is not a delay.
    """

    delay: timedelta

    def __init__(self, delay: DelayLike) -> None:
        object.__setattr__(self, "delay", parse_delay(delay))


@dataclass(frozen=True, slots=True)
class Park:
    """To the error queue, with everything that is needed to understand the failure.

    Attributes:
        queue: another queue than the endpoint's error queue.

    Raises:
        InvalidNameError: no queue can have that name.
    """

    queue: str | None = None

    def __post_init__(self) -> None:
        if self.queue is not None:
            check_name("queue", self.queue)


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop it: acknowledge it, and report it to the log and the observers only.

    Attributes:
        reason: why it is not needed.
    """

    reason: str


Decision = RetryNow | RetryLater | Park | Discard
