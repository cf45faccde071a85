"""The rules for the times of a recurring schedule."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final, Literal, Self, get_args

from bide.durations import (
    MILLISECOND,
    DelayLike,
    format_delay,
    from_milliseconds,
    number_advice,
    parse_delay,
    parse_due_time,
    to_milliseconds,
)
from bide.errors import InvalidDelayError, InvalidRecurrenceError, ScheduleRecordError
from bide.schedules.cron import CronExpression
from bide.schedules.fields import RecordFields
from bide.schedules.local_time import zone_of

CatchUp = Literal["none", "last", "all"]
"""Which runs that were missed while no gate worked are made up for."""

CATCH_UPS: Final[tuple[CatchUp, ...]] = get_args(CatchUp)

SHORTEST_INTERVAL: Final = timedelta(seconds=1)
LONGEST_INTERVAL: Final = timedelta(days=36_500)
LONGEST_JITTER: Final = timedelta(days=1)

_JITTER_STEPS: Final = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """When a recurring schedule runs. Make it with :meth:`of` or :meth:`parse`.

    Attributes:
        cron: a cron expression, None for an interval.
        time_zone: the IANA name of its zone.
        interval: milliseconds of elapsed time, None for a cron expression. Daylight saving does not change it.
        anchor: a time that runs of an interval are counted from, in milliseconds since the Unix epoch.
        first: no run before this time.
        last: no run after this time.
        jitter: each run is up to this many milliseconds late, by a number that follows from the schedule and the time.
        catch_up: ``last``: the latest missed run is made up for, ``all``: each, ``none``: none.
    """

    cron: str | None = None
    time_zone: str = "UTC"
    interval: int | None = None
    anchor: int = 0
    first: int | None = None
    last: int | None = None
    jitter: int = 0
    catch_up: CatchUp = "last"

    @classmethod
    def of(
        cls,
        every: str | timedelta,
        *,
        now: datetime,
        time_zone: str | None = None,
        first_run: datetime | str | None = None,
        last_run: datetime | str | None = None,
        jitter: DelayLike | None = None,
        catch_up: str = "last",
    ) -> Self:
        """Check the arguments of a caller.

        Args:
            every: a cron expression, or a duration such as ``"15m"``: elapsed time from the first run on.
            now: the present, from which an interval is counted where there is no first run.
            time_zone: an IANA name, for cron expressions only; UTC if None.

        Raises:
            InvalidRecurrenceError: an argument cannot be used, or there is no run at all.
            InvalidDueTimeError: a time has no zone.
            InvalidDelayError: the jitter is not a duration.
        """
        if catch_up not in CATCH_UPS:
            raise InvalidRecurrenceError(f"catch_up={catch_up!r} is unknown: give one of {', '.join(CATCH_UPS)}")
        first = None if first_run is None else to_milliseconds(parse_due_time(first_run))
        last = None if last_run is None else to_milliseconds(parse_due_time(last_run))
        shift = timedelta(0) if jitter is None else parse_delay(jitter)
        if shift > LONGEST_JITTER:
            raise InvalidRecurrenceError(
                f"the jitter {format_delay(shift)} is longer than {format_delay(LONGEST_JITTER)}: give a shorter one"
            )
        interval = _interval(every)
        if interval is not None and time_zone is not None:
            raise InvalidRecurrenceError(
                f"time_zone={time_zone!r} is for cron expressions, and {every!r} is elapsed time: remove the zone, or "
                "give a cron expression"
            )
        present = to_milliseconds(now)
        made = cls(
            cron=None if interval is not None else str(every),
            time_zone="UTC" if time_zone is None else time_zone,
            interval=None if interval is None else -(-interval // MILLISECOND),
            anchor=0 if interval is None else present if first is None else first,
            first=first,
            last=last,
            jitter=shift // MILLISECOND,
            catch_up=next(one for one in CATCH_UPS if one == catch_up),
        )
        if made.after(present) is None:
            raise InvalidRecurrenceError(f"{every!r} never runs: its last run lies before the first")
        return made

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Self:
        """Read the fields of :meth:`spec`.

        Raises:
            ScheduleRecordError: the fields are not those of a recurrence.
            InvalidRecurrenceError: the expression or the zone is not known here.
        """
        fields = RecordFields("a recurrence", dict(spec))
        catch_up = fields.text("catch_up")
        made = cls(
            cron=fields.optional_text("cron"),
            time_zone=fields.optional_text("time_zone") or "UTC",
            interval=fields.optional_integer("interval", lowest=SHORTEST_INTERVAL // MILLISECOND),
            anchor=fields.optional_integer("anchor") or 0,
            first=fields.optional_integer("first"),
            last=fields.optional_integer("last"),
            jitter=fields.optional_integer("jitter") or 0,
            catch_up=next((one for one in CATCH_UPS if one == catch_up), "last"),
        )
        fields.end()
        if catch_up not in CATCH_UPS or (made.cron is None) == (made.interval is None):
            raise ScheduleRecordError(
                f"a recurrence is {str(spec)[:80]}: it needs either a cron expression or an interval"
            )
        # Times that follow from longer ones could not be written in a claim.
        if (made.interval or 0) > LONGEST_INTERVAL // MILLISECOND or made.jitter > LONGEST_JITTER // MILLISECOND:
            raise ScheduleRecordError(f"a recurrence is {str(spec)[:80]}: its interval or jitter is too long")
        if made.cron is not None:
            _expression(made.cron, made.time_zone)
        return made

    def spec(self) -> dict[str, Any]:
        """The recurrence for a record."""
        fields: dict[str, Any] = {
            "cron": self.cron,
            "time_zone": self.time_zone if self.cron is not None else None,
            "interval": self.interval,
            "anchor": self.anchor or None,
            "first": self.first,
            "last": self.last,
            "jitter": self.jitter or None,
            "catch_up": self.catch_up,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def after(self, moment: int) -> int | None:
        """The first run after a moment, without jitter, in milliseconds since the Unix epoch; None if there is none."""
        start = moment if self.first is None else max(moment, self.first - 1)
        try:
            found = self._cron_after(start) if self.interval is None else self._interval_after(start, self.interval)
        except OverflowError:
            return None
        if found is None or (self.last is not None and found > self.last):
            return None
        return found

    def runs(self, moment: int) -> Iterator[int]:
        """All runs after a moment, without jitter."""
        found = self.after(moment)
        while found is not None:
            yield found
            found = self.after(found)

    def latest(self, moment: int, until: int) -> int:
        """The latest run at *until* or before it. *moment* is a run, and not after *until*.

        A recurrence by the second may have missed millions of runs in an outage, so it looks from the end backwards.
        """
        if self.interval is not None:
            end = until if self.last is None else min(until, self.last)
            return max(moment, self.anchor + (end - self.anchor) // self.interval * self.interval)
        span = 1000
        while until - span > moment:
            found = self.after(until - span)
            if found is not None and found <= until:
                return self._last_of(found, until)
            span *= 2
        return self._last_of(moment, until)

    def _last_of(self, found: int, until: int) -> int:
        for one in self.runs(found):
            if one > until:
                break
            found = one
        return found

    def due(self, schedule: str, nominal: int) -> int:
        """When a run is due, with its jitter.

        Args:
            schedule: the id of the schedule.
        """
        if not self.jitter:
            return nominal
        share = zlib.crc32(f"{schedule}@{nominal}".encode())
        return nominal + share * (self.jitter + 1) // _JITTER_STEPS

    def _interval_after(self, moment: int, interval: int) -> int:
        found = self.anchor + max((moment - self.anchor) // interval + 1, 0) * interval
        if from_milliseconds(found) is None:
            raise OverflowError(found)
        return found

    def _cron_after(self, moment: int) -> int | None:
        assert self.cron is not None
        start = from_milliseconds(moment)
        found = None if start is None else _expression(self.cron, self.time_zone).after(start)
        return None if found is None else to_milliseconds(found)


def _interval(every: object) -> timedelta | None:
    """The interval, or None for text that may be a cron expression."""
    if advice := number_advice(every):
        raise InvalidRecurrenceError(f"every={every!r} has no unit: {advice}or a cron expression of five fields")
    if isinstance(every, str):
        try:
            interval = parse_delay(every)
        except InvalidDelayError:
            return None
    elif isinstance(every, timedelta):
        interval = every
    else:
        raise InvalidRecurrenceError(
            f"every={every!r} cannot be used: give a cron expression, or a duration such as '15m'"
        )
    if not SHORTEST_INTERVAL <= interval <= LONGEST_INTERVAL:
        raise InvalidRecurrenceError(
            f"the interval {interval} is out of range: give {format_delay(SHORTEST_INTERVAL)} to "
            f"{format_delay(LONGEST_INTERVAL)}"
        )
    return interval


@lru_cache(maxsize=1024)
def _expression(text: str, zone: str) -> CronExpression:
    return CronExpression.parse(text, zone_of(zone))
