"""The table of docs/patterns.md, and the diagrams and commands of the page of each pattern."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bide.patterns.catalogue import PATTERNS, Pattern
from bide.topology.rendering import mermaid

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "patterns.md").read_text()
PAGES = ROOT / "docs" / "patterns"
EIGHTEEN = [one for one in PATTERNS if one.number is not None]


def page_name(pattern: Pattern) -> str:
    return f"{pattern.number:02}-{pattern.name}.md"


def page(pattern: Pattern) -> str:
    title, _, rest = (PAGES / page_name(pattern)).read_text().partition("\n")
    assert title == f"# {pattern.title}"
    return rest


def as_text(text: str) -> str:
    return " ".join(re.sub(r":\w+:|[`'~]", "", text).split())


@pytest.mark.parametrize("pattern", EIGHTEEN, ids=lambda one: one.name)
def test_each_diagram_shows_the_sample(pattern: Pattern) -> None:
    assert re.findall(r"```mermaid\n(.*?)```", page(pattern), re.DOTALL) == [mermaid(pattern.sample_topology())]


@pytest.mark.parametrize("pattern", EIGHTEEN, ids=lambda one: one.name)
def test_each_command_makes_the_sample(pattern: Pattern) -> None:
    (command,) = re.findall(r"```sh\n(.*?)```", page(pattern), re.DOTALL)
    bide, topology, show, name, *options = shlex.split(command.replace("\\\n", " "))
    assert (bide, topology, show, name) == ("bide", "topology", "show", pattern.name)
    given: dict[str, list[str]] = {}
    for option, value in zip(options[::2], options[1::2], strict=True):
        given.setdefault(option.removeprefix("--"), []).append(value)
    assert pattern.topology(given) == pattern.sample_topology()


@pytest.mark.parametrize("pattern", EIGHTEEN, ids=lambda one: one.name)
def test_each_page_has_the_caveat(pattern: Pattern) -> None:
    warned = as_text(pattern.caveat)
    assert warned[1:] in as_text(page(pattern))


def test_the_table_has_a_row_for_each_pattern() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0].strip("| ")) for row in rows] == [one.number for one in EIGHTEEN]
    for row, pattern in zip(rows, EIGHTEEN, strict=True):
        module = pattern.build.__module__.removeprefix("bide.patterns.")
        assert row[2] == f"`{module}.{pattern.build.__name__}`"
        assert row[1] == f"[{pattern.title}](patterns/{page_name(pattern)})"
        for cell in row[3:5]:
            link = re.search(r"\((.*?)\)", cell)
            assert link
            assert (ROOT / "docs" / link[1]).resolve().is_file()
        assert str(pattern.example) in row[3]
        assert re.search(r"\d+\.\d+\.\d+", row[5])


def test_each_page_is_of_a_pattern() -> None:
    assert sorted(one.name for one in PAGES.iterdir()) == [page_name(one) for one in EIGHTEEN]
