"""The colours of roles, by day and by night."""

from __future__ import annotations

from typing import Final

from bide.pipelines.report.drawing import Role

PAPER: Final = "#ffffff"
DAY: Final = {
    Role.INK: "#24292f",
    Role.FAINT: "#636c76",
    Role.GRID: "#d8dee4",
    Role.IN: "#2f6f9f",
    Role.OUT: "#c98a2b",
    Role.WAITING: "#5c8a4a",
    Role.BAD: "#c4372e",
    Role.MARK: "#24292f",
}

NIGHT_PAPER: Final = "#14181d"
NIGHT: Final = {
    Role.INK: "#e6e9ed",
    Role.FAINT: "#98a2ad",
    Role.GRID: "#303841",
    Role.IN: "#5fa8dc",
    Role.OUT: "#e0aa52",
    Role.WAITING: "#82b86c",
    Role.BAD: "#f0736a",
    Role.MARK: "#e6e9ed",
}
