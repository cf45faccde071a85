"""Views of failed messages: queues, groups, messages, and operations on them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from datetime import datetime
from typing import Any, Final

from bide.console.asked import Asked
from bide.console.operations import RunningOperation
from bide.console.site import Site
from bide.console.values import body_of, iso, plain
from bide.delay.recognition import part_of
from bide.durations import parse_delay
from bide.error_queues import ErrorQueue, FailedMessage, OperationResult, Selection
from bide.error_queues.grouping import By, Groups
from bide.errors import BideError, InvalidInputError, ManagementApiError
from bide.management.api import FoundQueue
from bide.runtime.wording import quantity

_LISTED: Final = 100
_GROUPS: Final = 200
_LIKELY: Final = re.compile(r"error|dead|dlq|dlx|poison|fail|undeliverable|parked", re.IGNORECASE)
_BY: Final[Mapping[str, By]] = {"exception": "exception", "type": "type", "key": "key"}
_CONDITIONS: Final = ("group", "endpoint", "exception", "text", "body_text", "message_type", "key", "reason")


async def queues(site: Site, asked: Asked) -> dict[str, Any]:
    """Queues that may hold failed messages, the likely ones first, with their numbers of messages."""
    try:
        found = await site.api.queues(site.name, "")
    except ManagementApiError as error:
        return {"queues": [], "why": asked.advise(str(error))}
    listed = [one for one in found if _is_candidate(one)]
    listed.sort(key=lambda one: (not is_likely(one), -(one.messages or 0), one.queue.name))
    rows = [
        {"name": one.queue.name, "messages": one.messages, "is_likely": is_likely(one), "part": part_of(one.queue.name)}
        for one in listed
    ]
    return {"queues": rows, "why": ""}


def _is_candidate(found: FoundQueue) -> bool:
    if found.type == "stream" or found.queue.exclusive:
        return False
    return part_of(found.queue.name, found.queue.arguments) in (None, "undeliverable")


def is_likely(found: FoundQueue) -> bool:
    return _LIKELY.search(found.queue.name) is not None


async def groups(site: Site, asked: Asked) -> dict[str, Any]:
    """The failed messages of a queue in groups, the largest first."""
    by = _BY.get(asked.text("by") or "exception")
    if by is None:
        raise InvalidInputError("failed messages are grouped by exception, type or key")
    found, selection, now = Groups(by), selection_of(asked), site.client.now()
    total = 0
    async with aclosing(_queue(site, asked).messages()) as messages:
        async for message in messages:
            total += 1
            if selection.holds(message, now):
                found.add(message)
    listed = found.largest_first()
    rows = [one.to_dict() for one in listed[:_GROUPS]]
    return {"groups": rows, "more": max(len(listed) - _GROUPS, 0), "total": total}


async def messages(site: Site, asked: Asked) -> dict[str, Any]:
    """The first messages that match."""
    rows: list[dict[str, Any]] = []
    has_more = False
    async with aclosing(_queue(site, asked).messages(selection_of(asked))) as found:
        async for one in found:
            if len(rows) == _LISTED:
                has_more = True
                break
            rows.append(_summary(one))
    return {"messages": rows, "has_more": has_more}


async def details(site: Site, asked: Asked) -> dict[str, Any]:
    """Everything that is known about a message."""
    return whole(await _queue(site, asked).get(asked.required("id")))


async def count(site: Site, asked: Asked) -> dict[str, Any]:
    """The number of messages that match, and the queues that a retry would send them to."""
    summary = await _queue(site, asked).summary(selection_of(asked))
    return {"count": summary.total, "queues": dict(summary.by["queue"].most_common(20))}


async def retry(site: Site, asked: Asked) -> dict[str, Any]:
    """Begin to send messages back to the queues that they failed on, evenly spread over a time if one is given."""
    over, to, allow = _over(asked), asked.text("to"), asked.texts("allow")

    async def act(queue: ErrorQueue, selection: Selection, running: RunningOperation) -> OperationResult:
        return await queue.retry(selection, to=to, over=over, allow=allow or None, progress=running.progress)

    return _start(site, asked, "retry", act)


async def discard(site: Site, asked: Asked) -> dict[str, Any]:
    """Begin to delete messages, evenly spread over a time if one is given."""
    over = _over(asked)

    async def act(queue: ErrorQueue, selection: Selection, running: RunningOperation) -> OperationResult:
        return await queue.discard(selection, over=over, progress=running.progress)

    return _start(site, asked, "discard", act)


async def archive(site: Site, asked: Asked) -> dict[str, Any]:
    """Begin to move messages to the archive of the queue, evenly spread over a time if one is given."""
    over, keep = _over(asked), asked.text("keep") or "30d"
    parse_delay(keep)

    async def act(queue: ErrorQueue, selection: Selection, running: RunningOperation) -> OperationResult:
        return await queue.archive(selection, keep=keep, over=over, progress=running.progress)

    return _start(site, asked, "archive", act)


async def edit(site: Site, asked: Asked) -> dict[str, Any]:
    """Send one message back with another body or other headers."""
    body, headers = asked.values.get("body"), asked.values.get("headers") or {}
    if body is not None and not isinstance(body, str):
        raise InvalidInputError("the body is not text")
    if not isinstance(headers, dict) or not all(isinstance(one, str) for one in headers.values()):
        raise InvalidInputError("the headers are not texts")
    message_id = await _queue(site, asked).edit(
        asked.required("id"),
        body=None if body is None else body.encode(),
        headers=headers,
        without=frozenset(asked.texts("without")),
        to=asked.text("to"),
    )
    return {"message_id": message_id}


async def operations(site: Site, _: Asked) -> dict[str, Any]:
    """The operations since the console started, the latest first."""
    return {"operations": [one.to_dict() for one in site.operations.list()]}


async def stop(site: Site, asked: Asked) -> dict[str, Any]:
    """Stop an operation. What was processed stays processed, and the rest stays in the queue."""
    return (await site.operations.stop(asked.required("id"))).to_dict()


def selection_of(asked: Asked) -> Selection:
    """The conditions in a request.

    Raises:
        InvalidInputError: a condition is invalid.
    """
    given: dict[str, Any] = {name: value for name in _CONDITIONS if (value := asked.text(name)) is not None}
    return Selection(ids=frozenset(asked.texts("ids")), queue=asked.text("failed_on"), **given)


def _over(asked: Asked) -> str | None:
    """The time over which messages are spread; None for all at once.

    Raises:
        InvalidInputError: it is not a delay.
    """
    over = asked.text("over")
    if over is not None:
        parse_delay(over)
    return over


_Act = Callable[[ErrorQueue, Selection, RunningOperation], Awaitable[OperationResult]]


def _start(site: Site, asked: Asked, name: str, act: _Act) -> dict[str, Any]:
    queue, selection = _queue(site, asked), selection_of(asked)
    if selection.everything and not asked.flag("all"):
        raise InvalidInputError("no condition was given: choose some messages, or all of them")

    async def work(running: RunningOperation) -> dict[str, Any]:
        try:
            return (await act(queue, selection, running)).to_dict()
        except (asyncio.CancelledError, BideError):
            if queue.interrupted is not None:
                running.result = queue.interrupted.to_dict()
            raise

    return site.operations.start(name, queue.queue, _text(selection, _over(asked)), work).to_dict()


def _text(selection: Selection, over: str | None) -> str:
    """The conditions and the pace for people."""
    given = selection.to_dict()
    if ids := given.pop("ids", None):
        given["messages"] = ids[0] if len(ids) == 1 else quantity(len(ids), "message")
    chosen = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in given.items()) or "all messages"
    return chosen if over is None else f"{chosen}, over {over}"


def _queue(site: Site, asked: Asked) -> ErrorQueue:
    return site.error_queue(asked.text("queue") or "error", asked.operator)


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


def whole(one: FailedMessage) -> dict[str, Any]:
    """Everything that is known about a failed message."""
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
        "deaths": plain(one.deaths),
        "headers": plain(one.headers),
        "properties": {name: plain(value) for name, value in one.values.items() if name != "headers"},
        "body": body_of(one.body),
    }


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else iso(moment)
