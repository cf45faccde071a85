"""Exit codes, other forms of options, and completion in a shell."""

from __future__ import annotations

import click
import pytest

from bide.admin.taps import StreamStatus
from bide.cli import tap
from bide.cli.app import run


def test_the_end_of_a_file_is_not_taken_for_a_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def broken() -> None:
        raise EOFError("marshal data too short")

    assert run([], command=broken) == 1
    assert "bide: internal error: EOFError: marshal data too short (with -v" in capsys.readouterr().err


def test_ctrl_c_ends_a_command_without_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert run([], command=interrupted) == 130
    assert capsys.readouterr().err.strip() == ""


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["help"], ["--help"]),
        (["help", "schedule", "add"], ["schedule", "add", "--help"]),
        (["version"], ["--version"]),
    ],
)
def test_help_and_version_are_also_commands(
    words: list[str], options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 0
    by_words = capsys.readouterr().out
    assert run(options) == 0
    assert by_words == capsys.readouterr().out != ""


def test_help_for_an_unknown_command_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "sned"]) == 2
    assert "No such command 'sned'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "completed"), [("bide sch", "schedule"), ("bide schedule ad", "add"), ("bide send --lay", "--layout")]
)
def test_a_shell_completes_commands_and_options(
    line: str, completed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_BIDE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit):
        run([])
    assert capsys.readouterr().out.split() == [f"plain,{completed}"]


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({}, ""),
        ({"x-max-age": "7D"}, ", keeps 7D"),
        ({"x-max-length-bytes": 10_000}, ", keeps 10,000 bytes"),
        ({"x-max-age": "7D", "x-max-length-bytes": 10_000}, ", keeps 7D, 10,000 bytes"),
    ],
)
def test_tap_status_shows_each_limit_with_its_unit(arguments: dict[str, object], kept: str) -> None:
    stream = StreamStatus(name="s", exists=True, messages=1, bindings=None, wanted=1, arguments=arguments)
    assert tap._stream_text(stream) == f"1 message{kept}"
