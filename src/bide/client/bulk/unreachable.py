"""Targets that could not be reached recently."""

from __future__ import annotations

import asyncio
from typing import Final

from bide.errors import BideError
from bide.messages.prepared import MessageTemplate
from bide.runtime.bounded_cache import BoundedCache

_KEPT_SECONDS: Final = 1.0
"""Seconds for which an unreachable target is not checked again."""


class Unreachable:
    """Errors of targets that could not be reached, by message template, kept for a second each."""

    def __init__(self) -> None:
        self._errors = BoundedCache[MessageTemplate, tuple[BideError, float]]()

    def add(self, template: MessageTemplate | None, error: BideError) -> None:
        """Remember an error for messages of this template."""
        if template is not None:
            self._errors[template] = error, asyncio.get_running_loop().time() + _KEPT_SECONDS

    def error(self, template: MessageTemplate | None) -> BideError | None:
        """The recent error of a message of this template, or None."""
        if template is None or template not in self._errors:
            return None
        error, until = self._errors[template]
        if asyncio.get_running_loop().time() < until:
            return error
        del self._errors[template]
        return None
