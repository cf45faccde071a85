"""Operations of ``bide errors`` on chosen messages: options, confirmation, run and result."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bide.cli import errors_view as view
from bide.cli.advice import with_options
from bide.cli.continuation import command, rest_of
from bide.cli.output import echo, progress_bar, working
from bide.cli.running import confirm, connected_client, run_async
from bide.cli.settings import Settings, json_option
from bide.errors import BideError
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from datetime import timedelta

    from bide.error_queues import ErrorQueue, OperationResult, Selection, Summary

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationOptions:
    """The options that ``retry``, ``archive``, ``unarchive`` and ``discard`` have in common."""

    everything: bool
    dry_run: bool
    yes: bool
    no_audit: bool
    as_json: bool


def operation_options(verb: str) -> Callable[[_Decorated], _Decorated]:
    """Add the options of :class:`OperationOptions`, and pass them as the argument ``options``.

    Args:
        verb: the participle for the help text: ``archived``.
    """

    def decorate(command: _Decorated) -> _Decorated:
        @wraps(command)
        def wrapper(
            *args: Any, everything: bool, dry_run: bool, yes: bool, no_audit: bool, as_json: bool, **kwargs: Any
        ) -> Any:
            options = OperationOptions(
                everything=everything, dry_run=dry_run, yes=yes, no_audit=no_audit, as_json=as_json
            )
            return command(*args, options=options, **kwargs)

        wrapped: Any = wrapper
        for option in (
            json_option("the result"),
            click.option("--no-audit", is_flag=True, help="Write no record to the stream bide.audit."),
            click.option("--yes", is_flag=True, help="Do not ask for confirmation."),
            click.option("--dry-run", is_flag=True, help=f"Only count the messages that would be {verb}."),
            click.option("--all", "everything", is_flag=True, help="Choose all messages of the queue."),
        ):
            wrapped = option(wrapped)
        return wrapped  # type: ignore[no-any-return]  # the same parameters

    return decorate


def run_operation(
    settings: Settings,
    queue: str,
    selection: Selection,
    act: Callable[[ErrorQueue, Any], Awaitable[OperationResult]],
    verb: str,
    *,
    options: OperationOptions,
    always_ask: bool = False,
    source: str | None = None,
    over: timedelta | None = None,
    targets: view.Targets | None = None,
) -> int:
    """Count the messages, ask for confirmation if needed, run the operation and print its result.

    Args:
        queue: the error queue.
        act: runs the operation on the error queue, with a function that it calls with its progress.
        verb: the participle for texts: ``archived``.
        always_ask: whether to ask for confirmation also without ``--all``.
        source: the queue whose messages are processed, if it is not the error queue.
        over: the time over which the messages are spread.
        targets: the queues that the messages are sent to, if the operation sends any.

    Returns:
        The exit code: 1 if a chosen message stays, or is not in the queue.
    """
    if selection.everything != options.everything:
        raise click.UsageError(
            "--all chooses every message: leave out ids and conditions"
            if options.everything
            else "no messages are chosen: give ids or conditions, or --all"
        )
    ask = (options.everything or always_ask) and not options.yes and not options.dry_run
    if ask and not sys.stdin.isatty():
        raise click.UsageError("the command asks for confirmation, and standard input is not a terminal: give --yes")

    async def summarize() -> Summary:
        async with open_error_queue(settings, source or queue) as error_queue:
            with working("counting"):
                return await error_queue.summary(selection)

    async def work() -> OperationResult:
        async with open_error_queue(settings, queue, audit=not options.no_audit) as error_queue:
            with progress_bar(verb) as progress:
                try:
                    return await act(error_queue, progress)
                except (asyncio.CancelledError, BideError):
                    interrupted.append(error_queue.interrupted)
                    raise

    interrupted: list[OperationResult | None] = []
    if options.dry_run or ask or (targets is not None and not options.yes and not options.as_json):
        summary = run_async(summarize())
        if options.dry_run:
            view.write_count(summary, verb, targets, as_json=options.as_json)
            return 0
        what = f"{quantity(summary.total, 'message')} of {source or queue}"
        where = "" if targets is None else f": {targets.describe(summary)}"
        if ask:
            confirm(f"{what} will be {verb}{where}: go on?")
        elif summary.total:
            echo(f"bide: {what}{where}", err=True)
    try:
        result = run_async(work())
    except (KeyboardInterrupt, SystemExit, BideError):
        if interrupted and interrupted[0] is not None:
            _print_continuation(
                settings, interrupted[0], source or queue, selection, verb, over=over, as_json=options.as_json
            )
        raise
    view.write_result(result, verb, as_json=options.as_json)
    for reason, number in result.kept.items():
        echo(f"bide: {quantity(number, 'message stays', 'messages stay')}: {with_options(reason)}", err=True)
    for one in result.missing:
        echo(f"bide: no message {one!r} is in the queue {source or queue!r}", err=True)
    return 1 if result.kept or result.missing else 0


def _print_continuation(
    settings: Settings,
    result: OperationResult,
    queue: str,
    selection: Selection,
    verb: str,
    *,
    over: timedelta | None,
    as_json: bool,
) -> None:
    """Print what was done before an interruption or error, and the command for the rest."""
    changed = {}
    if over and result.left is not None:
        total = result.done + sum(result.kept.values()) + result.left
        # Messages that stay are in front of the rest, so the next run processes them again.
        changed["--over"] = rest_of(over, left=total - result.done, total=total)
    again = command(settings.arguments, changed=changed, without=selection.ids - set(result.missing))
    view.write_interrupted(result, verb, queue, again, paced=bool(over), as_json=as_json)


@asynccontextmanager
async def open_error_queue(settings: Settings, queue: str, *, audit: bool = True) -> AsyncIterator[ErrorQueue]:
    """Connect to the broker of the settings, and open an error queue."""
    from bide.error_queues import ErrorQueue

    async with connected_client(settings) as client:
        yield ErrorQueue(client, queue, management_url=settings.management_url, audit=audit)
