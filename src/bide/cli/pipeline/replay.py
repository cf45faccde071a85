"""``bide pipeline replay``: send failed messages back to the queues on which they failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from bide.cli.pipeline.options import engine_options, refuse_missing_audit_packages, refuse_without_spark
from bide.cli.pipeline.replay_queue import QueueReplay, engine_for
from bide.cli.pipeline.replay_view import InterruptedReplay
from bide.cli.running import ended_by_signals
from bide.cli.settings import Settings, duration_of, json_option, management_options, pass_settings
from bide.errors import BideError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bide.cli.pipeline.engine_choice import EngineChoice
    from bide.pipelines.engine import Engine


@click.command()
@click.option("--queue", metavar="NAME", help="Error queue or dead-letter queue to replay.")
@click.option("--audit", "audited", metavar="DIR", help="Folder of an audit to replay from, instead of --queue.")
@click.option("--where", metavar="SQL", help="SQL condition on the messages. [default: all]")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Largest number of messages. [default: all]")
@click.option("--over", metavar="DELAY",
              help="Time to spread messages over, such as 2h. [default: none]")  # fmt: skip
@click.option("--to", metavar="QUEUE", help="Queue for all messages. [default: where each failed]")
@click.option("--allow", multiple=True, metavar="PATTERN",
              help="Send nothing unless all queues match. [default: any]")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Send nothing: print counts and due times.")
@click.option("--no-audit", is_flag=True, help="Write no record to the stream bide.audit (--queue).")
@click.option("--parked", is_flag=True, help="Also send copies of parked messages (--audit).")
@click.option("--skip-missing", is_flag=True, help="Leave out messages without a body in a tap (--audit).")
@click.option("--ledger", metavar="DIR", help="Folder for the record of what was sent (--audit).")
@click.option("--part-rows", type=click.IntRange(1), default=2_000, show_default=True, metavar="N",
              help="Messages per part of the ledger (--audit).")  # fmt: skip
@engine_options
@json_option("the counts and the result")
@management_options
@pass_settings
def replay(
    settings: Settings,
    /,
    *,
    queue: str | None,
    audited: str | None,
    over: str | None,
    to: str | None,
    dry_run: bool,
    as_json: bool,
    choice: EngineChoice,
    **rest: Any,
) -> int:
    """Send failed messages back to the queues on which they failed, with their ids, headers and history.

    --where is a condition in SQL, such as "exception like 'Timeout%' and endpoint = 'orders'". The columns are
    message_id, type, queue (on which it failed), endpoint, reason, failed_at, attempts, exception, text, group, sent,
    due and place (its number from 0 in the error queue, or by time of failure); with --queue also body (as text), size,
    headers, exchange, routing_key, correlation_id and id.

    With --queue, a message leaves the error queue after the broker has confirmed its copy. After an interruption or a
    crash, the same command sends the rest; at most a few hundred messages are sent twice, with the same ids. The exit
    code is 1 if a message could not be sent; it remains in the error queue.

    With --over, Ctrl-C stops the replay, and prints the command that continues it.

    With --audit, bide sends copies from the streams of taps, of messages that endpoints discarded or that expired. The
    ledger records what was chosen and sent: the same command finishes an interrupted replay, and repeats only the parts
    that were being sent. Without --ledger, the folder is in ~/.local/state/bide/replay.

    Conditions that only compare columns with text need no Spark, with --queue or with an audit of up to 100 MB.
    """
    from bide.amqp.url import DEFAULT_URL
    from bide.delay.protocol import check_name

    if (queue is None) == (audited is None):
        raise click.UsageError("give the source of the messages: either --queue NAME or --audit DIR")
    _refuse_options_of_other_source(rest, queue is not None)
    period = timedelta(0) if over is None else duration_of("--over", over)
    if to is not None:
        check_name("queue", to)
    if queue is None and rest["ledger"] is None and not choice.is_local and not dry_run:
        raise click.UsageError("on a cluster, give --ledger: a folder that the driver and all executors can access")
    common = {"url": settings.url or DEFAULT_URL, "to": to, **rest}
    # Errors in the options, of the broker or the ledger are reported before Spark starts.
    if queue is not None:
        job = _from_queue(settings, queue, period, common, choice, dry_run=dry_run, as_json=as_json)
    else:
        job = _from_audit(settings, audited, period, common, choice, dry_run=dry_run, as_json=as_json)
    name = f"bide pipeline replay {queue or audited}"
    try:
        with ended_by_signals(), job.lock:
            engine = job.start()
            if not engine.is_spark:
                return job.work(None)
            refuse_without_spark(engine)
            from bide.pipelines.session import spark_errors

            with choice.open_session(name, engine, quiet=not settings.verbosity) as spark, spark_errors():
                return job.work(spark)
    except job.interruptions:
        # Only now, because tasks may have recorded more parts until Spark stopped.
        if not dry_run and (stopped := job.stopped()) is not None:
            stopped.show(settings.arguments, over=period, as_json=as_json)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckedReplay:
    """A replay whose options are checked.

    Attributes:
        lock: a lock to hold from before Spark starts until it has stopped.
        start: chooses the engine, and searches the audit if that is this process.
        work: runs the replay with a session, or without one in this process, and returns the exit code.
        stopped: returns the result after an interruption; None if nothing was started.
        interruptions: the exceptions after which it is printed.
    """

    lock: AbstractContextManager[None]
    start: Callable[[], Engine]
    work: Callable[[Any], int]
    stopped: Callable[[], InterruptedReplay | None]
    interruptions: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit)


def _refuse_options_of_other_source(given: Mapping[str, Any], is_queue: bool) -> None:
    wrong = ("parked", "skip_missing", "ledger") if is_queue else ("no_audit",)
    for name in wrong:
        if given[name]:
            option, other = f"--{name.replace('_', '-')}", "--audit" if is_queue else "--queue"
            raise click.UsageError(f"{option} is for {other} only: leave it out")


def _from_audit(
    settings: Settings,
    place: Any,
    over: timedelta,
    given: Mapping[str, Any],
    choice: EngineChoice,
    *,
    dry_run: bool,
    as_json: bool,
) -> _CheckedReplay:
    refuse_missing_audit_packages(choice)

    from bide.cli.pipeline import replay_audit
    from bide.pipelines.audit.folder import Folder

    folder = Folder(place)
    folder.check()
    wanted = {name: value for name, value in given.items() if name != "no_audit"}
    replay = replay_audit.AuditReplay(folder=folder, over=over, started=settings.started, **wanted)
    replay.check()
    found: list[tuple[Engine, replay_audit.TappedMessages | None]] = []

    def start() -> Engine:
        found.append(replay_audit.search_in_process(replay, choice))
        return found[0][0]

    def work(spark: SparkSession | None) -> int:
        engine, messages = found[0]
        if messages is None:
            assert spark is not None
            messages = replay_audit.search_with_spark(spark, replay)
        return replay_audit.replay(messages, replay, engine, dry_run=dry_run, as_json=as_json)

    return _CheckedReplay(lock=replay.lock_ledger(dry_run=dry_run), start=start, work=work, stopped=replay.stopped)


def _from_queue(
    settings: Settings,
    queue: str,
    over: timedelta,
    given: Mapping[str, Any],
    choice: EngineChoice,
    *,
    dry_run: bool,
    as_json: bool,
) -> _CheckedReplay:
    from bide.pipelines.replay.queue import FailedIn

    engine, condition = engine_for(given["where"], choice)
    if engine.is_spark:
        refuse_without_spark(engine)
    source = FailedIn(
        url=given["url"],
        queue=queue,
        to=given["to"],
        management_url=settings.management_url,
        record=not given["no_audit"],
    )
    # A dry run prints which queues are missing, instead of an error.
    source.check(sends=not dry_run)
    replay = QueueReplay(
        source=source,
        over=over,
        where=given["where"],
        condition=condition,
        limit=given["limit"],
        allow=given["allow"],
        engine=engine,
        started=settings.started,
    )
    return _CheckedReplay(
        lock=nullcontext(),
        start=lambda: engine,
        work=lambda spark: replay.work(spark, dry_run=dry_run, as_json=as_json),
        stopped=lambda: replay.stopped[0] if replay.stopped else None,
        interruptions=(KeyboardInterrupt, SystemExit, BideError),
    )
