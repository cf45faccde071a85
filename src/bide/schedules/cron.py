"""Cron expressions in a time zone.

The parser is cronsim's, which follows Debian's cron; the fields may have ``L``, ``LW`` and ``#``, and a sixth field in
front for seconds. It works on local times without a zone here. Skipped and repeated hours follow the rule of Debian's
cron:

* An expression whose minute and hour do not begin with ``*`` is for fixed times of the day. A skipped time runs once,
  when the clocks go forward; a repeated one runs the first time only.
* Any other expression repeats every few minutes or hours. A skipped time does not run; a repeated one runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from bide.errors import InvalidRecurrenceError
from bide.schedules.local_time import first_moment, local_of, next_transition

MAX_EXPRESSION: Final = 200

_MACROS: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_SECOND: Final = timedelta(seconds=1)
_LAST_YEAR: Final = 9000


@dataclass(frozen=True, slots=True)
class CronExpression:
    """A cron expression in a zone. Make it with :meth:`parse`.

    Attributes:
        text: the expression; a macro is replaced by its fields.
        has_fixed_times: whether it is for fixed times of the day.
    """

    text: str
    zone: ZoneInfo
    has_fixed_times: bool

    @classmethod
    def parse(cls, text: str, zone: ZoneInfo) -> CronExpression:
        """Read an expression of five or six fields, or a macro such as ``@daily``.

        Raises:
            InvalidRecurrenceError: the expression cannot be read, or no time matches it in fifty years.
        """
        given = _MACROS.get(text.strip().lower(), text.strip())
        if len(given) > MAX_EXPRESSION or not given.isascii():
            raise InvalidRecurrenceError(f"the cron expression {text[:40]!r} cannot be read: {_WAY_OUT}")
        fields = given.split()
        minute, hour = fields[-5:-3] if len(fields) in (5, 6) else ("", "")
        made = cls(" ".join(fields), zone, not minute.startswith("*") and not hour.startswith("*"))
        try:
            found = next(made._matches(datetime(2000, 1, 1)), None)  # noqa: DTZ001 (a local time)
        except (CronSimError, ValueError, AssertionError) as error:
            raise InvalidRecurrenceError(
                f"the cron expression {text!r} cannot be read ({error}): {_WAY_OUT}"
            ) from error
        if found is None:
            raise InvalidRecurrenceError(f"the cron expression {text!r} matches no time: correct its day or month")
        return made

    def after(self, moment: datetime) -> datetime | None:
        """The first run after a moment, both in UTC; None if there is none in fifty years.

        Raises:
            OverflowError: the moment lies after the year 9000.
        """
        if moment.year > _LAST_YEAR:
            raise OverflowError(f"{moment} lies beyond the years that runs are computed for")
        return self._fixed_after(moment) if self.has_fixed_times else self._elapsed_after(moment)

    def _fixed_after(self, moment: datetime) -> datetime | None:
        for local in self._matches(local_of(moment, self.zone)):
            found = first_moment(local, self.zone)
            if found > moment:
                return found
        return None

    def _elapsed_after(self, moment: datetime) -> datetime | None:
        """Search span by span: between two changes of the offset, local times and moments run in step."""
        start, is_included = moment, False
        for _ in range(1000):
            offset = start.astimezone(self.zone).utcoffset()
            assert offset is not None
            local = (start + offset).replace(tzinfo=None)
            match = next(self._matches(local - _SECOND if is_included else local), None)
            if match is None:
                return None
            found = (match - offset).replace(tzinfo=UTC)
            change = next_transition(start, found, self.zone)
            if change is None:
                return found
            start, is_included = change, True
        return None

    def _matches(self, local: datetime) -> Iterator[datetime]:
        """Local times after this one that match, in order."""
        return CronSim(self.text, local)


_WAY_OUT: Final = "give minute, hour, day of month, month and day of week, as '0 8 * * MON-FRI'"
