"""Check the texts of bide against the rules of language that a machine can check.

Existing violations are counted in ``prose-baseline.txt``, per file and rule. The counts may only shrink: ``make lint``
fails when one is above or below its baseline. Lower the baseline with ``.venv/bin/python scripts/prose.py --lower``;
show every violation with ``--list``, which takes paths.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Final

import click

ROOT: Final = Path(__file__).parents[1]
BASELINE: Final = Path("scripts/prose-baseline.txt")
FOLDERS: Final = ("src", "tests", "benchmarks", "examples")
"""The folders of Python whose words and module docstrings are checked; names of classes are checked in ``src`` only."""

OWN_TEST: Final = "tests/unit/test_prose.py"
"""Contains examples of violations."""

MAX_DOCSTRING: Final = 90
MAX_HELP: Final = 60
WORDS: Final = re.compile(
    r"\b(?:"
    r"nobody|whoever|somebody|anybody|everybody(?!-)|other people|he|"
    r"told|tells|what (?:became|becomes|has become) of|for want of|"
    r"mend(?:s|ed|ing)?|shall|so many|(?:in|at) hand|"
    r"(?<!there )is no (?!longer\b)"
    r")\b",
    re.IGNORECASE,
)

Counts = dict[tuple[str, str], int]
"""Numbers of violations by file and rule."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A text that breaks a rule.

    Attributes:
        file: its path below the root of the repository.
        line: its line, from 1; 0 if only the file is known.
        rule: the name of the rule.
        text: the text that breaks the rule.
    """

    file: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.text}"


def words(file: str, text: str) -> Iterator[Violation]:
    """Find words that CONTRIBUTING.md asks to avoid."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in WORDS.finditer(line):
            yield Violation(file, number, "word", found[0].strip().lower())


def docstring(file: str, module: ast.Module) -> Iterator[Violation]:
    """Find a module docstring whose first paragraph is too long."""
    summary = " ".join((ast.get_docstring(module) or "").partition("\n\n")[0].split())
    if len(summary) > MAX_DOCSTRING:
        yield Violation(file, 1, "docstring", f"{len(summary)} characters, at most {MAX_DOCSTRING}")


def beginning(text: str) -> ast.Module:
    """Parse the docstring of a module, and nothing after it."""
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type == tokenize.STRING:
            return ast.parse(token.string)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            break
    return ast.parse("")


def repeated_classes(modules: Mapping[str, ast.Module]) -> Iterator[Violation]:
    """Find classes whose name another module uses too."""
    places = defaultdict(list)
    for file, module in modules.items():
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append((file, node.lineno))
    for name, found in places.items():
        if len(found) > 1:
            for file, line in found:
                yield Violation(file, line, "class", f"{name} is defined in {len(found)} modules")


def long_help(group: click.Command, root: Path) -> Iterator[Violation]:
    """Find options whose help is too long, once for each file of commands and text."""
    seen = set()
    for command in _commands(group):
        if command.callback is None:
            continue
        file = Path(inspect.getfile(inspect.unwrap(command.callback)))
        for option in command.params:
            text = getattr(option, "help", None) or ""
            if len(text) > MAX_HELP and (file, text) not in seen:
                seen.add((file, text))
                yield Violation(
                    file.relative_to(root).as_posix(),
                    0,
                    "help",
                    f"{option.opts[-1]}: {len(text)} characters, at most {MAX_HELP}: {text}",
                )


def _commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            part = command.get_command(context, name)
            assert part is not None
            yield from _commands(part)


def violations(root: Path) -> list[Violation]:
    """All violations in Python code, docs, README and changelog below a root, except those in help texts."""
    found: list[Violation] = []
    modules = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            file = path.relative_to(root).as_posix()
            text = path.read_text(encoding="utf-8")
            # Parsing the whole of every test would take half of the time.
            modules[file] = ast.parse(text) if folder == "src" else beginning(text)
            if file != OWN_TEST:
                found += words(file, text)
            found += docstring(file, modules[file])
    found += repeated_classes({file: module for file, module in modules.items() if file.startswith("src/")})
    for path in sorted([root / "README.md", root / "CHANGELOG.md", *(root / "docs").rglob("*.md")]):
        found += words(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
    return found


def count(found: Iterable[Violation]) -> Counts:
    """Violations by file and rule."""
    return dict(Counter((one.file, one.rule) for one in found))


def read_baseline(path: Path) -> Counts:
    """The counts that a file allows."""
    rows = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {(file, rule): int(number) for number, rule, file in rows}


def write_baseline(path: Path, counts: Counts) -> None:
    """Write counts as a file, sorted by file and rule."""
    lines = [f"{number} {rule} {file}\n" for (file, rule), number in sorted(counts.items())]
    path.write_text("".join(lines), encoding="utf-8")


def totals(counts: Counts) -> Counter[str]:
    """Counts by rule."""
    by_rule: Counter[str] = Counter()
    for (_, rule), number in counts.items():
        by_rule[rule] += number
    return by_rule


def problems(found: list[Violation], allowed: Counts) -> list[str]:
    """The reasons why the check fails: new violations, or a baseline that is too high."""
    counts = count(found)
    lines = []
    for key in sorted(counts.keys() | allowed.keys()):
        now, before = counts.get(key, 0), allowed.get(key, 0)
        if now > before:
            lines += [str(one) for one in found if (one.file, one.rule) == key]
            lines.append(f"{key[0]}: {now} violations of the rule {key[1]!r}, {before} are allowed: reword the text")
        elif now < before:
            lines.append(
                f"{key[0]}: {now} violations of the rule {key[1]!r}, {before} are allowed: "
                "lower the baseline with scripts/prose.py --lower"
            )
    return lines


def raised(counts: Counts, allowed: Counts) -> list[str]:
    """The reasons why a baseline may not be replaced: more violations of a rule. Moving files is fine."""
    before = totals(allowed)
    return [
        f"the rule {rule!r} is broken {now} times, {before[rule]} are allowed: reword the new texts first"
        for rule, now in sorted(totals(counts).items())
        if now > before[rule]
    ]


def main(arguments: list[str] | None = None) -> int:
    """Check, list, or lower the baseline."""
    from bide.cli.app import cli

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="write today's counts as the baseline")
    parser.add_argument("--list", nargs="*", metavar="PATH", help="print violations, of files below these paths")
    chosen = parser.parse_args(arguments)
    found = [*violations(ROOT), *long_help(cli, ROOT)]
    if chosen.list is not None:
        for one in found:
            if not chosen.list or one.file.startswith(tuple(chosen.list)):
                print(one)
        return 0
    allowed = read_baseline(ROOT / BASELINE)
    if chosen.lower:
        lines = raised(count(found), allowed)
        if not lines:
            write_baseline(ROOT / BASELINE, count(found))
    else:
        lines = problems(found, allowed)
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
