"""Output of ``bide pipeline replay``: of a dry run, and after an interruption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from bide.cli.continuation import command, rest_of
from bide.cli.output import echo, print_json
from bide.cli.pipeline.view import engine_facts, histogram, span_for
from bide.durations import from_microseconds
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from bide.pipelines.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The effect of a replay.

    Attributes:
        source: the source of the messages, in words.
        queues: target queue -> number of messages.
        missing: target queues that do not exist.
        unknown: messages that do not say on which queue they failed.
        times: the start of each span of time, with the number of messages that are due in it.
        every: the length of a span.
        first: the first due time; None without messages.
        last: the last due time; None without messages.
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
        """The number of messages."""
        return self.unknown + sum(self.queues.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedReplay:
    """The state of an interrupted replay.

    Attributes:
        source: the source of the messages, in words.
        sent: messages that were sent.
        left: messages that are still to be sent.
        kept: messages that could not be sent.
        is_ledger: whether a ledger has the remaining messages with their due times. If not, the next run chooses
            messages again.
    """

    source: str
    sent: int
    left: int
    kept: int = 0
    is_ledger: bool = False

    def show(self, arguments: Sequence[str], *, over: timedelta, as_json: bool) -> None:
        """Print the state, and the command that continues the replay.

        Args:
            arguments: the arguments of the interrupted command.
            over: the value of ``--over``.
            as_json: print JSON.
        """
        total = self.sent + self.kept + self.left
        changed = {}
        if not self.is_ledger:
            # Kept messages are in front of the rest, so the next run chooses them again.
            chosen = self.left + self.kept
            changed["--limit"] = str(chosen)
            if over:
                changed["--over"] = rest_of(over, left=chosen, total=total)
        again = command(arguments, changed=changed)
        if as_json:
            print_json({"interrupted": True, "sent": self.sent, "left": self.left, "kept": self.kept, "go_on": again})
            return
        due = " not yet due," if over else ""
        echo(
            f"bide: interrupted: {self.sent:,} of {quantity(total, 'message')} replayed, {self.left:,}{due} left of "
            f"{self.source}",
            err=True,
        )
        echo(f"bide: go on with: {again}", err=True)


def preview(messages: DataFrame, *, url: str, source: str, to: str | None, more: Mapping[str, int]) -> Preview:
    """Count messages by target queue and due time, and find missing queues.

    Args:
        to: the queue for all messages; None for the queues on which they failed.

    Raises:
        BrokerError: the broker cannot be reached, or refuses.
    """
    from bide.pipelines.replay.run import totals
    from bide.pipelines.schedule.run import due_times

    found = totals(messages).collect()

    def count_spans(every: timedelta) -> list[tuple[datetime, int]]:
        # As seconds, because PySpark converts timestamps to naive ones in the time zone of the driver.
        spans = due_times(messages, every).selectExpr("unix_seconds(due) as due", "count").collect()
        return [(datetime.fromtimestamp(row["due"], UTC), row["count"]) for row in spans]

    return preview_of(
        [(row["queue"], row["messages"]) for row in found],
        count_spans,
        url=url,
        source=source,
        to=to,
        first=min((row["first"] for row in found), default=None),
        last=max((row["last"] for row in found), default=None),
        more=more,
    )


def preview_of(
    counts: Iterable[tuple[str | None, int]],
    due_times: Callable[[timedelta], list[tuple[datetime, int]]],
    *,
    url: str,
    source: str,
    to: str | None,
    first: int | None,
    last: int | None,
    more: Mapping[str, int],
) -> Preview:
    """The preview of counted messages.

    Args:
        counts: queues on which messages failed (None if unknown), with numbers of messages.
        due_times: counts messages by spans of this length.
        first: the first due time in microseconds since the Unix epoch.
        last: the last due time.

    Raises:
        BrokerError: the broker cannot be reached, or refuses.
    """
    from bide.pipelines.replay.queue import missing_queues

    queues = Counter[str]()
    unknown = 0
    for queue, count in counts:
        if (name := to or queue) is None:
            unknown += count
        else:
            queues[name] += count
    begin, end = (None if one is None else from_microseconds(one) for one in (first, last))
    every = span_for(begin, end)
    return Preview(
        source=source,
        queues=dict(sorted(queues.items())),
        missing=tuple(missing_queues(url, queues)),
        unknown=unknown,
        times=due_times(every),
        every=every,
        first=begin,
        last=end,
        more=more,
    )


def show(found: Preview, engine: Engine, *, as_json: bool) -> None:
    """Print a preview."""
    if as_json:
        print_json({**_as_dict(found), **engine_facts(engine)})
        return
    echo(f"{quantity(found.total, 'message')} of {found.source}; nothing was sent")
    for name, count in found.queues.items():
        echo(f"{count:>9,} to {name}{'  (does not exist)' if name in found.missing else ''}")
    if found.unknown:
        echo(f"{found.unknown:>9,} without the queue on which they failed")
    for line in histogram(found.times, found.every):
        echo(line)
    echo(f"engine: {engine}")


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
