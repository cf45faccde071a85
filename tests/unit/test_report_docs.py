"""The documentation page of the report."""

from __future__ import annotations

import re
from pathlib import Path

from bide.cli.pipeline.report import report
from bide.pipelines.report.content import sections
from bide.pipelines.report.tables import COLUMNS
from bide.pipelines.report.writing import headline
from tests.reports import figures

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "pipeline-report.md").read_text(encoding="utf-8")


def test_every_option_is_documented() -> None:
    for option in report.params:
        name = option.opts[0]
        assert f"`{'DIR' if name == 'folder' else name}" in PAGE


def test_every_section_and_table_is_documented() -> None:
    for section in sections(figures()):
        assert f"\n| {section.title} |" in PAGE
    for name in COLUMNS:
        assert f"`{name}`" in PAGE


def test_every_field_of_the_summary_is_documented() -> None:
    for name in (*headline(figures()), "report", "svg", "seconds"):
        assert f"`{name}`" in PAGE


def test_the_page_has_two_pictures_under_300_kb() -> None:
    names = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE)
    assert len(names) == 2
    for name in names:
        assert 10_000 < (DOCS / name).stat().st_size < 300_000
