"""Text and tables within the width of a terminal."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.cli.app import run
from bide.cli.folding import fold, hanging, table

WORDS = st.lists(st.text("abcdefgh.:", min_size=1, max_size=12), min_size=1, max_size=20)


@given(WORDS, st.integers(12, 60))
def test_words_that_fit_are_never_broken(words: list[str], width: int) -> None:
    lines = fold(" ".join(words), width)
    assert [word for line in lines for word in line.split()] == words
    assert all(0 < len(line) <= width for line in lines)


@given(WORDS, st.integers(1, 11))
def test_nothing_is_lost_where_words_do_not_fit(words: list[str], width: int) -> None:
    lines = fold(" ".join(words), width)
    assert "".join(lines).replace(" ", "") == "".join(words)
    assert all(len(line) <= width for line in lines)


def test_a_long_routing_key_is_broken_after_a_dot() -> None:
    assert fold("0.0.1.0.1.0.destination", 12) == ["0.0.1.0.1.0.", "destination"]


def test_a_text_continues_below_its_start() -> None:
    assert hanging("stuck messages  none that are known", 16, 40) == ["stuck messages  none that are known"]
    assert hanging("stuck messages  none that any check knows of", 16, 37) == [
        "stuck messages  none that any check",
        "                knows of",
    ]
    assert hanging("stuck messages  none that are known", 16, 30) == ["stuck messages", "  none that are known"]


def test_a_table_keeps_cells_on_one_line_before_headings() -> None:
    rows = [("Delay in Queue", "Routed To"), ("60 seconds", "bide.v1.m1")]
    assert table(rows, 22) == ["Delay in    Routed To", "Queue", "----------  ----------", "60 seconds  bide.v1.m1"]
    assert table(rows, 18)[0] == "Delay in Queue"


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize(
    "command",
    [
        "delay explain 90s --to orders",
        "delay explain 1h30m5s --exchange shop --routing-key order.created",
        "delay explain 10s --to destination --layout nservicebus",
        "delay explain 10s --to destination --layout celery",
        "delay explain 10s --to destination --layout waiting-hall",
        "topology list",
    ],
)
def test_no_line_is_wider_than_the_terminal(
    columns: int, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(command.split()) == 0
    whole = set(re.findall(r"[\w:~-]+", capsys.readouterr().out))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(command.split()) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    # Every piece of a name appears unbroken.
    assert {word for word in whole if word.strip("-")} <= set(re.findall(r"[\w:~-]+", shown))
