"""Limits for the messages in flight to each target, so that a silent one holds up no other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from bide.errors import BideError, PublishRefusedError

WINDOW: Final = 30
"""Messages in flight to one target. From 32 unanswered commands to a quorum queue on, RabbitMQ blocks the channel, and
then the connection, until the queue answers (``quorum_commands_soft_limit``, ``rabbit_fifo_client``)."""

SILENT_AFTER: Final = 2.0
"""Seconds without a result after which more messages for a target are refused here. Its queue may have no majority."""

_Message = TypeVar("_Message")


@dataclass(slots=True)
class _Window(Generic[_Message]):
    progress_at: float
    in_flight: int = 0
    waiting: deque[_Message] = field(default_factory=deque)


class TargetWindows(Generic[_Message]):
    """Sends messages within the window of their target. All times are seconds by the clock of the event loop.

    Args:
        send: sends a message.
        on_result: called with the result of a message: that of :meth:`settled`, or a ``PublishRefusedError`` for a
            message that was not sent because its target is silent.
    """

    def __init__(
        self, *, send: Callable[[_Message], None], on_result: Callable[[_Message, BideError | None], None]
    ) -> None:
        self._send = send
        self._on_result = on_result
        self._windows: dict[str, _Window[_Message]] = {}

    def put(self, target: str, message: _Message, now: float) -> None:
        """Send a message, or let it wait for others."""
        window = self._windows.setdefault(target, _Window(now))
        if window.in_flight < WINDOW:
            window.in_flight += 1
            self._send(message)
        elif now - window.progress_at < SILENT_AFTER:
            window.waiting.append(message)
        else:
            self._refuse(target, message)

    def settled(self, target: str, message: _Message, error: BideError | None, now: float) -> None:
        """Pass the result of a message on, and send the next one."""
        window = self._windows[target]
        window.progress_at = now
        window.in_flight -= 1
        if window.waiting:
            window.in_flight += 1
            self._send(window.waiting.popleft())
        elif not window.in_flight:
            del self._windows[target]
        self._on_result(message, error)

    def refuse_silent(self, now: float) -> None:
        """Refuse the messages that wait for targets that are silent."""
        for target, window in list(self._windows.items()):
            if now - window.progress_at >= SILENT_AFTER:
                waiting, window.waiting = window.waiting, deque()
                for message in waiting:
                    self._refuse(target, message)

    def _refuse(self, target: str, message: _Message) -> None:
        self._on_result(
            message,
            PublishRefusedError(f"{target} has confirmed nothing for {SILENT_AFTER:g} s: it is tried again later"),
        )
