"""The delivery limit of a quorum queue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from bide.admin.snapshot import matches
from bide.management.api import ManagementApi

DEFAULT_LIMIT: Final = 20
"""The default limit of quorum queues since RabbitMQ 4.0."""

_DEFAULT_SINCE: Final = (4, 0)


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
        applying = [one for one in (await api.policies(vhost, operator=operator)).values() if matches(one, found)]
        if applying:
            definitions.append(max(applying, key=lambda one: one.priority).definition.get("delivery-limit"))
    return effective_limit(definitions, release=release)


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
