"""Drawings as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from bide.foreign_text import visible
from bide.pipelines.report.drawing import Area, Bar, Drawing, Label, Line, Point, Role
from bide.pipelines.report.palette import DAY, PAPER

_SCALE: Final = 2
"""Pixels of the picture for one of the drawing, in each direction."""

_SMOOTH: Final = 2
"""How many times larger it is drawn, so that slanted lines get smooth when it is made smaller."""

_TRANSLUCENT: Final = 64
_DASH: Final = 4.0
_ANCHORS: Final = {"start": "ls", "middle": "ms", "end": "rs"}
_FONTS: Final = {False: ("DejaVuSans.ttf", "Arial.ttf"), True: ("DejaVuSans-Bold.ttf", "Arial Bold.ttf")}


def write(drawings: Sequence[Drawing], path: Path, *, margin: float = 16) -> None:
    """Write a picture of drawings, one below the other."""
    width = max(one.width for one in drawings) + 2 * margin
    height = sum(one.height + margin for one in drawings) + margin
    size = round(width * _SCALE), round(height * _SCALE)
    picture = Image.new("RGB", size, PAPER)
    top = margin
    for drawing in drawings:
        picture.paste(_image(drawing), (round(margin * _SCALE), round(top * _SCALE)))
        top += drawing.height + margin
    # A palette holds all the colours that there are, and their shades, at a third of the size.
    picture.quantize(128, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, "PNG", optimize=True)


def _image(drawing: Drawing) -> Image.Image:
    scale = _SCALE * _SMOOTH
    size = round(drawing.width * scale), round(drawing.height * scale)
    image = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(image, "RGBA")
    for mark in drawing.marks:
        if not isinstance(mark, Label) and mark.role is not Role.POINTED:
            _draw(draw, mark, scale)
    small = image.resize((size[0] // _SMOOTH, size[1] // _SMOOTH), Image.Resampling.BOX)
    # Letters are smooth already, and sharper without being made smaller.
    letters = ImageDraw.Draw(small)
    for mark in drawing.marks:
        if isinstance(mark, Label):
            place = mark.x * _SCALE, mark.y * _SCALE
            font = _font(mark.size * _SCALE, mark.bold)
            letters.text(place, _plain(mark.text), DAY[mark.role], font, anchor=_ANCHORS[mark.anchor])
    return small


def _draw(draw: ImageDraw.ImageDraw, mark: Bar | Area | Line, scale: int) -> None:
    match mark:
        case Bar():
            low = mark.x * scale, mark.y * scale
            high = (mark.x + mark.width) * scale - 1, (mark.y + mark.height) * scale - 1
            draw.rectangle((low, (max(low[0], high[0]), max(low[1], high[1]))), DAY[mark.role])
        case Area():
            draw.polygon(_scaled(mark.points, scale), (*_rgb(DAY[mark.role]), _TRANSLUCENT))
        case Line():
            pieces = _dashes(mark.points) if mark.dashed else [mark.points]
            for piece in pieces:
                draw.line(_scaled(piece, scale), DAY[mark.role], round(mark.width * scale), joint="curve")


def _scaled(points: Sequence[Point], scale: int) -> list[Point]:
    return [(x * scale, y * scale) for x, y in points]


def _dashes(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Every other piece of a line."""
    found = []
    for (x0, y0), (x1, y1) in pairwise(points):
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        for number in range(0, int(length / _DASH) + 1, 2):
            start, end = number * _DASH / (length or 1), min((number + 1) * _DASH / (length or 1), 1.0)
            found.append(
                ((x0 + (x1 - x0) * start, y0 + (y1 - y0) * start), (x0 + (x1 - x0) * end, y0 + (y1 - y0) * end))
            )
    return found


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _plain(text: str) -> str:
    # The font of last resort has no dash.
    return visible(text.replace("–", "-"))


@cache
def _font(size: float, bold: bool) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """A font of the system, which knows more letters, or else the one that Pillow brings along."""
    for name in _FONTS[bold]:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)
