"""The server of RPC over RabbitMQ: handles requests and sends replies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from bide.client.client import Client
from bide.client.message import Message
from bide.delay.allowed_targets import AllowedTargets
from bide.delay.protocol import QueueTarget
from bide.errors import AccessRefusedError, BideError, DeliveryLostError, InvalidInputError, UnroutableError
from bide.messaging.rpc_caller import ERROR_HEADER
from bide.patterns.rpc import DIRECT_REPLY_TO
from bide.recoverability.exception_text import ExceptionText
from bide.runtime.arguments import whole_number
from bide.runtime.cancellation import outcome_apart
from bide.runtime.logs import logger

log = logger(__name__)

Handler = Callable[[Message], Awaitable[Any]]
"""Returns the body of the reply: bytes, text, None for an empty body, or a value that serialises as JSON."""

_MAX_ERROR: Final = 500
_PAUSE: Final = 1.0
"""Seconds before a request is requeued, because the broker delivers it again at once."""


async def serve(
    client: Client, queue: str, handler: Handler, *, at_once: int = 10, allow: Iterable[str] = ("*",)
) -> None:
    """Handle requests until cancelled.

    A request is acknowledged after the broker has confirmed its reply. If the server dies before, another one gets the
    request, so it can be handled twice. If the handler raises, the caller gets a ``RemoteError`` with the error in one
    line. A reply whose caller is gone is dropped.

    A request is rejected if it has no ``reply_to`` and its handler fails, or if no reply can be sent, because
    ``reply_to`` is not a queue name, is not allowed, or the user may not write to it. If the broker does not accept a
    reply at the moment, for example because its queue is full, the request is requeued after a second.

    Args:
        client: an open client.
        queue: the queue of requests.
        handler: see :data:`Handler`.
        at_once: number of requests handled at the same time, 1 to 65,535.
        allow: patterns of the queues that replies may be sent to, such as ``prices.replies.*``. The server replies with
            its own permissions, even to queues that the caller may not write to. Direct reply-to is always allowed.

    Raises:
        InvalidInputError: a pattern or *at_once* is invalid.
        TargetNotFoundError: the queue does not exist.
        ConsumerCancelledError: the queue was deleted.
        BrokerError: the broker refuses.
    """
    whole_number("at_once", at_once, 1, 65_535)
    allowed = AllowedTargets.of((*AllowedTargets.of(allow).patterns, f"{DIRECT_REPLY_TO}*"))
    tasks: set[asyncio.Task[None]] = set()
    async with client.consume(queue, prefetch=at_once) as requests:
        try:
            async for request in requests:
                task = asyncio.create_task(_answer(client, request, handler, allowed))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            # Closing the consumer requeues unacknowledged requests for other servers.
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)


async def _answer(client: Client, request: Message, handler: Handler, allowed: AllowedTargets) -> None:
    result, failure = await outcome_apart(handler, request)
    headers = {}
    if failure is not None:
        reason = f"{type(failure).__name__}: {ExceptionText.of(failure).message}"
        log.warning("the request %s failed: %s", request.correlation_id, reason, exc_info=failure)
        headers = {ERROR_HEADER: " ".join(reason.split())[:_MAX_ERROR]}
    try:
        replied = bool(request.reply_to) and await _reply(client, request, result, headers, allowed)
        await (request.reject() if headers and not replied else request.ack())
    except DeliveryLostError as error:
        log.info("the request %s will be redelivered: %s", request.correlation_id, error)
    except BideError as error:
        log.warning("the request %s cannot be answered, requeuing it: %s", request.correlation_id, error)
        if not request.settled:
            await _requeue(request)


async def _requeue(request: Message) -> None:
    await asyncio.sleep(_PAUSE)  # the broker delivers a requeued message at once
    try:
        await request.requeue()
    except DeliveryLostError as error:
        log.info("the request %s will be redelivered: %s", request.correlation_id, error)


async def _reply(
    client: Client, request: Message, result: Any, headers: dict[str, str], allowed: AllowedTargets
) -> bool:
    """Send a reply; False if the request is finished without one."""
    try:
        allowed.check_delivery(QueueTarget(request.reply_to or ""))
        try:
            await _send(client, request, result, headers)
        except InvalidInputError as error:
            # Most likely the handler's result cannot be encoded, and another server would have the same result.
            await _send(client, request, None, {ERROR_HEADER: str(error)[:_MAX_ERROR]})
            log.warning("the request %s failed: %s", request.correlation_id, error)
    except (InvalidInputError, AccessRefusedError) as error:
        # Handling the request again would not make a reply possible.
        log.warning("cannot reply to the request %s: %s", request.correlation_id, error)
        return False
    return True


async def _send(client: Client, request: Message, result: Any, headers: dict[str, str]) -> None:
    plain = result is None or isinstance(result, bytes | bytearray | memoryview | str)
    try:
        await client.publish(
            result if plain else None,
            json=None if plain else result,
            to=request.reply_to,
            correlation_id=request.correlation_id,
            headers=headers,
            persistent=False,
        )
    except UnroutableError:
        log.info("the caller of %s is gone: dropping the reply", request.correlation_id)
