"""Exit codes of commands that end with an error of Python."""

from __future__ import annotations

import click
import pytest

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
