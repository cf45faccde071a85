"""Delivery limits of quorum queues: the limits in effect, and policies that raise them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from bide.admin.snapshot import applying, is_readable
from bide.delay.cascade import Policy
from bide.delay.recognition import part_of
from bide.errors import TargetNotFoundError
from bide.management.api import FoundQueue, ManagementApi

DEFAULT_LIMIT: Final = 20
"""The default limit of quorum queues since RabbitMQ 4.0."""

UNLIMITED_BEFORE_4: Final = 2**31 - 1
"""A limit that no message reaches, for releases before 4.0, which have no value for "no limit"."""

_DEFAULT_SINCE: Final = (4, 0)
_POLICY_NAME: Final = "bide.delivery-limit."


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedQueue:
    """A quorum queue that drops or dead-letters a message after too few deliveries.

    Attributes:
        limit: the delivery limit in effect.
        source: where the limit is from: ``default``, ``argument``, ``policy NAME`` or ``operator policy NAME``.
        policy: the policy that raises the limit; None if no policy can, because an argument or an operator policy
            limits the queue.
        displaced: the name of the policy that applies now. The new policy repeats its definition.
    """

    queue: str
    limit: int
    source: str
    policy: Policy | None
    displaced: str | None = None


async def delivery_limit(api: ManagementApi, vhost: str, queue: str, *, release: tuple[int, ...]) -> int | None:
    """The delivery limit in effect for a queue. None if it has none, as on classic queues and old releases.

    Raises:
        ManagementApiError: the management API, which is the only source, gives an unexpected answer.
    """
    found = await api.queue(vhost, queue)
    if found is None or found.type != "quorum":
        return None
    definitions = [found.queue.arguments.get("x-delivery-limit")]
    for operator in (False, True):
        # The management API may report a queue's policy a few seconds late.
        policy = applying((await api.policies(vhost, operator=operator)).values(), found)
        if policy is not None:
            definitions.append(policy.definition.get("delivery-limit"))
    return effective_limit(definitions, release=release)


async def limited_queues(
    api: ManagementApi,
    vhost: str,
    *,
    release: tuple[int, ...],
    least: int | None = None,
    names: Collection[str] = (),
) -> list[LimitedQueue]:
    """The quorum queues whose delivery limit is too low, by name.

    Args:
        api: the management API.
        vhost: the virtual host.
        release: the broker's release.
        least: how many deliveries a queue has to allow; None for no limit.
        names: the queues to check; by default all except those of delay infrastructures, which have no consumers.

    Raises:
        ManagementApiError: the management API gives an unexpected answer.
        TargetNotFoundError: a queue of ``names`` does not exist, or is not a quorum queue.
    """
    queues = {one.queue.name: one for one in await api.queues(vhost, "") if one.type == "quorum"}
    if missing := sorted(set(names) - queues.keys()):
        raise TargetNotFoundError(
            f"the virtual host {vhost!r} has no quorum queue {missing[0]!r}: correct the name, or turn a classic queue "
            "into a quorum queue with bide.admin.to_quorum.convert(...)"
        )
    policies = await api.policies(vhost)
    operators = await api.policies(vhost, operator=True)
    chosen = names or [name for name, one in queues.items() if part_of(name, one.queue.arguments) is None]
    found = (_limited(queues[name], policies.values(), operators.values(), release, least) for name in sorted(chosen))
    return [one for one in found if one is not None]


def _limited(
    found: FoundQueue,
    policies: Iterable[Policy],
    operators: Iterable[Policy],
    release: tuple[int, ...],
    least: int | None,
) -> LimitedQueue | None:
    policies = list(policies)
    operator = applying(operators, found)
    # The broker reports a new policy some seconds late, so its report is used only for patterns that bide cannot read.
    reported = next((one for one in policies if one.name == found.policy and not is_readable(one)), None)
    own = reported or applying(policies, found)
    sources: dict[str, Any] = {
        f"policy {own.name}" if own else "": own.definition.get("delivery-limit") if own else None,
        "argument": found.queue.arguments.get("x-delivery-limit"),
        f"operator policy {operator.name}" if operator else " ": (
            operator.definition.get("delivery-limit") if operator else None
        ),
    }
    limit = effective_limit(sources.values(), release=release)
    wanted = _unlimited(release) if least is None else least
    if limit is None or (limit >= wanted >= 0):
        return None
    source = next((name for name, value in sources.items() if value == limit), "default")
    fixed = [value for name, value in sources.items() if name == "argument" or name.startswith("operator")]
    after = effective_limit([wanted, *fixed], release=release)
    can_raise = after is None or (after >= wanted >= 0)
    return LimitedQueue(
        queue=found.queue.name,
        limit=limit,
        source=source,
        policy=_raising_policy(found.queue.name, own, policies, wanted) if can_raise else None,
        displaced=own.name if own and own.name != _POLICY_NAME + found.queue.name else None,
    )


def _raising_policy(queue: str, own: Policy | None, policies: list[Policy], wanted: int) -> Policy:
    """A policy for one queue. It repeats the definition of the policy that it displaces, because RabbitMQ applies only
    one policy to a queue."""
    name = _POLICY_NAME + queue
    if own is not None and own.name == name:
        return replace(own, definition={**own.definition, "delivery-limit": wanted})
    return Policy(
        name=name,
        pattern=f"^{re.escape(queue)}$",
        definition={**(own.definition if own else {}), "delivery-limit": wanted},
        apply_to="queues",
        priority=1 + max((one.priority for one in policies if one.apply_to != "exchanges"), default=0),
    )


def _unlimited(release: tuple[int, ...]) -> int:
    return -1 if release >= _DEFAULT_SINCE else UNLIMITED_BEFORE_4


def effective_limit(given: Iterable[Any], *, release: tuple[int, ...]) -> int | None:
    """The delivery limit of a quorum queue, from its argument and its policies; None if it has none.

    By RabbitMQ's rules the smallest limit is in effect, and a negative limit means no limit.

    Args:
        given: the limits; a value that is not a number counts as not set.
    """
    limits = [value for value in given if isinstance(value, int) and not isinstance(value, bool)]
    if not limits:
        return DEFAULT_LIMIT if release >= _DEFAULT_SINCE else None
    return min((value for value in limits if value >= 0), default=None)
