"""``bide pipeline audit``: taps, events and the schedule log as tables."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import click

from bide.cli.advice import with_options
from bide.cli.output import echo, print_json, print_json_line
from bide.cli.pipeline.options import (
    engine_options,
    refuse_missing_audit_packages,
    refuse_missing_packages,
    refuse_without_spark,
)
from bide.cli.pipeline.view import engine_facts, progress
from bide.cli.settings import Settings, broker_options, duration_of, json_option, pass_settings
from bide.errors import BrokerUnreachableError, ConnectionLostError
from bide.pipelines.audit.table_format import TABLE_FORMATS, TableFormat
from bide.pipelines.engine import Engine, NeedsSparkError

if TYPE_CHECKING:
    from bide.cli.pipeline.engine_choice import EngineChoice
    from bide.pipelines.audit.folder import Folder
    from bide.pipelines.audit.run import RoundResult, Sources

_LAYOUTS: Final = ("clock", "nservicebus", "nservicebus-v1", "celery")


@click.command()
@click.option("--into", "place", required=True, metavar="DIR", help="Folder of the tables.")
@click.option("--once", is_flag=True, help="Run one round and exit. [default: until Ctrl-C]")
@click.option("--every", metavar="DELAY", default="1m", show_default=True,
              help="Interval between the starts of two rounds.")  # fmt: skip
@click.option("--format", "table_format", type=click.Choice(TABLE_FORMATS),
              help="Format of the tables. [default: as in DIR, or parquet]")  # fmt: skip
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
@engine_options
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
    table_format: TableFormat | None,
    layouts: tuple[str, ...],
    prefix: str | None,
    events: tuple[str, ...],
    stream_port: int | None,
    batch_rows: int,
    allow_gaps: bool,
    as_json: bool,
    choice: EngineChoice,
) -> None:
    """Read taps, events of endpoints and the schedule log into tables, in rounds until Ctrl-C or SIGTERM.

    DIR gets tables of facts: scheduled, delivered, processed, failed, occurrences (of schedules, with their outcomes),
    and undecodable (raw bytes of messages that are not AMQP 1.0). Other tables are computed from these facts: messages
    (with a row for each message), pending, lateness and failures. After an interruption or a crash, the same command
    continues, and counts no message twice. Turn on taps with 'bide tap on', and give endpoints a bide.EventStream() to
    write events. With --once, up to 100 MB of new messages are audited in this process, more with Spark; Delta and
    Iceberg tables always in this process.
    """
    pause = duration_of("--every", every).total_seconds()
    refuse_missing_audit_packages(choice)
    refuse_missing_packages(duckdb="DuckDB")

    from bide.amqp.url import DEFAULT_URL
    from bide.pipelines.audit.folder import Folder
    from bide.pipelines.audit.run import run
    from bide.pipelines.audit.size import MAX_EARLIER_BYTES
    from bide.pipelines.audit.sources import candidates, find_sources

    folder = Folder(place, table_format=table_format)

    def find() -> Sources:
        return find_sources(
            settings.url or DEFAULT_URL,
            candidates(layouts, prefix=prefix),
            all_tapped=bool(layouts),
            events=events,
            port=stream_port,
            batch_rows=batch_rows,
            allow_gaps=allow_gaps,
            time_zone=choice.time_zone,
        )

    folder.begin()
    # Errors in the options or of the broker are reported before Spark starts.
    engine = _engine_for(find(), folder, choice, once=once)
    largest = None if choice.forced() or folder.table_format != "parquet" else MAX_EARLIER_BYTES

    def open_session() -> AbstractContextManager[Any]:
        if not engine.is_spark:
            return nullcontext()
        refuse_without_spark(engine)
        return choice.open_session("bide pipeline audit", engine, quiet=not settings.verbosity)

    with folder.lock(), ExitStack() as opened:
        spark = opened.enter_context(open_session())
        received = opened.enter_context(_collect_signals())
        while not received:
            began = time.monotonic()
            try:
                # Before each round, because taps and endpoints may be added while the command runs.
                with progress("auditing", done=folder.noted_rows), _engine_errors(engine):
                    done = run(spark, find(), folder, largest=largest)
            except NeedsSparkError as error:
                # The round has appended its facts. Another one computes the other tables from them.
                engine = choice.choose_spark(error)
                spark = opened.enter_context(open_session())
                continue
            except (BrokerUnreachableError, ConnectionLostError) as error:
                if once:
                    raise
                echo(f"bide: {with_options(str(error))}; trying again in {every}", err=True)
            else:
                began_command = settings.started if once else None
                _print_round(done, folder.place, engine, began_command, as_json=as_json)
            if once:
                return
            # Short sleeps, because a signal does not end time.sleep.
            while not received and (remaining := began + pause - time.monotonic()) > 0:
                time.sleep(min(remaining, 0.5))
    raise SystemExit(128 + received[0])


def _engine_for(sources: Sources, folder: Folder, choice: EngineChoice, *, once: bool) -> Engine:
    if folder.table_format != "parquet":
        return choice.choose_local(f"only this process writes tables of the format {folder.table_format}")

    def work(largest: int | None) -> tuple[str, None]:
        from bide.pipelines.audit.size import check_small

        if largest is not None and not once:
            raise NeedsSparkError("without --once, the audit may become large")
        return check_small(sources, folder, largest=largest), None

    return choice.in_process(work)[0]


def _engine_errors(engine: Engine) -> AbstractContextManager[None]:
    if not engine.is_spark:
        return nullcontext()
    from bide.pipelines.session import spark_errors

    return spark_errors()


def _print_round(done: RoundResult, place: str, engine: Engine, began_command: float | None, *, as_json: bool) -> None:
    """Print the result of a round.

    Args:
        done: the result.
        place: folder of the tables.
        engine: the engine of the audit.
        began_command: when the command started, as a monotonic time, if this round is its only one (``--once``).
        as_json: print JSON instead of text.
    """
    waited = None if began_command is None else time.monotonic() - began_command
    if as_json:
        seconds = {name: round(getattr(done, name), 3) for name in ("read_seconds", "seconds")}
        result = {**asdict(done), **seconds, "into": place, **engine_facts(engine)}
        if done.schedules is None:
            del result["schedules"], result["ended"]
        if waited is None:
            print_json_line(result)
        else:
            print_json({**result, "command_seconds": round(waited, 3)})
        return
    counts = ", ".join(f"{count:,} {table}" for table, count in done.rows.items())
    overdue = f" ({done.overdue:,} overdue)" if done.overdue else ""
    undecodable = f", {done.undecodable:,} undecodable" if done.undecodable else ""
    days = f"{done.days} {'day' if done.days == 1 else 'days'} computed"
    if waited is None:
        # The time of a round, by its parts: it has to be shorter than --every.
        read, computed = f" in {done.read_seconds:.1f} s", f" in {done.seconds - done.read_seconds:.1f} s"
        total = ""
    else:
        read = computed = ""
        total = f"; audited in {waited:.1f} s"
    echo(f"{counts}{undecodable}{read}; {days}{computed}; {done.pending:,} pending{overdue}{total}")
    if done.schedules is not None:
        ended = "".join(f"{count:,} {outcome}, " for outcome, count in sorted(done.ended.items()))
        late = f" ({done.schedules.overdue:,} overdue)" if done.schedules.overdue else ""
        waiting = done.schedules.waiting + done.schedules.under_way
        echo(f"schedules: {ended}{waiting:,} pending{late}")
    if waited is not None:
        echo(f"tables: {place}")
        echo(f"engine: {engine}")


@contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP, so that the current round can finish.

    A second signal ends the program immediately. No message is lost, because the next run continues after a crash too.
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
