"""Command-line options of a pattern, read from the signature and docstring of its function."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Never

from bide.errors import InvalidInputError
from bide.topology import Argument, Topology

Kind = Literal["text", "number", "texts", "pairs", "lists", "rules"]
"""The kind of an option's value: a text, a number, several texts, or several of the form NAME=VALUE."""

_KINDS: Final[Mapping[str, Kind]] = {
    "str": "text",
    "DelayLike": "text",
    "int": "number",
    "Sequence[str]": "texts",
    "Mapping[str, str]": "pairs",
    "Mapping[str, Sequence[str]]": "lists",
    "Rules": "rules",
}
"""Kinds of options, by the annotation of the parameter."""

_FORMS: Final[Mapping[Kind, str]] = {
    "text": "TEXT",
    "number": "N",
    "texts": "NAME",
    "pairs": "NAME=VALUE",
    "lists": "NAME=VALUE",
    "rules": "QUEUE=HEADER=VALUE",
}
_PLURAL: Final = re.compile(r"(?<=ch)es$|s$")
_ARGUMENT: Final = re.compile(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A command-line option of a pattern.

    Attributes:
        parameter: the parameter of the function.
        name: the option without dashes; ``queue`` for the parameter ``queues``, whose option can be repeated.
        kind: the kind of its value.
        form: the form of its value, for help texts.
        required: whether the option must be given.
        help: a description.
    """

    parameter: str
    name: str
    kind: Kind
    form: str
    required: bool
    help: str

    @property
    def repeatable(self) -> bool:
        """Whether the option can be given more than once."""
        return self.kind not in ("text", "number")

    def read(self, texts: Sequence[str]) -> Any:
        """Parse the values given for this option.

        Raises:
            InvalidInputError: a value is malformed, or the option is given too often.
        """
        if not self.repeatable and len(texts) > 1:
            raise InvalidInputError(f"--{self.name} is given {len(texts)} times: give it once")
        match self.kind:
            case "text":
                return texts[0]
            case "number":
                return self._number(texts[0])
            case "texts":
                return tuple(texts)
            case "pairs":
                return self._pairs(texts)
            case "lists":
                lists: dict[str, list[str]] = {}
                for name, value in map(self._split, texts):
                    lists.setdefault(name, []).append(value)
                return lists
            case "rules":
                rules: dict[str, dict[str, Argument]] = {}
                for queue, rule in map(self._split, texts):
                    header, value = self._split(rule)
                    rules.setdefault(queue, {})[header] = header_value(value)
                return rules

    def _number(self, text: str) -> int:
        try:
            return int(text)
        except ValueError as error:
            raise InvalidInputError(f"--{self.name} {text!r} is not a whole number: give a whole number") from error

    def _pairs(self, texts: Sequence[str]) -> dict[str, str]:
        pairs: dict[str, str] = {}
        for name, value in map(self._split, texts):
            if name in pairs:
                raise InvalidInputError(f"--{self.name} is given twice for {name!r}: give it once")
            pairs[name] = value
        return pairs

    def _split(self, text: str) -> tuple[str, str]:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise InvalidInputError(f"--{self.name} {text!r} is not of the form {self.form}: write it in that form")
        return name, value


def header_value(text: str) -> Argument:
    """Parse a header's value: 2 is a number, true and false are booleans, and everything else is text.

    In quotes, "2" is text too. The type matters, because a headers exchange compares it.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, str | int | float) else text


def _no_constant(name: str) -> Never:
    """Refuse NaN and Infinity, which Python accepts although they are not JSON."""
    raise ValueError(name)


def options_of(function: Callable[..., Topology]) -> tuple[Option, ...]:
    """Read the options of a pattern from its function, in order.

    Raises:
        TypeError: a parameter has a type that no option can have.
    """
    explained = {name: _plain(text) for name, text in _ARGUMENT.findall(_unindented(function.__doc__ or ""))}
    options = []
    for parameter in inspect.signature(function).parameters.values():
        kind = _KINDS.get(str(parameter.annotation).removesuffix(" | None"))
        if kind is None:
            raise TypeError(f"{function.__name__}: the parameter {parameter.name} cannot be made an option")
        options.append(
            Option(
                parameter=parameter.name,
                name=option_name(parameter.name, repeatable=kind not in ("text", "number")),
                kind=kind,
                form=_FORMS[kind],
                required=parameter.default is inspect.Parameter.empty,
                help=explained.get(parameter.name, ""),  # "python -OO" has no docstrings
            )
        )
    return tuple(options)


def option_name(parameter: str, *, repeatable: bool) -> str:
    """The name of a parameter's option, without dashes at the start; the singular if the option can be repeated."""
    return (_PLURAL.sub("", parameter) if repeatable else parameter).replace("_", "-")


def _unindented(docstring: str) -> str:
    """Restore the indentation that Python 3.13 and later remove from docstrings."""
    if "\n    Args:" in docstring:
        return docstring
    return docstring.replace("\n", "\n    ")


def summary_of(function: Callable[..., Topology]) -> str:
    """The first paragraph of a docstring, without the number of the pattern."""
    first = inspect.getdoc(function) or ""
    text = _plain(first.partition("\n\n")[0])
    text = re.sub(r"^Pattern \d+, ", "", text)
    return text[:1].upper() + text[1:]


def caveat_of(function: Callable[..., Topology]) -> str:
    """The caveat in a docstring, or an empty text."""
    for paragraph in (inspect.getdoc(function) or "").split("\n\n"):
        head, colon, rest = paragraph.partition(": ")
        if colon and head in ("Caveat", "Caveats"):
            return _plain(rest)
    return ""


def _plain(text: str) -> str:
    """Join a part of a docstring to one line, with plain quotes in place of markup."""
    return " ".join(re.sub(r":\w+:`([^`]*)`|``([^`]*)``", r"'\1\2'", text).split())
