"""``bide pipeline replay --audit``: the messages come out of the streams of the taps."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from bide.cli.errors_view import counted
from bide.cli.output import print_json
from bide.cli.pipeline.replay_view import Stopped, preview, show
from bide.cli.pipeline.view import progress
from bide.errors import NotFoundError, TargetNotFoundError
from bide.foreign_text import visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

    from bide.pipelines.audit.folder import Folder
    from bide.pipelines.ledger import Ledger
    from bide.pipelines.replay.from_audit import Choices, Found

# A copy does not show what it has lost.
_LISTS: Final = (
    "bide: streams drop headers that hold lists or tables (since RabbitMQ 4.0 not those named x-...): messages that "
    "had some go back without them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfAudit:
    """A replay of failures that an audit knows, as the options describe it."""

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
        """Identifies replays that choose and send alike."""
        from bide.pipelines.ledger import digest_of

        options = {name: getattr(self, name) for name in ("where", "limit", "over", "to", "parked")}
        return digest_of({"audit": self.folder.place, **options})

    def check(self) -> None:
        """See whether the broker is there.

        Raises:
            BrokerError: it is not, or does not let us in.
        """
        from bide.pipelines.replay.run import missing_queues

        missing_queues(self.url, [])

    def choices(self) -> Choices:
        """Where it is written down what was chosen and sent."""
        from bide.pipelines.ledger import digest_of
        from bide.pipelines.replay.from_audit import Choices

        if self.ledger is not None:
            return Choices(folder=self.ledger)
        key = digest_of({"audit": self.folder.place, "broker": self.broker})[:16]
        state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        return Choices(folder=str(Path(state) / "bide" / "replay" / f"{Path(self.folder.place).name}-{key}"))

    def stopped(self) -> Stopped | None:
        """What was sent of the choice that is not finished, as an interruption left it; None if there is none."""
        ledger = self.choices().unfinished(self.plan, self.broker)
        head = None if ledger is None else ledger.head()
        if ledger is None or head is None:
            return None
        done = _done(ledger)
        return Stopped(source=f"the audit {self.folder.place}", sent=done, left=head.rows - done, is_ledger=True)

    @contextmanager
    def ledger_held(self, *, dry_run: bool) -> Iterator[None]:
        """Keep other runs from the ledger, and see before Spark is there whether it can be used.

        Raises:
            FolderInUseError: another run works with it.
            InvalidInputError: it cannot be read or written, or has a choice of other options that is not finished.
        """
        choices = self.choices()
        # A dry run writes nothing, not even that it has the lock.
        with nullcontext() if dry_run else choices.lock():
            choices.unfinished(self.plan, self.broker)
            yield


def replay(spark: SparkSession, given: OfAudit, *, dry_run: bool, as_json: bool) -> int:
    """Finish the last choice, or make a new one and send it; 1 if a dry run finds that it could not be done.

    Hold :meth:`OfAudit.ledger_held` meanwhile.

    Raises:
        NotFoundError: bodies are not there, and this was not to be skipped.
        TargetNotFoundError: queues are not there.
    """
    from bide.pipelines.replay.from_audit import find, left_of
    from bide.pipelines.replay.run import check_allowed, missing_queues, spread

    choices = given.choices()
    ledger = choices.unfinished(given.plan, given.broker)
    found: Found | None = None
    if ledger is not None:
        messages = left_of(spark, ledger)
    else:
        with progress("looking through the audit"):
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
        click.echo(
            f"bide: {found.parked:,} more lie in an error queue: 'bide pipeline replay --queue' takes them out of "
            "it, --parked sends copies of them",
            err=True,
        )
    if dry_run:
        source = f"the audit {given.folder.place}"
        if ledger is None:
            messages = spread(messages, given.over, begin=datetime.now(UTC))
        seen = preview(messages, url=given.url, source=source, to=given.to, more=counts)
        show(seen, as_json=as_json)
        if seen.total:
            click.echo(_LISTS, err=True)
        return _tell_missing(found, skip=given.skip_missing) or (1 if seen.missing else 0)
    if found is not None and not given.skip_missing:
        found.refuse_missing()
    queues = [row["queue"] for row in messages.select("queue").distinct().collect()]
    if missing := missing_queues(given.url, queues if given.to is None else [given.to]):
        raise TargetNotFoundError(
            f"messages failed on queues that do not exist any more ({', '.join(missing)}), and nothing was sent: "
            "declare them, send all to another queue by --to, or leave those out by --where"
        )
    if queues:
        click.echo(_LISTS, err=True)
    if ledger is None and queues:
        ledger = choices.make(messages, given.over, plan=given.plan, broker=given.broker, part_rows=given.part_rows)
    _send(spark, given, ledger, counts, as_json=as_json)
    return 0


def _tell_missing(found: Found | None, *, skip: bool) -> int:
    """What a run would refuse."""
    try:
        if found is not None and not skip:
            found.refuse_missing()
    except NotFoundError as error:
        click.echo(f"bide: {visible(str(error))}", err=True)
        return 1
    return 0


def _send(
    spark: SparkSession, given: OfAudit, ledger: Ledger | None, counts: Mapping[str, int], *, as_json: bool
) -> None:
    from bide.pipelines.replay.from_audit import run_of, send
    from bide.pipelines.replay.tap_reader import ReplayRun
    from bide.pipelines.session import spark_errors

    sent = rejected = before = 0
    started = time.monotonic()
    if ledger is not None:
        head = ledger.head()
        assert head is not None
        before = _done(ledger)
        way = ReplayRun(url=given.url, run=run_of(ledger))
        with progress("replaying", total=head.rows, done=lambda: _done(ledger)), spark_errors(sending=True):
            rows = send(spark, ledger, way, to=given.to, skip_missing=given.skip_missing).collect()
        sent, rejected = sum(row["sent"] for row in rows), sum(row["rejected"] for row in rows)
    seconds = time.monotonic() - started
    place = None if ledger is None else ledger.folder
    if as_json:
        result = {"sent": sent, "sent_before": before, **counts, "gone": rejected, "seconds": round(seconds, 3)}
        print_json({**result, "ledger": place})
        return
    click.echo(f"replayed {counted(sent)}{f' in {seconds:.1f} s' if sent else ''}")
    if before:
        click.echo(f"{counted(before)} of them were sent before, by an earlier run")
    if rejected:
        click.echo(f"{counted(rejected)} were dropped by the streams since they were chosen")
    if place is not None:
        click.echo(f"ledger: {place}")


def _done(ledger: Ledger) -> int:
    return sum(one.sent + one.rejected for one in ledger.parts())
