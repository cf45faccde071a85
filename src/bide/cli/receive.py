"""``bide receive``: print the messages of a queue as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from bide.cli.output import LineWriter, json_line, text_or_base64
from bide.cli.running import run_async
from bide.cli.settings import Settings, broker_options, json_option, pass_settings
from bide.foreign_text import visible
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from bide.client.client import Client
    from bide.client.message import Message
    from bide.error_queues.delivery_count import DeliveryCountReset

log = logger(__name__)

PREFETCH: Final = 100


@click.command()
@click.argument("queue")
@click.option("--declare", is_flag=True, help="Declare QUEUE as a quorum queue if it does not exist.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after this many messages.")
@click.option(
    "--timeout",
    metavar="DELAY",
    help="End after this time; exit with 1 if --count is not met.",
)
@json_option("the messages", lines=True)
@broker_options
@pass_settings
def receive(
    settings: Settings, *, queue: str, declare: bool, count: int | None, timeout: str | None, as_json: bool
) -> None:
    """Print the messages of QUEUE as they arrive, until interrupted. Of a stream, these are the messages from now on.

    A message is acknowledged once its line is written. Messages that were not printed stay in the queue, and nothing is
    lost when this command ends, however it ends. The queues of a delay infrastructure are refused.

    --json prints body, exchange, routing_key, message_id, type, content_type, correlation_id, reply_to, headers, due
    and lateness_ms. A body that is not UTF-8 is base64, and body_encoding says so.
    """
    from bide.durations import parse_delay

    limit = None if timeout is None else parse_delay(timeout)
    render = _json_line if as_json else _text_line
    run_async(_receive(settings, queue, declare=declare, count=count, time_limit=limit, render=render))


async def _receive(
    settings: Settings,
    queue: str,
    *,
    declare: bool,
    count: int | None,
    time_limit: timedelta | None,
    render: Callable[[Message], bytes],
) -> None:
    from bide.client.client import connect
    from bide.durations import format_delay
    from bide.error_queues.delay_queues import refuse_delay_queue
    from bide.topology import Queue, Topology

    async with connect(settings.broker_url()) as client:
        count_reset = await refuse_delay_queue(client, queue, None)
        if declare:
            await client.declare(Topology(queues=[Queue.quorum(queue)]))
        received = await _print_messages(client, count_reset, count=count, time_limit=time_limit, render=render)
    if count is not None and received < count:
        assert time_limit is not None
        raise click.ClickException(
            f"{received} of {count} messages arrived from {queue!r} within {format_delay(time_limit)}: wait longer "
            "with --timeout, or leave it out"
        )


async def _print_messages(
    client: Client,
    count_reset: DeliveryCountReset,
    *,
    count: int | None,
    time_limit: timedelta | None,
    render: Callable[[Message], bytes],
) -> int:
    """Print up to *count* messages until the timeout, and return their number."""
    from bide.error_queues.delay_queues import refuse_waiting

    writer = LineWriter()
    prefetch = PREFETCH if count is None else min(PREFETCH, count)
    received = 0
    # For each acknowledgement the broker sends another message. A message beyond --count would be requeued, and marked
    # as redelivered. The last messages up to --count are therefore acknowledged only at the end.
    last: list[Message] = []
    limit = asyncio.timeout(None if time_limit is None else time_limit.total_seconds())
    try:
        async with limit, client.consume(count_reset.queue, prefetch=prefetch) as messages:
            try:
                async for message in messages:
                    refuse_waiting(message.raw, count_reset)
                    await writer.write(render(message))
                    received += 1
                    if count is None or received <= count - prefetch:
                        await _acknowledge(message)
                    else:
                        last.append(message)
                    if received == count:
                        break
            finally:
                for message in last:
                    await _acknowledge(message)
    except TimeoutError:
        if not limit.expired():
            raise
    return received


async def _acknowledge(message: Message) -> None:
    from bide.errors import DeliveryLostError

    try:
        await message.ack()
    except DeliveryLostError as error:
        # The message will be delivered and printed again: delivery is at least once.
        log.info("%s", error)


def _json_line(message: Message) -> bytes:
    body, is_base64 = text_or_base64(message.body)
    lateness = message.lateness
    values: dict[str, Any] = {
        "body": body,
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "message_id": message.message_id,
        "type": message.type,
        "content_type": message.content_type,
        "correlation_id": message.correlation_id,
        "reply_to": message.reply_to,
        "headers": message.headers,
        "due": None if message.due is None else message.due.isoformat(timespec="milliseconds"),
        "lateness_ms": None if lateness is None else round(lateness / timedelta(milliseconds=1), 3),
    }
    if is_base64:
        values["body_encoding"] = "base64"
    return json_line(values)


def _text_line(message: Message) -> bytes:
    received = message.received_at.astimezone().strftime("%H:%M:%S.%f")[:-3]
    late = "" if message.lateness is None else f"{message.lateness / timedelta(milliseconds=1):+.0f} ms"
    body, is_base64 = text_or_base64(message.body)
    shown = f"(base64) {body}" if is_base64 else visible(body)
    return f"{received}  {late:>8}  {shown}\n".encode()
