"""Errors name calls and arguments; the command line prints commands and options."""

from __future__ import annotations

import ast
import inspect
import logging
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

import bide
from bide.cli.advice import COMMANDS, with_options
from bide.cli.app import cli
from bide.cli.settings import configure_logging
from bide.error_queues import ErrorQueue
from bide.local_broker import LocalBroker, LocalCluster

SOURCE = Path(bide.__file__).parent
OF_COMMANDS = {"check", "cli", "console", "demo"}
"""Packages whose errors only commands raise."""

EXCEPTIONS = {"patterns/catalogue.py"}
"""The catalogue reads options of the command line."""

ALSO_FOR_PEOPLE = {
    # A log line, which people read.
    "client/gate_check.py",
    # No call reads a file and sends its rows; the command does.
    "timeouts/dialects.py",
    "timeouts/tables.py",
}
"""Modules below the command line whose texts name a command."""

QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\brabbitmq\S* .*")
COMMAND = re.compile(rf"\bbide (?:{'|'.join(map(re.escape, cli.list_commands(click.Context(cli))))})\b")
CALL = re.compile(r"([\w.]+)\(([^()]*)\)")
OPTION = re.compile(r"(?:^|\s|\()(--[a-z][a-z-]*)")


def raised_texts(tree: ast.AST) -> Iterator[str]:
    """The texts in ``raise`` statements, and in calls of error classes; values are ``{}``."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.expr() as found):
                yield from texts(found)
            case ast.Call(func=ast.Name(id=name)) if name.endswith("Error"):
                yield from texts(node)


def texts(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.JoinedStr(values=parts):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
        case ast.Constant(value=str() as text):
            yield text
        case _:
            for one in ast.iter_child_nodes(node):
                yield from texts(one)


class Module(NamedTuple):
    """The texts of a module: those of its errors, and all."""

    name: str
    raised: tuple[str, ...]
    texts: tuple[str, ...]


@cache
def modules() -> list[Module]:
    """The modules below the command line, by their path in the package.

    Without their syntax trees: garbage collection would look through them again and again.
    """
    found = [(path.relative_to(SOURCE).as_posix(), path) for path in sorted(SOURCE.rglob("*.py"))]
    return [
        Module(name, tuple(raised_texts(tree)), tuple(all_texts(tree)))
        for name, path in found
        if name.partition("/")[0] not in OF_COMMANDS and name not in EXCEPTIONS
        for tree in [ast.parse(path.read_text())]
    ]


def all_texts(tree: ast.AST) -> Iterator[str]:
    """All texts but docstrings."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.JoinedStr() | ast.Constant(value=str()):
                yield from texts(node)
            case _:
                yield from all_texts(node)


def options(command: click.Command) -> Iterator[str]:
    """The options of a command and of its subcommands."""
    for one in command.params:
        yield from one.opts
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            part = command.get_command(context, name)
            assert part is not None
            yield from options(part)


def command_of(path: str) -> click.Command:
    """The command of these words."""
    found: click.Command = cli
    for word in path.split():
        if not word.startswith("--"):
            assert isinstance(found, click.Group)
            part = found.get_command(click.Context(found), word)
            assert part is not None, path
            found = part
    return found


def call_of(name: str) -> Any:
    """The function or class of this name: of a module, or of a class among those that documentation names alone."""
    first, _, rest = name.partition(".")
    owners = {"Client": bide.Client, "ErrorQueue": ErrorQueue, "LocalBroker": LocalBroker, "LocalCluster": LocalCluster}
    return attrgetter(rest)(owners[first]) if first in owners else pkgutil.resolve_name(name)


def test_no_error_below_the_command_line_names_an_option() -> None:
    found = [
        f"{module.name}: {option}"
        for module in modules()
        for text in module.raised
        for option in OPTION.findall(QUOTED.sub("", text))
    ]
    assert found == []


def test_no_text_below_the_command_line_names_a_command() -> None:
    found = [
        f"{module.name}: {command}"
        for module in modules()
        if module.name not in ALSO_FOR_PEOPLE
        for text in module.texts
        for command in COMMAND.findall(text)
    ]
    assert found == []


@pytest.mark.parametrize("name", COMMANDS)
def test_calls_and_their_commands_exist(name: str) -> None:
    assert callable(call_of(name))
    command_of(COMMANDS[name])


def test_arguments_of_calls_in_errors_exist() -> None:
    used = set()
    for module in modules():
        for text in module.texts:
            for call, arguments in CALL.findall(text):
                if call in COMMANDS:
                    used.add(call)
                    parameters = inspect.signature(call_of(call)).parameters
                    given = {one.partition("=")[0] for one in arguments.split(", ") if "=" in one}
                    assert given <= parameters.keys(), f"{module.name}: {text}"
                    available = set(options(command_of(COMMANDS[call])))
                    assert {f"--{one.replace('_', '-')}" for one in given} <= available, f"{module.name}: {text}"
    assert used == COMMANDS.keys()


def test_arguments_in_errors_of_patterns_are_options() -> None:
    available = set(options(cli))
    found = [
        f"{module.name}: {option}"
        for module in modules()
        if module.name.startswith("patterns/")
        for text in module.raised
        for option in OPTION.findall(with_options(text))
        if option not in available
    ]
    assert found == []


def test_the_check_finds_an_option() -> None:
    tree = ast.parse("""raise BideError(f"no queue {name!r}: name another with --to, see 'bide send --help'")""")
    assert OPTION.findall(QUOTED.sub("", next(raised_texts(tree)))) == ["--to"]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("name a queue with to=...", "name a queue with --to"),
        ("delete them with force=True", "delete them with --force"),
        ("or run with audit=False", "or run with --no-audit"),
        ("in branches={...} for 'q', or queues=[...]", "in --branch for 'q', or --queue"),
        ("call bide.Relay(allow=[...]) with the same", "run 'bide relay --allow ...' with the same"),
        ("and bide.admin.taps.turn_off(delete=True) ends", "and 'bide tap off --delete' ends"),
        ("bide.error_queues.ErrorQueue(client, queue='q')", "'bide errors list --queue q'"),
        (
            "call bide.admin.infrastructure.install(...) for the layout 'celery', or wait",
            "run 'bide delay apply --layout celery', or wait",
        ),
        ("call Model.apply(first=True), or name q(s)", "call Model.apply(first=True), or name q(s)"),
        ("allow it with allow=[...], if", "allow it with --allow, if"),
        ("its address with management_url=... or BIDE", "its address with --management-url or BIDE"),
        ("x-match=True, change.type=... and a_b=1", "x-match=True, change.type=... and a_b=1"),
    ],
)
def test_the_command_line_prints_arguments_as_options(text: str, printed: str) -> None:
    assert with_options(text) == printed


@pytest.mark.parametrize(
    ("name", "level", "printed"),
    [
        ("bide.amqp.tls_warnings", logging.WARNING, "bide: name it with --management-url"),
        ("bide.amqp.tls_warnings", logging.INFO, "bide: name it with management_url=..."),
        ("shop.handlers", logging.WARNING, "bide: name it with management_url=..."),
    ],
)
def test_warnings_of_bide_name_options(name: str, level: int, printed: str) -> None:
    configure_logging(0)
    (handler,) = logging.getLogger().handlers
    record = logging.LogRecord(name, level, "", 0, "name it with %s", ("management_url=...",), None)
    assert handler.format(record) == printed
