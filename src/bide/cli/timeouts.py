"""``bide timeouts``: move the stored timeouts of NServiceBus endpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bide.cli import continuation
from bide.cli.advice import with_options
from bide.cli.output import echo, echo_reasons, most_common_reasons, print_json, progress_bar, working
from bide.cli.running import confirm, run_async, run_until_signal
from bide.cli.settings import (
    Settings,
    allow_option,
    broker_options,
    duration_of,
    json_option,
    layout_options,
    pass_settings,
    verbose_option,
)
from bide.durations import format_delay, parse_due_time
from bide.errors import BideError
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from bide.delay.protocol import DelayInfrastructure
    from bide.timeouts import EndpointPreview, Retirement, RunStatus
    from bide.timeouts.migration import Past, TimeoutsMigrated
    from bide.timeouts.tables import TimeoutTable

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


@click.group()
def timeouts() -> None:
    """Move the timeouts that NServiceBus endpoints have stored in a database.

    The tables are those of NServiceBus SQL persistence, in PostgreSQL, MariaDB or MySQL. An endpoint here is the one
    that stored the timeouts. Its name is taken from its table: Sales_Orders has the table Sales_OrdersTimeoutData or
    Sales_Orders_TimeoutData.
    """


def _database_option(command: _Decorated) -> _Decorated:
    return click.option(
        "--database",
        required=True,
        metavar="URL",
        envvar="BIDE_DATABASE",
        show_envvar=True,
        help="postgresql:// or mysql://user:password@host/database.",
    )(command)


def _choosing(command: _Decorated) -> _Decorated:
    for option in (
        layout_options(which="to"),
        click.option(
            "--columns", metavar="USE=NAME,...", help="Columns of --table: id, destination, body, due, headers."
        ),
        click.option("--table", metavar="NAME", help="A table of any other form; needs --columns."),
        click.option("--allow", multiple=True, metavar="PATTERN", help="Allowed target. Repeatable. [default: any]"),
        click.option("--keyed", is_flag=True, help="Send schedules with keys, which gates deliver."),
        click.option("--cutoff", metavar="TIME", help="Leave timeouts that are due before this time."),
        click.option("--endpoint", "endpoints", multiple=True, metavar="NAME", help="Only this endpoint. Repeatable."),
        _database_option,
    ):
        command = option(command)
    return command


@timeouts.command()
@_choosing
@json_option("the preview")
@broker_options
@pass_settings
def preview(
    settings: Settings,
    *,
    database: str,
    endpoints: tuple[str, ...],
    table: str | None,
    columns: str | None,
    cutoff: str | None,
    allow: tuple[str, ...],
    keyed: bool,
    infrastructure: DelayInfrastructure,
    as_json: bool,
) -> int:
    """Show which timeouts would move, and which cannot; exit with 1 if some cannot. Nothing is changed.

    By default, the timeouts of all endpoints are shown.
    """
    from bide.timeouts import preview_timeouts

    with working("reading"):
        found = run_async(
            preview_timeouts(
                database,
                settings.broker_url(),
                infrastructure,
                endpoints=endpoints,
                table=_mapped(table, columns),
                cutoff=_cutoff(cutoff),
                allow=allow or ("*",),
                keyed=_keyed(infrastructure) if keyed else False,
            )
        )
    if as_json:
        print_json([one.to_dict() for one in found])
    else:
        _print_preview(found)
    return 1 if any(one.problems for one in found) else 0


@timeouts.command()
@_choosing
@click.option("--all", "everything", is_flag=True, help="Move the timeouts of all endpoints.")
@click.option(
    "--past",
    type=click.Choice(["leave", "send"]),
    default="leave",
    show_default=True,
    help="What to do with timeouts that are due already.",
)
@json_option("the counts")
@broker_options
@pass_settings
def migrate(
    settings: Settings,
    *,
    database: str,
    endpoints: tuple[str, ...],
    everything: bool,
    table: str | None,
    columns: str | None,
    cutoff: str | None,
    allow: tuple[str, ...],
    keyed: bool,
    past: Past,
    infrastructure: DelayInfrastructure,
    as_json: bool,
) -> int:
    """Move stored timeouts into a delay infrastructure.

    Each timeout keeps its due time. Its endpoint can keep running: a timeout that is claimed is no longer in the
    endpoint's table. Timeouts that cannot be sent, or that --allow does not allow, stay there. With --past send, stop
    the endpoints first.

    With --keyed, each timeout becomes a schedule with the key timeout:ENDPOINT:SAGA:ID, which 'bide schedule' can
    cancel and move.

    Run the command again, with the same options, after it was stopped or killed: it continues the run. After a kill, up
    to 2000 timeouts can arrive twice, with the same message id; the output counts them. The exit code is 1 if the run
    was stopped, or if timeouts are left.
    """
    from bide.timeouts import TimeoutMigration

    if bool(endpoints) + everything + (table is not None) != 1:
        raise click.UsageError("give one of --endpoint, --all and --table")
    with progress_bar("sent") as progress:
        migration = TimeoutMigration(
            database,
            settings.broker_url(),
            infrastructure,
            endpoints=endpoints,
            table=_mapped(table, columns),
            cutoff=_cutoff(cutoff),
            allow=allow or ("*",),
            past=past,
            keyed=_keyed(infrastructure) if keyed else False,
            progress=progress,
        )
        try:
            done = run_until_signal(migration.run(), migration.stop)
        except BideError:
            if migration.done.run:
                _print_continuation(settings, migration.done)
            raise
    if as_json:
        print_json(done.to_dict())
    else:
        _print_migrated(done)
    if not done.is_finished:
        _print_continuation(settings, done)
    return 0 if done.is_finished and not done.left and not done.past else 1


@timeouts.command()
@_database_option
@json_option("the runs")
@verbose_option
def status(*, database: str, as_json: bool) -> int:
    """Show the runs in a database; exit with 1 if one of them is unfinished."""
    from bide.timeouts import list_runs

    with working("reading"):
        found = list_runs(database)
    if as_json:
        print_json([one.to_dict() for one in found])
    else:
        for one in found:
            _print_run(one)
        if not found:
            echo("no runs")
    return 1 if any(one.ended_at is None for one in found) else 0


@timeouts.command()
@_database_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option("the run")
@verbose_option
def abort(*, database: str, yes: bool, as_json: bool) -> None:
    """End the unfinished run. Timeouts that are claimed and not known to be sent go back to their endpoints' tables.

    Timeouts that were sent stay sent. Restored timeouts that were sent just before a kill arrive twice.
    """
    from bide.timeouts import abort_run

    if not yes:
        confirm("End the unfinished run, and restore the timeouts that it has not sent?")
    with working("restoring"):
        done = abort_run(database)
    if as_json:
        print_json(done.to_dict())
    else:
        _print_run(done)


@timeouts.command()
@_database_option
@click.option("--endpoint", required=True, metavar="NAME", help="The endpoint, with its dots: Sales.Orders.")
@layout_options(which="to")
@allow_option
@json_option("the counts at the end")
@broker_options
@pass_settings
def dispatch(
    settings: Settings,
    *,
    database: str,
    endpoint: str,
    infrastructure: DelayInfrastructure,
    allow: tuple[str, ...],
    as_json: bool,
) -> None:
    """Do the work of an endpoint's timeout manager, until Ctrl-C or SIGTERM.

    Stored timeouts are sent when they are due. Messages that legacy senders publish to ENDPOINT.Timeouts go into the
    delay infrastructure. Switch the endpoint's own timeout manager off first. Several processes can share the work.

    The command sends with its own permissions, so it sends only to the targets that --allow names.

    After a kill, up to 100 timeouts and 100 messages can arrive twice. Messages that cannot be sent go to the queue
    bide.set-aside.ENDPOINT.Timeouts. Stored timeouts that cannot be sent stay in the table, and are tried again every
    minute.
    """
    from bide.timeouts import TimeoutDispatcher

    dispatcher = TimeoutDispatcher(database, settings.broker_url(), infrastructure, endpoint, allow=allow)
    done = run_until_signal(dispatcher.run(), dispatcher.stop)
    if as_json:
        print_json(asdict(done))
        return
    echo(
        f"{done.sent} stored timeouts sent, {done.delayed} messages delayed, {done.cleared} sagas cleared, "
        f"{done.set_aside} messages set aside, {done.left} failed attempts to send"
    )


@timeouts.command()
@_database_option
@click.option("--endpoint", required=True, metavar="NAME", help="The endpoint, with its dots: Sales.Orders.")
@click.option(
    "--watch", default="1m", show_default=True, metavar="TIME", help="Time that the queues have to stay empty."
)
@click.option("--dry-run", is_flag=True, help="Only show whether the queues are unused now.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option("the result")
@broker_options
@pass_settings
def retire(
    settings: Settings, *, database: str, endpoint: str, watch: str, dry_run: bool, yes: bool, as_json: bool
) -> int:
    """Remove the queues and the table of a timeout manager that is no longer used.

    These are the exchanges and queues ENDPOINT.Timeouts and ENDPOINT.TimeoutsDispatcher, and the table of the endpoint.
    They are removed if no timeout is stored, if nothing consumes from the queues, and if nothing is sent to them for
    the time of --watch. The exit code is 1 if something was found that prevents this.
    """
    from bide.timeouts import inspect_timeout_manager, retire_timeout_manager

    span = duration_of("--watch", watch)
    with working("looking"):
        found = run_async(inspect_timeout_manager(database, settings.broker_url(), endpoint))
    if not found.problems and not dry_run:
        names = [*found.queues, *([found.table] if found.table else [])]
        if not yes and names:
            confirm(f"Remove {', '.join(names)}, if nothing is sent for {watch}?")
        with working("watching the queues"):
            found = run_async(retire_timeout_manager(database, settings.broker_url(), endpoint, watch=span))
    found.problems = [with_options(one) for one in found.problems]
    if as_json:
        print_json(found.to_dict())
    else:
        _print_retirement(found)
    return 1 if found.problems else 0


def _mapped(table: str | None, columns: str | None) -> TimeoutTable | None:
    """The table of ``--table`` and ``--columns``."""
    from bide.timeouts.tables import mapped_table

    if (table is None) != (columns is None):
        raise click.UsageError("--table and --columns belong together: give both")
    if table is None or columns is None:
        return None
    pairs = [one.partition("=") for one in columns.split(",")]
    return mapped_table(table, {use.strip(): name.strip() for use, _, name in pairs})


def _keyed(infrastructure: DelayInfrastructure) -> bool:
    """True for ``--keyed``; a usage error with a layout other than ``clock``."""
    if infrastructure.name != "clock":
        raise click.UsageError("--keyed makes schedules of bide: give it with --to-layout clock")
    return True


def _cutoff(text: str | None) -> datetime | None:
    return None if text is None else parse_due_time(text)


def _print_continuation(settings: Settings, done: TimeoutsMigrated) -> None:
    echo(f"bide: stopped: {quantity(done.sent.total(), 'timeout')} sent, the run {done.run} is unfinished", err=True)
    echo(f"bide: go on with: {continuation.command(settings.arguments)}", err=True)


def _print_preview(found: list[EndpointPreview]) -> None:
    now = datetime.now(UTC)
    width = max(len("endpoint"), *(len(one.endpoint) for one in found))
    echo(f"{'endpoint':<{width}}  {'timeouts':>9}  {'past due':>9}  {'earliest due in':>20}  {'latest due in':>20}")
    for one in found:
        ends = [
            "-" if moment is None else format_delay(timedelta(seconds=round((moment - now).total_seconds())))
            for moment in (one.earliest_due, one.latest_due)
        ]
        echo(f"{one.endpoint:<{width}}  {one.count:>9}  {one.past:>9}  {ends[0]:>20}  {ends[1]:>20}")
        for destination, count in one.destinations.most_common():
            echo(f"{'':<{width}}  {count:>9}  to {destination}")
        for reason, count in most_common_reasons(one.problems):
            echo(f"{'':<{width}}  {count:>9}  cannot move: {reason}", colour="red")
    total = quantity(sum(one.count for one in found), "timeout")
    echo(f"{total} of {quantity(len(found), 'endpoint')}; nothing was changed")


def _print_migrated(done: TimeoutsMigrated) -> None:
    for endpoint, count in sorted(done.sent.items()):
        echo(f"{count:>9}  of {endpoint} sent")
    echo(f"{done.sent.total():>9}  sent")
    if done.repeated:
        echo(f"{done.repeated:>9}  perhaps sent before, possible duplicates")
    echo_reasons("left", done.left)
    if done.past:
        echo(f"{done.past:>9}  left: past due; the endpoint sends them, or --past send")


def _print_retirement(found: Retirement) -> None:
    for name, count in found.queues.items():
        echo(f"{count:>9}  in the queue {name}")
    if found.table is not None:
        echo(f"{found.stored:>9}  in the table {found.table}")
    if not found.queues and not found.exchanges and found.table is None:
        echo(f"nothing of a timeout manager of {found.endpoint} exists")
    for one in found.problems:
        echo(one, mark="✗", colour="red")
    for one in found.removed:
        echo(f"{one} removed", mark="✓", colour="green")


def _print_run(run: RunStatus) -> None:
    ended = "" if run.ended_at is None else f", ended {run.ended_at.isoformat(timespec='seconds')}"
    status = "unfinished" if run.ended_at is None else run.status
    echo(f"run {run.run}: {status}, started {run.started_at.isoformat(timespec='seconds')}{ended}")
    for one in run.endpoints:
        claimed = f", {one.claimed} claimed" if one.claimed else ""
        repeated = f", {one.repeated} perhaps sent twice" if one.repeated else ""
        echo(f"{one.sent:>9}  of {one.endpoint} sent{claimed}{repeated}")
        for reason, count in one.left.items():
            echo(f"{count:>9}  left: {with_options(reason)}")
