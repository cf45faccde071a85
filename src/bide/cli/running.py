"""Run the asynchronous core of a command, with an orderly end whatever ends it."""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from bide.amqp.connection import Connection
    from bide.cli.settings import Settings
    from bide.management.api import ManagementApi

_Result = TypeVar("_Result")


def run_async(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run *work* to its end.

    Ctrl-C, SIGTERM and SIGHUP cancel it, so that whatever it opened is closed. A second one of the same kind ends the
    process at once, for an end that hangs.

    Raises:
        KeyboardInterrupt: it ended by Ctrl-C.
        SystemExit: it ended by one of the other two, with 128 and the signal's number, as a shell reports it.
    """
    received: list[signal.Signals] = []
    try:
        return asyncio.run(_cancelled_by_signals(work, received))
    except asyncio.CancelledError:
        if not received:
            raise
        raise SystemExit(128 + received[0]) from None


async def _cancelled_by_signals(work: Coroutine[Any, Any, _Result], received: list[signal.Signals]) -> _Result:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def end(number: signal.Signals) -> None:
        received.append(number)
        loop.remove_signal_handler(number)
        task.cancel()

    # Ctrl-C is asyncio's own business: asyncio.run cancels at the first one and breaks off at the second.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            loop.add_signal_handler(number, end, number)
    return await work


def confirm(question: str) -> None:
    """Ask before something is deleted or moved; "no" ends the command.

    Raises:
        ClickException: the answer was no.
        Abort: Ctrl-C.
        UsageError: there is no answer, because standard input is empty or closed.
    """
    try:
        agreed = click.confirm(question, err=True)
    except (click.Abort, OSError) as error:
        is_closed = isinstance(error, OSError) and error.errno == errno.EBADF
        if is_closed or isinstance(error.__context__, EOFError):
            click.echo(err=True)
            raise click.UsageError(
                "the question has no answer on standard input: give --yes to go on without it"
            ) from None
        raise
    if not agreed:
        raise click.ClickException("nothing was done: the answer was no")


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end what is in the block by an exception, so that what it opened is closed.

    Ctrl-C does so anyway.

    Raises:
        SystemExit: one of them came, with 128 and its number, as a shell reports it.
    """

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # as nohup leaves it
    }
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@asynccontextmanager
async def connected(settings: Settings, purpose: str) -> AsyncIterator[tuple[Connection, ManagementApi]]:
    """A connection to the broker that the settings name, and its management API.

    Args:
        settings: of the command.
        purpose: what the connection's name says in brackets.
    """
    from bide.admin.locate import management_api
    from bide.amqp.connection import Connection

    url = settings.broker_url()
    api = management_api(url, settings.management_url)
    connection = await Connection.open(replace(url, name=f"{url.name} ({purpose})"))
    try:
        yield connection, api
    finally:
        await api.close()
        await connection.close()
