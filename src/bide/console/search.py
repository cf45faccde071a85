"""View of one message, hop by hop: in the index of the gates, taps and error queues."""

from __future__ import annotations

from typing import Any, Final

from bide.console import failures, schedules
from bide.console.gates import count_led_partitions
from bide.console.parameters import Parameters
from bide.console.tap_records import TapRecord
from bide.console.taps import TAPS, TapIndexAnswer, ask_index
from bide.console.vhost import ConsoleVhost
from bide.delay.protocol import ExchangeTarget, QueueTarget, Target
from bide.durations import MILLISECOND, to_milliseconds
from bide.errors import BideError, InvalidInputError, ManagementApiError, NotFoundError, TargetNotFoundError
from bide.schedules.names import partition_of

_MAX_BROWSED: Final = 20_000
"""The maximum number of messages of a queue that is searched."""


async def find(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """Look for a key in the index of the gates, and for a message id in the streams of the taps and in error queues.

    The answer lists the places, and says for each of them whether it was searched.
    """
    text = parameters.required("text").strip()
    schedule, under_gate = await _schedule(vhost, text)
    tapped = await find_in_taps(vhost, parameters)
    failed, browsed = await _failed(vhost, text, parameters.operator)
    return {
        "text": text,
        "schedule": schedule,
        "failed": failed,
        **tapped,
        "places": [under_gate, *tapped["places"], *browsed],
    }


async def find_in_taps(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """Look for a message id in the streams of the taps. With ``older``, older messages are read first."""
    text, older = parameters.required("text").strip(), parameters.flag("older")
    scheduled, delivered = [
        await ask_index(vhost, which, lambda index, address: index.find(address, text), older=older) for which in TAPS
    ]
    sent, arrived = scheduled.answer, delivered.answer
    left = [one.older_count for one in (scheduled, delivered) if not one.is_full]
    return {
        "tap": None if sent is None and arrived is None else _tap_values(vhost, sent, arrived),
        "older": sum(left),
        "places": [_tap_place(scheduled), _tap_place(delivered)],
    }


async def _schedule(vhost: ConsoleVhost, key: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    place = f"the index of the gates, partition {partition_of(key)}"
    gates = await count_led_partitions(vhost)
    if not gates["ok"]:
        return None, _place(place, looked=False, note=gates["why"])
    try:
        found = await schedules.details(vhost, Parameters(values={"key": key}))
    except NotFoundError:
        return None, _place(place, looked=True, note="exact: nothing waits under this key")
    except InvalidInputError as error:
        return None, _place(place, looked=True, note=str(error))
    return found, _place(place, looked=True, note="exact", found=True)


async def _failed(vhost: ConsoleVhost, text: str, operator: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    try:
        listed = await vhost.api.queues(vhost.name, "")
        names = [
            one.queue.name for one in listed if failures.has_likely_name(one) and (one.messages or 0) <= _MAX_BROWSED
        ]
        places = [
            _place(
                f"queue {one.queue.name}",
                looked=False,
                note=f"it has {one.messages:,} messages, the limit is {_MAX_BROWSED:,}: "
                "search it with 'bide errors show'",
            )
            for one in listed
            if failures.has_likely_name(one) and (one.messages or 0) > _MAX_BROWSED
        ]
    except ManagementApiError as error:
        names, places = ["error"], [_place("other queues", looked=False, note=str(error))]
    found: list[dict[str, Any]] = []
    for name in names:
        try:
            async with vhost.reading(name):
                message = await vhost.error_queue(name, operator).get(text)
        except NotFoundError:
            places.append(_place(f"queue {name}", looked=True, note="exact: no message with this id"))
        except TargetNotFoundError:
            continue
        except BideError as error:
            places.append(_place(f"queue {name}", looked=False, note=str(error)))
        else:
            found.append({**failures.values_of(message), "in": name})
            places.append(_place(f"queue {name}", looked=True, note="exact", found=True))
    return found, places


def _tap_place(tap: TapIndexAnswer[TapRecord | None]) -> dict[str, Any]:
    if tap.why:
        return _place(f"stream {tap.stream}" if tap.stream else "taps", looked=False, note=tap.why)
    note = f"{tap.count:,} messages"
    if tap.older_count:
        note = f"the latest {note}; {tap.older_count:,} are older"
    return _place(f"stream {tap.stream}", looked=True, note=note, found=tap.answer is not None)


def _tap_values(vhost: ConsoleVhost, sent: TapRecord | None, arrived: TapRecord | None) -> dict[str, Any]:
    """The times at which the taps saw a message, and its hops in between, which are computed."""
    known = sent or arrived
    assert known is not None
    values: dict[str, Any] = {
        "message_id": known.message_id,
        "target": known.target,
        "due": known.due,
        "scheduled_at": None if sent is None else sent.stored_at,
        "delivered_at": None if arrived is None else arrived.stored_at,
        "hops": [],
    }
    if known.due is not None and known.sent is not None and (target := _target(known.target)) is not None:
        now = to_milliseconds(vhost.client.now())
        values["hops"] = _hops(
            vhost, max(known.due - known.sent, 0), target, known.sent, now, is_over=arrived is not None
        )
    return values


def _target(text: str | None) -> Target | None:
    kind, _, name = (text or "").partition(":")
    if not name or kind not in ("q", "x"):
        return None
    return QueueTarget(name) if kind == "q" else ExchangeTarget(name, "#")


def _hops(
    vhost: ConsoleVhost, delay: int, target: Target, sent: int, now: int, *, is_over: bool
) -> list[dict[str, Any]]:
    try:
        steps = vhost.infrastructure.steps(delay * MILLISECOND, target)
    except BideError:
        return []
    hops: list[dict[str, Any]] = []
    at = sent
    for one in steps:
        waits = one.dead_letter_to is not None
        length = one.delay // MILLISECOND if waits else 0
        is_here = not is_over and waits and at <= now < at + length
        hops.append({"exchange": one.exchange, "to": one.routed_to, "wait": length, "from": at, "is_here": is_here})
        at += length
    return hops


def _place(name: str, *, looked: bool, note: str, found: bool = False) -> dict[str, Any]:
    return {"place": name, "looked": looked, "note": note, "found": found}
