"""The pictures of the pipeline pages in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.browser import Browser

PICTURES: Final = Path(__file__).parents[2] / "docs/pictures"
PAGE: Final = (
    '<!doctype html><meta name="viewport" content="width=device-width">'
    "<style>body {{ margin: 0 }} body > svg {{ width: 100%; height: auto }}</style>{}"
)
TEXTS: Final = "[...document.querySelectorAll('svg svg text')].filter(one => one.getBoundingClientRect().width > 0)"


@pytest.mark.parametrize("name", ["schedule", "audit", "replay", "plan"])
@pytest.mark.parametrize(("width", "kind"), [(830, "wide"), (358, "narrow")])
def test_texts_of_pictures_are_readable_and_do_not_overlap(
    chromium: Browser, tmp_path: Path, name: str, width: int, kind: str
) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGE.format((PICTURES / f"pipeline-{name}.svg").read_text(encoding="utf-8")), encoding="utf-8")
    chromium.open(path, width=width)
    shown = chromium.evaluate(f"[...new Set({TEXTS}.map(one => one.ownerSVGElement.classList[0]))]")
    assert shown == [kind]
    boxes = chromium.evaluate(
        f"""{TEXTS}.map(one => {{
            const box = one.getBoundingClientRect();
            const size = parseFloat(one.getAttribute('font-size')) * one.getScreenCTM().a;
            return [one.textContent, size, box.left, box.right, box.top, box.bottom];
        }})"""
    )
    assert len(boxes) > 10
    bottom = chromium.evaluate("document.querySelector('svg').getBoundingClientRect().bottom")
    for number, (text, size, left, right, top, low) in enumerate(boxes):
        assert size >= 10, text
        assert left >= 0, text
        assert right <= width, text
        assert low <= bottom, text
        for other, _, begin, end, high, deep in boxes[number + 1 :]:
            # Boxes are higher than letters.
            assert min(right, end) <= max(left, begin) or min(low, deep) - max(top, high) < 4, (text, other)
    assert chromium.complaints == []
