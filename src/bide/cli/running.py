"""Running the asynchronous part of a command, with cleanup after signals."""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bide.cli.output import echo, working
from bide.foreign_text import visible
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from bide.amqp.connection import Connection
    from bide.cli.settings import Settings
    from bide.client.client import Client
    from bide.management.api import ManagementApi

log = logger(__name__)

_Result = TypeVar("_Result")


def run_async(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run *work* and return its result.

    Ctrl-C, SIGTERM and SIGHUP cancel the coroutine, so that it closes what it opened. A second signal of the same kind
    ends the process at once, in case the cleanup hangs.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the coroutine.
        SystemExit: another signal ended it; the code is 128 plus the signal's number, as in a shell.
    """
    received: list[signal.Signals] = []
    try:
        return asyncio.run(_run_cancellable(work, received))
    except asyncio.CancelledError:
        if not received:
            raise
        raise SystemExit(128 + received[0]) from None


async def _run_cancellable(work: Coroutine[Any, Any, _Result], received: list[signal.Signals]) -> _Result:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def end(number: signal.Signals) -> None:
        received.append(number)
        loop.remove_signal_handler(number)
        task.cancel()

    # asyncio.run handles Ctrl-C: it cancels the task at the first one and aborts at the second.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            loop.add_signal_handler(number, end, number)
    return await work


def run_until_signal(work: Coroutine[Any, Any, _Result], stop: Callable[[], None]) -> _Result:
    """Run *work* and return its result.

    Ctrl-C, SIGTERM and SIGHUP call *stop*, which lets the work end. A second signal ends the process at once.
    """
    return asyncio.run(_run_stoppable(work, stop))


async def _run_stoppable(work: Coroutine[Any, Any, _Result], stop: Callable[[], None]) -> _Result:
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        log.info("%s: finishing the messages in flight", number.name)
        for one in signals:
            loop.remove_signal_handler(one)
        stop()

    signals = [one for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    for number in signals:
        loop.add_signal_handler(number, on_signal, number)
    return await work


def confirm(question: str) -> None:
    """Ask for confirmation. The answer "no" ends the command.

    Raises:
        ClickException: the answer was no.
        Abort: Ctrl-C.
        UsageError: there is no answer, because standard input is empty or closed.
    """
    try:
        agreed = click.confirm(visible(question), err=True)
    except (click.Abort, OSError) as error:
        is_closed = isinstance(error, OSError) and error.errno == errno.EBADF
        if is_closed or isinstance(error.__context__, EOFError):
            echo(err=True)
            raise click.UsageError("standard input has no answer to the question: give --yes to skip it") from None
        raise
    if not agreed:
        raise click.ClickException("nothing was done: the answer was no")


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise an exception in the block for SIGTERM and SIGHUP, as for Ctrl-C, so that the block closes what it opened.

    Raises:
        SystemExit: a signal came; the code is 128 plus its number, as in a shell.
    """

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup ignores SIGHUP
    }
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@asynccontextmanager
async def connected_client(settings: Settings, *, declare: bool = True) -> AsyncIterator[Client]:
    """A client of the broker that the settings name. A terminal shows that it connects.

    Args:
        settings: the settings of the command.
        declare: whether the client declares what is missing.
    """
    from bide.client.client import connect

    async with AsyncExitStack() as stack:
        with working("connecting"):
            client = await stack.enter_async_context(connect(settings.broker_url(), declare=declare))
        yield client


@asynccontextmanager
async def connected(settings: Settings, purpose: str) -> AsyncIterator[tuple[Connection, ManagementApi]]:
    """A connection to the broker that the settings name, and its management API.

    Args:
        settings: the settings of the command.
        purpose: the text in parentheses at the end of the connection's name.
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
