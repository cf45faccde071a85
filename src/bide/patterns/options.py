"""The options of a pattern, read from its function, and their values, read from text.

A function's signature says what the options are and which of them are needed, and its docstring what they mean:
they are not written down anywhere else.
"""

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
"""What an option takes: one text, one number, several texts, or several of the form NAME=VALUE."""

_KINDS: Final[Mapping[str, Kind]] = {
    "str": "text",
    "DelayLike": "text",
    "int": "number",
    "Sequence[str]": "texts",
    "Mapping[str, str]": "pairs",
    "Mapping[str, Sequence[str]]": "lists",
    "Rules": "rules",
}
"""By annotation."""

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
    """One option of a pattern.

    Attributes:
        parameter: of the function.
        name: on the command line, without the dashes: ``queue`` for the parameter ``queues``, which may be repeated.
        form: of its value, for help texts.
        help: what it means.
    """

    parameter: str
    name: str
    kind: Kind
    form: str
    required: bool
    help: str

    @property
    def repeatable(self) -> bool:
        """Whether it may be given more than once."""
        return self.kind not in ("text", "number")

    def read(self, texts: Sequence[str]) -> Any:
        """The value that these texts stand for.

        Raises:
            InvalidInputError: one of them is not of the right form, or there are too many.
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
            raise InvalidInputError(f"--{self.name} {text!r} is not a whole number: give one") from error

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
            raise InvalidInputError(f"--{self.name} {text!r} is not of the form {self.form}: write it so")
        return name, value


def header_value(text: str) -> Argument:
    """A header's value as it is written: 2 is a number, true and false are truth values, all else is text; so is "2".

    Headers exchanges compare the types too.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, str | int | float) else text


def _no_constant(name: str) -> Never:
    """NaN and its like are no JSON, though Python reads them."""
    raise ValueError(name)


def options_of(function: Callable[..., Topology]) -> tuple[Option, ...]:
    """The options of a pattern's function, in order.

    Raises:
        TypeError: a parameter is of a type that no option has.
    """
    explained = {name: _plain(text) for name, text in _ARGUMENT.findall(_unindented(function.__doc__ or ""))}
    options = []
    for parameter in inspect.signature(function).parameters.values():
        kind = _KINDS.get(str(parameter.annotation).removesuffix(" | None"))
        if kind is None:
            raise TypeError(f"{function.__name__}: the parameter {parameter.name} cannot be made an option")
        name = parameter.name if kind in ("text", "number") else _PLURAL.sub("", parameter.name)
        options.append(
            Option(
                parameter=parameter.name,
                name=name.replace("_", "-"),
                kind=kind,
                form=_FORMS[kind],
                required=parameter.default is inspect.Parameter.empty,
                help=explained.get(parameter.name, ""),  # "python -OO" has no docstrings
            )
        )
    return tuple(options)


def _unindented(docstring: str) -> str:
    """A docstring as it stands in the source, which from Python 3.13 on comes without its indentation."""
    if "\n    Args:" in docstring:
        return docstring
    return docstring.replace("\n", "\n    ")


def summary_of(function: Callable[..., Topology]) -> str:
    """The first sentence of its docstring, without the number in front."""
    first = inspect.getdoc(function) or ""
    text = _plain(first.partition("\n\n")[0])
    text = re.sub(r"^Pattern \d+, ", "", text)
    return text[:1].upper() + text[1:]


def caveat_of(function: Callable[..., Topology]) -> str:
    """What its docstring warns of; empty where it does not."""
    for paragraph in (inspect.getdoc(function) or "").split("\n\n"):
        head, colon, rest = paragraph.partition(": ")
        if colon and head in ("Caveat", "Caveats"):
            return _plain(rest)
    return ""


def _plain(text: str) -> str:
    """A part of a docstring on one line, with the quotes of ordinary text."""
    return " ".join(re.sub(r":\w+:`([^`]*)`|``([^`]*)``", r"'\1\2'", text).split())
