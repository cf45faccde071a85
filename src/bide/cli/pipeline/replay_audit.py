"""``bide pipeline replay --audit``: replay messages from the streams of taps."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bide.cli.advice import with_options
from bide.cli.output import echo, print_json
from bide.cli.pipeline.replay_view import Stopped, preview, show
from bide.cli.pipeline.view import engine_facts, progress
from bide.errors import NotFoundError, TargetNotFoundError
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

    from bide.pipelines.audit.folder import Folder
    from bide.pipelines.engine import Engine
    from bide.pipelines.ledger import Ledger
    from bide.pipelines.replay.from_audit import Choices, Found

# Always printed, because a copy does not show whether it has lost headers.
_LOST_HEADERS: Final = (
    "bide: streams drop headers whose values are lists or tables (since RabbitMQ 4.0 except those named x-...): "
    "messages are sent without these headers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReplay:
    """A replay of failures from an audit, with its options."""

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
        from bide.pipelines.replay.from_audit import Choices

        if self.ledger is not None:
            return Choices(folder=self.ledger)
        key = digest_of({"audit": self.folder.place, "broker": self.broker})[:16]
        state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        return Choices(folder=str(Path(state) / "bide" / "replay" / f"{Path(self.folder.place).name}-{key}"))

    def stopped(self) -> Stopped | None:
        """The state of the unfinished choice after an interruption; None if there is none."""
        ledger = self.choices().unfinished(self.plan, self.broker)
        head = None if ledger is None else ledger.head()
        if ledger is None or head is None:
            return None
        done = _done_count(ledger)
        return Stopped(source=f"the audit {self.folder.place}", sent=done, left=head.rows - done, is_ledger=True)

    @contextmanager
    def lock_ledger(self, *, dry_run: bool) -> Iterator[None]:
        """Lock the ledger against other runs, and check it before Spark starts.

        Raises:
            FolderInUseError: another run is using the ledger.
            InvalidInputError: the ledger cannot be read or written, or has an unfinished replay with other options.
        """
        choices = self.choices()
        # A dry run writes nothing, not even a lock file.
        with nullcontext() if dry_run else choices.lock():
            choices.unfinished(self.plan, self.broker)
            yield


def replay(spark: SparkSession, given: AuditReplay, engine: Engine, *, dry_run: bool, as_json: bool) -> int:
    """Finish the last choice, or make a new one and send it; returns 1 if a dry run finds a problem.

    Hold :meth:`AuditReplay.lock_ledger` during the call.

    Raises:
        NotFoundError: bodies are missing, and ``skip_missing`` is false.
        TargetNotFoundError: queues do not exist.
    """
    from bide.pipelines.replay.from_audit import find, remaining_of
    from bide.pipelines.replay.queue import missing_queues
    from bide.pipelines.replay.run import check_allowed, spread

    choices = given.choices()
    ledger = choices.unfinished(given.plan, given.broker)
    found: Found | None = None
    if ledger is not None:
        messages = remaining_of(spark, ledger)
    else:
        with progress("searching the audit"):
            found = find(
                spark,
                given.folder,
                choices,
                url=given.url,
                where=given.where,
                limit=given.limit,
                parked=given.parked,
                skip_missing=given.skip_missing,
            )
        messages = found.messages
    if given.allow:
        check_allowed(messages, given.to, given.allow)
    counts = {} if found is None else {name: getattr(found, name) for name in ("parked", "unseen", "dropped")}
    if found is not None and found.parked:
        echo(
            f"bide: {found.parked:,} more messages are in an error queue: replay them with 'bide pipeline replay "
            "--queue', or send copies with --parked",
            err=True,
        )
    if dry_run:
        source = f"the audit {given.folder.place}"
        if ledger is None:
            messages = spread(messages, given.over, begin=datetime.now(UTC))
        seen = preview(messages, url=given.url, source=source, to=given.to, more=counts)
        show(seen, engine, as_json=as_json)
        if seen.total:
            echo(_LOST_HEADERS, err=True)
        return _print_missing(found, skip=given.skip_missing) or (1 if seen.missing else 0)
    if found is not None and not given.skip_missing:
        found.refuse_missing()
    queues = [row["queue"] for row in messages.select("queue").distinct().collect()]
    if missing := missing_queues(given.url, queues if given.to is None else [given.to]):
        raise TargetNotFoundError(
            f"messages failed on queues that do not exist any more ({', '.join(missing)}), and nothing was sent: "
            "declare these queues, send all messages to another queue with --to, or leave some out with --where"
        )
    if queues:
        echo(_LOST_HEADERS, err=True)
    if ledger is None and queues:
        ledger = choices.make(messages, given.over, plan=given.plan, broker=given.broker, part_rows=given.part_rows)
    _send(spark, given, ledger, counts, engine, as_json=as_json)
    return 0


def _print_missing(found: Found | None, *, skip: bool) -> int:
    """Print the error that a run without ``--dry-run`` would raise; returns the exit code."""
    try:
        if found is not None and not skip:
            found.refuse_missing()
    except NotFoundError as error:
        echo(f"bide: {with_options(str(error))}", err=True)
        return 1
    return 0


def _send(
    spark: SparkSession,
    given: AuditReplay,
    ledger: Ledger | None,
    counts: Mapping[str, int],
    engine: Engine,
    *,
    as_json: bool,
) -> None:
    from bide.pipelines.replay.from_audit import run_of, send
    from bide.pipelines.replay.tap_reader import ReplayRun
    from bide.pipelines.session import spark_errors

    sent = rejected = before = 0
    started = time.monotonic()
    if ledger is not None:
        head = ledger.head()
        assert head is not None
        before = _done_count(ledger)
        replay_run = ReplayRun(url=given.url, run=run_of(ledger))
        with progress("replaying", total=head.rows, done=lambda: _done_count(ledger)), spark_errors(sending=True):
            rows = send(spark, ledger, replay_run, to=given.to, skip_missing=given.skip_missing).collect()
        sent, rejected = sum(row["sent"] for row in rows), sum(row["rejected"] for row in rows)
    seconds = time.monotonic() - started
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
