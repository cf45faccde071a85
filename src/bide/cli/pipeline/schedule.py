"""``bide pipeline schedule``: a message for each row of a table."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bide.cli.output import echo, print_json
from bide.cli.pipeline.options import engine_options, refuse_missing_packages, refuse_without_spark
from bide.cli.pipeline.schedule_rows import RowsOnSpark, ScheduleRows, SourceTable, engine_for
from bide.cli.pipeline.view import engine_facts, progress, span_for, summary, summary_lines, survey_lines
from bide.cli.selecting import pairs_of
from bide.cli.settings import Settings, broker_options, json_option, layout_options, pass_settings
from bide.errors import InvalidRowError
from bide.pipelines.formats import FORMATS, guess_format, is_uri, refuse_missing, refuse_unwritable
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bide.cli.pipeline.engine_choice import EngineChoice
    from bide.delay.protocol import DelayInfrastructure
    from bide.pipelines.engine import Engine
    from bide.pipelines.ledger import Ledger
    from bide.pipelines.schedule.plan import SchedulePlan
    from bide.pipelines.schedule.progress import Survey
    from bide.pipelines.schedule.targets import TargetCount
    from bide.spark.overdue import OverdueAction

_OUTCOMES = ("sent", "rejected", "dropped")
"""The outcomes of a row that the ledger counts."""


@click.command()
@click.argument("source")
@click.option("--format", type=click.Choice(FORMATS), help="Format of SOURCE. [default: by its suffix]")
@click.option("--read-option", "read_options", multiple=True, metavar="KEY=VALUE",
              help="Option of Spark's reader for SOURCE. Repeatable.")  # fmt: skip
@click.option("--to", metavar="QUEUE", help="Queue to send the messages to.")
@click.option("--to-column", metavar="COLUMN", help="Column of queues to send to, instead of --to.")
@click.option("--allow", multiple=True, metavar="PATTERN",
              help="Allowed target of --to-column. Repeatable. [default: any]")  # fmt: skip
@click.option("--exchange", metavar="NAME", help="Exchange to send the messages to, instead of --to.")
@click.option("--routing-key", metavar="KEY", help="Routing key of the messages, with --exchange.")
@click.option("--at-column", metavar="COLUMN", help="Column of due times: timestamps, dates or text.")
@click.option("--delay-column", metavar="COLUMN",
              help="Column of delays: intervals, milliseconds, or 5m.")  # fmt: skip
@click.option("--body-columns", metavar="A,B,C", help="Columns of the JSON body. [default: all but times, headers]")
@click.option("--body-column", metavar="COLUMN", help="Column that is the body itself: text or binary.")
@click.option("--header-columns", metavar="A,B,C", help="Columns to send as headers of the same names.")
@click.option("--headers-column", metavar="COLUMN", help="Column of all headers: a map, or a JSON object of text.")
@click.option("--id-column", metavar="COLUMN", help="Column of message ids. [default: digest of the row]")
@click.option("--key-column", metavar="COLUMN", help="Column of keys, for messages that can be cancelled.")
@click.option("--type", "kind", metavar="NAME", help="Message type, by which endpoints choose a handler.")
@click.option("--name", default="", metavar="TEXT", help="Name of the schedule; another name changes message ids.")
@click.option("--ledger", metavar="DIR", help="Record of the sent rows. [default: in ~/.local/state/bide]")
@click.option("--part-rows", type=click.IntRange(1), default=10_000, show_default=True, metavar="N",
              help="Rows per part of the ledger; more if over 10,000 parts.")  # fmt: skip
@click.option("--rejects", metavar="DIR", help="Folder for rows that cannot be sent, as Parquet files.")
@click.option("--past", type=click.Choice(("send", "drop", "reject")),
              help="What to do with rows due over 5 min ago. [default: stop]")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Send nothing: check rows and print due times.")
@click.option("--declare/--no-declare", default=True, show_default=True,
              help="Declare the delay infrastructure if it is missing.")  # fmt: skip
@layout_options()
@engine_options
@json_option("the counts and the result")
@broker_options
@pass_settings
def schedule(
    settings: Settings,
    /,
    *,
    source: str,
    format: str | None,
    read_options: tuple[str, ...],
    ledger: str | None,
    part_rows: int,
    dry_run: bool,
    as_json: bool,
    choice: EngineChoice,
    **rest: Any,
) -> None:
    """Schedule a message for each row of SOURCE: Parquet, CSV, JSON or ORC files, or a table.

    All rows are checked before the first message is sent, and their number and due times are printed. --dry-run stops
    there, and does not connect to a broker. Rows that were due more than 5 minutes ago are an error, unless --past is
    given, because their times may be seconds that were read as milliseconds.

    The ledger records which parts of the rows were sent. After an interruption or a crash, the same command sends the
    parts that are not in the ledger. A part that was interrupted is sent again as a whole, with the same message ids.
    Without --ledger, the folder is in ~/.local/state/bide/schedule, and its name depends on the broker, SOURCE and
    these options.
    """
    refuse_missing_packages(pyarrow="PyArrow", numpy="numpy")
    plan = _schedule_plan(settings, **rest)
    plan.check_messages()
    options = pairs_of("--read-option", read_options, form="KEY=VALUE")
    refuse_missing(source, format, reads_local_paths=choice.reads_local_paths)
    if ledger is None and not choice.is_local and not dry_run:
        raise click.UsageError("on a cluster, give --ledger: a folder that the driver and all executors can access")
    to_write: Ledger | None = None
    if not dry_run:
        # The ledger and the plan are checked before Spark reads a large table, which takes a long time.
        to_write = _open_ledger(ledger or _default_ledger(source, format, plan), plan, is_local=choice.is_local)
        plan.check()
    given = SourceTable(source, format, options, plan)
    engine, small = engine_for(given, choice)
    output = _Output(plan, engine, to_write, part_rows=part_rows, as_json=as_json, started=settings.started)
    if small is not None:
        output.finish(small)
        return
    refuse_without_spark(engine)
    from bide.pipelines.session import read

    with choice.open_session(f"bide pipeline schedule {source}", engine, quiet=not settings.verbosity) as spark:
        output.finish(RowsOnSpark(read(spark, source, format=format, options=options), plan))


@dataclass(frozen=True, slots=True)
class _Output:
    """Checks the rows of a schedule, sends them unless it is a dry run, and prints the result."""

    plan: SchedulePlan
    engine: Engine
    ledger: Ledger | None
    _: KW_ONLY
    part_rows: int
    as_json: bool
    started: float

    def finish(self, rows: ScheduleRows) -> None:
        """Check the rows, send them unless it is a dry run, and print the result."""
        now = datetime.now(UTC)
        begun = (None if self.ledger is None else self.ledger.begun_at()) or now
        with progress("checking the rows"):
            found, targets = rows.survey(now=now, begun=begun), rows.targets()
        if self.ledger is None:
            self._print_survey(rows, found, targets)
        else:
            self._send(rows, found, targets, self.ledger, begun)

    def _print_survey(self, rows: ScheduleRows, found: Survey, targets: list[TargetCount]) -> None:
        """Print the result of a dry run."""
        from bide.pipelines.schedule.progress import refuse_overdue
        from bide.pipelines.schedule.targets import check_targets

        plan, every = self.plan, span_for(found.first, found.last)
        with progress("counting due times"):
            times = rows.due_times(every)
        if self.as_json:
            spans = [{"from": due.isoformat(), "count": count} for due, count in times]
            counts = {**summary(found, plan, targets), **engine_facts(self.engine)}
            print_json({**counts, "every_seconds": every.total_seconds(), "due": spans})
        else:
            for line in survey_lines(found, plan, targets, times, every):
                echo(line)
            echo(f"engine: {self.engine}")
        if found.invalid and plan.settings.rejects is None:
            raise _invalid_rows(found, plan)
        check_targets(targets, plan, is_offline=True)
        refuse_overdue(found, plan)

    def _send(
        self, rows: ScheduleRows, found: Survey, targets: list[TargetCount], ledger: Ledger, begun: datetime
    ) -> None:
        from bide.pipelines.schedule.progress import head_for
        from bide.pipelines.schedule.targets import check_targets

        plan = self.plan
        for line in summary_lines(found, plan, targets):
            echo(line, err=self.as_json)
        if found.invalid and plan.settings.rejects is None:
            raise _invalid_rows(found, plan)
        queues = check_targets(targets, plan)
        head = head_for(ledger, plan, found, part_rows=self.part_rows)
        with _ledger_progress(ledger, found.rows):
            sent = rows.send(ledger, head, queues, begun=begun)
        seconds = time.monotonic() - self.started
        # A part that this run did not send counts as sent before, even if a worker of a killed run has just sent it.
        all_parts = ledger.parts()
        now = {
            **{name: sum(one[name] for one in sent) for name in _OUTCOMES},
            **{
                f"{name}_before": sum(getattr(one, name) for one in all_parts) - sum(one[name] for one in sent)
                for name in _OUTCOMES
            },
            "seconds": round(seconds, 3),
            "ledger": ledger.folder,
        }
        if self.as_json:
            print_json({**summary(found, plan, targets), **now, **engine_facts(self.engine)})
            return
        rate = f" in {seconds:.1f} s, {now['sent'] / seconds:,.0f}/s" if sent else ""
        echo(f"scheduled {quantity(now['sent'], 'message')}{rate}")
        if before := sum(now[f"{name}_before"] for name in _OUTCOMES):
            echo(f"{quantity(before, 'row was', 'rows were')} finished by an earlier run")
        if dropped := now["dropped"] + now["dropped_before"]:
            echo(f"{quantity(dropped, 'overdue row was', 'overdue rows were')} dropped")
        if rejected := now["rejected"] + now["rejected_before"]:
            echo(f"{quantity(rejected, 'rejected row is', 'rejected rows are')} in {plan.settings.rejects}")
        echo(f"ledger: {ledger.folder}")
        echo(f"engine: {self.engine}")


def _schedule_plan(
    settings: Settings,
    *,
    to: str | None,
    to_column: str | None,
    allow: tuple[str, ...],
    exchange: str | None,
    routing_key: str | None,
    at_column: str | None,
    delay_column: str | None,
    body_columns: str | None,
    body_column: str | None,
    header_columns: str | None,
    headers_column: str | None,
    id_column: str | None,
    key_column: str | None,
    kind: str | None,
    name: str,
    rejects: str | None,
    past: OverdueAction | None,
    declare: bool,
    infrastructure: DelayInfrastructure,
) -> SchedulePlan:
    from bide.pipelines.schedule.plan import WINDOW, SchedulePlan
    from bide.spark.sink_settings import SinkSettings

    if sum(one is not None for one in (to, to_column, exchange)) != 1:
        raise click.UsageError(
            "give the target of the messages: --to QUEUE, --to-column COLUMN, or --exchange NAME with --routing-key"
        )
    if routing_key is not None and exchange is None:
        raise click.UsageError("--routing-key needs --exchange; leave it out with --to and --to-column")
    if allow and to_column is None:
        raise click.UsageError("--allow needs --to-column: leave --allow out with --to and --exchange")
    if headers_column is not None and header_columns is not None:
        raise click.UsageError("give either --headers-column for all headers, or --header-columns for single ones")
    if (at_column is None) == (delay_column is None):
        raise click.UsageError("give the due times of the messages: either --at-column or --delay-column")
    if body_columns is not None and body_column is not None:
        raise click.UsageError("give either --body-columns for a JSON body, or --body-column for the body itself")
    if past == "reject" and rejects is None:
        raise click.UsageError("--past reject needs --rejects DIR, the folder for these rows")
    if past is not None and at_column is None:
        raise click.UsageError("--past needs --at-column: with --delay-column no row is overdue")
    constants = {"to": to, "exchange": exchange, "routing_key": routing_key, "type": kind}
    if body_column is None:
        constants["content_type"] = "application/json"
    return SchedulePlan(
        to_column=to_column,
        allow=allow,
        at_column=at_column,
        delay_column=delay_column,
        body_columns=_column_names("--body-columns", body_columns),
        body_column=body_column,
        id_column=id_column,
        key_column=key_column,
        header_columns=_column_names("--header-columns", header_columns),
        headers_column=headers_column,
        name=name,
        settings=SinkSettings.make(
            settings.url,
            infrastructure=infrastructure,
            declare=declare,
            constants={key: value for key, value in constants.items() if value is not None},
            rejects=rejects,
            window=WINDOW,
            past=past,
        ),
    )


@contextmanager
def _ledger_progress(ledger: Ledger, rows: int) -> Iterator[None]:
    """Show on a terminal how many rows are in the ledger."""
    with progress("scheduling", total=rows, done=lambda: sum(one.rows for one in ledger.parts())):
        yield


def _invalid_rows(found: Survey, plan: SchedulePlan) -> InvalidRowError:
    time = "due time" if plan.at_column is not None else "delay"
    headers = "a header that is not UTF-8" if plan.headers_column is None else "headers that are not an object of text"
    reasons = (
        (found.without_time, f"a missing or invalid {time}"),
        (found.without_body, "no body"),
        (found.too_late, f"a {time} beyond the longest delay"),
        (found.bad_headers, headers),
    )
    counts = ", ".join(f"{count:,} with {what}" for count, what in reasons if count)
    return InvalidRowError(
        f"{found.invalid:,} of {found.rows:,} rows cannot be sent ({counts}), and nothing was sent: fix these rows, or "
        "name a folder for them with --rejects"
    )


def _open_ledger(folder: str, plan: SchedulePlan, *, is_local: bool) -> Ledger:
    """Open the ledger, and check that it belongs to this plan."""
    from bide.pipelines.ledger import Ledger
    from bide.pipelines.schedule.progress import matching_head

    ledger = Ledger(folder)
    for option, place in (("--ledger", folder), ("--rejects", plan.settings.rejects)):
        if place is not None:
            refuse_unwritable(option, place, is_local=is_local)
    matching_head(ledger, plan)
    return ledger


def _default_ledger(source: str, format: str | None, plan: SchedulePlan) -> str:
    from bide.pipelines.ledger import digest_of

    # The name of a catalog table or a URI does not depend on the working directory.
    is_named = is_uri(source) or (format or guess_format(source)) == "table"
    place = source if is_named else os.path.abspath(source)  # noqa: PTH100 (no link is followed)
    key = digest_of({"source": place, "broker": plan.broker, "plan": plan.ledger_digest()})[:16]
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return str(Path(state) / "bide" / "schedule" / f"{Path(place).name}-{key}")


def _column_names(option: str, text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(one.strip() for one in text.split(",") if one.strip())
    if not names:
        raise click.UsageError(f"{option} {text!r} does not name a column: give names separated by commas")
    if len(set(names)) < len(names):
        raise click.UsageError(f"{option} {text!r} names a column twice: name each column once")
    return names
