"""Fields of a decoded JSON object, each with the type that it must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bide.errors import ScheduleRecordError

MAX_INTEGER: Final = 2**63 - 1
MAX_NAME: Final = 255
MAX_FLAT: Final = 16

MAX_HEAD: Final = 16_000_000
"""The maximum size in bytes of the JSON object before the messages."""


def without_absent(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields to write: None and False are written as absent fields."""
    return {name: value for name, value in fields.items() if value is not None and value is not False}


def write_head(fields: dict[str, Any]) -> bytes:
    """A JSON object in one line, with the version first. Messages that it refers to follow it."""
    text = json.dumps(without_absent(fields), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def read_head(what: str, body: bytes) -> tuple[RecordFields, bytes]:
    """The fields of the JSON object in the first line of a body, and the bytes after it.

    Raises:
        ScheduleRecordError: the body does not begin with such an object.
    """
    head, newline, rest = body.partition(b"\n")
    if not newline or not head.startswith(b'{"v":') or len(head) > MAX_HEAD:
        raise ScheduleRecordError(f"{body[:40]!r} is not {what}")
    try:
        value = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise ScheduleRecordError(f"{body[:40]!r} is not {what}: {error}") from error
    return RecordFields(what, value), rest


class RecordFields:
    """Takes the fields of an object one by one. A field that is left over, or missing, is an error.

    Args:
        what: the object, for messages: ``"a record"``.

    Raises:
        ScheduleRecordError: from each method, when the field is missing or of another type.
    """

    def __init__(self, what: str, value: object) -> None:
        if not isinstance(value, dict):
            raise ScheduleRecordError(f"{what} is {type(value).__name__}, not an object")
        self.what = what
        self._left: dict[str, Any] = dict(value)

    def text(self, name: str, *, limit: int = MAX_NAME, empty: bool = False) -> str:
        """A text of at most *limit* bytes."""
        value = self._take(name)
        if not isinstance(value, str) or (not value and not empty):
            raise self.error(name, value, "text" if empty else "text that is not empty")
        try:
            size = len(value.encode())
        except UnicodeEncodeError as error:
            raise self.error(name, value, "text that UTF-8 can encode") from error
        if size > limit:
            raise self.error(name, value[:40], f"at most {limit} bytes")
        return value

    def optional_text(self, name: str, *, limit: int = MAX_NAME) -> str | None:
        """A text, or None if it is absent."""
        return self.text(name, limit=limit) if self.has(name) else None

    def integer(self, name: str, *, lowest: int = 0) -> int:
        """A whole number of 64 bits."""
        value = self._take(name)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= MAX_INTEGER:
            raise self.error(name, value, f"a whole number from {lowest} to {MAX_INTEGER}")
        return value

    def optional_integer(self, name: str, *, lowest: int = 0) -> int | None:
        """A whole number, or None if it is absent."""
        return self.integer(name, lowest=lowest) if self.has(name) else None

    def flag(self, name: str) -> bool:
        """Whether a flag is set; an absent one is not."""
        if not self.has(name):
            return False
        if self._take(name) is not True:
            raise self.error(name, "something else", "true, or absent")
        return True

    def items(self, name: str, *, most: int = MAX_INTEGER) -> Sequence[Any]:
        """A list."""
        value = self._take(name)
        if not isinstance(value, list) or len(value) > most:
            raise self.error(name, type(value).__name__, f"a list of at most {most} items")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; an absent one is empty."""
        if not self.has(name):
            return ()
        found = self.items(name)
        return tuple(RecordFields(f"an item of {name} in {self.what}", {"item": one}).text("item") for one in found)

    def flat(self, name: str) -> Mapping[str, str | int] | None:
        """An object of texts and whole numbers, or None if it is absent.

        Its values are written again in snapshots. Python's JSON is not as strict: it reads NaN, infinite numbers and
        unpaired surrogates, which cannot be written.
        """
        if not self.has(name):
            return None
        value = self._take(name)
        if not isinstance(value, dict) or len(value) > MAX_FLAT:
            raise self.error(name, type(value).__name__, f"an object of at most {MAX_FLAT} fields")
        inner = RecordFields(f"{name} in {self.what}", value)
        for one in value:
            RecordFields(f"the names of {name}", {"name": one}).text("name")
        return {
            one: inner.text(one) if isinstance(found, str) else inner.integer(one, lowest=-MAX_INTEGER)
            for one, found in value.items()
        }

    def inner(self, name: str) -> RecordFields:
        """The fields of an object within this one."""
        return RecordFields(f"{name} in {self.what}", self._take(name))

    def has(self, name: str) -> bool:
        """Whether the field exists and was not taken yet."""
        return name in self._left

    def end(self, rest: bytes = b"") -> None:
        """Check that no field is left, and no byte after the object.

        Args:
            rest: the bytes after the object, which have to be none.
        """
        if self._left:
            raise ScheduleRecordError(f"{self.what} has unknown fields: {', '.join(sorted(map(repr, self._left)))}")
        if rest:
            raise ScheduleRecordError(f"{self.what} has {len(rest)} bytes too many")

    def error(self, name: str, value: object, wanted: str) -> ScheduleRecordError:
        """The error for a field."""
        return ScheduleRecordError(
            f"the field {name!r} of {self.what} is {str(value)[:80]!r}, where it must be {wanted}"
        )

    def _take(self, name: str) -> Any:
        try:
            return self._left.pop(name)
        except KeyError:
            raise ScheduleRecordError(f"{self.what} lacks the field {name!r}") from None
