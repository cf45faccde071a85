"""``bide delay migrate`` and ``bide delay transfer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bide.cli import continuation
from bide.cli.output import echo, echo_reasons, print_json, progress_bar, working
from bide.cli.running import run_async, run_until_signal
from bide.cli.settings import (
    Settings,
    allow_option,
    json_option,
    layout_options,
    management_options,
    pass_settings,
)
from bide.durations import format_delay
from bide.errors import BideError
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from bide.delay.protocol import DelayInfrastructure
    from bide.migration import Migrated, WaitingCount

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


def _options(command: _Decorated) -> _Decorated:
    """Add the options that both commands have."""
    for option in (
        management_options,
        json_option("the counts"),
        layout_options(which="to", argument="target"),
        layout_options(which="from", argument="source"),
        allow_option,
        click.option("--dry-run", is_flag=True, help="Only count the waiting messages."),
    ):
        command = option(command)
    return command


@click.command()
@_options
@pass_settings
def migrate(
    settings: Settings,
    *,
    source: DelayInfrastructure,
    target: DelayInfrastructure,
    allow: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> int:
    """Move waiting messages into another delay infrastructure.

    Each message keeps its due time. If this time is known only within bounds, the message arrives at the later bound.
    Overdue messages go to their target at once. Senders can continue meanwhile. Run the command again until nothing is
    left, also after it was stopped or killed.

    Messages that cannot be sent on are set aside in a queue, with the reason in a header. The next run takes them
    again. After Ctrl-C or SIGTERM, the command finishes the messages that it has taken. The exit code is 1 after such a
    signal, or if messages are left or set aside.
    """
    return _run(settings, None, source, target, allow, dry_run=dry_run, as_json=as_json)


@click.command()
@click.option("--to-url", required=True, metavar="URL", help="URL of the broker that the messages go to.")
@_options
@pass_settings
def transfer(
    settings: Settings,
    *,
    to_url: str,
    source: DelayInfrastructure,
    target: DelayInfrastructure,
    allow: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> int:
    """Move waiting messages to another broker or virtual host.

    This works like 'bide delay migrate', but between two brokers: messages that wait on the broker of --url then wait
    on the broker of --to-url, in the same layout or another one. Their targets must exist there.
    """
    return _run(settings, to_url, source, target, allow, dry_run=dry_run, as_json=as_json)


def _run(
    settings: Settings,
    to_url: str | None,
    source: DelayInfrastructure,
    target: DelayInfrastructure,
    allow: tuple[str, ...],
    *,
    dry_run: bool,
    as_json: bool,
) -> int:
    from bide.migration import Migration

    def migration_with(progress: Callable[[int, int], None] | None) -> Migration:
        return Migration(
            settings.broker_url(),
            source,
            target,
            to_url=to_url,
            allow=allow,
            management_url=settings.management_url,
            progress=progress,
        )

    if dry_run:
        with working("counting"):
            counts = run_async(migration_with(None).count())
        return _print_counts(counts, as_json=as_json)
    with progress_bar("moved") as progress:
        migration = migration_with(progress)
        try:
            done = run_until_signal(migration.run(), migration.stop)
        except BideError:
            if migration.done.taken:
                _print_continuation(settings, migration.done)
            raise
    if as_json:
        print_json(done.to_dict())
    else:
        _print_migrated(done, source)
    if done.set_aside:
        echo(f"bide: {quantity(sum(done.set_aside.values()), 'message')} set aside in {migration.set_aside}", err=True)
    if not done.is_finished:
        _print_continuation(settings, done)
    elif done.left:
        echo("bide: messages are left; run the command again when their senders use the new infrastructure", err=True)
    return 0 if done.is_finished and not done.left and not done.set_aside else 1


def _print_continuation(settings: Settings, done: Migrated) -> None:
    taken = quantity(done.taken.total(), "message")
    echo(f"bide: stopped: {taken} taken, the others are still in their queues", err=True)
    echo(f"bide: go on with: {continuation.command(settings.arguments)}", err=True)


def _print_counts(counts: list[WaitingCount], *, as_json: bool) -> int:
    if as_json:
        print_json([{"queue": one.queue, "messages": one.messages, "wait": one.wait.total_seconds()} for one in counts])
        return 0
    for one in counts:
        if one.messages:
            echo(f"{one.messages:>9}  {one.queue}, wait {format_delay(one.wait)}")
    total = sum(one.messages for one in counts)
    echo(f"{total:>9}  in {quantity(len(counts), 'queue')}; nothing was changed")
    return 0


def _print_migrated(done: Migrated, source: DelayInfrastructure) -> None:
    for queue, count in sorted(done.taken.items(), key=lambda one: -one[1]):
        echo(f"{count:>9}  from {queue}")
    echo(f"{done.taken.total():>9}  taken: {done.moved} moved, {done.set_aside.total()} set aside")
    if done.overdue:
        echo(f"{done.overdue:>9}  of them overdue, sent to their targets at once")
    if done.uncertain:
        echo(
            f"{done.uncertain:>9}  of them without an exact due time, late by up to "
            f"{format_delay(done.longest_uncertainty)}"
        )
    if done.redelivered:
        echo(f"{done.redelivered:>9}  of them delivered before, possible duplicates")
    echo_reasons("set aside", done.set_aside)
    for queue, count in done.left.items():
        echo(f"{count:>9}  left in {queue}")
    if not done.left:
        how = "" if done.counts_all else " ready; the management API did not answer, so dead letters are not counted"
        echo(f"{0:>9}  left in {source.name}{how}")
