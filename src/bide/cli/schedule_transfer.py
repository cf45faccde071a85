"""``bide schedule transfer``: move all schedules to another broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from bide.cli import continuation
from bide.cli.output import echo, echo_reasons, print_json, progress_bar, working
from bide.cli.running import run_async, run_until_signal
from bide.cli.settings import Settings, broker_options, json_option, pass_settings
from bide.errors import BideError
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from bide.migration import SchedulesTransferred


@click.command()
@click.option("--to-url", required=True, metavar="URL", help="URL of the other broker, or virtual host.")
@click.option("--dry-run", is_flag=True, help="Only count the schedules.")
@json_option("the counts")
@broker_options
@pass_settings
def transfer(settings: Settings, *, to_url: str, dry_run: bool, as_json: bool) -> int:
    """Move all schedules to another broker or virtual host. Gates have to run on both.

    Each schedule keeps its key, times, rules, target and message, and a paused one stays paused. Schedules that are due
    within 10 seconds are left to the gate of the first broker; for an interval under 30 seconds, the limit is a third
    of the interval. Run the command again until nothing waits, also after it was stopped or killed. After a kill or an
    error, some schedules wait on both brokers until the next run: until then, cancel or change them on both.

    The exit code is 1 if schedules still wait on the first broker.
    """
    from bide.migration import ScheduleTransfer

    if dry_run:
        with working("counting"):
            count = run_async(ScheduleTransfer(settings.broker_url(), to_url).count())
        print_json({"waiting": count}) if as_json else echo(f"{quantity(count, 'schedule')}; nothing was changed")
        return 0
    with progress_bar("moved") as progress:
        moving = ScheduleTransfer(settings.broker_url(), to_url, progress=progress)
        try:
            done = run_until_signal(moving.run(), moving.stop)
        except BideError:
            if moving.done.moved:
                _print_continuation(settings, moving.done)
            raise
    print_json(done.to_dict()) if as_json else _print_transferred(done)
    if not done.is_finished:
        _print_continuation(settings, done)
    return 0 if done.is_finished and not done.waiting else 1


def _print_continuation(settings: Settings, done: SchedulesTransferred) -> None:
    echo(f"bide: stopped: {quantity(done.moved, 'schedule')} moved, the others wait where they were", err=True)
    echo(f"bide: go on with: {continuation.command(settings.arguments)}", err=True)


def _print_transferred(done: SchedulesTransferred) -> None:
    echo(f"{done.moved:>9}  moved")
    if done.ended:
        echo(f"{done.ended:>9}  changed, cancelled or delivered on the first broker meanwhile")
    if done.kept:
        echo(f"{done.kept:>9}  of them changed or delivered on the other broker too")
    if done.repeated:
        echo(f"{done.repeated:>9}  delivered by both brokers")
    echo_reasons("left", done.left)
    # Schedules that were left for a reason may have been delivered since.
    if (soon := done.waiting - done.left.total()) > 0:
        echo(f"{soon:>9}  left: due soon, or scheduled after the others were moved")
    if not done.waiting:
        echo(f"{0:>9}  left")
