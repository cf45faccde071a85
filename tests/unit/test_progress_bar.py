"""Messages and bars of commands that take time, on a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from bide.cli.output import progress_bar, working
from tests.polling import wait_until


class Terminal(io.StringIO):
    """Standard error of a process in a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_bar_is_not_shown_before_its_total_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("sent back") as progress:
        assert progress is not None
        before = terminal.getvalue()
        progress(0, 100)
        progress(14, 100)
    assert "sent back" not in before
    shown = terminal.getvalue()
    assert "/100" in shown
    assert "/?" not in shown


def test_the_message_of_a_slow_operation_is_removed_before_the_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with working("reading") as end_message:
        wait_until(lambda: "reading" in terminal.getvalue(), "a thread shows the message")
        end_message()
        removed = terminal.getvalue()
        # The last sequence erases the line.
        assert removed.endswith("\x1b[2K")
        sys.stderr.write("the first line\n")
    assert terminal.getvalue() == f"{removed}the first line\n"


def test_no_message_is_shown_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with working("reading") as end_message:
        end_message()
    assert capsys.readouterr() == ("", "")
