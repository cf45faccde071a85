"""Ids of requests, and sets of the applied ones."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final, Self

from bide.errors import ScheduleRecordError

MAX_NUMBER: Final = 2**53
_TEXT: Final = re.compile(r"([0-9A-Za-z]{1,64})-([0-9]{1,16})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class RequestId:
    """The identity of one operation, the same each time that it is sent.

    Attributes:
        session: random, one per client and partition.
        number: counts the operations of that session, from 1 on.
    """

    session: str
    number: int

    def __str__(self) -> str:
        return f"{self.session}-{self.number}"

    @classmethod
    def parse(cls, text: object) -> Self:
        """Read the text of :meth:`__str__`.

        Raises:
            ScheduleRecordError: the text is not an id.
        """
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if found is None or not 1 <= int(found[2]) <= MAX_NUMBER or found[2].startswith("0"):
            raise ScheduleRecordError(f"{text!r} is not the id of a request, such as '5f2c8a-17'")
        return cls(found[1], int(found[2]))


@dataclass(frozen=True, slots=True)
class AppliedNumbers:
    """A set of numbers as ranges, which takes little room where most numbers follow each other.

    The highest number alone would not do: when a connection breaks, number 5 may be lost while 6 arrives, and the
    repeated 5 is then new.

    Attributes:
        starts: the first number of each range, ascending.
        ends: the last number of each range.
    """

    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self.starts, number) - 1
        return index >= 0 and number <= self.ends[index]

    def including(self, number: int) -> AppliedNumbers:
        """The set with one number more."""
        if number in self:
            return self
        index = bisect_right(self.starts, number)
        after_left = index > 0 and self.ends[index - 1] == number - 1
        before_right = index < len(self.starts) and self.starts[index] == number + 1
        starts, ends = list(self.starts), list(self.ends)
        if after_left and before_right:
            del starts[index], ends[index - 1]
        elif after_left:
            ends[index - 1] = number
        elif before_right:
            starts[index] = number
        else:
            starts.insert(index, number)
            ends.insert(index, number)
        return AppliedNumbers(tuple(starts), tuple(ends))
