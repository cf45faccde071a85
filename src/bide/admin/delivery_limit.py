"""The delivery limit of a quorum queue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from bide.admin.snapshot import matches
from bide.management.api import ManagementApi

DEFAULT_LIMIT: Final = 20
"""The limit of quorum queues from RabbitMQ 4.0 on, where none is set."""

_SINCE: Final = (4, 0)


async def delivery_limit(api: ManagementApi, vhost: str, queue: str, *, release: tuple[int, ...]) -> int | None:
    """The limit that holds for a queue, or None where it has none, as classic queues and old releases.

    Raises:
        ManagementApiError: the management API, which alone knows, does not answer as it should.
    """
    found = await api.queue(vhost, queue)
    if found is None or found.type != "quorum":
        return None
    definitions = [found.queue.arguments.get("x-delivery-limit")]
    for operator in (False, True):
        # The queue's own entry may name its policy a few seconds late.
        applying = [one for one in (await api.policies(vhost, operator=operator)).values() if matches(one, found)]
        if applying:
            definitions.append(max(applying, key=lambda one: one.priority).definition.get("delivery-limit"))
    return effective_limit(definitions, release=release)


def effective_limit(given: Iterable[Any], *, release: tuple[int, ...]) -> int | None:
    """The limit of a quorum queue, from its argument and its policies; None where there is none.

    The smallest holds, and a negative one is none (rules of RabbitMQ).

    Args:
        given: limits; a value that is not a number was not set.
    """
    limits = [value for value in given if isinstance(value, int) and not isinstance(value, bool)]
    if not limits:
        return DEFAULT_LIMIT if release >= _SINCE else None
    return min((value for value in limits if value >= 0), default=None)
