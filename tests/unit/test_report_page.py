"""The page and picture of a report with example figures."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from html import escape as html_escape
from html.parser import HTMLParser
from typing import Final
from xml.etree import ElementTree

import pytest

from bide.durations import LATEST
from bide.pipelines.charts.drawing import Area, Bar, Drawing, Label, Line, Mark, Role
from bide.pipelines.charts.palette import DARK_BACKGROUND, DARK_COLOURS, LIGHT_BACKGROUND, LIGHT_COLOURS
from bide.pipelines.charts.scale import ROUND_SPANS
from bide.pipelines.charts.svg import document
from bide.pipelines.report import content, picture, plots, schedule_sections
from bide.pipelines.report.figures import FailureFigures, Figures, FlowFigures, LatenessBin
from bide.pipelines.report.filters import short_span
from bide.pipelines.report.page import MEDIUM, NARROW, WIDE, page
from bide.pipelines.report.page_data import page_data
from bide.pipelines.report.pending_figures import OverdueMessage, PendingFigures, PendingTarget
from tests.reports import MINUTE, NOON, figures, headline

NASTY: Final = "</title></style><script>alert('x')</script><img src=http://example.org/?a=1&b onerror=\"x\">\x00\u202e"
VOID: Final = ("meta",)
ALLOWED: Final = frozenset(
    [
        *("html", "head", "meta", "title", "style", "body", "header", "main", "footer", "h1", "h2", "p"),
        *("dl", "div", "dt", "dd", "section", "figure", "figcaption", "details", "summary", "pre", "code", "script"),
        *("svg", "rect", "polyline", "polygon", "text", "table", "thead", "tbody", "tr", "th", "td"),
    ]
)


class Reader(HTMLParser):
    """A parser that fails on tags that are not closed in order, and collects names and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert not reader.open
    return reader


def drawings(found: Figures) -> list[Drawing]:
    return [
        section.draw(width) for section in content.sections(found) if section.draw for width in (WIDE, MEDIUM, NARROW)
    ]


def test_the_page_is_valid_and_loads_nothing() -> None:
    html = page(figures())
    reader = read(html)
    assert reader.names <= ALLOWED
    assert len(set(reader.ids)) == len(reader.ids)
    assert not {name for name, _ in reader.attributes} & {"src", "href", "style", "onload", "onclick"}
    assert "http:" not in html.replace('"http://www.w3.org/2000/svg"', ""), "the name of SVG is not an address"
    assert "https:" not in html
    assert "url(" not in html
    assert "@import" not in html


def test_every_drawing_has_a_title_and_a_table() -> None:
    html = page(figures())
    reader = read(html)
    for name in (value for key, value in reader.attributes if key == "aria-labelledby"):
        assert name in reader.ids
    sections = html.split("<section")[1:]
    assert len(sections) == 9
    for section in sections:
        assert section.count("<svg") == (0 if 'id="schedules"' in section or 'id="overdue"' in section else 3)
        assert section.count("<table>") == 1


def test_the_headline_has_figures_and_a_sentence() -> None:
    found = figures()
    assert [(card.name, card.value, card.bad) for card in content.cards(found)] == [
        ("scheduled", "1,000,000", False),
        ("delivered", "999,000", False),
        ("pending", "1,000", False),
        ("overdue", "13", True),
        ("lost?", "2", True),
        ("p50 late", "7.5 ms", False),
        ("p99 late", "33.2 ms", False),
        ("cancelled", "30", False),
        ("superseded", "4", False),
        ("undeliverable", "1", True),
        ("failures", "12", True),
    ]
    assert content.summary(found) == (
        "999,000 of 1,000,000 messages were delivered, half of them at most 7.5 ms late, 99 in 100 at most 33.2 ms. "
        "Not delivered: 30 cancelled, 4 superseded, 1 undeliverable. "
        "1,000 are pending, 13 of them overdue, 2 of these by more than 10 minutes: they may be lost."
    )


def test_texts_of_messages_are_escaped() -> None:
    found = figures(queue=f"q:{NASTY}", text=NASTY, exception=NASTY, message_id=NASTY, type=NASTY)
    html = page(replace(found, query=f"select '{NASTY}'"), title=NASTY)
    reader = read(html)
    assert reader.names <= ALLOWED
    assert html.count("<script") == html.count("</script") == 2, "the page's own ones"
    assert "\u202e" not in html
    assert "\x00" not in html
    shown = NASTY.replace("\x00", "\\x00").replace("\u202e", "\\u202e")
    assert shown in reader.texts
    assert [value for name, value in reader.attributes if name == "aria-label" and "script" in value] == []


def test_drawings_stay_within_their_edges() -> None:
    for drawing in drawings(figures(queue="q:" + "long" * 80, exception="W" * 300)):
        for mark in drawing.marks:
            points = _corners(mark)
            for x, y in points:
                assert -0.5 <= x <= drawing.width + 0.5, mark
                assert -0.5 <= y <= drawing.height + 0.5, mark


def test_heights_of_bars_are_proportional_to_counts() -> None:
    drawing = plots.lateness(
        [LatenessBin(low=1, high=2, count=50), LatenessBin(low=2, high=4, count=100)], headline(), width=900
    )
    low, high = (mark for mark in drawing.marks if isinstance(mark, Bar))
    assert high.height == pytest.approx(2 * low.height)
    assert low.y + low.height == high.y + high.height
    assert low.tip == "1 ms to 2 ms: 50 messages"


def test_the_smallest_count_is_at_least_a_pixel_high() -> None:
    found = figures().pending
    assert found is not None
    targets = [replace(one, counts=[1, 1_000_000, *[0] * 22], overdue=[0] * 24) for one in found.targets]
    drawing = plots.pending(replace(found, targets=targets), now=None, width=900)
    assert all(mark.height >= 1 and mark.width >= 1 for mark in drawing.marks if isinstance(mark, Bar))


def test_only_the_script_of_the_page_may_run() -> None:
    html = page(figures())
    (script,) = re.findall("<script>(.*?)</script>", html, re.DOTALL)
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'"
    )
    without = page(replace(figures(), filters=None))
    assert "<script" not in without
    assert "script-src" not in without


def test_the_data_of_the_filters_cannot_end_their_element() -> None:
    found = figures(queue=f"q:{NASTY}", message_id=NASTY, type=NASTY)
    assert found.filters is not None
    text = page_data(found, replace(found.filters, types=[NASTY]))
    assert not set(text) & set("<>&\x00\u202e")
    read_back = json.loads(text)
    shown = NASTY.replace("\x00", "\\x00").replace("\u202e", "\\u202e")
    assert read_back["types"] == [shown]
    assert read_back["targets"][0] == f"queue {shown}"
    assert read_back["choices"][0]["oldest"][0][:3] == [f"{shown}0", f"queue {shown}", shown]


def test_a_span_is_divided_into_equal_round_parts() -> None:
    for width in ROUND_SPANS:
        short = short_span(width)
        assert not width % short
        assert 1 <= width // short <= 8
    assert short_span(timedelta(hours=1)) == timedelta(minutes=10)
    assert short_span(timedelta(seconds=1)) == timedelta(milliseconds=200)


def test_overdue_messages_are_listed_by_id_target_type_and_due_time() -> None:
    (section,) = (one for one in content.sections(figures()) if one.name == "overdue")
    assert section.table is not None
    assert section.table.head == ("message id", "target", "type", "due (UTC)", "overdue for", "lost?")
    assert list(section.table.rows)[:3] == [
        ("order-0", "queue orders", "Call", "2026-11-21 12:10:00", "20 min", "maybe"),
        ("order-1", "queue orders", "SendMail", "2026-11-21 12:16:00", "14 min", "maybe"),
        ("order-2", "queue orders", "SendMail", "2026-11-21 12:22:00", "8 min", "–"),
    ]
    assert section.note == (
        "13 overdue messages in the table of messages, by due time. A message that is overdue by more than 10 minutes "
        "may be lost."
    )
    assert section.query_title == "Query for all 13"
    assert html_escape(figures().query) in page(figures())


@pytest.mark.parametrize(
    ("shown", "total", "overdue", "note"),
    [
        (20, 4500, 4500, "The first 20 of 4,500 overdue messages in the table of messages"),
        (1, 1, 1, "1 overdue message in the table of messages"),
        (13, 13, 14, "Not shown: 1 overdue schedule or retry."),
        (13, 13, 20, "Not shown: 7 overdue schedules or retries."),
    ],
)
def test_the_note_counts_overdue_messages_that_are_not_listed(shown: int, total: int, overdue: int, note: str) -> None:
    found = figures()
    head = replace(headline(), overdue=overdue)
    changed = replace(found, oldest=(list(found.oldest) * 2)[:shown], overdue=total, headline=head)
    (section,) = (one for one in content.sections(changed) if one.name == "overdue")
    assert note in section.note


def test_without_overdue_messages_nothing_is_listed() -> None:
    found = replace(figures(), oldest=[], overdue=0, query="")
    assert 'id="overdue"' not in page(found)


def test_an_overdue_message_without_a_due_time_is_listed() -> None:
    (row,) = content.oldest_rows([OverdueMessage(message_id="m", target="", type="", due=None)], headline())
    assert row == ("m", "unknown", "–", "–", "–", "–")


@pytest.mark.parametrize("width", [WIDE, MEDIUM, NARROW])
def test_no_mark_crosses_the_name_of_a_row(width: float) -> None:
    found = figures(queue="q:a-name-as-long-as-three-ticks-of-the-axis", exception="AnExceptionWithALongNameOfItsOwn")
    for name in ("pending", "failures", "targets"):
        (draw,) = (one.draw for one in content.sections(found) if one.name == name)
        assert draw is not None
        marks = draw(width).marks
        names = [one for one in marks if isinstance(one, Label) and (one.bold or one.role is Role.INK)]
        assert names
        for one in names:
            # From the top of the capitals to the bottom of letters such as q.
            top, bottom = one.y - 0.75 * one.size, one.y + 0.22 * one.size
            for mark in marks:
                if not isinstance(mark, Label):
                    lowest, highest = (pick(y for _, y in _corners(mark)) for pick in (max, min))
                    assert lowest <= top or highest >= bottom, (name, one.text, mark)


def test_a_few_failures_at_one_time_are_a_narrow_bar() -> None:
    found = _failures()
    group = replace(found.groups[0], count=3, counts=[3], last_seen=found.first)
    drawing = plots.failures(replace(found, spans=1, groups=[group], total=3), width=WIDE)
    (bar,) = (mark for mark in drawing.marks if isinstance(mark, Bar))
    assert bar.width < drawing.width / 10
    (line,) = (mark for mark in drawing.data_marks() if isinstance(mark, Line))
    assert line.points[-1][0] - line.points[0][0] < drawing.width / 10


def test_times_beyond_the_plot_are_drawn_at_its_edge() -> None:
    found = _failures()
    group = replace(found.groups[0], first_seen=datetime(1, 1, 1, tzinfo=UTC), last_seen=LATEST)
    drawing = plots.failures(replace(found, groups=[group]), width=WIDE)
    assert all(0 <= x <= WIDE for mark in drawing.marks for x, _ in _corners(mark))


@pytest.mark.parametrize(("overdue", "colours"), [(0, ["in"]), (4, ["in", "bad"]), (10, ["bad"])])
def test_overdue_messages_are_a_segment_of_their_bar(overdue: int, colours: list[str]) -> None:
    found = figures().pending
    assert found is not None
    one = PendingTarget(name="q:a", counts=[10], overdue=[overdue], pending=10, pending_overdue=overdue)
    drawing = plots.pending(replace(found, spans=1, targets=[one]), now=None, width=900)
    bars = [mark for mark in drawing.marks if isinstance(mark, Bar) and mark.tip]
    assert [str(bar.role) for bar in bars] == colours
    assert sum(bar.height for bar in bars) == pytest.approx(72)


def test_a_report_can_have_a_single_message() -> None:
    one = replace(headline(), scheduled=1, delivered=1, pending=0, overdue=0, lost=0, until=NOON, p50=0.0, p95=0.0)
    one = replace(one, p99=0.0, max=0.0, cancelled=0, superseded=0, undeliverable=0)
    flow = FlowFigures(first=NOON, width=MINUTE / 60, scheduled=[1], delivered=[1], p50=[0.0], p99=[0.0])
    found = Figures(folder="x", missing=[], headline=one, flow=flow, lateness=[LatenessBin(low=0.0, high=1.0, count=1)])
    read(page(found))
    assert content.summary(found) == ("1 of 1 message was delivered, 0 ms late. Nothing is pending.")


def test_schedules_are_counted_by_target_and_outcome() -> None:
    found = {section.name: section for section in content.sections(figures())}
    table, spans = found["schedules"].table, found["schedules-over-time"].table
    assert table is not None
    assert spans is not None
    outcomes = ("delivered", "cancelled", "superseded", "undeliverable")
    assert table.head == ("target", *outcomes, "pending", "overdue", "all", "latest"), "no outcome that nothing has"
    assert table.rows == [
        ("queue orders", "60", "30", "4", "1", "12", "1", "107", "240 ms"),
        ("exchange shop", "5", "0", "0", "0", "0", "0", "5", "35 ms"),
        ("all targets", "65", "30", "4", "1", "12", "1", "112", "240 ms"),
    ]
    assert [row[1:] for row in spans.rows] == [("40", "10", "0", "0", "50"), ("25", "20", "4", "1", "50")]
    assert schedule_sections.summary(figures()) == (
        "schedules: 65 delivered, 30 cancelled, 4 superseded, 1 undeliverable, 12 pending (1 overdue)"
    )


def test_without_schedules_nothing_mentions_them() -> None:
    found = replace(figures(), schedules=None)
    assert schedule_sections.summary(found) == ""
    assert 'id="schedules' not in page(found)


def test_bars_of_schedules_have_a_part_for_each_kind_of_outcome() -> None:
    found = figures().schedules
    assert found is not None
    bars = [mark for mark in plots.schedules(found, width=900).marks if isinstance(mark, Bar) and mark.tip]
    assert [str(bar.role) for bar in bars] == ["in", "out", "bad", "in", "out"]
    first, second = bars[:2], bars[2:]
    assert first[1].height == pytest.approx(4 * first[0].height)
    assert second[0].height >= 1.5
    assert first[0].y + first[0].height == pytest.approx(second[0].y + second[0].height)


def test_empty_tables_are_reported_as_empty() -> None:
    nothing = replace(headline(), scheduled=0, delivered=0, pending=0, overdue=0, lost=0, since=None, until=None)
    nothing = replace(nothing, p50=None, p95=None, p99=None, max=None)
    found = Figures(
        folder="x",
        missing=[],
        headline=nothing,
        flow=FlowFigures(first=NOON, width=MINUTE, scheduled=[], delivered=[], p50=[], p99=[]),
        lateness=[],
        pending=replace(_pending(), targets=[], spans=0),
        failures=replace(_failures(), groups=[], total=0),
        filters=figures().filters,
    )
    html = page(found)
    read(html)
    assert "<script" not in html, "there is nothing to filter"
    assert "<svg" not in html
    for text in ("Nothing was scheduled or delivered yet.", "Nothing is pending.", "Nothing failed."):
        assert text in html


def test_missing_tables_are_named() -> None:
    html = page(Figures(folder="x", missing=["messages", "pending", "failures", "failed"]))
    read(html)
    for name in ("messages", "pending", "failures"):
        assert f"This folder has no table &#x27;{name}&#x27;." in html


@pytest.mark.parametrize(
    ("recent", "before", "text"),
    [(0, 0, "stopped"), (5, 5, "steady, 5/h"), (9, 1200, "falling, 1,200/h to 9/h"), (2, 1, "rising, 1/h to 2/h")],
)
def test_a_trend_is_described_in_words(recent: int, before: int, text: str) -> None:
    group = _failures().groups[0]
    assert plots.trend(replace(group, recent=recent, before=before)) == text


def test_the_picture_has_all_drawings() -> None:
    found = figures(queue=f"q:{NASTY}", exception="Zeitüberschreitung")
    drawn = picture.picture(found)
    assert drawn.width == picture.WIDTH + 2 * 16
    parts = [section.draw(picture.WIDTH) for section in content.sections(found) if section.draw]
    assert sum(len(part.marks) for part in parts) < len(drawn.marks)
    assert sum(part.height for part in parts) < drawn.height
    assert {mark.role for mark in drawn.data_marks()} >= {Role.IN, Role.OUT, Role.BAD}
    for x, y in (corner for mark in drawn.marks for corner in _corners(mark)):
        assert 0 <= x <= drawn.width
        assert 0 <= y <= drawn.height


def test_the_picture_is_a_standalone_svg_file() -> None:
    file = document(picture.picture(figures(queue=f"q:{NASTY}", exception="Zeitüberschreitung")), name="report")
    root = ElementTree.fromstring(file)
    texts = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(one.startswith("Zeitüberschreitung") for one in texts)
    assert {one.tag.rpartition("}")[2] for one in root.iter()} <= {*ALLOWED, "style", "title"}
    assert not {name for one in root.iter() for name in one.attrib} & {"src", "href", "style", "onload", "onclick"}
    assert LIGHT_COLOURS[Role.BAD] in file
    assert DARK_COLOURS[Role.BAD] in file
    assert "var(" not in file, "not all programs that show SVG know variables"


def test_colours_have_enough_contrast() -> None:
    """At least 3 to 1, as the accessibility guidelines of the web ask for, and 4.5 to 1 for texts."""
    for paper, palette in ((LIGHT_BACKGROUND, LIGHT_COLOURS), (DARK_BACKGROUND, DARK_COLOURS)):
        for role, colour in palette.items():
            wanted = 0 if role is Role.GRID else 4.5 if role in (Role.INK, Role.FAINT, Role.BAD) else 2.7
            assert _contrast(colour, paper) >= wanted, role


def _corners(mark: Mark) -> Sequence[tuple[float, float]]:
    match mark:
        case Bar():
            return [(mark.x, mark.y), (mark.x + mark.width, mark.y + mark.height)]
        case Line() | Area():
            return mark.points
        case Label():
            return [(mark.x, mark.y)]


def _contrast(one: str, other: str) -> float:
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    parts = (int(part, 16) / 255 for part in re.findall("..", colour[1:]))
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _pending() -> PendingFigures:
    found = figures().pending
    assert found is not None
    return found


def _failures() -> FailureFigures:
    found = figures().failures
    assert found is not None
    return found
