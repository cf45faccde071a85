"""The commands in the blocks of README.md and docs, without running them."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import pytest

from bide.cli.app import cli
from bide.cli.settings import Settings
from tests.readme import README, ROOT, blocks

PAGES: Final = [README, *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
_COMMAND: Final = re.compile(r"(bide|eval|make|python3?|scripts/\S+) ")
_SUBSTITUTED: Final = re.compile(r"\$\((.*?)\)")
_ASSIGNED: Final = re.compile(r"\w+=")
_SEPARATORS: Final = {"&&", "||", "|", "&", ";"}


def commands_in(page: str) -> Iterator[list[str]]:
    """The words of each command: all lines of shell blocks, and lines with a prompt of others."""
    for language, text in blocks(page):
        if language not in ("", "sh", "console"):
            continue
        lines = text.replace("\\\n", " ").splitlines()
        if language == "sh" or _COMMAND.match(lines[0]):
            found = [line for line in lines if _COMMAND.match(line)]
        else:
            found = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in found:
            for one in (line, *_SUBSTITUTED.findall(line)):
                yield from simple_commands(one)


def simple_commands(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word in _SEPARATORS:
            if words:
                yield words
            words = []
        elif words or not _ASSIGNED.match(word):
            words.append(word)


def without_redirection(words: list[str]) -> list[str]:
    return words[: words.index(">")] if ">" in words else words


def test_a_line_is_split_into_its_commands() -> None:
    assert list(simple_commands("A=1 bide send 'a && b' --to x || true # so")) == [
        ["bide", "send", "a && b", "--to", "x"],
        ["true"],
    ]


def test_each_command_of_bide_has_arguments_that_it_accepts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = click.Command.invoke
    accepted: list[list[str]] = []

    def parse_only(command: click.Command, context: click.Context) -> Any:
        if isinstance(command, click.Group):
            return run(command, context)
        accepted.append(words)
        return None

    monkeypatch.setattr(click.Command, "invoke", parse_only)
    monkeypatch.setenv("BIDE_DATABASE", "postgresql://localhost")
    monkeypatch.chdir(tmp_path)
    given = [without_redirection(words) for page in PAGES for words in commands_in(page) if words[0] == "bide"]
    refused = []
    for words in given:
        arguments = [word.replace("$BIDE_URL", "amqp://localhost") for word in words[1:]]
        for file in arguments:
            if re.fullmatch(r"[\w-]+\.(json|toml)", file):
                (tmp_path / file).touch()
        try:
            cli.main(arguments, obj=Settings(arguments=tuple(arguments)), standalone_mode=False)
        except click.ClickException as error:
            refused.append((words, error.format_message()))
    assert refused == []
    assert accepted == given


def test_each_module_that_a_command_runs_has_its_options() -> None:
    """Soak tests and benchmarks take too long to run here."""
    targets = dict(re.findall(r"^([\w-]+):.*\n((?:\t.*\n)*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    checked = set()
    for words in (words for page in PAGES for words in commands_in(page)):
        match words:
            case ["make", target, *variables]:
                assert target in targets
                options = [option for one in variables for option in one.partition("=")[2].split()]
                module = f"tests.{target}" if f"-m tests.{target}" in targets[target] else ""
            case [("python" | "python3"), "-m", module, *options]:
                assert importlib.util.find_spec(module), module
            case [script, *_] if script.startswith("scripts/"):
                assert (ROOT / script).is_file(), script
                continue
            case _:
                continue
        source = source_of(module)
        for option in options:
            if option.startswith("--") and source:
                assert f'"{option}"' in source, f"{words}: {module} has no option {option}"
                checked.add(module)
    assert checked >= {"tests.soak", "benchmarks.broker_profile", "benchmarks.frameworks"}


def source_of(module: str) -> str:
    """The source of a module of the project; otherwise nothing."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8") if module and file.is_file() else ""
