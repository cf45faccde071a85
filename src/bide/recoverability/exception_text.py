"""An exception in words that fit into headers."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Final, Self

MESSAGE_BYTES: Final = 4096
STACK_BYTES: Final = 16_384
"""Bounds of what is kept of an exception: all headers together must fit into one frame, 128 KiB by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionText:
    """What is known of a failure.

    Attributes:
        type: of the exception, with its module.
        message: what it says.
        stack: its stack trace, oldest call first; the beginning is left out where it is too long.
        frame: where it was raised: ``file.py:12 in function``; empty where that is not known.
        inner_type: of the exception that caused it, or None.
        inner_message: what that one says, or None.
    """

    type: str
    message: str
    stack: str
    frame: str
    inner_type: str | None = None
    inner_message: str | None = None

    @classmethod
    def of(cls, error: BaseException, *, message_bytes: int = MESSAGE_BYTES, stack_bytes: int = STACK_BYTES) -> Self:
        """The explanation of an exception, within these bounds."""
        inner = _inner(error)
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1] if frames else None
        return cls(
            type=name_of(type(error)),
            message=cut(_text(error), message_bytes),
            stack=cut(_stack(error), stack_bytes, keep_end=True),
            frame=f"{_file(last.filename)}:{last.lineno} in {last.name}" if last is not None else "",
            inner_type=name_of(type(inner)) if inner is not None else None,
            inner_message=cut(_text(inner), message_bytes) if inner is not None else None,
        )


def name_of(kind: type) -> str:
    """A class as Python's stack traces name it: with its module, unless that is the built-ins."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def cut(text: str, size: int, *, keep_end: bool = False) -> str:
    """The text, or the part of it that fits into *size* bytes of UTF-8, with a sign of what was left out."""
    raw = text.encode(errors="backslashreplace")
    if len(raw) <= size:
        return raw.decode()
    if keep_end:
        return "[...] " + raw[len(raw) - size :].decode(errors="ignore")
    return raw[:size].decode(errors="ignore") + " [...]"


def _file(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _inner(error: BaseException) -> BaseException | None:
    try:
        return error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    except Exception:  # noqa: BLE001 (user code's attributes)
        return None


def _stack(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 (user code's attributes, which a stack trace shows too)
        return f"{''.join(traceback.format_tb(error.__traceback__))}{name_of(type(error))}: {_text(error)}\n"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 (user code's __str__)
        return f"(an exception that cannot be printed: {type(broken).__name__})"
