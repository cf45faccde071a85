"""An exception as text that fits into message headers."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Final, Self

MESSAGE_BYTES: Final = 4096
STACK_BYTES: Final = 16_384
"""How much text of an exception is kept: all headers of a message must fit into one frame, 128 KiB by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionText:
    """The text of an exception.

    Attributes:
        type: the exception's class, with its module.
        message: the exception's message.
        stack: its stack trace, oldest call first; if it is too long, the beginning is cut off.
        frame: where it was raised, as ``file.py:12 in function``; empty if that is not known.
        inner_type: the class of the exception that caused it, or None.
        inner_message: the message of that exception, or None.
    """

    type: str
    message: str
    stack: str
    frame: str
    inner_type: str | None = None
    inner_message: str | None = None

    @classmethod
    def of(cls, error: BaseException, *, message_bytes: int = MESSAGE_BYTES, stack_bytes: int = STACK_BYTES) -> Self:
        """Describe an exception in at most this many bytes."""
        inner = _inner(error)
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1] if frames else None
        return cls(
            type=name_of(type(error)),
            message=truncate(_text(error), message_bytes),
            stack=truncate(_stack(error), stack_bytes, keep_end=True),
            frame=f"{_file(last.filename)}:{last.lineno} in {last.name}" if last is not None else "",
            inner_type=name_of(type(inner)) if inner is not None else None,
            inner_message=truncate(_text(inner), message_bytes) if inner is not None else None,
        )


def name_of(kind: type) -> str:
    """The name of a class as in Python's stack traces: with its module, unless it is a built-in."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def truncate(text: str, size: int, *, keep_end: bool = False) -> str:
    """Cut a text to *size* bytes of UTF-8; ``[...]`` marks where something was cut off."""
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
