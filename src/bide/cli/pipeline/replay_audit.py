"""Replay of an audit from the streams of taps, on Spark or in this process."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from bide.cli.advice import with_options
from bide.cli.output import echo, print_json
from bide.cli.pipeline.replay_view import InterruptedReplay, Preview, preview, preview_of, show
from bide.cli.pipeline.view import engine_facts, progress
from bide.errors import NotFoundError, TargetNotFoundError
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from bide.cli.pipeline.engine_choice import EngineChoice
    from bide.pipelines.audit.folder import Folder
    from bide.pipelines.engine import Engine
    from bide.pipelines.ledger import Ledger
    from bide.pipelines.replay.choices import Choices, NotReplayedCounts
    from bide.pipelines.replay.small_audit import TappedFailure
    from bide.pipelines.replay.tap_reader import ReplayRun

# Always printed, because a copy does not show whether it has lost headers.
_LOST_HEADERS: Final = (
    "bide: streams drop headers whose values are lists or tables (since RabbitMQ 4.0 except those named x-...): "
    "messages are sent without these headers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReplay:
    """A replay of failures from an audit, with its options.

    Attributes:
        started: when the command started, as a monotonic time.
    """

    url: str = field(repr=False)
    folder: Folder
    where: str | None
    limit: int | None
    over: timedelta
    to: str | None
    parked: bool
    skip_missing: bool
    ledger: str | None
    part_rows: int
    started: float
    allow: tuple[str, ...] = ()

    @property
    def broker(self) -> str:
        """The broker and its virtual host, without user and password."""
        from bide.amqp.url import BrokerUrl

        url = BrokerUrl.parse(self.url)
        return f"{','.join(f'{host}:{port}' for host, port in url.hosts)}/{url.vhost.removeprefix('/')}"

    @property
    def plan(self) -> str:
        """A digest of the options, to recognize the same replay."""
        from bide.pipelines.ledger import digest_of

        options = {name: getattr(self, name) for name in ("where", "limit", "over", "to", "parked")}
        return digest_of({"audit": self.folder.place, **options})

    def check(self) -> None:
        """Check the connection to the broker.

        Raises:
            BrokerError: the broker cannot be reached, or refuses.
        """
        from bide.pipelines.replay.queue import missing_queues

        missing_queues(self.url, [])

    def choices(self) -> Choices:
        """The folder that records what was chosen and sent."""
        from bide.pipelines.ledger import digest_of
        from bide.pipelines.replay.choices import Choices

        if self.ledger is not None:
            return Choices(folder=self.ledger)
        key = digest_of({"audit": self.folder.place, "broker": self.broker})[:16]
        state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        return Choices(folder=str(Path(state) / "bide" / "replay" / f"{Path(self.folder.place).name}-{key}"))

    def unfinished(self) -> Ledger | None:
        """The ledger of the last choice, if some of its messages were not sent.

        Raises:
            InvalidInputError: the ledger cannot be read, or has an unfinished replay with other options.
        """
        return self.choices().unfinished(self.plan, self.broker)

    def stopped(self) -> InterruptedReplay | None:
        """The state of the unfinished choice after an interruption; None if there is none."""
        ledger = self.unfinished()
        head = None if ledger is None else ledger.head()
        if ledger is None or head is None:
            return None
        done = _done_count(ledger)
        return InterruptedReplay(
            source=f"the audit {self.folder.place}", sent=done, left=head.rows - done, is_ledger=True
        )

    @contextmanager
    def lock_ledger(self, *, dry_run: bool) -> Iterator[None]:
        """Lock the ledger against other runs, and check it before Spark starts.

        Raises:
            FolderInUseError: another run is using the ledger.
            InvalidInputError: the ledger cannot be read or written, or has an unfinished replay with other options.
        """
        # A dry run writes nothing, not even a lock file.
        with nullcontext() if dry_run else self.choices().lock():
            self.unfinished()
            yield


class TappedMessages(Protocol):
    """The messages of a replay of an audit, on one of the engines."""

    @property
    def found(self) -> NotReplayedCounts | None:
        """Counts of a new choice; None if this run finishes an earlier one."""
        ...

    def queues(self) -> list[str]:
        """The queues on which the messages failed."""
        ...

    def preview(self, counts: Mapping[str, int]) -> Preview:
        """Count the messages by target and due time."""
        ...

    def record(self) -> Ledger:
        """Record the messages as a choice."""
        ...

    def send(self, ledger: Ledger, replay: ReplayRun) -> tuple[int, int]:
        """Send the messages; returns how many were sent, and how many are missing."""
        ...


def search_in_process(given: AuditReplay, choice: EngineChoice) -> tuple[Engine, TappedMessages | None]:
    """The engine of a replay, with the messages if that is this process.

    Hold :meth:`AuditReplay.lock_ledger` during the call, and until the messages are sent.

    Raises:
        InvalidInputError: only Spark can search the audit, and ``--engine local`` was given.
        BrokerError: the broker cannot be reached, or refuses.
    """

    def work(largest: int | None) -> tuple[str, TappedMessages]:
        from bide.pipelines.engine import NeedsSparkError
        from bide.pipelines.replay.condition import AUDIT_COLUMNS, TextCondition

        condition = None if given.where is None else TextCondition.parse(given.where, AUDIT_COLUMNS)
        if find_spec("duckdb") is None:
            raise NeedsSparkError("DuckDB is missing")
        from bide.pipelines.replay.small_audit import check_small, find, remaining_of

        if (ledger := given.unfinished()) is not None:
            size = check_small(ledger, largest=largest)
            return size, _TappedInProcess(given, remaining_of(ledger), None)
        with progress("searching the audit"):
            found = find(
                given.folder,
                given.choices(),
                url=given.url,
                condition=condition,
                limit=given.limit,
                parked=given.parked,
                skip_missing=given.skip_missing,
                largest=largest,
            )
        return found.size, _TappedInProcess(given, found.messages, found)

    return choice.in_process(work)


def search_with_spark(spark: SparkSession, given: AuditReplay) -> TappedMessages:
    """The messages of a replay, on Spark.

    Hold :meth:`AuditReplay.lock_ledger` during the call, and until the messages are sent.

    Raises:
        InvalidInputError: the condition is invalid.
        BrokerError: the broker cannot be reached, or refuses.
    """
    from bide.pipelines.replay.from_audit import find, remaining_of

    if (ledger := given.unfinished()) is not None:
        return _TappedOnSpark(given, remaining_of(spark, ledger), None)
    with progress("searching the audit"):
        found = find(
            spark,
            given.folder,
            given.choices(),
            url=given.url,
            where=given.where,
            limit=given.limit,
            parked=given.parked,
            skip_missing=given.skip_missing,
        )
    return _TappedOnSpark(given, found.messages, found)


def replay(messages: TappedMessages, given: AuditReplay, engine: Engine, *, dry_run: bool, as_json: bool) -> int:
    """Send the messages; returns 1 if a dry run finds a problem.

    Raises:
        NotFoundError: bodies are missing, and ``skip_missing`` is false.
        TargetNotAllowedError: a queue is not allowed.
        TargetNotFoundError: queues do not exist.
    """
    from bide.pipelines.replay.queue import missing_queues, refuse_disallowed_targets

    found = messages.found
    names = messages.queues()
    targets = names if given.to is None else [given.to]
    if given.allow:
        refuse_disallowed_targets(targets, given.allow)
    counts = {} if found is None else {name: getattr(found, name) for name in ("parked", "unseen", "dropped")}
    if found is not None and found.parked:
        echo(
            f"bide: {found.parked:,} more messages are in an error queue: replay them with 'bide pipeline replay "
            "--queue', or send copies with --parked",
            err=True,
        )
    if dry_run:
        seen = messages.preview(counts)
        show(seen, engine, as_json=as_json)
        if seen.total:
            echo(_LOST_HEADERS, err=True)
        return _print_missing(found, skip=given.skip_missing) or (1 if seen.missing else 0)
    if found is not None and not given.skip_missing:
        found.refuse_missing()
    if missing := missing_queues(given.url, targets):
        raise TargetNotFoundError(
            f"messages failed on queues that do not exist any more ({', '.join(missing)}), and nothing was sent: "
            "declare these queues, send all messages to another queue with --to, or leave some out with --where"
        )
    if names:
        echo(_LOST_HEADERS, err=True)
    ledger = given.unfinished()
    if ledger is None and names:
        ledger = messages.record()
    _send(messages, given, ledger, counts, engine, as_json=as_json)
    return 0


def _print_missing(found: NotReplayedCounts | None, *, skip: bool) -> int:
    """Print the error that a run without ``--dry-run`` would raise; returns the exit code."""
    try:
        if found is not None and not skip:
            found.refuse_missing()
    except NotFoundError as error:
        echo(f"bide: {with_options(str(error))}", err=True)
        return 1
    return 0


def _send(
    messages: TappedMessages,
    given: AuditReplay,
    ledger: Ledger | None,
    counts: Mapping[str, int],
    engine: Engine,
    *,
    as_json: bool,
) -> None:
    from bide.pipelines.replay.choices import run_of
    from bide.pipelines.replay.tap_reader import ReplayRun

    sent = rejected = before = 0
    if ledger is not None:
        head = ledger.head()
        assert head is not None
        before = _done_count(ledger)
        operation = ReplayRun(url=given.url, run=run_of(ledger))
        with progress("replaying", total=head.rows, done=lambda: _done_count(ledger)):
            sent, rejected = messages.send(ledger, operation)
    seconds = time.monotonic() - given.started
    place = None if ledger is None else ledger.folder
    if as_json:
        result = {"sent": sent, "sent_before": before, **counts, "gone": rejected, "seconds": round(seconds, 3)}
        print_json({**result, "ledger": place, **engine_facts(engine)})
        return
    echo(f"replayed {quantity(sent, 'message')}{f' in {seconds:.1f} s' if sent else ''}")
    if before:
        echo(f"{quantity(before, 'message was', 'messages were')} sent by an earlier run")
    if rejected:
        echo(f"{quantity(rejected, 'message was', 'messages were')} dropped by the streams since they were chosen")
    if place is not None:
        echo(f"ledger: {place}")
    echo(f"engine: {engine}")


def _done_count(ledger: Ledger) -> int:
    return sum(one.sent + one.rejected for one in ledger.parts())


@dataclass(frozen=True, slots=True)
class _TappedOnSpark:
    given: AuditReplay
    messages: DataFrame
    found: NotReplayedCounts | None

    def queues(self) -> list[str]:
        return [row["queue"] for row in self.messages.select("queue").distinct().orderBy("queue").collect()]

    def preview(self, counts: Mapping[str, int]) -> Preview:
        from bide.pipelines.replay.run import spread

        messages, given = self.messages, self.given
        if self.found is not None:
            messages = spread(messages, given.over, begin=datetime.now(UTC))
        return preview(messages, **_of_preview(given), more=counts)

    def record(self) -> Ledger:
        from bide.pipelines.replay.from_audit import record

        return record(self.given.choices(), self.messages, **_of_record(self.given))

    def send(self, ledger: Ledger, replay: ReplayRun) -> tuple[int, int]:
        from bide.pipelines.replay.from_audit import send
        from bide.pipelines.session import spark_errors

        spark, given = self.messages.sparkSession, self.given
        with spark_errors(sending=True):
            rows = send(spark, ledger, replay, to=given.to, skip_missing=given.skip_missing).collect()
        return sum(row["sent"] for row in rows), sum(row["rejected"] for row in rows)


@dataclass(frozen=True, slots=True)
class _TappedInProcess:
    given: AuditReplay
    messages: Sequence[TappedFailure]
    found: NotReplayedCounts | None

    def queues(self) -> list[str]:
        return sorted({one.queue for one in self.messages})

    def preview(self, counts: Mapping[str, int]) -> Preview:
        from bide.pipelines.replay.small import due_times, spread

        dues = [one.due for one in self.messages]
        if self.found is not None:
            dues = spread(len(dues), self.given.over, begin=datetime.now(UTC))
        return preview_of(
            Counter(one.queue for one in self.messages).items(),
            lambda every: due_times(dues, every),
            first=min(dues, default=None),
            last=max(dues, default=None),
            **_of_preview(self.given),
            more=counts,
        )

    def record(self) -> Ledger:
        from bide.pipelines.replay.small_audit import record

        return record(self.given.choices(), self.messages, **_of_record(self.given))

    def send(self, ledger: Ledger, replay: ReplayRun) -> tuple[int, int]:
        from bide.pipelines.replay.small_audit import send

        parts = send(ledger, replay, to=self.given.to, skip_missing=self.given.skip_missing)
        return sum(one.sent for one in parts), sum(one.rejected for one in parts)


def _of_preview(given: AuditReplay) -> dict[str, Any]:
    return {"url": given.url, "source": f"the audit {given.folder.place}", "to": given.to}


def _of_record(given: AuditReplay) -> dict[str, Any]:
    return {"over": given.over, "plan": given.plan, "broker": given.broker, "part_rows": given.part_rows}
