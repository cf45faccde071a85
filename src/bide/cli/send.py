"""``bide send``: publish messages, delayed or not."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click

from bide.cli.output import echo, print_json_line, progress_bar, working
from bide.cli.running import run_async
from bide.cli.selecting import pairs_of
from bide.cli.settings import Settings, broker_options, json_option, layout_options, pass_settings
from bide.errors import BideError

if TYPE_CHECKING:
    from bide.client.client import Client
    from bide.client.publisher import Receipt
    from bide.delay.protocol import DelayInfrastructure

IN_FLIGHT: Final = 1_000
"""The maximum number of unconfirmed messages with ``--count``."""


@click.command()
@click.argument("body", required=False)
@click.option("--to", metavar="QUEUE", help="Target queue.")
@click.option("--exchange", metavar="NAME", help="Target exchange, instead of a queue.")
@click.option("--routing-key", metavar="KEY", help="Routing key, with --exchange.")
@click.option("--in", "--delay", "delay", metavar="DELAY", help="Time until delivery: 90s, 1h30m, PT1H30M.")
@click.option("--at", "deliver_at", metavar="TIME", help="Due time: 2026-12-24T18:00:00+01:00.")
@click.option("--file", type=click.File("rb"), help="File with the body; - is standard input.")
@click.option(
    "--count",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Number of times to send the message. [default: 1]",
)
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Header, as text. Repeatable.")
@click.option("--message-id", metavar="ID", help="Message id. [default: a new id]")
@click.option("--type", "kind", metavar="NAME", help="Message type; endpoints choose the handler by it.")
@click.option("--content-type", metavar="TYPE", help="MIME type of the body, such as application/json.")
@click.option("--isolated", is_flag=True, help="Use a release queue for the target (clock; one hop more).")
@click.option(
    "--declare/--no-declare",
    default=True,
    show_default=True,
    help="Declare the delay infrastructure if it is missing.",
)
@layout_options()
@json_option("the receipts", lines=True)
@broker_options
@pass_settings
def send(
    settings: Settings,
    *,
    body: str | None,
    to: str | None,
    exchange: str | None,
    routing_key: str | None,
    delay: str | None,
    deliver_at: str | None,
    file: BinaryIO | None,
    count: int,
    headers: tuple[str, ...],
    message_id: str | None,
    kind: str | None,
    content_type: str | None,
    isolated: bool,
    declare: bool,
    infrastructure: DelayInfrastructure,
    as_json: bool,
) -> None:
    """Send BODY now, after a delay or at a due time, and return when the broker has confirmed it.

    Without BODY and --file, the body is read from standard input. With --in or --at, the message waits in the broker,
    and this command ends at once. --json prints message_id, due, hops and attempts.
    """
    if (to is None) == (exchange is None):
        raise click.UsageError("the message needs one target: --to QUEUE, or --exchange NAME with --routing-key")
    if routing_key is not None and exchange is None:
        raise click.UsageError("--routing-key needs --exchange; a message to a queue needs none")
    if delay is not None and deliver_at is not None:
        raise click.UsageError("give --in or --at, not both")
    if message_id is not None and count > 1:
        raise click.UsageError(f"--message-id is for one message, and --count {count} sends more: leave out one option")
    message = {
        "body": _body(body, file),
        "to": to,
        "exchange": exchange,
        "routing_key": routing_key or "",
        "delay": delay,
        "deliver_at": deliver_at,
        "headers": pairs_of("--header", headers),
        "message_id": message_id,
        "type": kind,
        "content_type": content_type,
        "isolated": isolated,
    }
    # With --json, the receipts that are printed one by one already show the progress.
    has_bar = count > 1 and not as_json
    bar: AbstractContextManager[Callable[[int, int], None] | None] = progress_bar("sent") if has_bar else nullcontext()
    with bar as progress, nullcontext() if has_bar or as_json else working("sending"):
        done = run_async(
            _send(settings, infrastructure, message, count=count, declare=declare, as_json=as_json, progress=progress)
        )
    if not as_json:
        echo(done)


def _body(body: str | None, file: BinaryIO | None) -> bytes:
    if body is not None and file is not None:
        raise click.UsageError("give BODY or --file, not both")
    if body is not None:
        return body.encode("utf-8", errors="surrogateescape")
    if file is None:
        if sys.stdin.isatty():
            echo("type the body, and end it with Ctrl-D on an empty line:", err=True)
        file = sys.stdin.buffer
    return file.read()


async def _send(
    settings: Settings,
    infrastructure: DelayInfrastructure,
    message: dict[str, Any],
    *,
    count: int,
    declare: bool,
    as_json: bool,
    progress: Callable[[int, int], None] | None,
) -> str:
    """Send the message, and return a line about it."""
    from bide.client.client import connect
    from bide.messages.outgoing import OutgoingMessage
    from bide.messages.prepared import check_message

    check_message(OutgoingMessage(**message))  # report an invalid message before connecting to a broker
    last: list[Receipt] = []
    sent = 0

    def on_receipt(receipt: Receipt) -> None:
        nonlocal sent
        last[:] = [receipt]
        sent += 1
        if progress is not None:
            progress(sent, count)
        if as_json:
            print_json_line(_receipt_values(receipt))

    started = time.monotonic()
    async with connect(settings.broker_url(), infrastructure=infrastructure, declare=declare) as client:
        await _publish(client, message, count, on_receipt)
    return _receipt_text(last[0], message, count, time.monotonic() - started)


async def _publish(client: Client, message: dict[str, Any], count: int, on_receipt: Callable[[Receipt], None]) -> None:
    """Publish the message *count* times, in order, and report every receipt.

    Raises:
        BideError: a message was not accepted. It is raised after the results of all messages in flight are known.
    """
    under_way: deque[asyncio.Task[Receipt]] = deque()
    failure: BideError | None = None
    started = sent = 0
    try:
        while under_way or (started < count and failure is None):
            if started < count and failure is None and len(under_way) < IN_FLIGHT:
                under_way.append(asyncio.create_task(client.publish(**message)))
                started += 1
                continue
            try:
                receipt = await under_way.popleft()
            except BideError as error:
                failure = failure or error
            else:
                sent += 1
                on_receipt(receipt)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
    if failure is not None and count > 1:
        raise click.ClickException(f"{failure} ({sent} of {count} messages were sent)") from failure
    if failure is not None:
        raise failure


def _receipt_values(receipt: Receipt) -> dict[str, Any]:
    due = None if receipt.due is None else receipt.due.isoformat(timespec="milliseconds")
    return {"message_id": receipt.message_id, "due": due, "hops": receipt.hops, "attempts": receipt.attempts}


def _receipt_text(receipt: Receipt, message: dict[str, Any], count: int, seconds: float) -> str:
    target = message["to"] if message["exchange"] is None else f"{message['exchange']} ({message['routing_key']!r})"
    text = f"sent {receipt.message_id} to {target}" if count == 1 else f"sent {count:,} messages to {target}"
    if receipt.due is not None:
        due = receipt.due.astimezone()
        last = "" if count == 1 or message["deliver_at"] is not None else "the last of them "
        text += f", {last}due {due.isoformat(sep=' ', timespec='milliseconds')}"
        text += f" after {receipt.hops} {'hop' if receipt.hops == 1 else 'hops'}"
    return text if count == 1 else f"{text}, in {seconds:.1f} s"
