"""The progress bar of ``bide errors``."""

from __future__ import annotations

import io
import sys

import pytest

from bide.cli.output import progress_bar


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
