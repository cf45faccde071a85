"""Headers as JSON text that keeps their AMQP types.

Text, booleans, null, lists and tables are the JSON types of that name, and numbers stay whole or fractional. Values of
other types are objects with a single key: ``{"$bytes": "/wA="}`` (Base64), ``{"$time": "2026-01-01T00:00:00Z"}``,
``{"$decimal": "1.50"}`` and ``{"$number": "nan"}`` (also ``inf`` and ``-inf``). A table whose only key begins with
``$`` is ``{"$table": {...}}``.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from math import isfinite
from typing import Any, Final

from bide.errors import InvalidInputError

_PLAIN: Final = frozenset({str, int, bool, type(None)})
_NUMBERS: Final = frozenset({"nan", "inf", "-inf"})


def headers_to_json(headers: Mapping[Any, Any]) -> str:
    """The headers as a JSON object."""
    return json.dumps(
        {name: _marked(value) for name, value in headers.items()}, ensure_ascii=False, separators=(",", ":")
    )


def _marked(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    match value:
        case float():
            return value if isfinite(value) else {"$number": str(value)}
        case bytes():
            return {"$bytes": b64encode(value).decode()}
        case datetime():
            return {"$time": value.astimezone(UTC).isoformat().replace("+00:00", "Z")}
        case Decimal():
            return {"$decimal": str(value)}
        case list() | tuple():
            return [_marked(one) for one in value]
        case Mapping():
            table = {_key(name): _marked(one) for name, one in value.items()}
            return {"$table": table} if len(table) == 1 and next(iter(table)).startswith("$") else table
        case _:
            return str(value)


def _key(name: Any) -> str:
    return name if isinstance(name, str) else str(_marked(name))


def headers_from_json(text: str) -> dict[str, Any]:
    """The headers in a JSON object; an empty text has none.

    Raises:
        InvalidInputError: the text is not a JSON object, or a value has none of the forms of this module.
    """
    if not text:
        return {}
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError("the headers are not JSON: give a JSON object") from error
    if not isinstance(found, dict):
        raise InvalidInputError("the headers are JSON, but not an object: give a JSON object")
    try:
        return {name: _unmarked(value, name) for name, value in found.items()}
    except RecursionError:
        raise InvalidInputError(
            "the headers hold lists or tables that are nested too deeply: nest fewer levels"
        ) from None


def _refuse_constant(text: str) -> Any:
    raise ValueError(text)


def _unmarked(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_unmarked(one, name) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, content),) = value.items()
        if mark.startswith("$"):
            return _typed(mark, content, name)
    return {key: _unmarked(one, name) for key, one in value.items()}


def _typed(mark: str, content: Any, name: str) -> Any:
    try:
        match mark, content:
            case "$bytes", str():
                return b64decode(content, validate=True)
            case "$time", str():
                time = datetime.fromisoformat(content)
                if time.tzinfo is not None:
                    return time
            case "$decimal", str():
                return Decimal(content)
            case "$number", str() if content in _NUMBERS:
                return float(content)
            case "$table", dict():
                return {key: _unmarked(one, name) for key, one in content.items()}
            case _:
                pass
    except (ValueError, InvalidOperation):
        pass
    raise InvalidInputError(
        f"the header {name!r} is {{{json.dumps(mark)}: {json.dumps(content)}}}: give $bytes with Base64, $time with a "
        "time and its zone, $decimal, $number (nan, inf or -inf) or $table"
    )
