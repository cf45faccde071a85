"""A dictionary with a limit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeVar

MOST: Final = 10_000
"""Entries of a cache, unless it is made with another limit."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(OrderedDict[Key, Value]):
    """A dictionary in which a new entry takes the place of the oldest when it is full.

    Args:
        most: entries that it holds.
    """

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            self.popitem(last=False)
