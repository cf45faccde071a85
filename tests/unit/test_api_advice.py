"""Errors below the command line name arguments, and the command line prints them as options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import bide
from bide.cli.output import with_options

SOURCE = Path(bide.__file__).parent
OF_COMMANDS = {"check", "cli", "demo"}
"""Packages whose errors only commands raise."""

EXCEPTIONS = {"patterns/catalogue.py"}
"""The catalogue reads options of the command line."""

COMMAND = re.compile(r"'[^']*'|\"[^\"]*\"|\brabbitmq\S* .*")
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


def test_no_error_below_the_command_line_names_an_option() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {option}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] not in OF_COMMANDS and str(path.relative_to(SOURCE)) not in EXCEPTIONS
        for text in raised_texts(ast.parse(path.read_text()))
        for option in OPTION.findall(COMMAND.sub("", text))
    ]
    assert found == []


def test_the_check_finds_an_option() -> None:
    tree = ast.parse("""raise BideError(f"no queue {name!r}: name another with --to, see 'bide send --help'")""")
    assert OPTION.findall(COMMAND.sub("", next(raised_texts(tree)))) == ["--to"]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("name a queue with to=...", "name a queue with --to"),
        ("delete them with force=True", "delete them with --force"),
        ("or run with audit=False", "or run with --no-audit"),
        ("allow it with allow=[...], if", "allow it with --allow, if"),
        ("its address with management_url=... or BIDE", "its address with --management-url or BIDE"),
        ("x-match=True, change.type=... and a_b=1", "x-match=True, change.type=... and a_b=1"),
    ],
)
def test_the_command_line_prints_arguments_as_options(text: str, printed: str) -> None:
    assert with_options(text) == printed
