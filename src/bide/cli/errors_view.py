"""Output of ``bide errors``: failed messages as text and JSON."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from bide.cli.advice import with_options
from bide.cli.output import echo, in_local_time, print_json, print_json_line, text_or_base64
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from bide.error_queues import FailedMessage, Group, OperationResult, OperatorLogRecord, Summary

_MAX_NAMES: Final = 10
"""The number of queues that one line names, because headers of failed messages can have any number of names."""


def as_dict(message: FailedMessage, *, whole: bool = False) -> dict[str, Any]:
    """A message as values for JSON, with body, stack trace and all properties if ``whole``."""
    found: dict[str, Any] = {
        "id": message.id,
        "message_id": message.message_id,
        "type": message.message_type,
        "queue": message.queue,
        "reason": message.reason,
        "endpoint": message.endpoint,
        "failed_at": message.failed_at,
        "first_failed_at": message.history.first_failed_at,
        "attempts": message.history.attempts,
        "attempt_times": list(message.history.times),
        "exception": message.exception,
        "text": message.text,
        "group": message.group,
        "inner_exception": message.inner_exception,
        "host": message.host,
        "process": message.process,
        "sent_by": message.sent_by,
        "key": message.key,
        "schedule_id": message.schedule_id,
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "deaths": [dict(one) for one in message.deaths],
        "headers": message.headers,
        "size": len(message.body),
    }
    if whole:
        body, is_base64 = text_or_base64(message.body)
        properties = {name: value for name, value in message.values.items() if name != "headers"}
        found |= {"stack": message.stack, "inner_text": message.inner_text, "properties": properties, "body": body}
        if is_base64:
            found["body_encoding"] = "base64"
    return found


def write_json(message: FailedMessage, *, whole: bool = False) -> None:
    """Print a message as one line of JSON."""
    print_json_line(as_dict(message, whole=whole))


def write_line(message: FailedMessage) -> None:
    """Print a message as one line: id, when and where it failed, and why."""
    what = message.exception or message.reason
    if message.text:
        what = f"{what}: {message.text}"
    key = "" if message.key is None else f"key {message.key}  "
    line = f"{message.id}  {_local_time(message.failed_at)}  {message.queue or '?':<20}  {key}{what}"
    echo(line, fit=True)


def write_details(message: FailedMessage) -> None:
    """Print everything that is known about a message."""
    rows: list[tuple[str, Any]] = [
        ("id", message.id),
        ("message id", message.message_id),
        ("type", message.message_type),
        ("failed on", message.queue),
        ("reason", message.reason),
        ("endpoint", message.endpoint),
        ("failed at", _local_time(message.failed_at) if message.failed_at else None),
        ("attempts", message.history.attempts or None),
        ("first failure", _local_time(message.history.first_failed_at) if message.history.first_failed_at else None),
        ("host", f"{message.host}, process {message.process}" if message.host else None),
        ("sent by", message.sent_by),
        ("key", message.key),
        ("schedule id", message.schedule_id),
        ("sent to", f"exchange {message.exchange!r}, routing key {message.routing_key!r}"),
        ("exception", message.exception),
        ("text", message.text),
        ("caused by", f"{message.inner_exception}: {message.inner_text}" if message.inner_exception else None),
        ("raised at", message.frame),
    ]
    for name, value in rows:
        if value is not None:
            echo(f"{name:<14} {value}")
    for death in message.deaths:
        where = f"{death.get('reason')} in {death.get('queue')} x{death.get('count')}"
        source = f"from exchange {death.get('exchange')!r} with {death.get('routing-keys')}"
        echo(f"{'died':<14} {where}, {source}")
    for name, value in message.headers.items():
        if name != "x-death":
            echo(f"{'header':<14} {name}: {value}")
    body, is_base64 = text_or_base64(message.body)
    echo(f"{'body':<14} {len(message.body)} bytes{' (base64)' if is_base64 else ''}")
    echo(body, keep="\n\t")
    if message.stack:
        echo()
        echo(message.stack.rstrip(), keep="\n\t")


def write_groups(groups: list[Group]) -> None:
    """Print groups, the largest first."""
    for one in groups:
        queues = ", ".join(sorted(one.queues)) or "?"
        echo(f"{one.count:>7}  {_local_time(one.first)} to {_local_time(one.last)}  {queues}", fit=True)
        echo(f"         {one.name}")
        if one.text:
            echo(f"         such as {one.example}: {one.text}", fit=True)
    if not groups:
        echo("no message")


def write_summary(summary: Summary) -> None:
    """Print the counts of ``bide errors stats``."""
    found = summary.to_dict()
    echo(f"{quantity(summary.total, 'message')}, {summary.size:,} bytes")
    if summary.first and summary.last:
        echo(f"failed from {_local_time(summary.first)} to {_local_time(summary.last)}")
    for name in ("queue", "reason", "endpoint", "exception", "message_type", "hour"):
        values = found[f"by_{name}"]
        if values:
            echo(f"by {name.replace('_', ' ')}")
            for value, count in values.items():
                echo(f"{count:>9,}  {value}")


def write_result(result: OperationResult, verb: str, *, as_json: bool) -> None:
    """Print the result of an operation."""
    if as_json:
        print_json(result.to_dict())
        return
    where = ", ".join(f"{count:,} to {queue}" for queue, count in sorted(result.queues.items()))
    echo(f"{quantity(result.done, 'message')} {verb}{f': {where}' if where else ''}")


def write_interrupted(
    result: OperationResult, verb: str, queue: str, again: str, *, paced: bool, as_json: bool
) -> None:
    """Print what was done before an interruption, what remains, and the command that continues."""
    if as_json:
        print_json({**result.to_dict(), "interrupted": True, "go_on": again})
        return
    if result.left is None:
        done, left = f"{quantity(result.done, 'message')} {verb}", "the others are"
    else:
        total = result.done + sum(result.kept.values()) + result.left
        done = f"{result.done:,} of {quantity(total, 'message')} {verb}"
        left = f"{result.left:,} not yet due," if paced else f"{result.left:,}"
    echo(f"bide: interrupted: {done}, {left} still in {queue}", err=True)
    for reason, number in result.kept.items():
        echo(f"bide: {quantity(number, 'message')} cannot be sent: {with_options(reason)}", err=True)
    echo(f"bide: go on with: {again}", err=True)


class Targets:
    """The queues that a retry sends messages to.

    Args:
        to: one queue for all messages, instead of the queues where they failed; or None.
        allow: patterns of the names of allowed queues; messages for other queues stay. Empty: all queues are allowed.

    Raises:
        InvalidInputError: a pattern cannot be used.
    """

    def __init__(self, to: str | None, allow: Sequence[str]) -> None:
        from bide.delay.allowed_targets import ANY_TARGET, AllowedTargets

        self._to = to
        self._allowed = AllowedTargets.of(allow) if allow else ANY_TARGET

    def count(self, summary: Summary) -> tuple[dict[str, int], dict[str, int], int]:
        """The numbers of messages by allowed queue, by queue that is not allowed, and without a known queue."""
        from bide.delay.protocol import QueueTarget

        by_queue = summary.by["queue"] if self._to is None else Counter({self._to: summary.total})
        allowed: dict[str, int] = {}
        refused: dict[str, int] = {}
        for name, number in by_queue.most_common():
            (allowed if self._allowed.allow(QueueTarget(name)) else refused)[name] = number
        return allowed, refused, summary.total - by_queue.total()

    def describe(self, summary: Summary) -> str:
        """The queues with their numbers of messages, and how many messages stay."""
        allowed, refused, nowhere = self.count(summary)
        parts = [f"{number:,} to {name}" for name, number in [*allowed.items()][:_MAX_NAMES]]
        if len(allowed) > _MAX_NAMES:
            rest = [*allowed.values()][_MAX_NAMES:]
            parts.append(f"{sum(rest):,} to {len(rest):,} other queues")
        if refused:
            names = ", ".join([*refused][:_MAX_NAMES]) + (", ..." if len(refused) > _MAX_NAMES else "")
            parts.append(f"{_stay_text(sum(refused.values()))} (not allowed: {names})")
        if nowhere:
            parts.append(f"{_stay_text(nowhere)} (the queue where they failed is unknown)")
        return ", ".join(parts) or "nothing to send"

    def to_dict(self, summary: Summary) -> dict[str, Any]:
        """The counts as values for JSON."""
        allowed, refused, _ = self.count(summary)
        return {"queues": allowed, **({"refused": refused} if refused else {})}


def write_count(summary: Summary, verb: str, targets: Targets | None, *, as_json: bool) -> None:
    """Print how many messages an operation would affect, and the queues that they would go to."""
    if as_json:
        more = {} if targets is None else targets.to_dict(summary)
        print_json({"would_be_done": summary.total, **more})
    else:
        where = "" if targets is None or not summary.total else f": {targets.describe(summary)}"
        echo(f"{quantity(summary.total, 'message')} would be {verb}{where}")


def _stay_text(number: int) -> str:
    return quantity(number, "stays", "stay")


def write_record(record: OperatorLogRecord) -> None:
    """Print one record of the operator log."""
    details = {name: value for name, value in record.details.items() if name != "ids"}
    count = len(record.details.get("ids", ()))
    what = f"{count} ids" if record.step == "ids" else " ".join(f"{n}={v}" for n, v in details.items())
    echo(
        f"{_local_time(record.at)}  {record.who} ({record.user})  {record.operation} {record.queue} {record.run} "
        f"{record.step}: {what}"
    )


def write_malformed(number: int, stream: str) -> None:
    """Print how many messages of the stream of the operator log were left out, because they are not records."""
    what = quantity(number, "message that is not a record", "messages that are not records")
    echo(f"bide: left out {what} of an operation: see the stream {stream!r}", err=True)


def _local_time(moment: datetime | None) -> str:
    """A time in this machine's time zone; in UTC with a Z if the local time would be outside the years 1 to 9999."""
    if moment is None:
        return f"{'?':<19}"
    local = in_local_time(moment)
    zone = "Z" if local is moment else ""
    # strftime writes years before 1000 with fewer digits.
    return local.replace(tzinfo=None).isoformat(" ", "seconds") + zone
