"""Output of ``bide schedule``: schedules and results as text and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bide.cli.output import echo, in_local_time, print_json, print_json_line, text_or_base64
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from datetime import datetime

    from bide.client.schedule_result import FilterResult, Scheduled, ScheduleResult, ScheduleView

SHOWN_RUNS: Final = 5
"""The number of runs of a recurring schedule that ``show`` prints."""

_TEXTS: Final = {
    "scheduled": "scheduled",
    "moved": "moved",
    "paused": "paused",
    "resumed": "resumed",
    "running": "delivered now",
    "cancelled": "cancelled",
    "too-late": "too late: it is being delivered, or was delivered or set aside within the last hour",
    "not-found": "not found: nothing waits, and nothing was delivered or set aside within the last hour",
    "exists": "not scheduled: a schedule waits under this key",
    "changed": "nothing was done: the schedule has another version",
    "forgotten": "applied more than an hour ago; the result is no longer known",
}


def write_scheduled(made: Scheduled, *, as_json: bool) -> None:
    """Print the result of scheduling."""
    if as_json:
        due = None if made.due_time is None else _precise(made.due_time)
        values = {"key": made.key, "outcome": made.outcome.value, "id": made.id, "version": made.version, "due": due}
        print_json_line(values)
        return
    text = f"{made.key}: {_TEXTS[made.outcome.value]}"
    if made.due_time is not None:
        text += f", due {_local(made.due_time)}"
    echo(f"{text}, version {made.version}" if made.version is not None else text)


def write_result(result: ScheduleResult, *, as_json: bool) -> None:
    """Print the result of an operation on one schedule."""
    if as_json:
        values: dict[str, Any] = {
            "key": result.key,
            "outcome": result.outcome.value,
            "version": result.version,
            "under_way": list(result.under_way),
        }
        print_json_line(values)
        return
    text = f"{result.key}: {_TEXTS[result.outcome.value]}"
    if result.under_way and result.outcome.value != "running":
        text += f"; {len(result.under_way)} under way: {', '.join(result.under_way[:SHOWN_RUNS])}"
    echo(text)


def write_filter_result(result: FilterResult, *, as_json: bool) -> None:
    """Print the result of an operation on all schedules that match."""
    if as_json:
        print_json(
            {
                "outcome": result.outcome.value,
                "count": result.count,
                "keys": list(result.keys),
                "forgotten": list(result.forgotten),
            }
        )
        return
    echo(f"{result.outcome.value} {result.count:,}")
    if result.forgotten:
        partitions = quantity(len(result.forgotten), "partition")
        knows = "knows how many schedules it" if len(result.forgotten) == 1 else "know how many schedules they"
        echo(
            f"bide: {partitions} applied the change more than an hour ago, and no longer {knows} changed",
            err=True,
        )


def write_count(count: int, verb: str, *, as_json: bool) -> None:
    """Print the result of a dry run."""
    if as_json:
        print_json_line({"count": count})
    else:
        echo(f"{count:,} would be {verb}")


def as_dict(one: ScheduleView, *, whole: bool = False) -> dict[str, Any]:
    """A schedule as values for JSON, with its message and next runs if ``whole``."""
    found: dict[str, Any] = {
        "key": one.key,
        "id": one.id,
        "version": one.version,
        "state": one.state,
        "due": _precise(one.due_time),
        "to": one.to,
        "exchange": one.exchange,
        "routing_key": one.routing_key,
        "every": one.every,
        "time_zone": one.time_zone,
    }
    if whole:
        body, is_base64 = text_or_base64(one.body or b"")
        found |= {
            "next_runs": [_precise(run) for run in one.next_runs(SHOWN_RUNS)],
            "under_way": list(one.under_way),
            "recurrence": None if one.recurrence is None else dict(one.recurrence),
            "headers": dict(one.headers),
            "properties": {name: value for name, value in one.properties.items() if name != "headers"},
            "body": body,
        }
        if is_base64:
            found["body_encoding"] = "base64"
    return found


def write_line(one: ScheduleView) -> None:
    """Print a schedule as one line: due time, state, target and key."""
    every = "" if one.every is None else f"  every {_every(one)}"
    echo(f"{_local(one.due_time)}  {one.state:<9}  {_target(one):<24}  {one.key}{every}", fit=True)


def write_details(one: ScheduleView) -> None:
    """Print everything that is known about a schedule."""
    runs = one.next_runs(SHOWN_RUNS) if one.every is not None else []
    rows: list[tuple[str, Any]] = [
        ("key", one.key),
        ("state", one.state),
        ("due", _local(one.due_time)),
        ("target", _target(one)),
        ("every", None if one.every is None else _every(one)),
        ("next runs", ", ".join(map(_local, runs)) or None),
        ("id", one.id),
        ("version", one.version),
        ("under way", ", ".join(one.under_way) or None),
        *((f"header {name}", value) for name, value in one.headers.items()),
        *((name.replace("_", " "), value) for name, value in one.properties.items() if name != "headers"),
    ]
    for name, value in rows:
        if value is not None:
            echo(f"{name + ':':<16} {value}")
    body, is_base64 = text_or_base64(one.body or b"")
    echo(f"{'body' + (' (base64)' if is_base64 else '') + ':':<16} {body}")


def _target(one: ScheduleView) -> str:
    return str(one.to) if one.to is not None else f"{one.exchange} ({one.routing_key!r})"


def _every(one: ScheduleView) -> str:
    return f"{one.every!r}" + ("" if one.time_zone is None else f" {one.time_zone}")


def _local(moment: datetime) -> str:
    return in_local_time(moment).isoformat(sep=" ", timespec="milliseconds")


def _precise(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds")
