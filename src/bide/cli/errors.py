"""``bide errors``: inspect, retry, edit, archive and discard failed messages."""

from __future__ import annotations

import os
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bide.cli import errors_view as view
from bide.cli.advice import with_options
from bide.cli.errors_operation import OperationOptions, open_error_queue, operation_options, run_operation
from bide.cli.output import echo, print_json, print_json_line, working
from bide.cli.running import connected_client, run_async
from bide.cli.selecting import pairs_of, queue_option, selection_options
from bide.cli.settings import Settings, duration_of, json_option, management_options, pass_settings

if TYPE_CHECKING:
    from bide.error_queues import ErrorQueue, OperationResult, Selection


@click.group()
def errors() -> None:
    """Failed messages: list, inspect, retry, edit, archive or discard them.

    These commands work on error queues and dead-letter queues of any program. To choose messages, give ids or
    conditions; a message has to match all conditions.
    """


_allow_option = click.option(
    "--allow",
    multiple=True,
    metavar="PATTERN",
    help="Allowed queue: 'orders.*'. Repeatable. [default: any]",
)

_over_option = click.option("--over", metavar="DELAY", help="Spread the messages evenly over this time: 90s, 10m.")


@errors.command("list")
@selection_options
@queue_option
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Maximum number of messages.")
@json_option("the messages", lines=True)
@management_options
@pass_settings
def list_(settings: Settings, selection: Selection, queue: str, limit: int | None, as_json: bool) -> None:
    """List messages: id, time, queue and reason of the failure. The messages stay in the queue."""

    async def work() -> int:
        count = 0
        async with open_error_queue(settings, queue) as error_queue:
            with working("reading") as end_message:
                async with aclosing(error_queue.messages(selection)) as messages:
                    async for message in messages:
                        end_message()
                        view.write_json(message) if as_json else view.write_line(message)
                        count += 1
                        if count == limit:
                            break
        return count

    if not run_async(work()) and not as_json:
        echo("no message", err=True)


@errors.command()
@click.argument("id")
@queue_option
@json_option("the message")
@management_options
@pass_settings
def show(settings: Settings, id: str, queue: str, as_json: bool) -> None:
    """Show everything that is known about one message, by its id or message id."""

    async def work() -> None:
        async with open_error_queue(settings, queue) as error_queue:
            with working("reading"):
                message = await error_queue.get(id)
        view.write_json(message, whole=True) if as_json else view.write_details(message)

    run_async(work())


@errors.command()
@selection_options
@queue_option
@click.option("--by", type=click.Choice(["exception", "type", "key"]), default="exception", show_default=True,
              help="Group by exception and stack frame, message type, or key.")  # fmt: skip
@json_option("the groups", lines=True)
@management_options
@pass_settings
def groups(settings: Settings, selection: Selection, queue: str, by: Any, as_json: bool) -> None:
    """Group messages by their failure, the largest group first."""

    async def work() -> None:
        async with open_error_queue(settings, queue) as error_queue:
            with working("reading"):
                found = await error_queue.groups(selection, by=by)
        if as_json:
            for one in found:
                print_json_line(one.to_dict())
        else:
            view.write_groups(found)

    run_async(work())


@errors.command()
@selection_options
@queue_option
@json_option("the figures")
@management_options
@pass_settings
def stats(settings: Settings, selection: Selection, queue: str, as_json: bool) -> None:
    """Count messages by queue, reason, endpoint, exception, type and hour."""

    async def work() -> None:
        async with open_error_queue(settings, queue) as error_queue:
            with working("reading"):
                summary = await error_queue.summary(selection)
        if as_json:
            print_json_line(summary.to_dict())
        else:
            view.write_summary(summary)

    run_async(work())


@errors.command()
@selection_options
@queue_option
@click.option("--to", metavar="QUEUE", help="Target queue. [default: where each message failed]")
@_over_option
@_allow_option
@operation_options("sent back")
@management_options
@pass_settings
def retry(
    settings: Settings,
    selection: Selection,
    queue: str,
    to: str | None,
    over: str | None,
    allow: tuple[str, ...],
    options: OperationOptions,
) -> int:
    """Send messages back to the queues where they failed.

    The headers of the messages name these queues. The command prints the queues before it sends anything, unless --yes
    or --json is given. With --allow, messages for other queues stay, and the exit code is 1.

    With --over, messages leave the error queue one by one. Ctrl-C stops the command, which then prints the command that
    continues.
    """
    period = None if over is None else duration_of("--over", over)
    targets = view.Targets(to, allow)

    async def act(error_queue: ErrorQueue, progress: Any) -> OperationResult:
        return await error_queue.retry(selection, to=to, over=period, allow=allow or None, progress=progress)

    return run_operation(settings, queue, selection, act, "sent back", over=period, targets=targets, options=options)


@errors.command()
@selection_options
@queue_option
@click.option("--keep", default="30d", show_default=True, metavar="DELAY", help="Delete archived messages after this.")
@_over_option
@operation_options("archived")
@management_options
@pass_settings
def archive(
    settings: Settings, selection: Selection, queue: str, keep: str, over: str | None, options: OperationOptions
) -> int:
    """Move messages to the queue NAME.archive, which deletes them after the time of --keep.

    'bide errors unarchive' moves them back. With --over, messages move one by one, as with 'bide errors retry'.
    """
    period = None if over is None else duration_of("--over", over)
    duration_of("--keep", keep)

    async def act(error_queue: ErrorQueue, progress: Any) -> OperationResult:
        return await error_queue.archive(selection, keep=keep, over=period, progress=progress)

    return run_operation(settings, queue, selection, act, f"archived for {keep}", over=period, options=options)


@errors.command()
@selection_options
@queue_option
@operation_options("put back")
@management_options
@pass_settings
def unarchive(settings: Settings, selection: Selection, queue: str, options: OperationOptions) -> int:
    """Move messages from the archive back to the error queue."""

    async def act(error_queue: ErrorQueue, progress: Any) -> OperationResult:
        return await error_queue.unarchive(selection, progress=progress)

    return run_operation(settings, queue, selection, act, "put back", source=f"{queue}.archive", options=options)


@errors.command()
@selection_options
@queue_option
@_over_option
@operation_options("discarded")
@management_options
@pass_settings
def discard(settings: Settings, selection: Selection, queue: str, over: str | None, options: OperationOptions) -> int:
    """Delete messages. The command asks for confirmation, unless --yes is given.

    With --over, messages are deleted one by one, as with 'bide errors retry'. Ctrl-C keeps the rest.
    """
    period = None if over is None else duration_of("--over", over)

    async def act(error_queue: ErrorQueue, progress: Any) -> OperationResult:
        return await error_queue.discard(selection, over=period, progress=progress)

    return run_operation(settings, queue, selection, act, "discarded", always_ask=True, over=period, options=options)


@errors.command()
@click.argument("id")
@queue_option
@click.option("--body", help="New body, as text.")
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="File with the new body.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Set a header, as text.")
@click.option("--remove-header", "without", multiple=True, metavar="NAME", help="Remove a header.")
@click.option("--to", metavar="QUEUE", help="Target queue. [default: where the message failed]")
@_allow_option
@click.option("--no-audit", is_flag=True, help="Write no record to the stream bide.audit.")
@json_option("the new message id")
@management_options
@pass_settings
def edit(
    settings: Settings,
    id: str,
    queue: str,
    body: str | None,
    file: Path | None,
    headers: tuple[str, ...],
    without: tuple[str, ...],
    to: str | None,
    allow: tuple[str, ...],
    no_audit: bool,
    as_json: bool,
) -> None:
    """Send one message back with a new body or new headers. It gets a new message id; a header has the old one."""
    if body is not None and file is not None:
        raise click.UsageError("both --body and --file were given: give one")
    # Arguments from the shell need not be UTF-8.
    content = file.read_bytes() if file is not None else None if body is None else os.fsencode(body)

    async def work() -> str:
        from bide.errors import TargetNotAllowedError

        async with open_error_queue(settings, queue, audit=not no_audit) as error_queue:
            try:
                with working("sending"):
                    return await error_queue.edit(
                        id,
                        body=content,
                        headers=pairs_of("--header", headers),
                        without=frozenset(without),
                        to=to,
                        allow=allow or None,
                    )
            except TargetNotAllowedError as error:
                # The message is invalid, not the command line: exit with 1, not with 2.
                raise click.ClickException(with_options(str(error))) from error

    message_id = run_async(work())
    if as_json:
        print_json({"message_id": message_id, "edit_of": id})
    else:
        echo(f"sent back as {message_id}")


@errors.command()
@json_option("the records", lines=True)
@management_options
@pass_settings
def history(settings: Settings, as_json: bool) -> None:
    """Show the records of operations on failed messages: who, what and when."""

    async def work() -> None:
        from bide.error_queues import read_operator_log
        from bide.error_queues.operator_log import OPERATOR_LOG

        malformed: list[bytes] = []
        async with connected_client(settings) as client:
            with working("reading") as end_message:
                async with aclosing(read_operator_log(client, malformed=lambda _: malformed.append(b""))) as records:
                    async for record in records:
                        end_message()
                        print_json_line(record.to_dict()) if as_json else view.write_record(record)
        if malformed:
            view.write_malformed(len(malformed), OPERATOR_LOG)

    run_async(work())
