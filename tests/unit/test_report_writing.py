"""Where a report cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from bide.errors import InvalidInputError
from bide.pipelines.report.writing import write
from tests.reports import figures


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    place = tmp_path / "page.html"
    place.mkdir()
    with pytest.raises(InvalidInputError, match=r"page\.html cannot be written: .+; name another"):
        write(figures(), out=place, png=None, title="t")
    assert not [one for one in tmp_path.iterdir() if one != place]
