"""What ``bide pipeline replay`` shows before anything is sent, and when it is interrupted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from bide.cli.continuation import command, rest_of
from bide.cli.errors_view import counted
from bide.cli.output import print_json
from bide.cli.pipeline.view import histogram, span_for
from bide.durations import from_microseconds
from bide.foreign_text import visible

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a replay would do.

    Attributes:
        source: what the messages are of.
        queues: messages by the queue that they go to.
        missing: those of the queues that do not exist.
        unknown: messages without the queue that they failed on.
        times: how many are due in each span of time, by its beginning.
        every: how long a span is.
        first: when the first is due, None where there is none.
        last: when the last is due.
        more: other counts, for ``--json``.
    """

    source: str
    queues: Mapping[str, int]
    missing: tuple[str, ...]
    unknown: int
    times: list[tuple[datetime, int]]
    every: timedelta
    first: datetime | None
    last: datetime | None
    more: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All messages."""
        return self.unknown + sum(self.queues.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What a replay had done when it was interrupted.

    Attributes:
        source: what the messages are of.
        sent: messages that were sent.
        left: those that were not.
        kept: those that could not be sent.
        is_ledger: whether a ledger knows what is left, and when that is due. Else the next run chooses anew.
    """

    source: str
    sent: int
    left: int
    kept: int = 0
    is_ledger: bool = False

    def show(self, arguments: Sequence[str], *, over: timedelta, as_json: bool) -> None:
        """Print it, and the command that goes on.

        Args:
            arguments: of the program.
        """
        total = self.sent + self.kept + self.left
        changed = {}
        if not self.is_ledger:
            changed["--limit"] = str(self.left)
            if over:
                changed["--over"] = rest_of(over, left=self.left, total=total)
        again = command(arguments, changed=changed)
        if as_json:
            print_json({"interrupted": True, "sent": self.sent, "left": self.left, "kept": self.kept, "go_on": again})
            return
        due = " not yet due," if over else ""
        click.echo(
            f"bide: interrupted: {self.sent:,} of {counted(total)} replayed, {self.left:,}{due} left of {self.source}",
            err=True,
        )
        click.echo(f"bide: go on with: {again}", err=True)


def preview(messages: DataFrame, *, url: str, source: str, to: str | None, more: Mapping[str, int]) -> Preview:
    """Look at messages with their due times, and at the queues that they go to.

    Args:
        to: the queue that all of them go to, rather than to those that they failed on.

    Raises:
        BrokerError: the broker cannot be asked.
    """
    from bide.pipelines.replay.run import missing_queues, totals
    from bide.pipelines.schedule.run import due_times

    found = totals(messages).collect()
    queues: dict[str, int] = {}
    unknown = 0
    for row in found:
        if (name := to or row["queue"]) is None:
            unknown += row["messages"]
        else:
            queues[name] = queues.get(name, 0) + row["messages"]
    first = from_microseconds(min(row["first"] for row in found)) if found else None
    last = from_microseconds(max(row["last"] for row in found)) if found else None
    every = span_for(first, last)
    # As seconds: PySpark turns timestamps into those of the driver's own zone, without saying so.
    spans = due_times(messages, every).selectExpr("unix_seconds(due) as due", "count").collect()
    return Preview(
        source=source,
        queues=dict(sorted(queues.items())),
        missing=tuple(missing_queues(url, queues)),
        unknown=unknown,
        times=[(datetime.fromtimestamp(row["due"], UTC), row["count"]) for row in spans],
        every=every,
        first=first,
        last=last,
        more=more,
    )


def show(found: Preview, *, as_json: bool) -> None:
    """Print it."""
    if as_json:
        print_json(_as_dict(found))
        return
    click.echo(f"{counted(found.total)} of {found.source}; nothing was sent")
    for name, count in found.queues.items():
        click.echo(f"{count:>9,} to {visible(name)}{'  (does not exist)' if name in found.missing else ''}")
    if found.unknown:
        click.echo(f"{found.unknown:>9,} without the queue that they failed on")
    for line in histogram(found.times, found.every):
        click.echo(line)


def _as_dict(found: Preview) -> dict[str, Any]:
    return {
        "messages": found.total,
        "queues": found.queues,
        "missing_queues": list(found.missing),
        "without_queue": found.unknown,
        **found.more,
        "first_due": None if found.first is None else found.first.isoformat(),
        "last_due": None if found.last is None else found.last.isoformat(),
        "every_seconds": found.every.total_seconds(),
        "due": [{"from": due.isoformat(), "count": count} for due, count in found.times],
    }
