"""scripts/prose.py: the check of texts and its baseline."""

from __future__ import annotations

import ast
from pathlib import Path

import click
import pytest

from scripts import prose


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"README.md": "", "CHANGELOG.md": "", "docs/page.md": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    "text",
    [
        "Nobody reads it.",
        "It waits for whoever comes.",
        "what became of them",
        "It is told as lost.",
        "It tells how many.",
        "Mend it.",
        "what a relay has in hand",
        "A target shall be bound.",
        "It sends so many messages.",
        "He acknowledges it.",
        "It is no queue.",
    ],
)
def test_a_phrase_to_avoid_is_a_violation(text: str) -> None:
    (found,) = prose.words("docs/page.md", f"fine\n{text}\n")
    assert (found.file, found.line, found.rule) == ("docs/page.md", 2, "word")


@pytest.mark.parametrize(
    "text",
    [
        "There is no queue.",
        "It is no longer bound.",
        "Recommend an amendment.",
        "the marshaller",
        "to tell a queue from an exchange",
        "on the other hand",
    ],
)
def test_a_similar_phrase_is_not_a_violation(text: str) -> None:
    assert list(prose.words("docs/page.md", text)) == []


def test_a_docstring_of_90_characters_passes_and_one_of_91_fails() -> None:
    def checked(summary: str) -> int:
        return len(list(prose.docstring("src/a.py", ast.parse(f'"""{summary}\n\n{"More. " * 50}\n"""'))))

    assert checked("x" * 90) == 0
    assert checked("x" * 91) == 1
    assert checked(f"{'x' * 45}\n{'x' * 45}") == 1


def test_a_module_without_a_docstring_passes() -> None:
    assert list(prose.docstring("src/a.py", ast.parse("x = 1"))) == []


def test_a_class_name_in_two_modules_counts_in_both(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "src/a.py": "class Same: ...",
            "src/b/c.py": "\nclass Same: ...",
            "src/d.py": "class Other: ...",
            "tests/a.py": "class Other: ...",
        },
    )
    found = prose.violations(tmp_path)
    assert [(one.file, one.line, one.rule) for one in found] == [("src/a.py", 1, "class"), ("src/b/c.py", 2, "class")]


def test_words_count_in_python_docs_readme_and_changelog_only(tmp_path: Path) -> None:
    files = (
        "src/a.py",
        "tests/a.py",
        "benchmarks/a.py",
        "examples/a.py",
        "docs/deep/page.md",
        "README.md",
        "CHANGELOG.md",
    )
    others = ("scripts/a.py", "docs/a.svg", "tests/unit/test_prose.py")
    tree(tmp_path, dict.fromkeys((*files, *others), "# nobody\n"))
    assert prose.count(prose.violations(tmp_path)) == {(file, "word"): 1 for file in files}


def test_help_over_60_characters_counts_once_for_a_text_that_two_commands_share() -> None:
    long = click.option("--long", help="x" * 61)
    short = click.option("--short", help="x" * 60)

    @click.group()
    def group() -> None: ...

    @group.command()
    @long
    @short
    def first(long: str, short: str) -> None: ...

    @group.command()
    @long
    def second(long: str) -> None: ...

    root = Path(__file__).parents[2]
    (found,) = prose.long_help(group, root)
    assert (found.file, found.rule) == ("tests/unit/test_prose.py", "help")
    assert found.text.startswith("--long: 61 characters")


def test_a_count_above_its_baseline_names_each_violation() -> None:
    found = [prose.Violation("src/a.py", 1, "word", "nobody"), prose.Violation("src/a.py", 2, "word", "shall")]
    assert prose.problems(found, {("src/a.py", "word"): 1}) == [
        "src/a.py:1: word: nobody",
        "src/a.py:2: word: shall",
        "src/a.py: 2 violations of the rule 'word', 1 are allowed: reword the text",
    ]


def test_a_count_below_its_baseline_asks_to_lower_it() -> None:
    (line,) = prose.problems([], {("src/a.py", "word"): 1})
    assert line.endswith("lower the baseline with scripts/prose.py --lower")


def test_a_count_that_equals_its_baseline_passes() -> None:
    assert prose.problems([prose.Violation("src/a.py", 1, "word", "nobody")], {("src/a.py", "word"): 1}) == []


def test_the_baseline_can_follow_a_moved_file_but_not_rise() -> None:
    before = {("src/a.py", "word"): 2}
    assert prose.raised({("src/b.py", "word"): 2}, before) == []
    assert prose.raised({("src/b.py", "word"): 1}, before) == []
    assert len(prose.raised({("src/b.py", "word"): 3}, before)) == 1
    assert len(prose.raised({("src/b.py", "docstring"): 1}, before)) == 1


def test_a_written_baseline_can_be_read(tmp_path: Path) -> None:
    counts = {("src/a.py", "word"): 2, ("docs/page.md", "word"): 1, ("src/a.py", "class"): 3}
    prose.write_baseline(tmp_path / "baseline.txt", counts)
    assert prose.read_baseline(tmp_path / "baseline.txt") == counts
