"""The reviewed public API, its documentation, and the length of files."""

from __future__ import annotations

import inspect
import os
from enum import Enum
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import bide

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "bide"
SNAPSHOT = Path(__file__).with_name("public_api.txt")

MAX_LINES = 400
LONG_FILES = {
    "amqp/channel.py": 450,
    "amqp/connection.py": 441,
    "client/bulk/sender.py": 449,
    "error_queues/error_queue.py": 448,
    "errors.py": 454,
}
"""Files of one noun each that are longer, with the length that they may have."""


def public_api() -> str:
    lines = []
    for name in sorted(bide.__all__):
        value = getattr(bide, name)
        if not inspect.isclass(value):
            lines.append(f"{name}{inspect.signature(value)}" if callable(value) else name)
            continue
        lines.append(f"class {name}{_signature(value)}")
        for member, found in sorted(inspect.getmembers_static(value)):
            if member.startswith("_"):
                continue
            if isinstance(found, property):
                lines.append(f"    {member}: property")
            elif isinstance(found, classmethod | staticmethod):
                lines.append(f"    {type(found).__name__} {member}{inspect.signature(found.__func__)}")
            elif inspect.isfunction(found):
                prefix = "async " if inspect.iscoroutinefunction(inspect.unwrap(found)) else ""
                lines.append(f"    {prefix}{member}{inspect.signature(found)}")
            else:
                lines.append(f"    {member}")
    return "\n".join(lines) + "\n"


def _signature(value: type) -> str:
    if issubclass(value, Enum):
        # It is not called, and differs between releases of Python.
        return ""
    try:
        return str(inspect.signature(value))
    except ValueError:
        return ""


def test_the_public_api_equals_its_snapshot() -> None:
    current = public_api()
    if "BIDE_WRITE_SNAPSHOT" in os.environ:
        SNAPSHOT.write_text(current)
    assert current == SNAPSHOT.read_text(), "if the change is meant: scripts/write-public-api.sh, and review its diff"


@pytest.mark.parametrize("name", bide.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(bide, name)
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}("), "that is what dataclasses write where a docstring is missing"
    if inspect.isclass(value):
        undocumented = [
            member
            for member, one in vars(value).items()
            if not member.startswith("_")
            and isinstance(one, FunctionType | property | classmethod | staticmethod)
            and not inspect.getdoc(one)
        ]
        assert undocumented == []


def test_the_list_of_public_names_is_sorted_and_complete() -> None:
    assert list(bide.__all__) == sorted(bide.__all__)
    for name in bide.__all__:
        getattr(bide, name)  # some are imported when they are asked for
    public = {
        name for name, value in vars(bide).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public - {"annotations", "TYPE_CHECKING"} == set(bide.__all__)


def test_files_have_at_most_400_lines() -> None:
    lines = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert not {name: number for name, number in lines.items() if number > LONG_FILES.get(name, MAX_LINES)}


def test_the_list_of_long_files_only_shrinks() -> None:
    short = [name for name in LONG_FILES if len((SOURCE / name).read_text().splitlines()) <= MAX_LINES]
    assert short == [], "these have at most as many lines as other files: remove them from the list"
