"""A cheap counter of publisher confirms."""

from __future__ import annotations


class Confirmed:
    """How many messages of a channel were confirmed, numbered from 1 on.

    Attributes:
        count: up to now.
    """

    __slots__ = ("_ahead", "_upto", "count")

    def __init__(self) -> None:
        self.count = 0
        self._upto = 0
        self._ahead: set[int] = set()

    def add(self, tag: int, *, multiple: bool) -> None:
        """Count one confirm: of a message, or of all up to it."""
        ahead = self._ahead
        if multiple:
            self._upto = max(self._upto, tag)
            if ahead:
                ahead.difference_update([one for one in ahead if one <= tag])
        elif tag == self._upto + 1:
            self._upto = tag
        else:
            ahead.add(tag)
        while ahead and self._upto + 1 in ahead:
            self._upto += 1
            ahead.discard(self._upto)
        self.count = self._upto + len(ahead)
