"""Colours of roles in light and dark mode, and the style sheets for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from bide.pipelines.charts.drawing import Role

LIGHT_BACKGROUND: Final = "#ffffff"
LIGHT_COLOURS: Final = {
    Role.INK: "#24292f",
    Role.FAINT: "#636c76",
    Role.GRID: "#d8dee4",
    Role.IN: "#2f6f9f",
    Role.OUT: "#c98a2b",
    Role.WAITING: "#5c8a4a",
    Role.BAD: "#c4372e",
    Role.MARK: "#24292f",
}

DARK_BACKGROUND: Final = "#14181d"
DARK_COLOURS: Final = {
    Role.INK: "#e6e9ed",
    Role.FAINT: "#98a2ad",
    Role.GRID: "#303841",
    Role.IN: "#5fa8dc",
    Role.OUT: "#e0aa52",
    Role.WAITING: "#82b86c",
    Role.BAD: "#f0736a",
    Role.MARK: "#e6e9ed",
}


def rules() -> list[str]:
    """CSS rules for an HTML page with drawings. The style sheet of the page uses the same variables."""
    found = [
        f":root {{ {_variables(LIGHT_BACKGROUND, LIGHT_COLOURS)} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK_BACKGROUND, DARK_COLOURS)} }} }}",
    ]
    for role in Role:
        if role is not Role.POINTED:
            found.append(f".f-{role} {{ fill: var(--{role}) }} .s-{role} {{ stroke: var(--{role}) }}")
            found.append(f".a-{role} {{ fill: var(--{role}); fill-opacity: .25 }}")
    return found


def file_rules() -> list[str]:
    """CSS rules for an SVG file. They have no variables, because some SVG viewers do not support them."""
    return [
        *_classes(LIGHT_BACKGROUND, LIGHT_COLOURS),
        "@media (prefers-color-scheme: dark) {",
        *_classes(DARK_BACKGROUND, DARK_COLOURS),
        "}",
        f".f-{Role.POINTED} {{ fill: none }}",
    ]


def _classes(paper: str, colours: Mapping[Role, str]) -> Iterator[str]:
    yield f".paper {{ fill: {paper} }}"
    for role, colour in colours.items():
        yield f".f-{role} {{ fill: {colour} }} .s-{role} {{ stroke: {colour} }}"
        yield f".a-{role} {{ fill: {colour}; fill-opacity: .25 }}"


def _variables(paper: str, colours: Mapping[Role, str]) -> str:
    return "; ".join([f"--paper: {paper}", *(f"--{role}: {colour}" for role, colour in colours.items())])
