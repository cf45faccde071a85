"""Output of commands: JSON, progress, and lines on standard output."""

from __future__ import annotations

import os
import select
import shutil
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from math import isfinite
from typing import Any, Final

import click

from bide.cli.advice import with_options
from bide.cli.folding import hanging
from bide.foreign_text import visible, visible_json
from bide.runtime.wording import quantity

_SHOWN_REASONS: Final = 10
"""The maximum number of reasons that a command prints."""

_NARROWEST: Final = 30
"""The width to assume for a terminal that is narrower, or reports no width."""


def echo(
    text: str = "",
    *,
    mark: str = "",
    colour: str | None = None,
    keep: str = "",
    fit: bool = False,
    hang: int | None = None,
    err: bool = False,
) -> None:
    r"""Print a line, with unprintable characters as escapes, so that no name in it can control a terminal.

    Args:
        text: the line.
        mark: a sign before the line.
        colour: the colour of the mark; without a mark, that of the line.
        keep: characters to print unchanged: ``"\n"`` for a text of several lines, in which all names are escaped.
        fit: shorten the line to the width of the terminal.
        hang: fold a line that is wider than the terminal. The other lines have this indent, after that of the mark.
        err: print to standard error.
    """
    shown = visible(text, keep=keep)
    if fit and sys.stdout.isatty() and len(shown) > (width := shutil.get_terminal_size().columns):
        shown = shown[: width - 1] + "…"
    if hang is not None and (columns := terminal_width()) is not None:
        before = len(visible(mark)) + 1 if mark else 0
        shown = f"\n{' ' * before}".join(hanging(shown, hang, columns - before))
    if mark:
        shown = f"{click.style(visible(mark), fg=colour)} {shown}"
    elif colour is not None:
        shown = click.style(shown, fg=colour)
    click.echo(shown, err=err)


def echo_reasons(outcome: str, reasons: Counter[str]) -> None:
    """Print the most common reasons for an outcome, such as ``left``, with their counts."""
    for reason, count in most_common_reasons(reasons):
        echo(f"{count:>9}  {outcome}: {reason}")


def most_common_reasons(reasons: Counter[str]) -> list[tuple[str, int]]:
    """The most common reasons with their counts, and one more for all others, so that the counts add up."""
    shown = [(with_options(reason), count) for reason, count in reasons.most_common(_SHOWN_REASONS)]
    if (others := len(reasons) - len(shown)) > 0:
        rest = reasons.total() - sum(count for _, count in shown)
        shown.append((f"{quantity(others, 'other reason')}, see --json", rest))
    return shown


def terminal_width() -> int | None:
    """The width of the terminal; None for files and pipes."""
    return max(_NARROWEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    click.echo(visible_json(_json_value(value), indent=2))


def print_json_line(value: Mapping[str, Any]) -> None:
    """Print a value as one line of JSON."""
    click.echo(json_line(value), nl=False)


def json_line(value: Mapping[str, Any]) -> bytes:
    """A value as one line of JSON in UTF-8, for all values of AMQP.

    Times are ISO 8601. Bytes are text if they are UTF-8, and base64 otherwise. Numbers that JSON cannot represent
    become text.
    """
    return visible_json(_json_value(value)).encode() + b"\n"


def _json_value(value: Any) -> Any:
    match value:
        case Mapping():
            return {str(name): _json_value(one) for name, one in value.items()}
        case list() | tuple():
            return [_json_value(one) for one in value]
        case bytes() | bytearray() | memoryview():
            return text_or_base64(bytes(value))[0]
        case datetime():
            return value.isoformat()
        case Decimal():
            return str(value)
        case float() if not isfinite(value):
            return str(value)
        case _:
            return value


def text_or_base64(value: bytes) -> tuple[str, bool]:
    """Bytes as text, and whether the text is base64 because the bytes are not UTF-8."""
    try:
        return value.decode(), False
    except UnicodeDecodeError:
        return b64encode(value).decode(), True


@contextmanager
def working(what: str) -> Iterator[Callable[[], None]]:
    """Show a message during a slow operation, if standard error is a terminal, and remove it afterwards.

    The block gets a function that removes the message earlier: call it before the first line of output.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as shown:
        yield shown.stop


@contextmanager
def progress_bar(verb: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar, if standard error is a terminal. It is shown once the messages are counted."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(verb), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(verb, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def in_local_time(moment: datetime) -> datetime:
    """A time in this machine's time zone; unchanged if the local time would be outside the years 1 to 9999."""
    try:
        return moment.astimezone()
    except (OverflowError, ValueError):
        return moment


class LineWriter:
    """Writes lines to standard output without buffering: when :meth:`write` returns, the line has left the process.

    If the reader stops reading, only the writer waits. The event loop continues, and with it heartbeats.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self._file = sys.stdout.fileno()

    async def write(self, line: bytes) -> None:
        """Write one line.

        Raises:
            BrokenPipeError: the reader has closed the pipe.
        """
        rest = memoryview(line)
        while rest:
            await self._writable()
            # A pipe that is writable accepts at least this many bytes without blocking.
            rest = rest[os.write(self._file, rest[: select.PIPE_BUF]) :]

    async def _writable(self) -> None:
        import asyncio

        poll = select.poll()
        poll.register(self._file, select.POLLOUT)
        if poll.poll(0):
            return
        # Only pipes, sockets and terminals are ever not writable, and the event loop can watch all three.
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(self._file, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self._file)
