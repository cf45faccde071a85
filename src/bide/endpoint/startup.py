"""Checks and declarations before an endpoint receives its first message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

from bide.admin.delivery_limit import delivery_limit
from bide.admin.endpoints import subscription_topology
from bide.admin.locate import management_api
from bide.client.client import Client
from bide.delay.message_type import MessageType
from bide.delay.protocol import DelayInfrastructure
from bide.durations import format_delay
from bide.errors import (
    AccessRefusedError,
    BrokerError,
    DeliveryLimitError,
    InvalidDelayError,
    InvalidInputError,
    TargetNotFoundError,
    UnsupportedBrokerError,
)
from bide.recoverability.retry_policy import BrokerRetry, Retry, RetryPolicy
from bide.runtime.logs import logger
from bide.topology import Queue, Topology

log = logger(__name__)

_DELAYED_RETRY: Final = (4, 3)
_MANAGEMENT_TIMEOUT: Final = 10.0
"""Seconds to wait for the management API; the endpoint starts without it."""


async def prepare(
    client: Client,
    *,
    queue: str,
    error_queue: str,
    audit_queue: str | None,
    reports: bool,
    declare: bool,
    subscriptions: Iterable[MessageType],
    policy: RetryPolicy,
    least_limit: int,
    management_url: str | None,
) -> None:
    """Declare what is missing, bind the queue to the delay infrastructure, and check the delivery limit.

    Args:
        audit_queue: the queue for copies of handled messages, or None.
        reports: whether the endpoint sends audit copies or heartbeats to ServiceControl.
        declare: declare missing queues and subscriptions; if False, a missing queue is an error.
        subscriptions: types of events that the queue receives.
        least_limit: the lowest delivery limit that the queue may have.

    Raises:
        InvalidDelayError: the policy has a delay that the infrastructure cannot hold.
        InvalidInputError: the queue is a stream, or the layout does not write the headers that ServiceControl reads.
        TargetNotFoundError: a queue is missing, and *declare* is False.
        UnsupportedBrokerError: the policy needs a newer broker.
        UnsupportedTargetError: the layout has no rule for events.
        DeliveryLimitError: the queue's delivery limit is too low.
        BrokerError: the broker refuses a declaration.
    """
    arguments: dict[str, Any] = {}
    if isinstance(policy, BrokerRetry):
        release = await client.release()
        if release < _DELAYED_RETRY:
            raise UnsupportedBrokerError(
                f"BrokerRetry needs RabbitMQ 4.3 or newer, and this broker is RabbitMQ {'.'.join(map(str, release))}: "
                "use bide.Retry"
            )
        arguments |= policy.queue_arguments
    infrastructure = await client.infrastructure()
    if reports and not infrastructure.writes_nservicebus_headers:
        raise InvalidInputError(
            f"audit_queue and heartbeat_queue are for ServiceControl, and the layout {infrastructure.name!r} has no "
            "headers for it: connect with infrastructure=bide.NServiceBus()"
        )
    _check_delays(policy, infrastructure)
    await _ensure_queue(client, Queue.quorum(queue, arguments), declare=declare, exactly=bool(arguments))
    others = [name for name in (error_queue, audit_queue) if name is not None]
    for name in others:
        await _ensure_queue(client, Queue.quorum(name), declare=declare, exactly=False)
    await _check_queue(client, queue, least_limit, management_url)
    for name in (queue, *others):
        if declare and len(address := infrastructure.address_topology(name)):
            await _declare_address(client, address, name, is_own=name == queue)
    if not isinstance(policy, BrokerRetry):
        await client.bind(queue)
    for kind in subscriptions:
        subscription = subscription_topology(infrastructure, queue, kind)
        if declare:
            await client.declare(subscription, external={queue})


async def _declare_address(client: Client, address: Topology, queue: str, *, is_own: bool) -> None:
    try:
        await client.declare(Topology(address.exchanges))
    except AccessRefusedError as error:
        if is_own:
            raise
        # Not an error: senders use the exchange if it exists, and otherwise the default exchange.
        log.info("the exchange of the queue %s was not declared: %s", queue, error)
        return
    await client.declare(address, external={queue})


async def _ensure_queue(client: Client, queue: Queue, *, declare: bool, exactly: bool) -> None:
    if not exactly and await client.exists(queue.name):
        return
    if not declare:
        raise TargetNotFoundError(
            f"the queue {queue.name!r} does not exist on the virtual host {client.url.vhost!r}: declare it, or let the "
            "endpoint do it with declare=True"
        )
    await client.declare(Topology(queues=[queue]))


def _check_delays(policy: RetryPolicy, infrastructure: DelayInfrastructure) -> None:
    if isinstance(policy, Retry) and policy.longest_delay > infrastructure.max_delay:
        raise InvalidDelayError(
            f"the retry policy has delays of up to {format_delay(policy.longest_delay)}, and the delay infrastructure "
            f"holds at most {format_delay(infrastructure.max_delay)}: use shorter delays, or raise max_delay"
        )


async def _check_queue(client: Client, queue: str, least: int, management_url: str | None) -> None:
    try:
        release = await client.release()
        async with asyncio.timeout(_MANAGEMENT_TIMEOUT), management_api(client.url, management_url) as api:
            found = await api.queue(client.url.vhost, queue)
            limit = await delivery_limit(api, client.url.vhost, queue, release=release)
    except (BrokerError, TimeoutError) as error:
        log.warning("the delivery limit of the queue %s was not checked: %s", queue, error)
        return
    if found is not None and found.type == "stream":
        raise InvalidInputError(
            f"the queue {queue!r} is a stream, which keeps its messages and takes none back: give the endpoint a "
            "quorum queue, and read the stream with client.consume"
        )
    if limit is not None and limit < least:
        raise DeliveryLimitError(
            f"the queue {queue!r} drops or dead-letters a message after {limit} deliveries, but the endpoint needs "
            f"{least}: set a policy with delivery-limit {least} or more, or lower the number of immediate retries or "
            "poison_after"
        )
