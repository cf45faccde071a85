"""The error tree: its diagram, and printing, copying and pickling of every error."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import bide
from bide import errors
from bide.errors import BideError

CLASSES: list[type[BideError]] = [
    one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, BideError)
]

ARGUMENTS: dict[type[BideError], tuple[tuple[Any, ...], dict[str, Any]]] = {
    errors.InvalidTopologyError: ((["one", "two"],), {}),
    errors.DeclarationMismatchError: (
        ("differs",),
        {"kind": "queue", "name": "q", "argument": "x-message-ttl", "wanted": "5", "found": "6", "reply_code": 406},
    ),
    errors.NotEmptyError: (("holds messages",), {"counts": {"q": 3}, "reply_code": 406}),
    errors.PublishError: (("refused",), {"message_id": "m", "reply_code": 312}),
    errors.UnroutableError: (("no queue",), {"message_id": "m"}),
    errors.AuthenticationError: (("no",), {"reply_code": 403}),
}
"""What the classes are made with that take more than a message."""

OWN_MESSAGE: list[type[BideError]] = [
    errors.InvalidTopologyError,
    errors.DeclarationMismatchError,
    errors.NotEmptyError,
]
"""Classes that have no default message: what they say is nothing without its details."""


def made(kind: type[BideError]) -> BideError:
    positional, named = ARGUMENTS.get(kind, (("something happened",), {}))
    return kind(*positional, **named)


def drawn_tree() -> dict[str, str | None]:
    """Class -> its parent, as the picture in the module's docstring shows them."""
    picture = inspect.getdoc(errors) or ""
    parents: dict[str, str | None] = {}
    branch: list[str] = []
    for line in picture.splitlines():
        found = re.match(r" {4}((?:[│ ] {3})*)([├└]── )?([A-Z]\w+)", line)
        if found is None:
            continue
        depth = len(found[1]) // 4 + bool(found[2])
        assert depth <= len(branch), f"a level is left out before {found[3]}"
        del branch[depth:]
        parents[found[3]] = branch[-1] if branch else None
        branch.append(found[3])
    return parents


def test_the_documented_tree_has_every_error_class() -> None:
    bases = {
        one.__name__: next((base.__name__ for base in one.__mro__[1:] if base in CLASSES), None) for one in CLASSES
    }
    assert drawn_tree() == bases


def test_the_documented_tree_has_the_order_of_the_source() -> None:
    source = inspect.getsource(errors)
    assert list(drawn_tree()) == re.findall(r"^class (\w+)\(", source, re.MULTILINE)


def test_only_bad_input_is_a_value_error() -> None:
    for one in CLASSES:
        # What a sender put into a body is bad input too, only not the caller's.
        bad_input = issubclass(one, errors.InvalidInputError | errors.UndecodableMessageError)
        assert issubclass(one, ValueError) == bad_input


def test_the_root_error_is_exported_by_bide() -> None:
    assert bide.BideError is BideError


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_docstring_starts_with_one_sentence_on_one_line(kind: type[BideError]) -> None:
    assert kind.__doc__, f"{kind.__name__} has no docstring of its own"
    first = kind.__doc__.partition("\n\n")[0]
    assert "\n" not in first
    assert first.endswith(".")


@pytest.mark.parametrize("kind", [one for one in CLASSES if one not in OWN_MESSAGE], ids=lambda kind: kind.__name__)
def test_the_docstring_is_the_default_message(kind: type[BideError]) -> None:
    assert kind.__doc__ is not None
    assert str(kind()) == kind.__doc__.splitlines()[0]


@pytest.mark.parametrize("kind", OWN_MESSAGE, ids=lambda kind: kind.__name__)
def test_errors_with_their_own_message_need_details(kind: type[BideError]) -> None:
    with pytest.raises(TypeError):
        kind()


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_an_error_can_be_copied_and_pickled(kind: type[BideError], again: Any) -> None:
    error = made(kind)
    twin = again(error)
    assert type(twin) is kind
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)


def test_an_invalid_topology_error_lists_every_problem() -> None:
    problems = ["exchange 'a' is missing", "queue 'b' is odd"]
    error = errors.InvalidTopologyError(problems)
    assert str(error) == "exchange 'a' is missing; queue 'b' is odd"
    problems.append("later")
    assert error.problems == ["exchange 'a' is missing", "queue 'b' is odd"]


def test_every_public_error_is_defined_in_errors_py() -> None:
    """One tree: other modules may have errors for their own use at most."""
    package = Path(bide.__file__).parent
    names = {one.__name__ for one in CLASSES} | {"Exception", "BaseException", "RuntimeError", "ValueError", "OSError"}
    strays = [
        f"{path.relative_to(package)}: {node.name}"
        for path in package.rglob("*.py")
        if path != package / "errors.py"
        if re.search(r"^ *class [^_]\w*[(\[]", text := path.read_text(), re.MULTILINE)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and any(ast.unparse(base).rpartition(".")[2] in names for base in node.bases)
    ]
    assert strays == []
