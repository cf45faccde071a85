"""``bide schedule``: schedule messages by a key, and list or change what waits."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import wraps
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

import click

from bide.cli import schedule_view as view
from bide.cli.output import echo, print_json, print_json_line, working
from bide.cli.running import confirm, connected_client, run_async
from bide.cli.schedule_transfer import transfer
from bide.cli.selecting import pairs_of
from bide.cli.settings import Settings, broker_options, json_option, pass_settings
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from bide.client.client import Client
    from bide.client.schedule_result import FilterResult, ScheduleResult

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

_DONE: Final = frozenset({"scheduled", "moved", "paused", "resumed", "running", "cancelled"})
"""Outcomes for which the exit code is 0."""


@click.group()
def schedule() -> None:
    """Schedules: delayed messages that can be cancelled, moved, replaced and listed by a key.

    A gate delivers them and answers these commands; run one with 'bide gate'.
    """


def _filter_options(command: _Decorated) -> _Decorated:
    """Add the options of a filter, and pass those that were given as the argument ``chosen``."""

    @wraps(command)
    def wrapper(
        *args: Any,
        prefix: str | None,
        to: str | None,
        exchange: str | None,
        due_from: str | None,
        due_before: str | None,
        **kwargs: Any,
    ) -> Any:
        options = {"prefix": prefix, "to": to, "exchange": exchange, "due_from": due_from, "due_before": due_before}
        chosen = {name: value for name, value in options.items() if value is not None}
        return command(*args, chosen=chosen, **kwargs)

    wrapped: Any = wrapper
    for option in (
        click.option("--due-before", metavar="TIME", help="Due before this time."),
        click.option("--due-from", metavar="TIME", help="Due at this time or later."),
        click.option("--exchange", metavar="NAME", help="Target exchange."),
        click.option("--to", metavar="QUEUE", help="Target queue."),
        click.option("--prefix", metavar="TEXT", help="Start of the key."),
    ):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]  # the same parameters


def _bulk_options(verb: str) -> Callable[[_Decorated], _Decorated]:
    def decorate(command: _Decorated) -> _Decorated:
        wrapped: Any = command
        for option in (
            click.option("--yes", is_flag=True, help="Do not ask for confirmation."),
            click.option("--dry-run", is_flag=True, help=f"Only count the schedules that would be {verb}."),
            click.option("--all", "everything", is_flag=True, help="Choose all schedules."),
        ):
            wrapped = option(wrapped)
        return wrapped  # type: ignore[no-any-return]  # the same parameters

    return decorate


_version_option = click.option("--if-version", metavar="VERSION", help="Do nothing if another version waits.")


@schedule.command()
@click.argument("key")
@click.argument("body", required=False)
@click.option("--to", metavar="QUEUE", help="Target queue.")
@click.option("--exchange", metavar="NAME", help="Target exchange, instead of a queue.")
@click.option("--routing-key", metavar="KEY", help="Routing key, with --exchange.")
@click.option("--in", "--delay", "delay", metavar="DELAY", help="Time until delivery: 90s, 1h30m, 3d.")
@click.option("--at", "deliver_at", metavar="TIME", help="Due time: 2026-12-24T18:00:00+01:00.")
@click.option("--every", metavar="RULE", help="Cron expression '0 8 * * MON-FRI', or interval 15m.")
@click.option("--time-zone", metavar="ZONE", help="Time zone of the cron expression. [default: UTC]")
@click.option("--first-run", metavar="TIME", help="No run before this time.")
@click.option("--last-run", metavar="TIME", help="No run after this time.")
@click.option("--jitter", metavar="DELAY", help="Delay each run by up to this much.")
@click.option(
    "--catch-up",
    type=click.Choice(["last", "all", "none"]),
    default="last",
    show_default=True,
    help="Missed runs to make up for after an outage.",
)
@click.option("--if-absent", is_flag=True, help="Do nothing if a schedule waits under KEY.")
@_version_option
@click.option("--file", type=click.File("rb"), help="File with the body; - is standard input.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Header, as text. Repeatable.")
@click.option("--message-id", metavar="ID", help="Message id. [default: a new id]")
@click.option("--type", "kind", metavar="NAME", help="Message type; endpoints choose the handler by it.")
@click.option("--content-type", metavar="TYPE", help="MIME type of the body, such as application/json.")
@click.option(
    "--declare/--no-declare", default=True, show_default=True, help="Declare the schedule log if it is missing."
)
@json_option("the result")
@broker_options
@pass_settings
def add(
    settings: Settings,
    /,
    *,
    body: str | None,
    file: BinaryIO | None,
    headers: tuple[str, ...],
    kind: str | None,
    declare: bool,
    as_json: bool,
    routing_key: str | None,
    **given: Any,
) -> int:
    """Schedule BODY under KEY, in place of a schedule that waits there. Without BODY and --file, the body is empty.

    The command ends when the broker has confirmed the schedule; with --if-absent or --if-version, when a gate has
    answered. The exit code is 1 if the condition did not hold.
    """
    from bide.durations import sending_time
    from bide.schedules.outgoing import OutgoingSchedule
    from bide.schedules.prepared import check_schedule

    if body is not None and file is not None:
        raise click.UsageError("give BODY or --file, not both")
    if sum(given[name] is not None for name in ("delay", "deliver_at", "every")) != 1:
        raise click.UsageError("the schedule needs one time: give --in DELAY, --at TIME or --every RULE")
    content = file.read() if file is not None else (body or "").encode("utf-8", errors="surrogateescape")
    texts = pairs_of("--header", headers)
    outgoing = {**given, "body": content, "headers": texts, "type": kind, "routing_key": routing_key or ""}
    check_schedule(OutgoingSchedule(**outgoing), sending_time())  # report invalid values before connecting

    async def work() -> int:
        async with connected_client(settings, declare=declare) as client:
            with working("waiting for a gate"):
                made = await client.schedule(**outgoing)
        view.write_scheduled(made, as_json=as_json)
        return _exit_code(made.outcome.value)

    return run_async(work())


@schedule.command("list")
@_filter_options
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Maximum number of schedules.")
@click.option("--count", "only_count", is_flag=True, help="Only count the schedules.")
@json_option("the schedules", lines=True)
@broker_options
@pass_settings
def list_(settings: Settings, chosen: dict[str, str], limit: int | None, only_count: bool, as_json: bool) -> None:
    """List schedules in the order of their keys. A schedule has to match every condition."""
    if only_count and limit is not None:
        raise click.UsageError("--count counts all schedules that match: leave out --limit")

    async def work(client: Client) -> int:
        if only_count:
            with working("waiting for a gate"):
                count = await client.count_scheduled(**chosen)
            print_json_line({"count": count}) if as_json else echo(f"{count:,}")
            return 0
        count = 0
        with working("waiting for a gate") as end_message:
            async with aclosing(client.list_scheduled(**chosen)) as found:  # type: ignore[arg-type]  # options by name
                async for one in found:
                    end_message()
                    print_json_line(view.as_dict(one)) if as_json else view.write_line(one)
                    count += 1
                    if count == limit:
                        break
        if not count and not as_json:
            echo("no schedule", err=True)
        return 0

    _check_filter(chosen)
    _run(settings, work)


@schedule.command()
@click.argument("key")
@json_option("the schedule")
@broker_options
@pass_settings
def show(settings: Settings, key: str, as_json: bool) -> int:
    """Show what waits under KEY: its times, target and message. The exit code is 1 if nothing waits."""

    async def work(client: Client) -> int:
        from bide.schedules.names import ScheduleNames

        with working("waiting for a gate"):
            found = await client.scheduled(key)
        if found is None:
            raise click.ClickException(
                f"nothing waits under the key {key!r}; see undeliverable messages with 'bide errors list --queue "
                f"{ScheduleNames().undeliverable} --key ...'"
            )
        print_json(view.as_dict(found, whole=True)) if as_json else view.write_details(found)
        return 0

    return _run(settings, work)


@schedule.command()
@click.argument("key", required=False)
@_filter_options
@_version_option
@_bulk_options("cancelled")
@json_option("the result")
@broker_options
@pass_settings
def cancel(
    settings: Settings,
    /,
    key: str | None,
    chosen: dict[str, str],
    if_version: str | None,
    as_json: bool,
    **bulk: bool,
) -> int:
    """Cancel the schedule of KEY, or all schedules that match every condition.

    The exit code is 1 if KEY was not cancelled: it was too late, nothing waits, or it has another version.
    """

    async def change_one(client: Client) -> ScheduleResult:
        return await client.cancel(str(key), if_version=if_version)

    async def change_all(client: Client, conditions: dict[str, str]) -> FilterResult:
        return await client.cancel_scheduled(**conditions)

    return _change(
        settings, key, chosen, change_one, change_all, "cancelled", if_version=if_version, as_json=as_json, **bulk
    )


@schedule.command()
@click.argument("key", required=False)
@click.option("--in", "--delay", "delay", metavar="DELAY", help="New time until delivery: 90s, 1h30m, 3d.")
@click.option("--at", "deliver_at", metavar="TIME", help="New due time: 2026-12-24T18:00:00+01:00.")
@_filter_options
@_version_option
@_bulk_options("moved")
@json_option("the result")
@broker_options
@pass_settings
def move(
    settings: Settings,
    /,
    key: str | None,
    delay: str | None,
    deliver_at: str | None,
    chosen: dict[str, str],
    if_version: str | None,
    as_json: bool,
    **bulk: bool,
) -> int:
    """Move the schedule of KEY, or all schedules that match every condition, to another time.

    The exit code is 1 if KEY was not moved: it was too late, nothing waits, or it has another version.
    """
    from bide.durations import sending_time
    from bide.schedules.prepared import check_due

    if (delay is None) == (deliver_at is None):
        raise click.UsageError("exactly one new time is needed: give --in DELAY or --at TIME")
    check_due(delay, deliver_at, sending_time())

    async def change_one(client: Client) -> ScheduleResult:
        return await client.reschedule(str(key), delay=delay, deliver_at=deliver_at, if_version=if_version)

    async def change_all(client: Client, conditions: dict[str, str]) -> FilterResult:
        return await client.move_scheduled(delay=delay, deliver_at=deliver_at, **conditions)

    return _change(
        settings, key, chosen, change_one, change_all, "moved", if_version=if_version, as_json=as_json, **bulk
    )


@schedule.command()
@click.argument("key")
@_version_option
@json_option("the result")
@broker_options
@pass_settings
def pause(settings: Settings, key: str, if_version: str | None, as_json: bool) -> int:
    """Deliver nothing under KEY until 'bide schedule resume'."""
    return _operate(settings, lambda client: client.pause(key, if_version=if_version), as_json=as_json)


@schedule.command()
@click.argument("key")
@_version_option
@json_option("the result")
@broker_options
@pass_settings
def resume(settings: Settings, key: str, if_version: str | None, as_json: bool) -> int:
    """Resume the paused schedule of KEY. If it became due meanwhile, a single message is delivered at once; recurring
    runs are skipped."""
    return _operate(settings, lambda client: client.resume(key, if_version=if_version), as_json=as_json)


@schedule.command("run-now")
@click.argument("key")
@_version_option
@json_option("the result")
@broker_options
@pass_settings
def run_now(settings: Settings, key: str, if_version: str | None, as_json: bool) -> int:
    """Deliver the message of KEY now. A recurring schedule goes on as before."""
    return _operate(settings, lambda client: client.run_now(key, if_version=if_version), as_json=as_json)


def _change(
    settings: Settings,
    key: str | None,
    chosen: dict[str, str],
    change_one: Callable[[Client], Coroutine[Any, Any, ScheduleResult]],
    change_all: Callable[[Client, dict[str, str]], Coroutine[Any, Any, FilterResult]],
    verb: str,
    *,
    if_version: str | None,
    everything: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Change the schedule of a key, or all schedules that match."""
    if sum((key is not None, bool(chosen), everything)) != 1:
        raise click.UsageError("give either KEY, or conditions such as --prefix, or --all")
    if key is not None:
        if dry_run:
            raise click.UsageError("--dry-run needs conditions, but KEY was given: use 'bide schedule show' instead")
        return _operate(settings, change_one, as_json=as_json)
    if if_version is not None:
        raise click.UsageError("--if-version needs KEY: give KEY, or leave out --if-version")
    _check_filter(chosen)
    conditions = chosen or {"prefix": ""}

    async def work(client: Client) -> int:
        if dry_run or not yes:
            with working("waiting for a gate"):
                count = await client.count_scheduled(**conditions)
            if dry_run:
                view.write_count(count, verb, as_json=as_json)
                return 0
            confirm(f"{quantity(count, 'schedule')} would be {verb}. Continue?")
        with working("waiting for a gate"):
            result = await change_all(client, conditions)
        view.write_filter_result(result, as_json=as_json)
        return 0

    return _run(settings, work)


def _operate(
    settings: Settings, operation: Callable[[Client], Coroutine[Any, Any, ScheduleResult]], *, as_json: bool
) -> int:
    async def work(client: Client) -> int:
        with working("waiting for a gate"):
            result = await operation(client)
        view.write_result(result, as_json=as_json)
        return _exit_code(result.outcome.value)

    return _run(settings, work)


def _run(settings: Settings, work: Callable[[Client], Coroutine[Any, Any, int]]) -> int:
    async def connected() -> int:
        async with connected_client(settings) as client:
            return await work(client)

    return run_async(connected())


def _check_filter(chosen: dict[str, str]) -> None:
    """Report invalid conditions before connecting."""
    from bide.schedules.prepared import check_filter

    check_filter(**chosen)


def _exit_code(outcome: str) -> int:
    return 0 if outcome in _DONE else 1


schedule.add_command(transfer)
