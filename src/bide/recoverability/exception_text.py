"""An exception as text that fits into message headers."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

MESSAGE_BYTES: Final = 4096
STACK_BYTES: Final = 16_384
"""How much text of an exception is kept: all headers of a message must fit into one frame, 128 KiB by default."""

_SPACE: Final = re.compile(r"\s")
_ABSOLUTE: Final = re.compile(r"/|[A-Za-z]:")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionText:
    """The text of an exception.

    Attributes:
        type: the exception's class, with its module.
        message: the exception's message.
        stack: its stack trace, oldest call first; if it is too long, the beginning is cut off.
        frame: where it was raised, as ``file.py:12 in function``; empty if that is not known.
        dotnet_frame: the same as a line of a .NET stack trace, ``at shop.charge() in /srv/shop.py:line 12``.
        inner_type: the class of the exception that caused it, or None.
        inner_message: the message of that exception, or None.
    """

    type: str
    message: str
    stack: str
    frame: str
    inner_type: str | None = None
    inner_message: str | None = None
    dotnet_frame: str = ""

    @property
    def line(self) -> str:
        """The class and the message, as at the end of Python's stack traces: ``KeyError: 'kind'``."""
        return f"{self.type}: {self.message}" if self.message else self.type

    @property
    def dotnet_stack(self) -> str:
        """The stack trace with the frame that raised the exception as its first line, in the format of .NET.

        ServiceControl groups failures by the first line in this format, and Python's stack traces have none.
        """
        if not self.dotnet_frame:
            return self.stack
        frame = self.dotnet_frame
        if self.message and self.message in frame:
            # ServiceControl removes the message from the stack trace first. If that removes the line number, it ignores
            # the frame.
            frame = frame.partition(" in ")[0]
        return f"   {frame}\n{self.stack}"

    @classmethod
    def of(cls, error: BaseException, *, message_bytes: int = MESSAGE_BYTES, stack_bytes: int = STACK_BYTES) -> Self:
        """Describe an exception, with messages and a stack trace of at most this many bytes each."""
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
            dotnet_frame=truncate(_dotnet_frame(error.__traceback__), message_bytes),
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


def _dotnet_frame(trace: TracebackType | None) -> str:
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    module = str(trace.tb_frame.f_globals.get("__name__", "__main__"))
    if module == "__main__":
        # Every program has a module of this name.
        module = _file(code.co_filename).removesuffix(".py")
    # ServiceControl ignores the line if the file has no absolute path.
    location = f" in {code.co_filename}:line {trace.tb_lineno}" if _ABSOLUTE.match(code.co_filename) else ""
    return f"at {_SPACE.sub('_', f'{module}.{code.co_qualname}')}(){location}"


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
