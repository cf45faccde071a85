"""A dictionary with a maximum size."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeVar

MAX_SIZE: Final = 10_000
"""The default maximum number of entries."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(OrderedDict[Key, Value]):
    """A dictionary that drops its oldest entry when a new one would exceed the maximum size.

    Args:
        max_size: the maximum number of entries.
    """

    def __init__(self, max_size: int = MAX_SIZE) -> None:
        super().__init__()
        self._max_size = max_size

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self._max_size:
            self.popitem(last=False)
