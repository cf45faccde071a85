"""Recognition of delay queues and of the schedule log by names, arguments and messages.

A message that is taken out of such a queue and put back waits again, and a copy of it arrives early. Commands that read
queues therefore have to recognise delay queues of any program and prefix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, Literal

from bide.delay.cascade_keys import LEVELS as CASCADE_LEVELS
from bide.delay.clock_digits import LEVELS
from bide.delay.waiting_hall import HEADER_REST
from bide.errors import DelayQueueError

Part = Literal["waiting", "release", "relay", "passage", "schedule", "undeliverable"]
"""The role of a queue in a delay infrastructure, or in the schedule log."""

_BASE: Final = r".+\.v[0-9]+"
_HALL: Final = r".+\.hall(?:-[0-9]+ms)?\.v[0-9]+"
_CASCADE_LEVEL: Final = r"nsb(?:\.v[0-9]+)?\.delay-level-[0-9]{2}|(?:.+_)?celery_delayed_[0-9]{1,2}"

_DIGIT_QUEUE: Final = re.compile(rf"{_BASE}\.([edhmsc])([1-9][0-9]?)(?:/[0-9]+)?", re.DOTALL)
_HIGHEST_DIGIT: Final = {level.letter: level.highest for level in LEVELS}

_NAMES: Final[Mapping[Part, str]] = {
    "waiting": rf"{_CASCADE_LEVEL}|{_HALL}\.(?:level|meditating)-[0-9]{{2}}",
    "release": rf"{_BASE}\.release\.[qxk][:#].*|bide\.release\.(?:nsb(?:\.v[0-9]+)?|(?:.+_)?celery):.*",
    "relay": rf"{_HALL}\.(?:receiving|distributing)",
    "passage": r"bide\.tap\..+\.passage",
    "schedule": rf"{_BASE}\.schedule\.[0-9]+(?:\.(?:queries|room))?",
    "undeliverable": rf"{_BASE}(?:\.schedule)?\.undeliverable"
    r"|bide\.undeliverable\.(?:nsb(?:\.v[0-9]+)?|(?:.+_)?celery)",
}

_LOG_ARGUMENTS: Final = frozenset({"x-message-ttl", "x-max-length"})
"""Arguments of the queues beside a stream of the schedule log."""

_LOG_EXCHANGE: Final = re.compile(rf"{_BASE}\.schedule(?:\.gates)?", re.DOTALL)

_EXCHANGE_AFTER_LEVEL: Final = re.compile(
    rf"{_BASE}\.(?:[dhmsc]|released)|{_HALL}\.(?:check-in|level-[0-9]{{2}})|{_CASCADE_LEVEL}"
    r"|nsb(?:\.v[0-9]+)?\.delay-delivery|(?:.+_)?celery_delayed_delivery",
    re.DOTALL,
)
"""Exchanges that the queue of a level dead-letters to."""

_CLOCK_LEVEL_NAME: Final = re.compile(rf"{_BASE}\.(?:in\.)?[edhmsc]", re.DOTALL)
_CLOCK_ENTRY_EXCHANGE: Final = re.compile(rf"{_BASE}\.in\.[edhmsc]", re.DOTALL)
_CASCADE_LEVEL_NAME: Final = re.compile(_CASCADE_LEVEL, re.DOTALL)
_HALL_LEVEL_NAME: Final = re.compile(rf"{_HALL}\.(?:check-in|meditating-[0-9]{{2}}|level-[0-9]{{2}})", re.DOTALL)
_DIGIT_KEY: Final = re.compile(r"(?:~\.)*~([edhmsc][1-9][0-9]?(?:/[0-9]+)?)", re.DOTALL)
_BINARY_KEY: Final = re.compile(rf"((?:[01]\.){{{CASCADE_LEVELS}}})")

_INFRASTRUCTURE: Final = "a delay infrastructure"
_WHOLE: Final[Mapping[Part, str]] = {"schedule": "the schedule log"}

_ADVICE: Final[Mapping[Part, str]] = {
    "waiting": "messages wait there until they are due, and leave by themselves. bide.admin.verify.verify(...) counts "
    "them, and bide.admin.taps.turn_on(...) records what is scheduled",
    "release": "messages pass through it to their target, and wait only while the target refuses them: fix the target",
    "relay": "bide.Relay(allow=[...]) consumes its messages: run a relay",
    "passage": "messages pass through it to the stream of a tap, which bide.pipelines.audit.run.run(...) reads",
    "schedule": "only gates read the schedule log. Client.list_scheduled(...) shows what waits in it",
    "undeliverable": "its messages may not be due yet. bide.error_queues.undeliverable.resend(allow=[...]) sends them "
    "to their targets, and keeps the rest of their delay",
}


def refuse(queue: str, arguments: Mapping[str, Any] | None = None, *, sends: bool = False) -> None:
    """Refuse to read or copy the messages of a delay queue.

    The undeliverable queue may be read, because messages do not wait there.

    Args:
        queue: its name.
        arguments: the arguments that it was declared with, or None if they are not known.
        sends: whether its messages are to be sent to their targets.

    Raises:
        DelayQueueError: the queue belongs to a delay infrastructure.
    """
    part = part_of(queue, arguments)
    if part is not None and (sends or part != "undeliverable"):
        raise refusal(queue, part)


def refuse_target(queue: str, arguments: Mapping[str, Any] | None = None) -> None:
    """Refuse to send messages to a delay queue.

    Args:
        queue: its name.
        arguments: the arguments that it was declared with, or None if they are not known.

    Raises:
        DelayQueueError: the queue belongs to a delay infrastructure. A message sent there has no keys for a target.
    """
    part = part_of(queue, arguments)
    if part is not None:
        raise DelayQueueError(
            f"the queue {queue!r} belongs to {_WHOLE.get(part, _INFRASTRUCTURE)}: a message that is sent there "
            "directly has no target. Name a queue that a consumer reads"
        )


def refuse_target_exchange(exchange: str) -> None:
    """Refuse to send messages of others to the schedule log.

    Raises:
        DelayQueueError: the exchange belongs to the schedule log. A message there changes schedules, or counts as a
            record of a gate, although its sender may have no permission to write there.
    """
    if _LOG_EXCHANGE.fullmatch(exchange):
        raise DelayQueueError(
            f"the exchange {exchange!r} belongs to {_WHOLE['schedule']}: only clients and gates publish there, with "
            "their own permissions. Name another exchange instead"
        )


def refusal(queue: str, part: Part) -> DelayQueueError:
    """The error for an operation on a queue of a delay infrastructure."""
    return DelayQueueError(
        f"the queue {queue!r} belongs to {_WHOLE.get(part, _INFRASTRUCTURE)}: {_ADVICE[part]}. Name another queue "
        "instead"
    )


def part_of(queue: str, arguments: Mapping[str, Any] | None = None) -> Part | None:
    """The role of a queue in a delay infrastructure of any layout and prefix; None for any other queue.

    Args:
        queue: its name.
        arguments: the arguments that it was declared with, or None if they are not known. They identify a level's queue
            with another name, and another system's queue with a matching name, such as ``backup.v1.s3``.
    """
    named = _by_name(queue)
    if arguments is None or named == "undeliverable":
        return named
    behind = arguments.get("x-dead-letter-exchange")
    if named is not None:
        if named == "schedule":
            is_one = arguments.get("x-queue-type") == "stream" or not _LOG_ARGUMENTS.isdisjoint(arguments)
        else:
            is_one = behind is not None and (named == "relay" or "x-message-ttl" in arguments)
        return named if is_one else None
    leads_on = isinstance(behind, str) and _EXCHANGE_AFTER_LEVEL.fullmatch(behind) is not None
    return "waiting" if leads_on and "x-message-ttl" in arguments else None


@lru_cache(maxsize=1024)
def _by_name(queue: str) -> Part | None:
    digit = _DIGIT_QUEUE.fullmatch(queue)
    if digit is not None and int(digit[2]) <= _HIGHEST_DIGIT[digit[1]]:
        return "waiting"
    return next((part for part, names in _NAMES.items() if re.fullmatch(names, queue, re.DOTALL)), None)


def is_waiting(exchange: str, routing_key: str, headers: Mapping[str, Any]) -> bool:
    """Whether a delivered message still has to wait in some of the queues that its keys name.

    A message at its target still has its keys, so they are compared with the queues in which it died.

    Args:
        exchange: the exchange of the delivery; an exchange of the levels if the message waits.
        routing_key: the routing key of the delivery.
        headers: all headers, including the broker's.
    """
    if _CLOCK_LEVEL_NAME.fullmatch(exchange):
        keys = (key for name in ("CC", "BCC") for key in _as_list(headers.get(name)) if isinstance(key, str))
        digits = {found[1] for key in keys if (found := _DIGIT_KEY.fullmatch(key))}
        if digits:
            return bool(digits - {name.rpartition(".")[2] for name in _queues_died_in(headers)})
        # The broker removes BCC keys. A message that comes from an entry exchange has to wait at that level.
        return _CLOCK_ENTRY_EXCHANGE.fullmatch(exchange) is not None and not any(
            _DIGIT_QUEUE.fullmatch(one) for one in _queues_died_in(headers)
        )
    if _CASCADE_LEVEL_NAME.fullmatch(exchange):
        found = _BINARY_KEY.match(routing_key)
        passed = {name for name in _queues_died_in(headers) if _CASCADE_LEVEL_NAME.fullmatch(name)}
        return found is not None and found[1].count("1") > len(passed)
    return _HALL_LEVEL_NAME.fullmatch(exchange) is not None and HEADER_REST in headers


def _queues_died_in(headers: Mapping[str, Any]) -> set[str]:
    deaths = (one for one in _as_list(headers.get("x-death")) if isinstance(one, Mapping))
    return {queue for one in deaths if isinstance(queue := one.get("queue"), str)}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
