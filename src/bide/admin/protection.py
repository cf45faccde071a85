"""The policy that keeps other policies off the queues of a delay infrastructure."""

from __future__ import annotations

import os.path
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from bide.admin.policies import changed_keys, owned_queues
from bide.admin.report import Finding, judged, listed
from bide.admin.snapshot import Snapshot, applying, take_schedule_snapshot, take_snapshot
from bide.delay.cascade import Policy
from bide.delay.protocol import DelayInfrastructure
from bide.management.api import FoundQueue, ManagementApi
from bide.schedules.names import ScheduleNames
from bide.topology import Argument

_NEUTRAL_KEY: Final = "alternate-exchange"
"""A key without effect on queues of any type (3.10 to 4.3), because RabbitMQ rejects a policy without keys."""


_NOT_THE_LOG: Final = r"(?!schedule\.)"
"""The end of a pattern: after the base of an infrastructure, any name except those of the schedule log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """The result of :func:`protect`.

    Attributes:
        policy: the policy that was set.
        displaced: the names of the policies that no longer apply to the queues.
        left_out: the keys of the displaced policies that the new policy does not have.
    """

    policy: Policy
    displaced: tuple[str, ...]
    left_out: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The result as ``--json`` prints it."""
        return {
            "policy": self.policy.name,
            "priority": self.policy.priority,
            "definition": dict(self.policy.definition),
            "displaced": list(self.displaced),
            "left_out": list(self.left_out),
        }


def protection_name(infrastructure: DelayInfrastructure) -> str:
    """The name of the policy that protects an infrastructure."""
    if infrastructure.base:
        return f"bide.protect.{infrastructure.base}"
    return infrastructure.undeliverable.replace("undeliverable", "protect", 1)


def queue_pattern(infrastructure: DelayInfrastructure) -> str:
    """The regular expression for the names of an infrastructure's queues, including queues that do not exist yet."""
    if infrastructure.base:
        return f"^{re.escape(f'{infrastructure.base}.')}"
    # NServiceBus or Celery defines the names in a cascade; bide defines those of its guard and taps.
    levels = os.path.commonprefix([one.name for one in infrastructure.topology().queues])  # noqa: RUF071 (of names)
    names = [rf"{re.escape(levels)}\d*", re.escape(infrastructure.undeliverable)]
    taps = infrastructure.taps()
    if taps is not None:
        names += [re.escape(one) for one in (*taps.names, *(queue.name for queue in taps.passage.queues))]
    return f"^({'|'.join(names)})$"


async def protect(
    api: ManagementApi, vhost: str, infrastructure: DelayInfrastructure, release: tuple[int, ...]
) -> Protection:
    """Set a policy that displaces all others on the queues of an infrastructure, which need not exist yet.

    RabbitMQ applies one policy to a queue, the one with the highest priority. The new policy keeps those settings of
    the displaced policies that all queues had in common and that do not affect messages. Operator policies apply in
    addition and cannot be displaced.

    Raises:
        ManagementApiError: the policy cannot be set.
    """
    snapshot = await take_snapshot(api, vhost, infrastructure)
    queues = owned_queues(snapshot, infrastructure)
    for queue in infrastructure.topology().queues:
        queues.setdefault(queue.name, FoundQueue(queue=queue, type=queue.type))
    neutral = Policy(
        name=protection_name(infrastructure),
        # A policy that gives the streams of the schedule log a longer retention must stay in effect.
        pattern=f"{queue_pattern(infrastructure)}{_NOT_THE_LOG if infrastructure.base else ''}",
        definition={_NEUTRAL_KEY: infrastructure.undeliverable},
        apply_to="queues",
        priority=0,
    )
    return await _displace(api, vhost, snapshot, queues, neutral, release)


async def protect_schedule_log(
    api: ManagementApi, vhost: str, names: ScheduleNames, release: tuple[int, ...]
) -> Protection | None:
    """Set a policy like that of :func:`protect` on the queues of the schedule log, but not on its streams.

    The streams keep their policies, because one of them may give them a longer retention.

    Returns:
        None if the virtual host has no schedule log.

    Raises:
        ManagementApiError: the policy cannot be set.
    """
    snapshot = await take_schedule_snapshot(api, vhost, names)
    queues = {name: one for name, one in snapshot.queues.items() if one.type != "stream"}
    if not queues:
        return None
    neutral = Policy(
        name=f"bide.protect.{names.operations}",
        pattern=rf"^{re.escape(names.operations)}\.([0-9]+\.(queries|room)|undeliverable)$",
        definition={_NEUTRAL_KEY: names.undeliverable},
        apply_to="queues",
        priority=0,
    )
    return await _displace(api, vhost, snapshot, queues, neutral, release)


async def _displace(
    api: ManagementApi,
    vhost: str,
    snapshot: Snapshot,
    queues: Mapping[str, FoundQueue],
    neutral: Policy,
    release: tuple[int, ...],
) -> Protection:
    """Set a policy with the highest priority. It keeps the harmless settings that all queues had in common."""
    others = [one for one in snapshot.policies.values() if one.name != neutral.name]
    before = {queue: applying(others, found) for queue, found in queues.items()}
    displaced = {one.name: one for one in before.values() if one is not None}
    common = _common([{} if one is None else one.definition for one in before.values()])
    spoiled = {key for found in queues.values() for key in changed_keys(found, common, release)}
    kept = {key: value for key, value in common.items() if key not in spoiled}
    policy = replace(
        neutral,
        definition={**neutral.definition, **kept},
        priority=1 + max((one.priority for one in others if one.apply_to != "exchanges"), default=0),
    )
    await api.set_policy(vhost, policy)
    keys = {key for one in displaced.values() for key in one.definition}
    return Protection(policy=policy, displaced=tuple(sorted(displaced)), left_out=tuple(sorted(keys - kept.keys())))


def _common(definitions: list[Mapping[str, Argument]]) -> dict[str, Argument]:
    first, *rest = definitions
    return {key: value for key, value in first.items() if all(one.get(key) == value for one in rest)}


def protection_findings(snapshot: Snapshot, infrastructure: DelayInfrastructure) -> list[Finding]:
    """Check whether the policy of :func:`protect` still applies to all queues; no findings if it was never set."""
    name = protection_name(infrastructure)
    policy = snapshot.policies.get(name)
    if policy is None:
        return []
    queues = owned_queues(snapshot, infrastructure)
    without: defaultdict[str | None, list[str]] = defaultdict(list)
    for queue, found in queues.items():
        applied = snapshot.own_policy_of(found)
        if applied != policy:
            without[None if applied is None else applied.name].append(queue)
    problems = []
    for other, names in without.items():
        instead = (
            "" if other is None else f"; the policy {other!r} of priority {snapshot.policies[other].priority} does"
        )
        problems.append(
            f"the policy {name!r} of priority {policy.priority} does not apply to {len(names)} of {len(queues)} queues "
            f"({listed(sorted(names), limit=2)}){instead}: call bide.admin.protection.protect(...) with the same "
            "settings"
        )
    return judged("protection", problems, f"the policy {name!r} keeps other policies off these {len(queues)} queues")
