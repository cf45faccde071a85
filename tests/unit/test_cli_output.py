"""Lines that commands print."""

from __future__ import annotations

from collections import Counter

import pytest

from bide.cli.output import echo_reasons


def test_the_counts_of_the_printed_reasons_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = Counter({f"reason {number}": number for number in range(1, 13)})
    echo_reasons("left", reasons)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "       12  left: reason 12"
    assert lines[10:] == ["        3  left: 2 other reasons, see --json"]
    assert sum(int(line.split()[0]) for line in lines) == reasons.total()
    echo_reasons("left", Counter({"a": 2}))
    assert capsys.readouterr().out == "        2  left: a\n"
