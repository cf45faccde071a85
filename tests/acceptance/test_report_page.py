"""The page of the report in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from bide.pipelines.charts.svg import document
from bide.pipelines.report.page import page
from bide.pipelines.report.picture import picture
from tests import browser
from tests.browser import Browser
from tests.reports import figures

NASTY: Final = "<script>document.title = 'taken'; fetch('//example.org')</script><img src='//example.org/x.png'>"
SVGS: Final = 7
OPEN_TABLES: Final = 2
SHOWN: Final = "[...document.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().width > 0)"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser.start(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(page(figures()), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "kind"), [(1200, "wide"), (768, "wide"), (390, "narrow"), (320, "narrow")])
def test_every_plot_has_visible_marks(chromium: Browser, report: Path, width: int, kind: str) -> None:
    chromium.open(report, width=width)
    assert chromium.evaluate(f"{SHOWN}.map(one => one.classList[0])") == [kind] * SVGS
    # What is drawn lies within its plot, and takes up room there.
    drawn = chromium.evaluate(
        f"""{SHOWN}.map(svg => {{
            const frame = svg.getBoundingClientRect();
            const marks = [...svg.querySelectorAll('rect:not(.f-pointed), polygon, polyline.s-in')]
                .map(one => one.getBoundingClientRect());
            const inside = marks.filter(one => one.width > 0 && one.left >= frame.left - 1
                && one.right <= frame.right + 1 && one.top >= frame.top - 1 && one.bottom <= frame.bottom + 1);
            return [marks.length, inside.length];
        }})"""
    )
    assert all(marks == inside >= 2 for marks, inside in drawn), drawn


@pytest.mark.parametrize("width", [1200, 768, 390, 320])
def test_the_page_fits_the_window(chromium: Browser, report: Path, width: int) -> None:
    chromium.open(report, width=width)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    cut = chromium.evaluate(
        f"""{SHOWN}.flatMap(svg => {{
            const frame = svg.getBoundingClientRect();
            return [...svg.querySelectorAll('text')].filter(one => {{
                const box = one.getBoundingClientRect();
                return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
            }}).map(one => one.textContent);
        }})"""
    )
    assert cut == []


@pytest.mark.parametrize("width", [1200, 390])
def test_texts_have_at_least_10_pixels(chromium: Browser, report: Path, width: int) -> None:
    chromium.open(report, width=width)
    smallest = chromium.evaluate(
        f"Math.min(...{SHOWN}.flatMap(svg => [...svg.querySelectorAll('text')]"
        ".map(one => parseFloat(one.getAttribute('font-size')) * svg.getScreenCTM().a)))"
    )
    assert smallest >= 10


def test_the_page_loads_nothing_and_logs_nothing(chromium: Browser, report: Path) -> None:
    chromium.open(report)
    assert chromium.requests == [report.as_uri()]
    assert chromium.complaints == []


def test_html_in_texts_of_messages_is_not_interpreted(chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(figures(queue=f"q:{NASTY}", text=NASTY, exception=NASTY)), encoding="utf-8")
    chromium.open(path)
    assert chromium.evaluate("document.title") == "Delayed delivery"
    assert chromium.evaluate("document.querySelectorAll('script, img').length") == 0
    assert chromium.evaluate("[...document.querySelectorAll('td')].map(one => one.textContent)").count(NASTY) == 1
    assert chromium.requests == [path.as_uri()]
    assert chromium.complaints == []


def test_the_content_security_policy_blocks_an_injected_script(chromium: Browser, report: Path) -> None:
    """Should an escape ever be forgotten, the page's own policy still refuses: this also shows that we would notice."""
    report.write_text(report.read_text(encoding="utf-8").replace("<main>", f"<main>{NASTY}"), encoding="utf-8")
    chromium.open(report)
    assert chromium.evaluate("document.title") == "Delayed delivery"
    assert any("Content Security Policy" in one for one in chromium.complaints)


def test_the_page_follows_the_dark_colour_scheme(chromium: Browser, report: Path) -> None:
    papers = []
    for dark in (False, True):
        chromium.open(report, dark=dark)
        papers.append(chromium.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert papers == ["rgb(255, 255, 255)", "rgb(20, 24, 29)"]


@pytest.mark.parametrize(("dark", "paper"), [(False, "rgb(255, 255, 255)"), (True, "rgb(20, 24, 29)")])
def test_every_mark_of_the_picture_is_visible(chromium: Browser, tmp_path: Path, *, dark: bool, paper: str) -> None:
    path = tmp_path / "report.svg"
    path.write_text(document(picture(figures()), name="report"), encoding="utf-8")
    chromium.open(path, dark=dark)
    assert chromium.evaluate("getComputedStyle(document.querySelector('.paper')).fill") == paper
    fills = chromium.evaluate(
        "[...document.querySelectorAll('svg svg :is(rect, text)')].map(one => getComputedStyle(one).fill)"
    )
    assert len(fills) > 100
    assert paper not in fills
    outside = chromium.evaluate(
        """[...document.querySelectorAll('svg svg :is(rect, polyline, polygon, text)')].filter(one => {
            const box = one.getBoundingClientRect(), frame = document.documentElement.getBoundingClientRect();
            return box.left < frame.left || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
        }).map(one => one.textContent)"""
    )
    assert outside == []
    assert chromium.complaints == []


def test_tables_can_be_opened_without_a_script(chromium: Browser, report: Path) -> None:
    chromium.open(report, width=390)
    shown = "[...document.querySelectorAll('table')].filter(one => one.checkVisibility()).length"
    assert chromium.evaluate(shown) == OPEN_TABLES
    chromium.evaluate("document.querySelectorAll('summary').forEach(one => one.click())")
    assert chromium.evaluate(shown) == SVGS + 1
    assert chromium.evaluate("document.documentElement.scrollWidth") <= 390
