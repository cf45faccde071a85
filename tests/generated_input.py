"""Command lines that no user should give, made from the command tree."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

import click

from bide.cli.app import cli, run
from bide.delay.by_name import LAYOUTS
from tests.timeouts import TIMEOUT

DEAD: Final = "amqp://guest:guest@127.0.0.1:9/?timeout=1"
"""A broker that does not answer."""

DEAD_API: Final = "http://127.0.0.1:9"

TEXTS: Final = (
    *("", " ", "²", "-1", "0", "1", "9" * 400, "nan", "inf", "1e400", "0x10", "1_0"),
    *("a\nb\x1b[2J\u202ec\x9b", "\udcff", "\x7f", "q" * 300, "bide.v1.h1", "amq.direct", "*", "[", "{", "\\"),
    *("3s", "²s", "-3s", "9999999d", "999999999d", "9" * 50 + "d", "PT", "P1Y", "1ms"),
    *("2026-12-24T18:00:00+01:00", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00", "2026-12-24"),
    *("=", "a=", "=b", "a=²", "a=b", "CC=x", "bide-to=q:x", "x=" + "[" * 5000),
    *("amqp://[::1", "amqp://h:²", "amqp://h:99999", "amqp://", "http://[", "http://h:²", "http://a:b@", "amqp://h/%"),
    *("2026-12-24T18:00:00+24:00", "Europe/Nowhere", "../../etc/passwd", "/dev/null/x", "1:2:3", "10%", "5/²"),
)
"""Values of an option or an argument."""


@dataclass(frozen=True)
class Case:
    """One command line, and the parameter that it is about."""

    command: tuple[str, ...]
    parameter: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([*self.command, *(repr(one)[:60] for one in self.arguments)])


class Outcome(NamedTuple):
    """What came of a command."""

    code: int
    out: str
    err: str


def commands(group: click.Command = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands that do something, with the words that call them."""
    if not isinstance(group, click.Group):
        yield path, group
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield from commands(found, (*path, name))


def files(folder: Path) -> tuple[str, ...]:
    """Paths of files that are not what a command expects."""
    contents = {
        "empty": b"",
        "null.json": b"null",
        "five.json": b'{"queues": 5, "bindings": null}',
        "deep.json": b"[" * 100_000 + b"]" * 100_000,
        "deeper.json": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "odd.json": b'{"queues": [{"name": 5}, null, []], "vhosts": {}}',
        "digits.json": b"1" * 5000,
        "binary.json": bytes(range(256)),
        "binary.toml": b"\xff[[flow]]",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return (*(str(folder / name) for name in contents), str(folder), str(folder / "missing" / "file"))


def cases(folder: Path, *, url: str = DEAD, api: str = DEAD_API, every: int = 1) -> Iterator[Case]:
    """Every option and argument of every command, with every value.

    Args:
        every: use one of this many values, and different ones for other options.
    """
    values = (*TEXTS, *files(folder))
    for path, command in commands():
        base = _required(path, command, url=url, api=api)
        yield Case(path, "", ("--no-such-option",))
        for parameter in command.params:
            name = parameter.name or ""
            place = crc32(" ".join([*path, name]).encode())
            for number, value in enumerate(values):
                if (number + place) % every:
                    continue
                if isinstance(parameter, click.Option):
                    option = max(parameter.opts, key=len)
                    flag = parameter.is_flag or parameter.count
                    if flag and number >= every:
                        continue
                    given = (option,) if flag else (f"{option}={value}",)
                    rest = [one for one in base if not one.startswith(f"{option}=")]
                    for layout in _layouts(command, name, number if every > 1 else None):
                        yield Case(path, name, (*given, *layout, *rest))
                else:
                    others = [one for one in base if one.startswith("--")]
                    yield Case(path, name, (*others, "--", value, value))


def _layouts(command: click.Command, name: str, number: int | None) -> Iterator[tuple[str, ...]]:
    """What an option of a layout is tried with: every layout, or the one whose turn it is."""
    others = {one.name for one in command.params}
    if "layout" not in others or name not in {"prefix", "max_delay", "resolution", "lanes", "levels"}:
        yield ()
        return
    for place, layout in enumerate(LAYOUTS):
        if number is None or place == number % len(LAYOUTS):
            yield (f"--layout={layout}",)


def _required(path: Sequence[str], command: click.Command, *, url: str, api: str) -> list[str]:
    """What a command needs to get past its usage, and to reach the broker that it should reach."""
    given: list[str] = []
    arguments: list[str] = []
    for one in command.params:
        if isinstance(one, click.Argument):
            arguments += ["3s" if "delay" in (one.name or "") else "x"] if one.required else []
            continue
        option = max(one.opts, key=len)
        if one.name == "url":
            given.append(f"{option}={url}")
        elif one.name == "management_url":
            given.append(f"{option}={api}")
        elif one.name == "yes" or (one.name == "everything" and path[0] == "errors"):
            given.append(option)
        elif one.name == "timeout" and path[0] == "receive":
            given.append(f"{option}=100ms")
        elif one.name == "to" and path[0] in ("send", "delay"):
            given.append(f"{option}=x")
        elif one.required:
            given.append(f"{option}={'3' if isinstance(one.type, click.types.IntParamType) else 'x'}")
    return [*given, *arguments]


def run_in_process(arguments: Sequence[str], *, seconds: float = TIMEOUT) -> Outcome:
    """Run a command line as the program does, without a new process.

    Raises:
        TimeoutError: it did not end.
    """

    late = False

    def too_long(*_: object) -> None:
        nonlocal late
        late = True
        # An event loop hands on KeyboardInterrupt, and keeps any other exception for the task that it hits.
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with (
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
            io.TextIOWrapper(out, "utf-8", errors="surrogateescape", write_through=True) as stdout,
            io.TextIOWrapper(err, "utf-8", errors="backslashreplace", write_through=True) as stderr,
        ):
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(), "utf-8")
                try:
                    code = run(list(arguments))
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else 1
                finally:
                    sys.stdin = stdin
            found = []
            for file in (out, err):
                file.seek(0)
                found.append(file.read().decode("utf-8", errors="replace"))
            return Outcome(code, *found)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if late:
            raise TimeoutError(f"did not end within {seconds:g} s: {arguments}")


def fault(outcome: Outcome) -> str | None:
    """The reason why a command's exit is wrong, or None."""
    if "internal error" in outcome.err or "Traceback" in outcome.err:
        return "an internal error"
    if outcome.code not in (0, 1, 2):
        return f"the exit code {outcome.code}"
    lines = outcome.err.splitlines()
    if outcome.code == 2 and not (lines and lines[-1].startswith("bide")):
        return "bad usage, and nothing says so"
    if outcome.code == 2 and len([one for one in lines if one.startswith("bide")]) != 1:
        return "bad usage in several lines"
    if outcome.code == 1 and not outcome.err and not outcome.out:
        return "a failure, and nothing says so"
    if any(not (one.isprintable() or one == "\n") for one in outcome.out + outcome.err):
        return "control characters in the output"
    return None


def report(found: dict[str, list[str]]) -> str:
    """The faults, a few cases of each."""
    return json.dumps({what: [len(several), *several[:6]] for what, several in found.items()}, indent=1)
