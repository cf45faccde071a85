"""How an endpoint treats its messages."""

from __future__ import annotations

from dataclasses import dataclass

from bide.recoverability.policy import RetryPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """How an endpoint treats its messages.

    Attributes:
        poison_after: a message that was delivered so often is parked without another attempt.
        places: room for so many times of attempts in the headers of a retry.
        nservicebus: use the header names of NServiceBus.
    """

    endpoint: str
    queue: str
    error_queue: str
    policy: RetryPolicy
    poison_after: int
    places: int
    nservicebus: bool
