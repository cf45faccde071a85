"""The diagrams, commands and table of docs/patterns.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bide.patterns.catalogue import PATTERNS, Pattern
from bide.topology.rendering import mermaid

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "patterns.md").read_text()
EIGHTEEN = [one for one in PATTERNS if one.number is not None]


def section(pattern: Pattern) -> str:
    found = re.search(
        rf"^## {pattern.number}\. {re.escape(pattern.title)}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL
    )
    assert found, f"no section for {pattern.name}"
    return found[1]


def as_text(text: str) -> str:
    return " ".join(re.sub(r":\w+:|[`'~]", "", text).split())


@pytest.mark.parametrize("pattern", EIGHTEEN, ids=lambda one: one.name)
def test_each_diagram_shows_the_sample(pattern: Pattern) -> None:
    assert re.findall(r"```mermaid\n(.*?)```", section(pattern), re.DOTALL) == [mermaid(pattern.sample_topology())]


@pytest.mark.parametrize("pattern", EIGHTEEN, ids=lambda one: one.name)
def test_each_command_makes_the_sample(pattern: Pattern) -> None:
    (command,) = re.findall(r"```sh\n(.*?)```", section(pattern), re.DOTALL)
    bide, topology, show, name, *options = shlex.split(command.replace("\\\n", " "))
    assert (bide, topology, show, name) == ("bide", "topology", "show", pattern.name)
    given: dict[str, list[str]] = {}
    for option, value in zip(options[::2], options[1::2], strict=True):
        given.setdefault(option.removeprefix("--"), []).append(value)
    assert pattern.topology(given) == pattern.sample_topology()


@pytest.mark.parametrize("pattern", EIGHTEEN, ids=lambda one: one.name)
def test_each_section_has_the_caveat(pattern: Pattern) -> None:
    warned = as_text(pattern.caveat)
    assert warned[1:] in as_text(section(pattern))


def test_the_table_has_a_row_for_each_pattern() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0].strip("| ")) for row in rows] == [one.number for one in EIGHTEEN]
    for row, pattern in zip(rows, EIGHTEEN, strict=True):
        module = pattern.build.__module__.removeprefix("bide.patterns.")
        assert row[2] == f"`{module}.{pattern.build.__name__}`"
        for cell in row[3:5]:
            link = re.search(r"\((.*?)\)", cell)
            assert link
            assert (ROOT / "docs" / link[1]).resolve().is_file()
        assert str(pattern.example) in row[3]
        assert re.search(r"\d+\.\d+\.\d+", row[5])


def test_every_link_within_the_page_has_a_target() -> None:
    anchors = {
        re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#(.*?)\)", PAGE)) <= anchors
