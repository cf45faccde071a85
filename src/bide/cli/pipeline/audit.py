"""``bide pipeline audit``: taps, events and the schedule log as Parquet tables."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import click

from bide.cli.advice import with_options
from bide.cli.output import echo, print_json, print_json_line
from bide.cli.pipeline.options import spark_options
from bide.cli.pipeline.view import progress
from bide.cli.settings import Settings, broker_options, duration_of, json_option, pass_settings
from bide.errors import (
    BideError,
    BrokerUnreachableError,
    ConnectionLostError,
    InvalidOptionError,
    OffsetsLostError,
)

if TYPE_CHECKING:
    from bide.pipelines.audit.run import Round

_LAYOUTS: Final = ("clock", "nservicebus", "nservicebus-v1", "celery")
_GAP_ADVICE: Final = "with --allow-gaps, or audit into another folder (--into)"
_OPTIONS_ADVICE: Final = "with the same --layout, --prefix and --events as before"


@click.command()
@click.option("--into", "place", required=True, metavar="DIR", help="Folder of the tables.")
@click.option("--once", is_flag=True, help="Run one round and exit. [default: until Ctrl-C]")
@click.option("--every", metavar="DELAY", default="1m", show_default=True,
              help="Time from the start of a round to that of the next.")  # fmt: skip
@click.option("--layout", "layouts", multiple=True, type=click.Choice(_LAYOUTS),
              help="Taps to read. Repeatable. [default: all that exist]")  # fmt: skip
@click.option("--prefix", metavar="NAME", help="Prefix of all names. [default: bide; none with celery]")
@click.option("--events", multiple=True, metavar="STREAM",
              help="Events stream to read. Repeatable. [default: bide.events]")  # fmt: skip
@click.option("--stream-port", type=click.IntRange(1, 65535), metavar="PORT",
              help="Stream port. [default: BIDE_STREAM_PORT, 5552, TLS: 5551]")  # fmt: skip
@click.option("--batch-rows", type=click.IntRange(1), default=1_000_000, show_default=True, metavar="N",
              help="Largest number of messages per batch.")  # fmt: skip
@click.option(
    "--allow-gaps",
    is_flag=True,
    help="Continue although messages or a stream were lost.",
)
@spark_options
@json_option("the results of the rounds", lines=True)
@broker_options
@pass_settings
def audit(
    settings: Settings,
    /,
    *,
    place: str,
    once: bool,
    every: str,
    layouts: tuple[str, ...],
    prefix: str | None,
    events: tuple[str, ...],
    stream_port: int | None,
    batch_rows: int,
    allow_gaps: bool,
    as_json: bool,
    open_session: Callable[..., Any],
    is_here: bool,
    reads_here: bool,
) -> None:
    """Read taps, events of endpoints and the schedule log into Parquet tables, until Ctrl-C or SIGTERM, or --once.

    DIR gets tables of facts: scheduled, delivered, processed, failed, occurrences (how schedules ended), and
    undecodable (raw bytes of messages that are not AMQP 1.0); and tables computed from them: messages (one row each),
    pending, lateness and failures. After an interruption or a crash, the same command continues, and counts nothing
    twice. Turn on taps with 'bide tap on', and give endpoints a bide.EventStream() to write events.
    """
    from bide.amqp.url import DEFAULT_URL
    from bide.pipelines.audit.folder import Folder
    from bide.pipelines.audit.run import run
    from bide.pipelines.audit.sources import candidates, find_sources
    from bide.pipelines.session import spark_errors

    pause = duration_of("--every", every).total_seconds()
    folder = Folder(place)

    def find() -> Any:
        return find_sources(
            settings.url or DEFAULT_URL,
            candidates(layouts, prefix=prefix),
            all_tapped=bool(layouts),
            events=events,
            port=stream_port,
            batch_rows=batch_rows,
            allow_gaps=allow_gaps,
        )

    folder.begin()
    # Errors in the options or of the broker are reported before Spark starts.
    find()
    with (
        folder.lock(),
        open_session("bide pipeline audit", quiet=not settings.verbosity) as spark,
        _collect_signals() as received,
    ):
        while not received:
            began = time.monotonic()
            try:
                # Before each round, because taps and endpoints may be added while the command runs.
                with progress("auditing", done=folder.noted_rows), spark_errors():
                    done = run(spark, find(), folder)
            except (BrokerUnreachableError, ConnectionLostError) as error:
                if once:
                    raise
                echo(f"bide: {with_options(str(error))}; trying again in {every}", err=True)
            except BideError as error:
                # The other queries of the round that failed.
                for note in getattr(error, "__notes__", ()):
                    echo(f"bide: {with_command_options(note)}", err=True)
                if isinstance(error, OffsetsLostError | InvalidOptionError):
                    raise type(error)(with_command_options(str(error))) from error
                raise
            else:
                _print_round(done, folder.place, once=once, as_json=as_json)
            if once:
                return
            # Short sleeps, because a signal does not end a sleep.
            while not received and (remaining := began + pause - time.monotonic()) > 0:
                time.sleep(min(remaining, 0.5))
    raise SystemExit(128 + received[0])


def with_command_options(text: str) -> str:
    """Replace the options of the data source in the advice of an error by those of this command."""
    from bide.spark.source import TAKE_BACK, WAY_OUT_OF_LEFT_OUT, WAY_OUT_OF_NEW, WAY_OUT_OF_UNREAD
    from bide.streams.range_reader import WAY_OUT_OF_GAP

    take_back = f"{TAKE_BACK} (below _checkpoint)"
    for theirs, own in (
        (WAY_OUT_OF_UNREAD, f"name them {_OPTIONS_ADVICE}, continue without them {_GAP_ADVICE}"),
        (
            WAY_OUT_OF_LEFT_OUT,
            f"name them {_OPTIONS_ADVICE} and {take_back}; continue without them {_GAP_ADVICE}",
        ),
        (WAY_OUT_OF_NEW, f"Continue {_GAP_ADVICE}"),
        (WAY_OUT_OF_GAP, f"Continue with the remaining messages {_GAP_ADVICE}"),
    ):
        text = text.replace(theirs, own)
    return text


def _print_round(done: Round, place: str, *, once: bool, as_json: bool) -> None:
    if as_json:
        seconds = {name: round(getattr(done, name), 3) for name in ("read_seconds", "seconds")}
        result = {**asdict(done), **seconds, "into": place}
        if done.schedules is None:
            del result["schedules"], result["ended"]
        if once:
            print_json(result)
        else:
            print_json_line(result)
        return
    counts = ", ".join(f"{count:,} {table}" for table, count in done.rows.items())
    overdue = f" ({done.overdue:,} overdue)" if done.overdue else ""
    undecodable = f", {done.undecodable:,} undecodable" if done.undecodable else ""
    days = f"{done.days} {'day' if done.days == 1 else 'days'} computed"
    echo(
        f"{counts}{undecodable} in {done.read_seconds:.1f} s; {days} in {done.seconds - done.read_seconds:.1f} s; "
        f"{done.pending:,} pending{overdue}"
    )
    if done.schedules is not None:
        ended = "".join(f"{count:,} {outcome}, " for outcome, count in sorted(done.ended.items()))
        late = f" ({done.schedules.overdue:,} overdue)" if done.schedules.overdue else ""
        waiting = done.schedules.waiting + done.schedules.under_way
        echo(f"schedules: {ended}{waiting:,} pending{late}")
    if once:
        echo(f"tables: {place}")


@contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP, so that the current round can finish.

    A second signal ends the program immediately, which loses nothing either.
    """
    received: list[int] = []

    def receive(number: int, _: FrameType | None) -> None:
        if received:
            raise SystemExit(128 + number)
        received.append(number)

    before = {
        number: signal.signal(number, receive)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
