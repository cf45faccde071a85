"""A dictionary with a maximum size."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeVar

MOST: Final = 10_000
"""The default maximum number of entries."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(OrderedDict[Key, Value]):
    """A dictionary that drops its oldest entry when a new one would exceed the maximum size.

    Args:
        most: the maximum number of entries.
    """

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            self.popitem(last=False)
