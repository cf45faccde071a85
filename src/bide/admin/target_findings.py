"""Findings about the limits of a delay infrastructure's target queues."""

from __future__ import annotations

from bide.admin.delivery_limit import effective_limit
from bide.admin.policies import prevailing
from bide.admin.report import Finding, judged
from bide.admin.snapshot import Snapshot
from bide.delay.protocol import DelayInfrastructure
from bide.management.api import FoundQueue
from bide.recoverability.retry_policy import Retry, poison_limit
from bide.runtime.wording import quantity


def target_findings(snapshot: Snapshot, infrastructure: DelayInfrastructure) -> list[Finding]:
    """Check whether a bound queue refuses messages once it is full."""
    if infrastructure.relay_queues:
        # If a target refuses a message, the relay lets it wait and continues with the others.
        return []
    problems = []
    targets = _target_queues(snapshot, infrastructure)
    for name in targets:
        found = snapshot.queues.get(name)
        limit = None if found is None else _refusing_limit(snapshot, found)
        if limit is not None:
            problems.append(
                f"the queue {name!r} refuses messages once it is full ({limit}), and then holds up all "
                "messages in the delay queues: send to it with isolated=True, so that only its own messages wait"
            )
    return judged("targets", problems, f"{quantity(len(targets), 'bound queue')}, none refuses messages")


def delivery_limit_findings(
    snapshot: Snapshot, infrastructure: DelayInfrastructure, release: tuple[int, ...]
) -> list[Finding]:
    """Check whether bound quorum queues deliver a message often enough for the default retries of endpoints."""
    least = poison_limit(Retry())
    queues = [
        found
        for name in _target_queues(snapshot, infrastructure)
        if (found := snapshot.queues.get(name)) is not None and found.type == "quorum"
    ]
    problems = []
    for found in queues:
        given = [found.queue.arguments.get("x-delivery-limit"), snapshot.policy_of(found).get("delivery-limit")]
        limit = effective_limit(given, release=release)
        if limit is not None and limit < least:
            problems.append(
                f"the queue {found.queue.name!r} drops a message after {limit} deliveries (or dead-letters it, if it "
                f"has a dead-letter exchange); an endpoint with the default retries needs {least}: raise the limit"
            )
    fine = f"{quantity(len(queues), 'bound quorum queue')}, each delivers a message at least {least} times"
    return judged("delivery limits", problems, fine)


def _target_queues(snapshot: Snapshot, infrastructure: DelayInfrastructure) -> list[str]:
    """The target queues that the delivery exchange leads to, directly or through other exchanges."""
    queues: dict[str, None] = {}
    taps = infrastructure.taps()
    follow, seen = [infrastructure.delivery_exchange], set[str]()
    while follow:
        source = follow.pop()
        if source in seen:
            continue
        seen.add(source)
        for binding in snapshot.bindings_from(source):
            if binding.destination_type == "exchange":
                follow.append(binding.destination)
            elif not (infrastructure.owns(binding.destination) or (taps and taps.owns(binding.destination))):
                queues[binding.destination] = None
    return list(queues)


def _refusing_limit(snapshot: Snapshot, found: FoundQueue) -> str | None:
    """The length limit at which a queue refuses messages, or None."""
    policy = snapshot.policy_of(found)
    # A quorum queue treats reject-publish-dlx as drop-head.
    refusing = ("reject-publish",) if found.type == "quorum" else ("reject-publish", "reject-publish-dlx")
    if prevailing(found, "overflow", policy.get("overflow")) not in refusing:
        return None
    for name in ("max-length", "max-length-bytes"):
        if (limit := prevailing(found, name, policy.get(name))) is not None:
            return f"{name} {limit}"
    return None
