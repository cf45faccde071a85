"""``bide pipeline replay``: failed messages back to where they failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from bide.cli.errors_view import counted
from bide.cli.output import print_json
from bide.cli.pipeline import spark_options
from bide.cli.pipeline_view import histogram, progress, span_for
from bide.cli.settings import Settings, json_option, layout_options, management_options, pass_settings
from bide.duration import parse_delay

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from bide.delay.infrastructure import DelayInfrastructure
    from bide.pipelines.replay import FailedIn


@click.command()
@click.option("--queue", required=True, metavar="NAME", help="The error queue, or any dead-letter queue.")
@click.option("--where", metavar="SQL", help="Only those that this holds for; see below. [default: all]")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="The first N of those.")
@click.option("--over", metavar="DELAY", help="Spread them evenly over this time: 2h. [default: all at once]")
@click.option("--to", metavar="QUEUE", help="To this queue rather than where they failed.")
@click.option("--dry-run", is_flag=True, help="Send nothing: count, and show when they would be due.")
@click.option("--no-audit", is_flag=True, help="Leave no record in the stream bide.audit.")
@click.option("--declare/--no-declare", default=True, show_default=True,
              help="Put the delay infrastructure on the broker where it is missing.")  # fmt: skip
@layout_options()
@spark_options
@json_option("what was found and done")
@management_options
@pass_settings
def replay(
    settings: Settings,
    /,
    *,
    queue: str,
    where: str | None,
    limit: int | None,
    over: str | None,
    to: str | None,
    dry_run: bool,
    no_audit: bool,
    declare: bool,
    infrastructure: DelayInfrastructure,
    as_json: bool,
    open_session: Callable[..., Any],
    is_here: bool,
) -> int:
    """Send failed messages back to the queues that they failed on, with their ids, headers and history.

    --where is a condition in SQL: "exception like 'Timeout%' and endpoint = 'orders'". Its columns are message_id,
    type, queue (that it failed on), endpoint, reason, failed_at, attempts, exception, text, group, sent, due, body (as
    text), size, headers, exchange, routing_key, correlation_id, id, place (in the error queue, from 0 on).

    A message leaves the error queue when the broker has confirmed its copy. Whatever ended a run, the same command
    sends the rest; at most 200 messages are then sent twice, with the same ids. Exit code 1 if a message could not be
    sent: it stays in the error queue.
    """
    from bide.amqp.url import DEFAULT_URL
    from bide.delay.infrastructure import check_name
    from bide.pipelines.replay import FailedIn, check_values, choose, failed, spread
    from bide.pipelines.session import spark_errors

    period = timedelta(0) if over is None else parse_delay(over)
    if to is not None:
        check_name("queue", to)
    source = FailedIn(
        url=settings.url or DEFAULT_URL,
        queue=queue,
        infrastructure=infrastructure,
        declare=declare,
        to=to,
        management_url=settings.management_url,
        record=not no_audit,
    )
    # What is wrong with the options or the broker is said before Spark starts.
    source.check(period)
    with open_session(f"bide pipeline replay {queue}", quiet=not settings.verbosity) as spark, spark_errors():
        chosen = choose(failed(spark, source), where=where, limit=limit)
        with progress("looking through the queue"):
            messages = check_values(spread(chosen, period, begin=datetime.now(UTC)), where)
        if dry_run:
            return _show(messages, source, as_json=as_json)
        details = {"where": where, "limit": limit, "over": over}
        return _send(messages, source, details, as_json=as_json)


def _show(messages: DataFrame, source: FailedIn, *, as_json: bool) -> int:
    """What a run would do; 1 if it could not be done."""
    from bide.pipelines.replay import totals
    from bide.pipelines.schedule import due_times

    found = totals(messages).collect()
    counts: dict[str, int] = {}
    unknown = 0
    for row in found:
        if (name := source.to or row["queue"]) is None:
            unknown += row["messages"]
        else:
            counts[name] = counts.get(name, 0) + row["messages"]
    missing = source.missing(list(counts))
    first, last = (
        (_moment(min(row["first"] for row in found)), _moment(max(row["last"] for row in found)))
        if found
        else (None, None)
    )
    every = span_for(first, last)
    # As seconds: PySpark turns timestamps into those of the driver's own zone, without saying so.
    spans = due_times(messages, every).selectExpr("unix_seconds(due) as due", "count").collect()
    times = [(datetime.fromtimestamp(row["due"], UTC), row["count"]) for row in spans]
    total = unknown + sum(counts.values())
    if as_json:
        told = {"messages": total, "queues": counts, "missing_queues": missing, "without_queue": unknown,
                "first_due": first and first.isoformat(), "last_due": last and last.isoformat(),
                "every_seconds": every.total_seconds(),
                "due": [{"from": due.isoformat(), "count": count} for due, count in times]}  # fmt: skip
        print_json(told)
    else:
        click.echo(f"{counted(total)} of {source.queue}; nothing was sent")
        for name, count in sorted(counts.items()):
            click.echo(f"{count:>9,} to {name}{'  (does not exist)' if name in missing else ''}")
        if unknown:
            click.echo(f"{unknown:>9,} of which nothing tells where they failed")
        for line in histogram(times, every):
            click.echo(line)
    return 1 if missing or unknown else 0


def _send(messages: DataFrame, source: FailedIn, details: dict[str, Any], *, as_json: bool) -> int:
    from bide.pipelines.replay import send

    given = {name: value for name, value in details.items() if value is not None}
    total = messages.count()
    done = 0

    def count(number: int, _: int) -> None:
        nonlocal done
        done = number

    started = time.monotonic()
    with progress("replaying", total=total, done=lambda: done):
        found = send(messages, source, details=given, progress=count).collect()
    seconds = time.monotonic() - started
    sent = {row["queue"]: row["messages"] for row in found if row["outcome"] == "sent"}
    kept = {row["reason"]: row["messages"] for row in found if row["outcome"] == "kept"}
    gone = sum(row["messages"] for row in found if row["outcome"] == "gone")
    number = sum(sent.values())
    if as_json:
        told = {"messages": total, "sent": number, "queues": sent, "kept": kept, "gone": gone}
        print_json({**told, "seconds": round(seconds, 3)})
    else:
        where = ", ".join(f"{count:,} to {name}" for name, count in sent.items())
        rate = f" in {seconds:.1f} s: {where}" if number else ""
        click.echo(f"replayed {counted(number)}{rate}")
    for reason, count_kept in kept.items():
        stay = "stays" if count_kept == 1 else "stay"
        click.echo(f"bide: {counted(count_kept)} {stay} in {source.queue}: {reason}", err=True)
    if gone:
        click.echo(f"bide: {counted(gone)} left {source.queue} since they were chosen", err=True)
    return 1 if kept else 0


def _moment(micros: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=micros)
