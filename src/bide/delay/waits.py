"""The wait of a message by its queue, keys and headers, for each family of layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from math import isfinite
from typing import Any, Final

from bide.delay.cascade_keys import queue_name
from bide.delay.clock_digits import LEVELS, RESOLUTION, Level
from bide.delay.forwarding import parse_target
from bide.delay.protocol import HEADER_PICK_UP_KEY, HEADER_TO, ExchangeTarget, QueueTarget, Target, Wait
from bide.delay.release import released_address
from bide.errors import InvalidInputError

_DIGIT_QUEUE: Final = re.compile(r"([edhmsc])([1-9][0-9]?)(?:/[0-9]+)?")
_DIGIT_KEY: Final = re.compile(r"(?:~\.)*~([edhmsc])([0-9]{1,2})((?:/[0-9]+)?)")
_TARGET_KEY: Final = re.compile(r"(?:~\.)*~([qrx]):(.+)", re.DOTALL)
_LEVELS: Final = {level.letter: level for level in LEVELS}
_LONGEST: Final = timedelta(days=36525)
"""The longest remaining wait of a waiting hall that is plausible."""


def cascade_wait(
    level_names: Sequence[str],
    queue: str,
    routing_key: str,
    *,
    unit: timedelta,
    target_of: Callable[[str], Target],
) -> Wait | None:
    """The wait in a binary cascade.

    Args:
        level_names: the queues of the levels, lowest first.
        unit: the wait of the lowest level.
        target_of: returns the target of an address that is not a word of bide's own.
    """
    if queue not in level_names:
        return None
    found = re.fullmatch(rf"((?:[01]\.){{{len(level_names)}}})(.*)", routing_key, re.DOTALL)
    if found is None:
        raise InvalidInputError(f"the routing key {routing_key!r} does not start with the digits of a delay")
    level, units = level_names.index(queue), int(found[1].replace(".", ""), 2)
    address = found[2]
    if (name := queue_name(address)) is not None:
        target: Target = QueueTarget(name)
    elif (onward := released_address(address)) is not None:
        exchange, key = onward
        target = ExchangeTarget(exchange, key) if exchange else QueueTarget(key, isolated=True)
    elif address:
        target = target_of(address)
    else:
        raise InvalidInputError(f"the routing key {routing_key!r} has no address after the digits of the delay")
    return _binary_wait(level_names, level, units, unit=unit, target=target)


def _binary_wait(
    level_names: Sequence[str], level: int, units: int, *, unit: timedelta, target: Target, owns_due: bool = False
) -> Wait:
    if not units >> level & 1:
        raise InvalidInputError(
            f"the routing key does not lead to the queue {level_names[level]!r}: its digit there is 0"
        )
    above = units >> level + 1
    below = unit * (units & (1 << level) - 1)
    # The lowest digit above this level that is 1.
    next_level = level + (above & -above).bit_length()
    previous = level_names[next_level] if above and next_level < len(level_names) else None
    return Wait(
        target=target,
        here=unit * (1 << level),
        least=below,
        most=below,
        whole=unit * units,
        previous=previous,
        owns_due=owns_due,
    )


def clock_wait(base: str, queue: str, routing_key: str, headers: Mapping[str, Any]) -> Wait | None:
    """The wait in a ``Clock``.

    Its digits are in the CC header. A broker of 4.0 or later removes a BCC header. The digits of the lower levels are
    then unknown, and their waits add up to less than one unit of this level.
    """
    found = _DIGIT_QUEUE.fullmatch(queue.removeprefix(f"{base}.")) if queue.startswith(f"{base}.") else None
    if found is None or int(found[2]) > _LEVELS[found[1]].highest:
        return None
    level, digit = _LEVELS[found[1]], int(found[2])
    given = headers.get("CC")
    keys = [one for one in given if isinstance(one, str)] if isinstance(given, list) else []
    digits = {one[1]: (int(one[2]), one[3]) for key in keys if (one := _DIGIT_KEY.fullmatch(key))}
    is_isolated = any((one := _TARGET_KEY.fullmatch(key)) and one[1] == "r" for key in keys)
    target = _named_target(headers, routing_key, is_isolated=is_isolated) or _keyed_target(keys, routing_key)
    if target is None:
        raise InvalidInputError(f"the message has no header {HEADER_TO}, and its keys name no target")
    here, wait = level.unit * digit, timedelta(0)
    if digits.get(level.letter, (0, ""))[0] != digit:
        return Wait(target=target, here=here, most=level.unit - RESOLUTION, owns_due=True)
    index = LEVELS.index(level)
    for below in LEVELS[index + 1 :]:
        wait += below.unit * digits.get(below.letter, (0, ""))[0]
    return Wait(
        target=target, here=here, least=wait, most=wait, previous=_digit_above(base, index, digits), owns_due=True
    )


def _digit_above(base: str, index: int, digits: Mapping[str, tuple[int, str]]) -> str | None:
    above: list[Level] = [one for one in LEVELS[:index] if digits.get(one.letter, (0, ""))[0]]
    if not above:
        return None
    digit, lane = digits[above[-1].letter]
    return f"{base}.{above[-1].letter}{digit}{lane}"


def hall_wait(
    level_names: Sequence[str],
    queue: str,
    routing_key: str,
    headers: Mapping[str, Any],
    *,
    unit: timedelta,
    meditating: str,
    relay_queues: Sequence[str],
    pick_up: str,
    rest_header: str,
) -> Wait | None:
    """The wait in a waiting hall.

    Messages in the relay's queues do not wait, except a message that has no due time yet: it waits for the time in its
    header ``x-delay``, counted from when it is taken, as with a relay.
    """
    if queue not in (*level_names, meditating, *relay_queues):
        return None
    own_key = headers.get(HEADER_PICK_UP_KEY, routing_key)
    if not isinstance(own_key, str):
        raise InvalidInputError(f"the header {HEADER_PICK_UP_KEY} is {own_key!r}: it must be a routing key")
    target = _named_target(headers, own_key) or ExchangeTarget(pick_up, own_key)
    if queue in level_names:
        if re.fullmatch(r"1(?:\.[01])*", routing_key) is None:
            raise InvalidInputError(f"the routing key {routing_key!r} is not the digits of a wait")
        units, level = int(routing_key.replace(".", ""), 2), level_names.index(queue)
        return _binary_wait(level_names, level, units, unit=unit, target=target, owns_due=True)
    if queue == meditating:
        here = unit * (1 << len(level_names) - 1)
        return Wait(target=target, here=here, most=_milliseconds(headers, rest_header), owns_due=True)
    waits = queue == relay_queues[0] and rest_header not in headers and "x-delay" in headers
    here = _milliseconds(headers, "x-delay") if waits else timedelta(0)
    return Wait(target=target, here=here, owns_due=not waits)


def _milliseconds(headers: Mapping[str, Any], name: str) -> timedelta:
    value = headers.get(name)
    try:
        number = float("nan" if isinstance(value, bool) or value is None else value)
    except (TypeError, ValueError):
        number = float("nan")
    if not isfinite(number) or number > _LONGEST / timedelta(milliseconds=1):
        raise InvalidInputError(f"the header {name} is {value!r}: it must be milliseconds, at most a hundred years")
    return timedelta(milliseconds=max(-int(-number // 1), 0))


def _named_target(headers: Mapping[str, Any], routing_key: str, *, is_isolated: bool = False) -> Target | None:
    """The target in the header ``bide-to``; None without the header."""
    text = headers.get(HEADER_TO)
    if text is None:
        return None
    target = parse_target(text, routing_key)
    return QueueTarget(target.queue, is_isolated) if isinstance(target, QueueTarget) else target


def _keyed_target(keys: Sequence[str], routing_key: str) -> Target | None:
    """The target that one of the keys of a ``Clock`` names; None if its name is only there as a hash."""
    for key in keys:
        if (found := _TARGET_KEY.fullmatch(key)) is None:
            continue
        if found[1] == "x":
            return ExchangeTarget(found[2].replace("%2E", ".").replace("%25", "%"), routing_key)
        return QueueTarget(found[2], isolated=found[1] == "r")
    return None
