"""The effect of RabbitMQ policies on the queues of a delay infrastructure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

from bide.admin.delivery_limit import effective_limit
from bide.admin.report import Finding, judged, listed, unchecked
from bide.admin.snapshot import Snapshot, is_readable, take_snapshot
from bide.delay.cascade import Policy
from bide.delay.protocol import DelayInfrastructure
from bide.management.api import FoundQueue, ManagementApi
from bide.runtime.wording import quantity
from bide.topology import Argument

_QUEUE_FULL_EFFECT: Final = "a full queue refuses or drops messages"
_RETENTION_EFFECT: Final = "the streams lose their oldest messages sooner"

_EFFECTS: Final[Mapping[str, Mapping[str, str]]] = {
    "quorum": {
        "message-ttl": "messages leave before they are due, or are dropped",
        "expires": "RabbitMQ deletes queues that are unused for that long, with the messages in them",
        "max-length": _QUEUE_FULL_EFFECT,
        "max-length-bytes": _QUEUE_FULL_EFFECT,
        "overflow": "a full queue drops messages, and dead-lettering is at-most-once",
        "delivery-limit": "messages are dropped or dead-lettered after fewer deliveries",
        "dead-letter-exchange": "messages leave for another exchange",
        "dead-letter-routing-key": "messages lose the routing keys that lead to their targets",
        "dead-letter-strategy": "messages are dead-lettered with another strategy",
    },
    "stream": {"max-age": _RETENTION_EFFECT, "max-length-bytes": _RETENTION_EFFECT},
}
"""The effect of each key on queues of a type. Other keys of policies do not affect messages."""

_NUMERIC_KEYS: Final = frozenset({"message-ttl", "expires", "max-length", "max-length-bytes"})
_LENGTH_KEYS: Final = ("max-length", "max-length-bytes")
_DEFAULTS: Final[Mapping[str, Argument]] = {"overflow": "drop-head", "dead-letter-strategy": "at-most-once"}

_SECONDS_PER_UNIT: Final = {"Y": 31_536_000, "M": 2_592_000, "D": 86_400, "h": 3_600, "m": 60, "s": 1}


def owned_queues(snapshot: Snapshot, infrastructure: DelayInfrastructure) -> dict[str, FoundQueue]:
    """The queues of an infrastructure, including the streams of its taps, by name."""
    taps = infrastructure.taps()
    return {
        name: one
        for name, one in snapshot.queues.items()
        if infrastructure.owns(name) or (taps is not None and taps.owns(name))
    }


def policy_findings(snapshot: Snapshot, infrastructure: DelayInfrastructure, release: tuple[int, ...]) -> list[Finding]:
    """One problem for each key of a policy or operator policy that changes how long messages wait, or where they go.

    Queues that do not exist yet are checked too, because clients may declare them when they first need them.

    Args:
        snapshot: the snapshot of the infrastructure.
        infrastructure: the infrastructure whose queues are checked.
        release: the broker's release.
    """
    queues = owned_queues(snapshot, infrastructure)
    missing = [one for one in infrastructure.topology().queues if one.name not in queues]
    planned = {one.name: FoundQueue(queue=one, type=one.type) for one in missing}
    problems = policy_problems(snapshot, queues, release, ways_out=_FIXES, planned=planned)
    unreadable = [one for one in snapshot.operator_policies.values() if not is_readable(one)]
    if planned:
        # For a queue that does not exist yet, the broker does not report which policy applies.
        unreadable += [one for one in snapshot.policies.values() if not is_readable(one)]
    if unreadable:
        names = listed(one.name for one in unreadable)
        why = f"bide cannot read the patterns of the policies {names}: check which queues they match"
        return [*(judged("policies", problems, "") if problems else []), unchecked("policies", why)]
    return judged("policies", problems, f"no harmful policy on {quantity(len(queues), 'queue')}")


def policy_problems(
    snapshot: Snapshot,
    queues: Mapping[str, FoundQueue],
    release: tuple[int, ...],
    *,
    ways_out: Mapping[str, str],
    planned: Mapping[str, FoundQueue] | None = None,
) -> list[str]:
    """One text for each key of a policy or operator policy that is harmful to queues.

    Args:
        snapshot: a snapshot with the policies.
        queues: the queues to check, by name.
        release: the broker's release.
        ways_out: how to fix the problem, for a ``policy`` and for an ``operator policy``.
        planned: queues that do not exist yet. A text is about them only if no existing queue has the same problem.
    """
    texts: dict[tuple[str, str, str], str] = {}
    for group, description in ((queues, f"of {len(queues)} queues"), (planned or {}, "queues that do not exist yet")):
        changed: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
        settings: dict[tuple[str, str, str], tuple[Argument, str]] = {}
        for name, found in group.items():
            for kind, policy, key in _harmful_keys(snapshot, found, release):
                changed[kind, policy.name, key].append(name)
                settings[kind, policy.name, key] = policy.definition[key], _effects(found)[key]
        for (kind, policy_name, key), names in changed.items():
            value, effect = settings[kind, policy_name, key]
            texts.setdefault(
                (kind, policy_name, key),
                f"the {kind} {policy_name!r} sets {key} to {value} on {len(names)} {description} "
                f"({listed(sorted(names), limit=2)}): {effect}; {ways_out[kind]}",
            )
    return list(texts.values())


async def harmful_policies(
    api: ManagementApi, vhost: str, infrastructure: DelayInfrastructure, release: tuple[int, ...]
) -> list[str]:
    """The texts of the problems that :func:`policy_findings` finds in a new snapshot.

    Raises:
        ManagementApiError: the API gives an unexpected answer.
    """
    snapshot = await take_snapshot(api, vhost, infrastructure)
    return [one.text for one in policy_findings(snapshot, infrastructure, release) if one.status == "problem"]


_FIXES: Final = {
    "policy": "call bide.admin.protection.protect(...) with the same settings, or change its pattern to leave these "
    "queues out",
    "operator policy": "no other policy can override it, so change its pattern to leave these queues out",
}


def _harmful_keys(snapshot: Snapshot, found: FoundQueue, release: tuple[int, ...]) -> Iterator[tuple[str, Policy, str]]:
    together = snapshot.policy_of(found)
    kinds = {"policy": snapshot.own_policy_of(found), "operator policy": snapshot.operator_policy_of(found)}
    for key in changed_keys(found, together, release):
        for kind, policy in kinds.items():
            if policy is not None and key in changed_keys(found, policy.definition, release):
                yield kind, policy, key


def changed_keys(found: FoundQueue, definition: Mapping[str, Argument], release: tuple[int, ...]) -> list[str]:
    """The keys of a policy's definition that harm the messages of a queue.

    Args:
        found: the queue, with its arguments.
        definition: the definitions of its policies, merged.
        release: the broker's release.
    """
    return [key for key in definition if key in _effects(found) and _is_changed(found, definition, key, release)]


def _effects(found: FoundQueue) -> Mapping[str, str]:
    return _EFFECTS.get(found.type, _EFFECTS["quorum"])


def _is_changed(found: FoundQueue, definition: Mapping[str, Argument], key: str, release: tuple[int, ...]) -> bool:
    before, after = effective(found, {}, key, release), effective(found, definition, key, release)
    if key == "delivery-limit" or found.type == "stream":
        # A higher delivery limit, or a longer retention, is harmless.
        return _as_number(after) < _as_number(before)
    if key == "overflow" and found.type == "classic":
        # A classic queue without a length limit is never full. A quorum queue also dead-letters in another way.
        limits = [effective(found, definition, length, release) for length in _LENGTH_KEYS]
        return after != (before or _DEFAULTS[key]) and limits != [None, None]
    if key in ("dead-letter-routing-key", "dead-letter-strategy"):
        exchange = effective(found, definition, "dead-letter-exchange", release)
        return exchange is not None and after != (before or _DEFAULTS.get(key))
    return after != (before or _DEFAULTS.get(key))


def effective(
    found: FoundQueue, definition: Mapping[str, Argument], key: str, release: tuple[int, ...]
) -> Argument | None:
    """The value in effect for a key of a queue, from its argument and its policies; None without either.

    The rules are those of gather_policy_config and dead_letter_handler in rabbit_quorum_queue, process_args_policy in
    rabbit_amqqueue_process, and policy_precedence in rabbit_stream_queue, the same from 3.10 to 4.3. The exception is
    ``expires`` on a quorum queue of 3.10, where the policy wins; bide's queues do not have that argument.
    """
    argument, given = found.queue.arguments.get(f"x-{key}"), definition.get(key)
    if key == "delivery-limit":
        return effective_limit((argument, given), release=release)
    return prevailing(found, key, given)


def prevailing(found: FoundQueue, key: str, given: Argument | None) -> Argument | None:
    """The value in effect for a key, given a queue's argument and a policy's value. Not for the delivery limit."""
    argument = found.queue.arguments.get(f"x-{key}")
    if given is None or argument is None:
        return argument if given is None else given
    if found.type == "stream" or (found.type == "quorum" and key == "overflow"):
        return given
    if key in _NUMERIC_KEYS and isinstance(argument, int) and isinstance(given, int):
        return min(argument, given)
    return argument


def _as_number(value: Any) -> float:
    """A limit as a number for comparison; infinity if there is no limit."""
    if value is None:
        return math.inf
    if isinstance(value, int | float):
        return value
    # The broker accepts no other form (rabbit_amqqueue:check_max_age).
    return int(value[:-1]) * _SECONDS_PER_UNIT[value[-1]]
