"""The number of partitions that gates lead, from the consumers of their query queues."""

from __future__ import annotations

from typing import Any

from bide.admin.snapshot import count_each
from bide.console.vhost import ConsoleVhost
from bide.errors import BideError, BrokerError, TargetNotFoundError
from bide.schedules.names import PARTITIONS


async def count_led_partitions(vhost: ConsoleVhost) -> dict[str, Any]:
    """The number of partitions that gates lead, and whether to ask them anything.

    Without a gate, a question would wait until its timeout. The values are
    ``{"led": 8, "of": 8, "ok": true, "why": ""}``.
    """
    names = vhost.schedules.requests.names
    try:
        connection = await vhost.connection()
        answers = await count_each(connection, [names.queries(number) for number in range(PARTITIONS)])
    except BideError as error:
        return _gates(0, f"the gates cannot be counted: {error}")
    if all(isinstance(one, TargetNotFoundError) for one in answers):
        return _gates(0, "there is no schedule log on this virtual host: the first schedule declares it")
    led = sum(1 for one in answers if not isinstance(one, BrokerError) and one.consumer_count)
    unknown = [one for one in answers if isinstance(one, BrokerError) and not isinstance(one, TargetNotFoundError)]
    if unknown:
        return _gates(led, f"the gates cannot be counted: {unknown[0]}")
    if led < PARTITIONS:
        return _gates(led, f"gates lead {led} of {PARTITIONS} partitions: run 'bide gate --allow ...'")
    return _gates(led, "")


def _gates(led: int, why: str) -> dict[str, Any]:
    # If gates lead only some partitions, a gate takes over the others within seconds.
    return {"led": led, "of": PARTITIONS, "ok": led > 0, "why": why}
