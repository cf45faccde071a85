"""What must stand before an endpoint takes its first message."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from bide.admin.delivery_limit import delivery_limit
from bide.admin.locate import management_api
from bide.client.client import Client
from bide.delay.protocol import DelayInfrastructure
from bide.durations import format_delay
from bide.errors import (
    BrokerError,
    DeliveryLimitError,
    InvalidDelayError,
    InvalidInputError,
    TargetNotFoundError,
    UnsupportedBrokerError,
)
from bide.recoverability.policy import BrokerRetry, Retry, RetryPolicy
from bide.runtime.logs import logger
from bide.topology import Queue, Topology

log = logger(__name__)

_DELAYED_RETRY: Final = (4, 3)
_PATIENCE: Final = 10.0
"""Seconds for the management API to answer: an endpoint starts without it."""


async def prepare(
    client: Client,
    *,
    queue: str,
    error_queue: str,
    declare: bool,
    policy: RetryPolicy,
    least_limit: int,
    management_url: str | None,
) -> None:
    """Declare what is missing, bind the queue to the delay infrastructure, and check the delivery limit.

    Args:
        declare: queues that are missing; else their absence is an error.
        least_limit: the queue must be ready to deliver a message so often.

    Raises:
        InvalidDelayError: the policy has a delay that the infrastructure cannot hold.
        InvalidInputError: the queue is a stream.
        TargetNotFoundError: a queue is missing and may not be declared.
        UnsupportedBrokerError: the policy needs a newer broker.
        DeliveryLimitError: the queue would give a message up too early.
        BrokerError: the broker refuses.
    """
    arguments: dict[str, Any] = {}
    if isinstance(policy, BrokerRetry):
        release = await client.release()
        if release < _DELAYED_RETRY:
            raise UnsupportedBrokerError(
                f"RabbitMQ {'.'.join(map(str, release))} has no delayed retry of its own, which BrokerRetry uses: it "
                "came with 4.3; use bide.Retry"
            )
        arguments |= policy.queue_arguments
    infrastructure = await client.infrastructure()
    _check_delays(policy, infrastructure)
    await _expect(client, Queue.quorum(queue, arguments), declare=declare, exactly=bool(arguments))
    await _expect(client, Queue.quorum(error_queue), declare=declare, exactly=False)
    await _check_queue(client, queue, least_limit, management_url)
    if declare and len(address := infrastructure.address_topology(queue)):
        await client.declare(address, external={queue})
    if not isinstance(policy, BrokerRetry):
        await client.bind(queue)


async def _expect(client: Client, queue: Queue, *, declare: bool, exactly: bool) -> None:
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
            f"holds {format_delay(infrastructure.max_delay)} at most: give shorter delays, or more max_delay"
        )


async def _check_queue(client: Client, queue: str, least: int, management_url: str | None) -> None:
    try:
        release = await client.release()
        async with asyncio.timeout(_PATIENCE), management_api(client.url, management_url) as api:
            found = await api.queue(client.url.vhost, queue)
            limit = await delivery_limit(api, client.url.vhost, queue, release=release)
    except (BrokerError, TimeoutError) as error:
        log.warning("the delivery limit of the queue %s was not checked: %s", queue, error)
        return
    if found is not None and found.type == "stream":
        raise InvalidInputError(
            f"the queue {queue!r} is a stream, which takes no message back and forgets none: give the endpoint a "
            "quorum queue, and read the stream with client.consume"
        )
    if limit is not None and limit < least:
        raise DeliveryLimitError(
            f"the queue {queue!r} delivers a message {limit} times and then drops or dead-letters it, but the endpoint "
            f"needs {least}: raise its delivery limit (a policy with delivery-limit {least} or more), or lower "
            "the retries at once, or poison_after"
        )
