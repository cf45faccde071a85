"""Whether the connections of a client are open, and the callbacks for their loss and return."""

from __future__ import annotations

from collections.abc import Callable

from bide.errors import BideError
from bide.runtime.logs import logger

log = logger(__name__)

OnDisconnected = Callable[[BideError], None]
"""Called with the reason when the first of a client's connections is lost."""

OnReconnected = Callable[[], None]
"""Called when all connections of a client are open again."""


class ConnectionWatch:
    """Watches the connections of one client. A watched connection is opened again as soon as it is lost."""

    def __init__(self, on_disconnected: OnDisconnected | None, on_reconnected: OnReconnected | None) -> None:
        self._on_disconnected = on_disconnected
        self._on_reconnected = on_reconnected
        self._lost: set[object] = set()

    @property
    def is_lost(self) -> bool:
        """Whether a connection is lost and not yet open again."""
        return bool(self._lost)

    def on_lost(self, connection: object, error: BideError) -> None:
        """Record that a connection was lost."""
        is_first = not self._lost
        self._lost.add(connection)
        if is_first and self._on_disconnected is not None:
            try:
                self._on_disconnected(error)
            except Exception:
                log.exception("the callback on_disconnected failed")

    def on_open(self, connection: object) -> None:
        """Record that a connection is open, for the first time or again."""
        if connection not in self._lost:
            return
        self._lost.remove(connection)
        if not self._lost and self._on_reconnected is not None:
            try:
                self._on_reconnected()
            except Exception:
                log.exception("the callback on_reconnected failed")
