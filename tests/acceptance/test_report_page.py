"""The page of the report in a browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from bide.pipelines.charts.svg import document
from bide.pipelines.report.page import MEDIUM, NARROW, WIDE, page
from bide.pipelines.report.picture import picture
from tests.browser import Browser
from tests.reports import figures

NASTY: Final = "<script>document.title = 'taken'; fetch('//example.org')</script><img src='//example.org/x.png'>"
SVGS: Final = 7
OPEN_TABLES: Final = 3
MARK: Final = """one => [
    one.tagName + ' ' + one.getAttribute('class'),
    [...one.childNodes].map(child => child.textContent).join(),
    ['stroke-width', 'stroke-dasharray', 'font-size', 'font-weight', 'text-anchor'].map(name => one.getAttribute(name)),
    (one.getAttribute('points') ?? ['x', 'y', 'width', 'height'].map(name => one.getAttribute(name) ?? '0').join())
        .split(/[ ,]/).map(Number),
]"""
"""What an element of a plot shows, and where."""

SHOWN: Final = "[...document.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().width > 0)"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(page(figures()), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("width", "kind"),
    [(1200, "wide"), (960, "wide"), (768, "medium"), (660, "medium"), (390, "narrow"), (320, "narrow")],
)
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
    hidden = "[...document.querySelectorAll('.open')].filter(one => one.scrollWidth > one.clientWidth + 1)"
    assert chromium.evaluate(f"{hidden}.map(one => one.ariaLabel)") == [], "a table has columns out of sight"
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


@pytest.mark.parametrize("width", [1200, 940, 768, 390])
def test_texts_are_large_enough_to_read(chromium: Browser, report: Path, width: int) -> None:
    chromium.open(report, width=width)
    smallest = chromium.evaluate(
        f"Math.min(...{SHOWN}.flatMap(svg => [...svg.querySelectorAll('text')]"
        ".map(one => parseFloat(one.getAttribute('font-size')) * svg.getScreenCTM().a)))"
    )
    assert smallest >= 9.8


def test_the_page_loads_nothing_and_logs_nothing(chromium: Browser, report: Path) -> None:
    chromium.open(report)
    assert chromium.requests == [report.as_uri()]
    assert chromium.complaints == []


def test_html_in_texts_of_messages_is_not_interpreted(chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    found = figures(queue=f"q:{NASTY}", text=NASTY, exception=NASTY, message_id=NASTY, type=NASTY)
    path.write_text(page(found), encoding="utf-8")
    chromium.open(path)
    texts = "[...document.querySelectorAll('td')].map(one => one.textContent)"
    # The text of the failure, and the types of five overdue messages.
    assert chromium.evaluate(texts).count(NASTY) == 6
    # What the filters draw is not interpreted either.
    choose(chromium, "target", 1)
    assert chromium.evaluate(f"{texts}.filter(one => one.includes('<script>')).length") > 13
    assert chromium.evaluate("document.title") == "Delayed delivery"
    assert chromium.evaluate("document.querySelectorAll('script').length") == 2, "the page's own ones"
    assert chromium.evaluate("document.querySelectorAll('img').length") == 0
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


@pytest.mark.parametrize("name", ["flow", "lateness", "lateness-over-time", "pending"])
def test_the_script_draws_the_same_plots_as_the_report(chromium: Browser, report: Path, name: str) -> None:
    """The report draws its plots once in Python, and the script draws parts of them: both are the same drawing."""
    chromium.open(report)
    for number, width in enumerate((WIDE, MEDIUM, NARROW)):
        drawn = f"[...document.querySelectorAll('#{name} svg')[{number}].children].slice(1)"
        again = f"PLOTS['{name}'](data.choices[0], {width})"
        ours, theirs = (chromium.evaluate(f"{one}.map({MARK})") for one in (drawn, f"{again}.marks"))
        assert len(ours) == len(theirs) > 10
        for one, other in zip(ours, theirs, strict=True):
            assert one[:3] == other[:3]
            assert one[3] == pytest.approx(other[3], abs=0.11), one
        box = f"document.querySelectorAll('#{name} svg')[{number}].viewBox.baseVal.height"
        assert chromium.evaluate(f"{again}.height") == pytest.approx(chromium.evaluate(box), abs=0.1)
    rows = f"[...document.querySelectorAll('#{name} tbody tr')].map(row => [...row.cells].map(one => one.textContent))"
    assert chromium.evaluate(rows) == chromium.evaluate(f"PLOTS['{name}'](data.choices[0], {WIDE}).rows")


def test_filters_and_zoom_change_plots_and_tables(chromium: Browser, report: Path) -> None:
    chromium.open(report)
    before = chromium.evaluate("document.querySelector('main').innerHTML")
    assert chromium.evaluate("[...document.querySelectorAll('.filters option')].map(one => one.textContent)") == [
        *("all", "queue orders", "exchange shop"),
        *("all", "SendMail", "Call"),
    ]
    choose(chromium, "target", 1)
    choose(chromium, "type", 2)
    assert scheduled(chromium) == [10_000] * 25 + [0] * 6
    assert first_column(chromium, "overdue") == ["order-0", "order-3", "order-6", "order-9", "order-12"]
    assert chromium.evaluate("document.getElementById('chosen').textContent") == (
        "250,000 scheduled, 249,750 delivered, 3 overdue; lateness 7.5 ms at p50, 33.2 ms at p99"
    )
    assert texts_of(chromium, "pending").count("queue orders, Call") == 1
    assert "exchange shop" not in texts_of(chromium, "pending")
    # Only messages for the queue have this type.
    choose(chromium, "target", 2)
    assert scheduled(chromium) == [0] * 31
    assert first_column(chromium, "overdue") == []
    choose(chromium, "type", 0)
    assert scheduled(chromium) == [10_000] * 25 + [0] * 6
    assert "exchange shop" in texts_of(chromium, "pending")
    # From 12:08 to 12:12, of 31 minutes: there is room for spans of ten seconds, each minute's messages in the first.
    drag(chromium, "#flow .wide", 8.1 / 31, 11.9 / 31)
    assert scheduled(chromium) == [10_000, 0, 0, 0, 0, 0] * 4
    assert "per 10 seconds" in texts_of(chromium, "flow")
    assert first_column(chromium, "lateness-over-time") == [f"2026-11-21 12:{minute:02}:00" for minute in range(8, 12)]
    press(chromium, "flow", "Later")
    assert "2026-11-21 12:09:00" < first_column(chromium, "flow")[0] < "2026-11-21 12:11:00"
    press(chromium, "flow", "Zoom out")
    assert "2026-11-21 12:07:00" < first_column(chromium, "flow")[0] < "2026-11-21 12:09:00"
    assert len(scheduled(chromium)) > 24
    press(chromium, "flow", "Show the whole range")
    assert scheduled(chromium) == [10_000] * 25 + [0] * 6
    # One bar is the legend.
    bars = "document.querySelectorAll('#pending .wide rect[class=f-in]').length"
    assert chromium.evaluate(bars) == 2
    drag(chromium, "#pending .wide", 12 / 24, 1)
    assert chromium.evaluate(bars) == 1
    press(chromium, "pending", "Show the whole range")
    assert chromium.evaluate(bars) == 2
    chromium.evaluate("document.querySelector('.filters button').click()")
    choose(chromium, "target", 0)
    assert scheduled(chromium) == [40_000] * 25 + [0] * 6
    assert chromium.evaluate("document.querySelector('main').innerHTML") == before
    assert chromium.requests == [report.as_uri()]
    assert chromium.complaints == []


def test_a_filtered_page_fits_a_phone(chromium: Browser, report: Path) -> None:
    chromium.open(report, width=320)
    choose(chromium, "type", 1)
    chromium.evaluate("document.querySelectorAll('summary').forEach(one => one.click())")
    assert chromium.evaluate("document.documentElement.scrollWidth") <= 320


def test_without_a_script_the_page_shows_no_filters(chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(replace(figures(), filters=None)), encoding="utf-8")
    chromium.open(path)
    assert chromium.evaluate("document.querySelectorAll('select, button').length") == 0
    assert chromium.evaluate(f"{SHOWN}.length") == SVGS


def choose(chromium: Browser, name: str, number: int) -> None:
    """Choose an option of a filter."""
    chromium.evaluate(
        f"(() => {{ const one = document.getElementById('filter-{name}'); one.value = '{number}'; "
        "one.dispatchEvent(new Event('change')); })()"
    )


def drag(chromium: Browser, selector: str, first: float, last: float) -> None:
    """Drag the mouse over a part of a plot, given as shares of its time axis."""
    left, top, width, height = chromium.evaluate(
        f"""(() => {{
            const svg = document.querySelector('{selector}');
            svg.scrollIntoView({{ block: 'center' }});
            const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
            return [box.left + 52 * scale, box.top, box.width - 64 * scale, box.height];
        }})()"""
    )
    for kind, share, buttons in (("mousePressed", first, 1), ("mouseMoved", last, 1), ("mouseReleased", last, 0)):
        chromium.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=left + width * share,
            y=top + height / 2,
            button="left",
            buttons=buttons,
            clickCount=1,
        )


def press(chromium: Browser, section: str, title: str) -> None:
    chromium.evaluate(f"document.querySelector('#{section} button[title=\"{title}\"]').click()")


def scheduled(chromium: Browser) -> list[int]:
    """The numbers of scheduled messages in the table."""
    cells = chromium.evaluate("[...document.querySelectorAll('#flow tbody tr')].map(row => row.cells[1].textContent)")
    return [int(one.replace(",", "")) for one in cells]


def first_column(chromium: Browser, section: str) -> list[str]:
    found: list[str] = chromium.evaluate(
        f"[...document.querySelectorAll('#{section} tbody tr')].map(row => row.cells[0].textContent)"
    )
    return found


def texts_of(chromium: Browser, section: str) -> list[str]:
    """The texts of the wide plot."""
    found: list[str] = chromium.evaluate(
        f"[...document.querySelectorAll('#{section} .wide text')].map(one => one.textContent)"
    )
    return found


def test_tables_can_be_opened_without_a_script(chromium: Browser, report: Path) -> None:
    chromium.open(report, width=390)
    shown = "[...document.querySelectorAll('table')].filter(one => one.checkVisibility()).length"
    assert chromium.evaluate(shown) == OPEN_TABLES
    chromium.evaluate("document.querySelectorAll('summary').forEach(one => one.click())")
    assert chromium.evaluate(shown) == SVGS + 2
    assert chromium.evaluate("document.documentElement.scrollWidth") <= 390
