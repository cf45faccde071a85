"""Picture of a report: all its drawings in one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bide.pipelines.charts import texts
from bide.pipelines.charts.drawing import Drawing, Label, Line, Mark, Role, stacked
from bide.pipelines.report import content
from bide.pipelines.report.figures import Figures

WIDTH: Final = 976
_CARDS: Final = 9
_CARD_HEIGHT: Final = 56

_MARGIN: Final = 16


def picture(figures: Figures, *, title: str = "Delayed delivery") -> Drawing:
    """Draw the headline, and each section with its title."""
    parts = list(_parts(figures, title))
    return stacked(parts, title=f"{title}. {content.summary(figures)}", margin=_MARGIN)


def _parts(figures: Figures, title: str) -> Iterator[Drawing]:
    yield _head(figures, title)
    for section in content.sections(figures):
        heading = Label(x=0, y=26, text=section.title, size=17, bold=True)
        rule = Line(points=((0, 0.5), (WIDTH, 0.5)), role=Role.GRID)
        if section.draw is None:
            note = Label(x=0, y=52, text=section.note, role=Role.FAINT, size=13)
            yield Drawing(title=section.title, width=WIDTH, height=60, marks=(rule, heading, note))
        else:
            yield Drawing(title=section.title, width=WIDTH, height=30, marks=(rule, heading))
            yield section.draw(WIDTH)


def _head(figures: Figures, title: str) -> Drawing:
    marks: list[Mark] = [Label(x=0, y=30, text=title, size=28, bold=True)]
    head = figures.headline
    if head is not None and head.since is not None:
        period = f"{texts.moment(head.since)} to {texts.moment(head.until)} UTC"
        marks.append(Label(x=0, y=54, text=period, role=Role.FAINT, size=13))
    cards = content.cards(figures)
    rows = [cards[start : start + _CARDS] for start in range(0, len(cards), _CARDS)]
    for line, row in enumerate(rows):
        top = 92 + _CARD_HEIGHT * line
        for number, card in enumerate(row):
            x = number * WIDTH / max(map(len, rows))
            role = Role.BAD if card.bad else Role.INK
            marks.append(Label(x=x, y=top, text=card.name, role=Role.FAINT, size=13))
            marks.append(Label(x=x, y=top + 26, text=card.value, role=role, size=20, bold=True))
    height = 130 + _CARD_HEIGHT * max(len(rows) - 1, 0)
    return Drawing(title=content.summary(figures), width=WIDTH, height=height, marks=tuple(marks))
