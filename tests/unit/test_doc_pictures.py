"""The pictures of the pipeline pages: figures, drawings and captions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import pytest

from benchmarks.doc_pictures import pages
from benchmarks.doc_pictures.figures import Received, audited_of, campaign_of, levels_of, replay_of
from benchmarks.doc_pictures.plots import NARROW, WIDE, audited, campaign, picture, planned, replayed
from bide.pipelines.charts.drawing import Area, Bar, Drawing, Label, Line, Mark, Role

ROOT: Final = Path(__file__).parents[2]
KEPT: Final = json.loads((ROOT / "benchmarks/doc_pictures.json").read_text(encoding="utf-8"))
PLAN: Final = json.loads((ROOT / "benchmarks/plan_check.json").read_text(encoding="utf-8"))
PAGES: Final = ("schedule", "audit", "replay", "plan")
START: Final = 1_795_240_800.0

CAME: Final = [
    Received(START, START + 5.0, START + 5.5),
    Received(START + 1.0, START + 5.0, START + 6.5),
    Received(START + 3.0, START + 9.0, START + 9.0),
]
ROWS: Final[list[dict[str, Any]]] = [
    {"due": 11.0, "delivered": 11.004, "lateness_ms": 4.0, "outcome": "processed"},
    {"due": 12.0, "delivered": 12.008, "lateness_ms": 8.0, "outcome": "parked"},
    {"due": 13.0, "delivered": 13.1, "lateness_ms": 100.0, "outcome": "delivered"},
    {"due": 16.0, "delivered": 21.0, "lateness_ms": 5000.0, "outcome": "processed"},
    {"due": 21.0, "delivered": None, "lateness_ms": None, "outcome": "scheduled"},
]
SAMPLES: Final[list[dict[str, Any]]] = [
    {"at": 1000, "measured": {"m": 0, "c": 0}, "planned": {"all": 0.0, "m": 0.0, "c": 0.0}},
    {"at": 3000, "measured": {"m": 4, "c": 0}, "planned": {"all": 5.0, "m": 5.0, "c": 0.0}},
    {"at": 5000, "measured": {"m": 0, "c": 0}, "planned": {"all": 0.0, "m": 0.0, "c": 0.0}},
    {"at": 7000, "measured": {"m": 0, "c": 0}, "planned": {"all": 0.0, "m": 0.0, "c": 0.0}},
]

DRAWN: Final[dict[str, Callable[[float], Drawing]]] = {
    "schedule": lambda width: campaign(campaign_of(CAME, START), width=width),
    "audit": lambda width: audited(audited_of(ROWS), width=width),
    "replay": lambda width: replayed(replay_of([START + 9.0], CAME, START, 6.0), width=width),
    "plan": lambda width: planned(levels_of({"samples": SAMPLES}), width=width),
}


def test_a_campaign_is_counted_in_steps_of_two_seconds() -> None:
    found = campaign_of(CAME, START)
    assert found.due == [0, 0, 2, 0, 1]
    assert found.received == [0, 0, 1, 1, 1]
    assert found.waiting == [2, 3, 2, 1, 0]
    assert found.sent_in == 3.0


def test_an_audit_is_counted_by_due_time_and_outcome() -> None:
    found = audited_of(ROWS)
    assert found.first == 10.0
    assert found.processed == [1, 0, 0, 1, 0, 0]
    assert found.parked == [0, 1, 0, 0, 0, 0]
    # What was delivered and not handled waits too: for its handler.
    assert found.waiting == [0, 1, 0, 0, 0, 1]
    # What was due in the step before the last delivery may not be there yet.
    assert (found.p50, found.p99) == ([8.0, None, None], [100.0, None, None])
    assert found.until == 21.0


def test_a_replay_shows_parked_and_due_times_with_a_margin_before() -> None:
    found = replay_of([START + 9.0, START + 9.5], CAME, START, 6.0)
    assert found.parked_from == 4.0
    assert found.parked == [0, 0, 2, 0, 0, 0, 0, 0]
    assert found.back_from == 0.0
    assert found.due == [0, 0, 2, 0, 1, 0, 0, 0]
    assert found.received == [0, 0, 1, 1, 1, 0, 0, 0]


def newer(sample: dict[str, Any]) -> dict[str, Any]:
    """As ``plan_check.py`` writes it now: in seconds since the start, and with two plans."""
    plan = sample["planned"]
    return {"at": (sample["at"] - 3000) / 1000, "measured": sample["measured"], "as planned": plan, "as sent": {}}


@pytest.mark.parametrize("samples", [SAMPLES, [newer(one) for one in SAMPLES]])
def test_only_levels_and_times_with_messages_are_shown(samples: list[dict[str, Any]]) -> None:
    [level] = levels_of({"samples": samples})
    assert (level.name, level.at, level.measured, level.planned) == ("m", [0.0, 2.0], [4, 0], [5.0, 0.0])


def corners(mark: Mark) -> Iterator[tuple[float, float]]:
    match mark:
        case Bar():
            assert mark.width > 0
            assert mark.height > 0
            yield from ((mark.x, mark.y), (mark.x + mark.width, mark.y + mark.height))
        case Line() | Area():
            yield from mark.points
        case Label():
            yield mark.x, mark.y


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_everything_is_drawn_within_the_picture(page: str, width: float) -> None:
    drawing = DRAWN[page](width)
    assert any(isinstance(one, Bar | Area) for one in drawing.data_marks())
    assert any(isinstance(one, Line) and one.dashed and one.role is Role.MARK for one in drawing.marks)
    for x, y in (corner for mark in drawing.marks for corner in corners(mark)):
        assert 0 <= x <= drawing.width
        assert 0 <= y <= drawing.height


@pytest.mark.parametrize("page", PAGES)
def test_a_file_has_a_wide_and_a_narrow_drawing_of_one_shape(page: str) -> None:
    root = ElementTree.fromstring(picture(page, DRAWN[page]))
    boxes = {one.get("class"): one.attrib["viewBox"].split() for one in root.iter("{http://www.w3.org/2000/svg}svg")}
    assert set(boxes) == {None, "wide", "narrow"}
    shapes = [float(height) / float(width) for _, _, width, height in boxes.values()]
    assert shapes == pytest.approx([shapes[0]] * 3, rel=1e-3)


def test_a_new_caption_replaces_the_old_one() -> None:
    page = "# Title\n\n![a bell](pictures/pipeline-audit.svg)\n\nSaid\nbefore.\n\nSaid after.\n"
    assert pages.with_caption(page, "audit", "New.") == page.replace("Said\nbefore.", "New.")
    with pytest.raises(SystemExit, match=r"the page of replay has no picture pictures/pipeline-replay\.svg"):
        pages.with_caption(page, "replay", "New.")


@pytest.mark.parametrize("page", PAGES)
def test_the_documentation_shows_the_last_measurement(page: str) -> None:
    """``make doc-pictures`` was run after the last change; ``PICTURES="--from FILE"`` draws the same figures anew."""
    docs = ROOT / "docs"
    drawn = picture(f"pipeline-{page}", pages.drawings(KEPT, PLAN)[page])
    assert (docs / pages.name_of(page)).read_text(encoding="utf-8") == drawn
    text = (docs / f"pipeline-{page}.md").read_text(encoding="utf-8")
    assert pages.with_caption(text, page, pages.captions(KEPT, PLAN)[page]) == text
