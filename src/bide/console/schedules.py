"""Views of schedules: list, details, changes of one or of many."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from bide.client.schedule_result import FilterResult, ScheduleOutcome, ScheduleResult, ScheduleView
from bide.console.gates import count_led_partitions
from bide.console.parameters import Parameters
from bide.console.values import body_of, iso, json_value
from bide.console.vhost import ConsoleVhost
from bide.console.waiting import filter_of
from bide.durations import from_milliseconds, parse_due_time, to_milliseconds
from bide.errors import BideError, InvalidInputError, NoGateAnswerError, NotFoundError
from bide.schedules.entries import WaitingSchedule
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import check_key, partition_of
from bide.schedules.questions import KeyQuestion
from bide.schedules.records import Action, AddSchedule
from bide.schedules.recurrence import Recurrence

_PAGE_ROWS: Final = 50
"""The maximum number of schedules on a page of the list."""

_RUNS: Final = 5
"""The number of next runs in the details of a schedule."""

_LISTED_RUNS: Final = 3
"""The number of next runs of each schedule in the list."""

_NEVER: Final = 253_402_300_799_000
"""The end of the year 9999, in milliseconds since the Unix epoch: no gate reaches this due time."""

_ACTIONS: Final[dict[str, Action]] = {
    "cancel": "cancel",
    "move": "move",
    "pause": "pause",
    "resume": "resume",
    "run": "run-now",
}


async def listing(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """A page of schedules in the order of keys, and the number of all that match, unless only recurring ones do."""
    gates = await count_led_partitions(vhost)
    if not gates["ok"]:
        return {"gates": gates}
    chosen, is_recurring = filter_of(parameters), parameters.flag("recurring")
    found: list[dict[str, Any]] = []
    has_more = False
    async with aclosing(
        vhost.schedules.entries(chosen, after=parameters.text("after"), is_recurring=is_recurring)
    ) as entries:
        async for one in entries:
            if len(found) == _PAGE_ROWS:
                has_more = True
                break
            found.append(_values(ScheduleView.of(one, (), with_message=False), runs=_LISTED_RUNS))
    count = None if is_recurring else await vhost.schedules.count(chosen)
    return {"gates": gates, "schedules": found, "count": count, "after": found[-1]["key"] if has_more else None}


async def count(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """The number of schedules that match, and of the paused ones among them.

    The second number is None if the gates are of an earlier release, which cannot count paused schedules.
    """
    chosen = filter_of(parameters)
    count, paused = await asyncio.gather(
        vhost.schedules.count(chosen), vhost.schedules.count(chosen, is_paused=True), return_exceptions=True
    )
    if isinstance(count, BaseException):
        raise count
    if isinstance(paused, BaseException) and not isinstance(paused, NoGateAnswerError):
        raise paused
    return {"count": count, "paused": None if isinstance(paused, NoGateAnswerError) else paused}


async def details(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """Everything that is known about the schedule of a key.

    Raises:
        NotFoundError: nothing waits.
    """
    key = parameters.required("key")
    found = await vhost.client.scheduled(key)
    if found is None:
        raise NotFoundError(f"nothing waits under the key {key!r}")
    return {
        **_values(found, runs=_RUNS),
        "under_way": list(found.under_way),
        "recurrence": json_value(found.recurrence),
        "headers": json_value(found.headers),
        "properties": {name: json_value(value) for name, value in found.properties.items() if name != "headers"},
        "body": body_of(found.body or b""),
        "partition": partition_of(key),
    }


async def change(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """Cancel, move, pause, resume or run the schedule of a key, if it still has the version that the page showed."""
    action, key = _action(parameters), check_key(parameters.required("key"))
    times = _times(parameters) if action == "move" else {}
    details = {"key": key, **times}
    queue = vhost.schedules.requests.names.operations
    async with vhost.recorded(f"{action} schedule", queue, parameters.operator, details) as record:
        result = await vhost.schedules.change(action, key, if_version=parameters.text("version"), **times)
        record |= _result(result)
    return _result(result)


async def change_all(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """Cancel, move, pause, resume or run all schedules that match. At least one condition, or ``all``, is needed."""
    action, chosen = _action(parameters), filter_of(parameters)
    given = {
        name: parameters.text(name)
        for name in ("prefix", "to", "exchange", "due_from", "due_before")
        if parameters.text(name) is not None
    }
    if not given and not parameters.flag("all"):
        raise InvalidInputError("no condition was given: choose some schedules, or all of them")
    times = _times(parameters) if action == "move" else {}
    queue = vhost.schedules.requests.names.operations
    async with vhost.recorded(
        f"{action} schedules", queue, parameters.operator, {"selection": given, **times}
    ) as record:
        if action == "move":
            result = await vhost.schedules.move_all(
                chosen, delay=times.get("delay"), deliver_at=times.get("deliver_at")
            )
        else:
            result = await vhost.schedules.change_all(action, chosen)
        record |= _filter_result(result)
    return _filter_result(result)


async def edit(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """Store a schedule again with another body or rule. Properties, headers and target stay as they are."""
    key, version = check_key(parameters.required("key")), parameters.required("version")
    body, every = parameters.values.get("body"), parameters.text("every")
    if body is not None and not isinstance(body, str):
        raise InvalidInputError(f"body is of the type {type(body).__name__}: give a string")
    if body is None and every is None:
        raise InvalidInputError("nothing would change: give another body or another rule")
    answer = await vhost.schedules.requests.ask(partition_of(key), f"the question for {key!r}", KeyQuestion(key=key))
    found = next(iter(answer.waiting), None)
    if found is None:
        raise NotFoundError(f"nothing waits under the key {key!r}")
    new = _edited(vhost, found, body, every, parameters.text("time_zone"))
    queue = vhost.schedules.requests.names.operations
    given = {"key": key, "every": every, "body": body is not None}
    async with vhost.recorded("edit schedule", queue, parameters.operator, given) as record:
        outcome, version_now = await _store(vhost, found, new, version)
        record |= {"outcome": outcome, "version": version_now}
    return {"key": key, "outcome": outcome, "version": version_now}


def _edited(
    vhost: ConsoleVhost, found: WaitingSchedule, body: str | None, every: str | None, time_zone: str | None
) -> WaitingSchedule:
    """The schedule with another body, another rule, or both. The first run of another rule is after now."""
    if body is not None:
        found = replace(found, message=ScheduledMessage(found.message.properties, body.encode()))
    if every is None:
        return found
    if found.recurrence is None:
        raise InvalidInputError("this schedule is a single message: move it to another time instead")
    now = vhost.client.now()
    old = Recurrence.parse(found.recurrence)
    rule = replace(
        Recurrence.of(every, now=now, time_zone=time_zone), last=old.last, jitter=old.jitter, catch_up=old.catch_up
    )
    nominal = rule.after(to_milliseconds(now))
    if nominal is None:
        raise InvalidInputError(f"the rule {every!r} has no run before this schedule ends: give another rule")
    return replace(found, recurrence=rule.spec(), nominal=nominal, due=nominal)


async def _store(
    vhost: ConsoleVhost, old: WaitingSchedule, new: WaitingSchedule, version: str
) -> tuple[str, str | None]:
    """Replace a schedule if it has this version; returns the outcome and the version that waits.

    A schedule that is stored is not paused. Therefore the replacement of a paused schedule is stored with a due time
    that no gate reaches, then paused, then moved to its due time.
    """
    has_new_rule = new.recurrence is not old.recurrence

    def record(request: Any) -> AddSchedule:
        due = new.due
        if has_new_rule and new.recurrence is not None:
            due = Recurrence.parse(new.recurrence).due(str(request), new.nominal)
        return AddSchedule(
            request=request,
            key=new.key,
            target=new.target,
            routing_key=new.routing_key,
            nominal=new.nominal,
            due=_NEVER if old.is_paused else due,
            recurrence=new.recurrence,
            if_version=version,
            message=new.message,
        )

    _, answer = await vhost.schedules.requests.append(
        partition_of(new.key), f"editing {new.key!r}", record, needs_answer=True
    )
    assert answer is not None
    if answer.outcome != "scheduled" or not old.is_paused:
        return answer.outcome, answer.version
    paused = await vhost.schedules.change("pause", new.key, if_version=answer.version)
    if paused.outcome is not ScheduleOutcome.PAUSED:
        return paused.outcome.value, paused.version
    due = from_milliseconds(new.due)
    assert due is not None
    moved = await vhost.schedules.change("move", new.key, if_version=paused.version, deliver_at=due)
    return "scheduled" if moved.outcome is ScheduleOutcome.MOVED else moved.outcome.value, moved.version


def _action(parameters: Parameters) -> Action:
    name = parameters.required("action")
    if name not in _ACTIONS:
        raise InvalidInputError(f"the action {name!r} is unknown: give one of {', '.join(_ACTIONS)}")
    return _ACTIONS[name]


def _times(parameters: Parameters) -> dict[str, str]:
    """The new time: either a delay or a due time."""
    given = {name: value for name in ("delay", "deliver_at") if (value := parameters.text(name)) is not None}
    if len(given) != 1:
        raise InvalidInputError("one new time is needed: give either a delay such as 2h, or a due time")
    if "deliver_at" in given:
        parse_due_time(given["deliver_at"])
    return given


def _result(result: ScheduleResult) -> dict[str, Any]:
    return {"key": result.key, "outcome": result.outcome.value, "version": result.version}


def _filter_result(result: FilterResult) -> dict[str, Any]:
    return {"outcome": result.outcome.value, "count": result.count, "forgotten": list(result.forgotten)}


def _values(one: ScheduleView, *, runs: int) -> dict[str, Any]:
    next_runs: list[str] = []
    why = ""
    if one.every is not None:
        try:
            next_runs = [iso(run) for run in one.next_runs(runs)]
        except BideError as error:
            why = str(error)
    return {
        "key": one.key,
        "id": one.id,
        "version": one.version,
        "state": one.state,
        "due": iso(one.due_time),
        "to": one.to,
        "exchange": one.exchange,
        "routing_key": one.routing_key,
        "every": one.every,
        "time_zone": one.time_zone,
        "next_runs": next_runs,
        "next_runs_why": why,
    }
