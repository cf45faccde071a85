"""Requests and replies: the server's side. The caller's is :mod:`bide.messaging.rpc`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from bide.arguments import whole_number
from bide.client.client import Client
from bide.client.message import Message
from bide.delay.allowed_targets import AllowedTargets
from bide.delay.protocol import QueueTarget
from bide.errors import AccessRefusedError, BideError, DeliveryLostError, InvalidInputError, UnroutableError
from bide.messaging.rpc_caller import ERROR_HEADER
from bide.patterns.rpc import DIRECT_REPLY_TO
from bide.recoverability.exception_text import ExceptionText
from bide.runtime.cancellation import outcome_apart
from bide.runtime.logs import logger

log = logger(__name__)

Handler = Callable[[Message], Awaitable[Any]]
"""Takes a request and returns the body of the reply: bytes, text, None for an empty one, or what serialises as JSON."""

_LONGEST_ERROR: Final = 500
_PAUSE: Final = 1.0
"""Seconds before a request goes back: the broker would deliver it again at once, and again, as long as it is so."""


async def serve(
    client: Client, queue: str, handler: Handler, *, at_once: int = 10, allow: Iterable[str] = ("*",)
) -> None:
    """Answer requests until it is cancelled.

    A request is acknowledged when its reply is with the broker, so that another server gets it when this one dies: a
    request may be handled twice. What the handler raises goes to the caller, in a line, as ``RemoteError``. A request
    without ``reply_to`` is handled, and rejected if that fails; so is one to which no reply can be sent, because its
    ``reply_to`` is not a name, is not allowed, or this user may not write to it. A reply that the broker does not take
    at the moment, as when its queue is full, has the request handled again a second later. A caller that has gone is
    not an error.

    Args:
        handler: see :data:`Handler`.
        at_once: requests that are handled at the same time, 1 to 65,535.
        allow: patterns of the queues that replies may go to, such as ``prices.replies.*``. The server replies with its
            own permissions, also to a queue that the caller may not write to. Direct reply-to is always allowed.

    Raises:
        InvalidInputError: a pattern or ``at_once`` cannot be used.
        TargetNotFoundError: the queue does not exist.
        ConsumerCancelledError: the queue was deleted.
        BrokerError: the broker refuses.
    """
    whole_number("at_once", at_once, 1, 65_535)
    allowed = AllowedTargets.of((*allow, f"{DIRECT_REPLY_TO}*") if not isinstance(allow, str) else allow)
    under_way: set[asyncio.Task[None]] = set()
    async with client.consume(queue, prefetch=at_once) as requests:
        try:
            async for request in requests:
                task = asyncio.create_task(_answer(client, request, handler, allowed))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
        finally:
            # What they have not acknowledged goes back with the consumer, to another server.
            for task in under_way:
                task.cancel()
            if under_way:
                await asyncio.wait(under_way)


async def _answer(client: Client, request: Message, handler: Handler, allowed: AllowedTargets) -> None:
    result, failure = await outcome_apart(handler, request)
    headers = {}
    if failure is not None:
        reason = f"{type(failure).__name__}: {ExceptionText.of(failure).message}"
        log.warning("the request %s failed: %s", request.correlation_id, reason, exc_info=failure)
        headers = {ERROR_HEADER: " ".join(reason.split())[:_LONGEST_ERROR]}
    try:
        replied = bool(request.reply_to) and await _reply(client, request, result, headers, allowed)
        await (request.reject() if headers and not replied else request.ack())
    except DeliveryLostError as error:
        log.info("the request %s comes again: %s", request.correlation_id, error)
    except BideError as error:
        log.warning("the request %s cannot be answered, and goes back: %s", request.correlation_id, error)
        if not request.settled:
            await _give_back(request)


async def _give_back(request: Message) -> None:
    await asyncio.sleep(_PAUSE)
    try:
        await request.requeue()
    except DeliveryLostError as error:
        log.info("the request %s comes again: %s", request.correlation_id, error)


async def _reply(
    client: Client, request: Message, result: Any, headers: dict[str, str], allowed: AllowedTargets
) -> bool:
    """Send a reply, and tell whether there is anything to send it to."""
    try:
        allowed.check(QueueTarget(request.reply_to or ""))
        try:
            await _send(client, request, result, headers)
        except InvalidInputError as error:
            # Most likely what the handler returned cannot be sent. Another server would do no better.
            await _send(client, request, None, {ERROR_HEADER: str(error)[:_LONGEST_ERROR]})
            log.warning("the request %s failed: %s", request.correlation_id, error)
    except (InvalidInputError, AccessRefusedError) as error:
        # Handled again, it would not be answered either.
        log.warning("the request %s can have no reply: %s", request.correlation_id, error)
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
        log.info("the caller of %s has gone: its reply is dropped", request.correlation_id)
