"""What a retry policy may decide about a failed message."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True)
class RetryNow:
    """Back to the queue, to be delivered again at once."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Through the delay infrastructure, back to the endpoint's own queue.

    Attributes:
        delay: at least this long from now.
    """

    delay: timedelta


@dataclass(frozen=True, slots=True)
class Park:
    """To the error queue, with everything that is needed to understand the failure.

    Attributes:
        queue: another queue than the endpoint's error queue.
    """

    queue: str | None = None


@dataclass(frozen=True, slots=True)
class Discard:
    """Away with it: acknowledged, and told in the log and to the observers alone.

    Attributes:
        reason: why nobody will miss it.
    """

    reason: str


Decision = RetryNow | RetryLater | Park | Discard
