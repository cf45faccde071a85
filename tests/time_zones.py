"""A second reader of the time zone database: TZif files and POSIX rules."""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from importlib import resources
from pathlib import Path
from zoneinfo import TZPATH, available_timezones

FIRST_YEAR, LAST_YEAR = 2000, 2100

_RULE = re.compile(r"M(\d+)\.(\d+)\.(\d+)(?:/([-+]?[\d:]+))?|J(\d+)(?:/([-+]?[\d:]+))?|(\d+)(?:/([-+]?[\d:]+))?")
_POSIX = re.compile(
    r"(?:<[^>]+>|[A-Za-z]+)(?P<std>[-+]?[\d:]+)"
    r"(?:(?:<[^>]+>|[A-Za-z]+)(?P<dst>[-+]?[\d:]+)?,(?P<start>[^,]+),(?P<end>[^,]+))?"
)


@dataclass(frozen=True)
class Zone:
    """Changes of the offset from 2000 to 2100: seconds since the Unix epoch, and the offsets in between."""

    changes: tuple[int, ...]
    offsets: tuple[int, ...]

    def offset(self, moment: int) -> int:
        return self.offsets[bisect_right(self.changes, moment)]


def zones() -> dict[Zone, str]:
    """All different zones, each with one of its names."""
    found: dict[Zone, str] = {}
    for name in sorted(available_timezones() - {"localtime", "posixrules", "Factory"}):
        if not name.startswith(("posix/", "right/")):
            found.setdefault(read(name), name)
    return found


def read(name: str) -> Zone:
    data = _file(name)
    counts = struct.unpack(">6l", data[20:44])
    isut, isstd, leaps, times, types, characters = counts
    second = 44 + times * 5 + types * 6 + characters + leaps * 8 + isstd + isut
    isut, isstd, leaps, times, types, characters = struct.unpack(">6l", data[second + 20 : second + 44])
    place = second + 44
    moments = struct.unpack(f">{times}q", data[place : place + times * 8])
    kinds = data[place + times * 8 : place + times * 9]
    table = [struct.unpack(">l", data[place + times * 9 + one * 6 :][:4])[0] for one in range(types)]
    rest = place + times * 9 + types * 6 + characters + leaps * 12 + isstd + isut
    footer = data[rest:].strip(b"\n").decode()
    pairs = [(moment, table[kind]) for moment, kind in zip(moments, kinds, strict=True)]
    last = moments[-1] if moments else -(2**62)
    pairs += [(moment, offset) for moment, offset in _rules(footer) if moment > last]
    return _between(pairs, table[0])


def _file(name: str) -> bytes:
    """The file that ``zoneinfo`` reads: the system's, or else that of the package tzdata."""
    for folder in TZPATH:
        if (path := Path(folder, name)).is_file():
            return path.read_bytes()
    return resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes()


def _between(pairs: list[tuple[int, int]], initial: int) -> Zone:
    start = int(datetime(FIRST_YEAR, 1, 1, tzinfo=UTC).timestamp())
    end = int(datetime(LAST_YEAR, 1, 1, tzinfo=UTC).timestamp())
    current, changes, offsets = initial, list[int](), list[int]()
    for moment, offset in pairs:
        if moment <= start:
            current = offset
        elif moment < end and offset != (offsets[-1] if offsets else current):
            changes.append(moment)
            offsets.append(offset)
    return Zone(tuple(changes), (current, *offsets))


def _seconds(text: str) -> int:
    sign = -1 if text.startswith("-") else 1
    parts = [int(one) for one in text.lstrip("+-").split(":")]
    return sign * sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))


def _rules(footer: str) -> Iterator[tuple[int, int]]:
    found = _POSIX.fullmatch(footer)
    assert found is not None, footer
    standard = -_seconds(found["std"])
    if not found["start"]:
        return
    summer = -_seconds(found["dst"]) if found["dst"] else standard + 3600
    for year in range(1970, LAST_YEAR + 1):
        begin = _moment(found["start"], year) - standard
        end = _moment(found["end"], year) - summer
        yield from sorted([(begin, summer), (end, standard)])


def _moment(rule: str, year: int) -> int:
    found = _RULE.fullmatch(rule)
    assert found is not None, rule
    if found[1]:
        month, week, day = int(found[1]), int(found[2]), int(found[3])
        first = date(year, month, 1)
        day_of_month = 1 + (day - first.isoweekday()) % 7 + (week - 1) * 7
        length = (date(year + month // 12, month % 12 + 1, 1) - first).days
        if day_of_month > length:
            day_of_month -= 7
        when, time = date(year, month, day_of_month), found[4]
    elif found[5]:
        number = int(found[5])
        is_leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        when, time = date(year, 1, 1) + timedelta(days=number - 1 + (is_leap and number >= 60)), found[6]
    else:
        when, time = date(year, 1, 1) + timedelta(days=int(found[7])), found[8]
    midnight = int(datetime(when.year, when.month, when.day, tzinfo=UTC).timestamp())
    return midnight + (_seconds(time) if time else 7200)
