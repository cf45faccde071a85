"""The checks of a results file before it is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from bide.errors import InvalidInputError

_Holds = Callable[[Any], bool]

_OPTIONAL: Final = frozenset({"failures", "setting", "values", "runs", "notes", "stolen"})
_MACHINE: Final = ("processor", "cores", "memory", "kernel", "python")


def check(data: Mapping[str, Any]) -> None:
    """Check results as they come from JSON.

    Raises:
        InvalidInputError: something is missing, or of another kind.
    """
    _check("it", data, _RESULTS)
    for number, row in enumerate(data["rows"], 1):
        place = f"row {number}"
        _check(place, row, _ROW)
        for run in row.get("runs", ()):
            _check(f"a run of {place}", run, _RUN)


def _check(place: str, data: Mapping[str, Any], fields: Mapping[str, tuple[str, _Holds]]) -> None:
    for name, (wanted, holds) in fields.items():
        if name in data:
            if not holds(data[name]):
                raise InvalidInputError(f"{name!r} of {place} is not {wanted}")
        elif name not in _OPTIONAL:
            raise InvalidInputError(f"{place} has no {name!r}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    # Neither infinite nor NaN, which is not less than anything.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _list_of(holds: _Holds) -> _Holds:
    return lambda value: isinstance(value, list) and all(map(holds, value))


def _object_of(holds: _Holds, *names: str) -> _Holds:
    return lambda value: isinstance(value, dict) and value.keys() >= set(names) and all(map(holds, value.values()))


_TEXT: Final = ("text", _is_text)
_NUMBER: Final = ("a number", _is_number)
_TEXTS: Final = ("a list of texts", _list_of(_is_text))
_OBJECTS: Final = ("a list of objects", _list_of(_is_object))

_RESULTS: Final[Mapping[str, tuple[str, _Holds]]] = {
    "date": _TEXT,
    "scale": _NUMBER,
    "rounds": ("a whole number", lambda value: type(value) is int),
    "machine": (f"an object of texts with {', '.join(_MACHINE)}", _object_of(_is_text, *_MACHINE)),
    "releases": ("an object of texts with RabbitMQ", _object_of(_is_text, "RabbitMQ")),
    "rows": _OBJECTS,
    "failures": _TEXTS,
}
_ROW: Final[Mapping[str, tuple[str, _Holds]]] = {
    "measurement": _TEXT,
    "case": _TEXT,
    "setting": _TEXT,
    "values": ("an object of lists of numbers", _object_of(_list_of(_is_number))),
    "runs": _OBJECTS,
    "notes": _TEXTS,
}
_RUN: Final[Mapping[str, tuple[str, _Holds]]] = {
    "begun": _TEXT,
    "source": _TEXT,
    "busy": _NUMBER,
    "stolen": ("a number or null", lambda value: value is None or _is_number(value)),
}
