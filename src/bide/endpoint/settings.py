"""Settings of an endpoint, as its worker needs them."""

from __future__ import annotations

from dataclasses import dataclass

from bide.recoverability.retry_policy import RetryPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """How an endpoint treats its messages.

    Attributes:
        endpoint: the endpoint's name.
        queue: the queue that it consumes.
        error_queue: where it parks messages.
        policy: its retry policy.
        poison_after: a message that was delivered this many times is parked without another attempt.
        max_failure_times: number of failure times that the headers of a retry have room for.
        nservicebus: use NServiceBus's header names.
        audit_queue: where copies of handled messages go, or None.
    """

    endpoint: str
    queue: str
    error_queue: str
    policy: RetryPolicy
    poison_after: int
    max_failure_times: int
    nservicebus: bool
    audit_queue: str | None = None
