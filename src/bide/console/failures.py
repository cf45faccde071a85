"""Views of failed messages: queues, groups, messages, and operations on them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext
from datetime import datetime
from typing import Any, Final

from bide.console.operations import BackgroundOperation
from bide.console.parameters import Parameters
from bide.console.values import body_of, iso, json_value
from bide.console.vhost import ConsoleVhost
from bide.delay.recognition import part_of
from bide.durations import parse_delay
from bide.error_queues import ErrorQueue, FailedMessage, OperationResult, Selection
from bide.error_queues.grouping import By, Groups
from bide.errors import BideError, InvalidInputError, ManagementApiError
from bide.management.api import FoundQueue
from bide.runtime.wording import quantity

_MAX_LISTED: Final = 100
"""The maximum number of messages in a list."""

_MAX_GROUPS: Final = 200
"""The maximum number of groups in a list."""

_LIKELY_NAME: Final = re.compile(r"error|dead|dlq|dlx|poison|fail|undeliverable|parked", re.IGNORECASE)
"""Matches names that error queues and dead-letter queues often have."""

_BY: Final[Mapping[str, By]] = {"exception": "exception", "type": "type", "key": "key"}
_CONDITIONS: Final = ("group", "endpoint", "exception", "text", "body_text", "message_type", "key", "reason")


async def queues(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """Queues that may hold failed messages, with their numbers of messages. Queues with a likely name come first."""
    try:
        found = await vhost.api.queues(vhost.name, "")
    except ManagementApiError as error:
        return {"queues": [], "why": parameters.advise(str(error))}
    listed = [one for one in found if _is_candidate(one)]
    listed.sort(key=lambda one: (not has_likely_name(one), -(one.messages or 0), one.queue.name))
    rows = [
        {
            "name": one.queue.name,
            "messages": one.messages,
            "is_likely": has_likely_name(one),
            "part": part_of(one.queue.name),
        }
        for one in listed
    ]
    return {"queues": rows, "why": ""}


def _is_candidate(found: FoundQueue) -> bool:
    if found.type == "stream" or found.queue.exclusive:
        return False
    return part_of(found.queue.name, found.queue.arguments) in (None, "undeliverable")


def has_likely_name(found: FoundQueue) -> bool:
    return _LIKELY_NAME.search(found.queue.name) is not None


async def groups(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """The failed messages of a queue in groups, the largest first."""
    by = _BY.get(parameters.text("by") or "exception")
    if by is None:
        raise InvalidInputError(f"by is {parameters.text('by')!r}: give exception, type or key")
    found, selection, now = Groups(by), selection_of(parameters), vhost.client.now()
    total = 0
    async with _reading(vhost, parameters) as queue, aclosing(queue.messages()) as messages:
        async for message in messages:
            total += 1
            if selection.holds(message, now):
                found.add(message)
    listed = found.largest_first()
    rows = [one.to_dict() for one in listed[:_MAX_GROUPS]]
    return {"groups": rows, "more": max(len(listed) - _MAX_GROUPS, 0), "total": total}


async def messages(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """The first messages that match."""
    rows: list[dict[str, Any]] = []
    has_more = False
    selection = selection_of(parameters)
    async with _reading(vhost, parameters) as queue, aclosing(queue.messages(selection)) as found:
        async for one in found:
            if len(rows) == _MAX_LISTED:
                has_more = True
                break
            rows.append(_summary(one))
    return {"messages": rows, "has_more": has_more}


async def details(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """Everything that is known about one message."""
    async with _reading(vhost, parameters) as queue:
        return values_of(await queue.get(parameters.required("id")))


async def count(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """The number of messages that match, and of those that a retry would send to each of the 20 largest queues."""
    async with _reading(vhost, parameters) as queue:
        summary = await queue.summary(selection_of(parameters))
    return {"count": summary.total, "queues": dict(summary.by["queue"].most_common(20))}


async def retry(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """Start to send messages back to the queues where they failed, at once or evenly spread over a time."""
    over, to, allow = _over(parameters), parameters.text("to"), parameters.texts("allow")

    async def act(queue: ErrorQueue, selection: Selection, running: BackgroundOperation) -> OperationResult:
        return await queue.retry(selection, to=to, over=over, allow=allow or None, progress=running.progress)

    return _start(vhost, parameters, "retry", act)


async def discard(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """Start to delete messages, at once or evenly spread over a time."""
    over = _over(parameters)

    async def act(queue: ErrorQueue, selection: Selection, running: BackgroundOperation) -> OperationResult:
        return await queue.discard(selection, over=over, progress=running.progress)

    return _start(vhost, parameters, "discard", act)


async def archive(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """Start to move messages to the archive of the queue, at once or evenly spread over a time."""
    over, keep = _over(parameters), parameters.text("keep") or "30d"
    parse_delay(keep)

    async def act(queue: ErrorQueue, selection: Selection, running: BackgroundOperation) -> OperationResult:
        return await queue.archive(selection, keep=keep, over=over, progress=running.progress)

    return _start(vhost, parameters, "archive", act)


async def edit(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """Send one message back with another body or other headers."""
    body, headers = parameters.values.get("body"), parameters.values.get("headers") or {}
    if body is not None and not isinstance(body, str):
        raise InvalidInputError(f"body is of the type {type(body).__name__}: give a string")
    if not isinstance(headers, dict) or not all(isinstance(one, str) for one in headers.values()):
        raise InvalidInputError("headers is not an object whose values are strings: give one")
    async with _reading(vhost, parameters) as queue:
        message_id = await queue.edit(
            parameters.required("id"),
            body=None if body is None else body.encode(),
            headers=headers,
            without=frozenset(parameters.texts("without")),
            to=parameters.text("to"),
        )
    return {"message_id": message_id}


async def operations(vhost: ConsoleVhost, _: Parameters) -> dict[str, Any]:
    """The operations that are running, and the latest ones that have ended."""
    return {"operations": [one.to_dict() for one in vhost.operations.list()]}


async def stop(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """Stop an operation. What was processed stays processed, and the rest stays in the queue."""
    return (await vhost.operations.stop(parameters.required("id"))).to_dict()


def selection_of(parameters: Parameters) -> Selection:
    """The conditions in a request.

    Raises:
        InvalidInputError: a condition is invalid.
    """
    given: dict[str, Any] = {name: value for name in _CONDITIONS if (value := parameters.text(name)) is not None}
    return Selection(ids=frozenset(parameters.texts("ids")), queue=parameters.text("failed_on"), **given)


def _over(parameters: Parameters) -> str | None:
    """The time over which messages are spread; None for all at once.

    Raises:
        InvalidInputError: it is not a delay.
    """
    over = parameters.text("over")
    if over is not None:
        parse_delay(over)
    return over


_Act = Callable[[ErrorQueue, Selection, BackgroundOperation], Awaitable[OperationResult]]


def _start(vhost: ConsoleVhost, parameters: Parameters, name: str, act: _Act) -> dict[str, Any]:
    queue, selection, over = _queue(vhost, parameters), selection_of(parameters), _over(parameters)
    if selection.everything and not parameters.flag("all"):
        raise InvalidInputError("no condition was given: choose some messages, or all of them")

    async def work(running: BackgroundOperation) -> dict[str, Any]:
        try:
            # Views do not wait for an operation at a pace, which can take hours.
            async with vhost.reading(queue.queue) if over is None else nullcontext():
                return (await act(queue, selection, running)).to_dict()
        except (asyncio.CancelledError, BideError):
            if queue.interrupted is not None:
                running.result = queue.interrupted.to_dict()
            raise

    return vhost.operations.start(name, queue.queue, _text(selection, over), work).to_dict()


def _text(selection: Selection, over: str | None) -> str:
    """The conditions and the pace as text, for the list of operations."""
    given = selection.to_dict()
    if ids := given.pop("ids", None):
        given["messages"] = ids[0] if len(ids) == 1 else quantity(len(ids), "message")
    chosen = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in given.items()) or "all messages"
    return chosen if over is None else f"{chosen}, over {over}"


def _queue(vhost: ConsoleVhost, parameters: Parameters) -> ErrorQueue:
    return vhost.error_queue(parameters.text("queue") or "error", parameters.operator)


@asynccontextmanager
async def _reading(vhost: ConsoleVhost, parameters: Parameters) -> AsyncIterator[ErrorQueue]:
    queue = _queue(vhost, parameters)
    async with vhost.reading(queue.queue):
        yield queue


def _summary(one: FailedMessage) -> dict[str, Any]:
    return {
        "id": one.id,
        "message_id": one.message_id,
        "type": one.message_type,
        "queue": one.queue,
        "reason": one.reason,
        "failed_at": _iso(one.failed_at),
        "exception": one.exception,
        "text": one.text,
        "group": one.group,
        "key": one.key,
        "size": len(one.body),
    }


def values_of(one: FailedMessage) -> dict[str, Any]:
    """Everything that is known about a failed message, as JSON values."""
    return {
        **_summary(one),
        "endpoint": one.endpoint,
        "stack": one.stack,
        "frame": one.frame,
        "inner_exception": one.inner_exception,
        "inner_text": one.inner_text,
        "host": one.host,
        "process": one.process,
        "sent_by": one.sent_by,
        "schedule_id": one.schedule_id,
        "exchange": one.exchange,
        "routing_key": one.routing_key,
        "deaths": json_value(one.deaths),
        "headers": json_value(one.headers),
        "properties": {name: json_value(value) for name, value in one.values.items() if name != "headers"},
        "body": body_of(one.body),
    }


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else iso(moment)
