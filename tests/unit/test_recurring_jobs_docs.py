"""What docs/recurring-jobs.md says about times, of Celery's crontab and of schedules."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import crontab

from bide.durations import from_milliseconds, to_milliseconds
from bide.schedules.recurrence import Recurrence

HELSINKI = ZoneInfo("Europe/Helsinki")
BEFORE_SPRING = datetime(2026, 3, 28, 12, tzinfo=UTC)
BEFORE_AUTUMN = datetime(2026, 10, 24, 12, tzinfo=UTC)


def runs_of_celery(start: datetime) -> Iterator[str]:
    """When beat would send, if it looked every minute."""
    app = Celery(set_as_current=False)
    app.conf.timezone = HELSINKI.key
    last = now = start
    while True:
        now += timedelta(minutes=1)
        schedule = crontab(hour=3, minute=30, app=app, nowfun=lambda now=now: now.astimezone(HELSINKI))
        if schedule.is_due(last).is_due:
            last = now
            yield f"{now.astimezone(HELSINKI):%d. %H:%M}"


def runs_of_bide(every: str, start: datetime, zone: ZoneInfo) -> Iterator[str]:
    recurrence = Recurrence.of(every, now=start, time_zone=zone.key)
    for one in recurrence.runs(to_milliseconds(start)):
        moment = from_milliseconds(one)
        assert moment is not None
        yield f"{moment.astimezone(zone):%d. %H:%M}"


@pytest.mark.parametrize(
    ("start", "celery", "bide"),
    [
        (BEFORE_SPRING, ["29. 04:30", "30. 03:30"], ["29. 04:00", "30. 03:30"]),
        (BEFORE_AUTUMN, ["25. 03:30", "26. 03:30"], ["25. 03:30", "26. 03:30"]),
    ],
)
def test_skipped_and_repeated_times_run_as_the_page_says(start: datetime, celery: list[str], bide: list[str]) -> None:
    assert list(islice(runs_of_celery(start), 2)) == celery
    assert list(islice(runs_of_bide("30 3 * * *", start, HELSINKI), 2)) == bide


@pytest.mark.parametrize(
    ("every", "days"),
    [
        ("0 9 * * FRI#3", ["18. 09:00", "15. 09:00"]),
        ("0 0 L * *", ["30. 00:00", "31. 00:00"]),
        ("0 8 1 * MON", ["30. 08:00", "01. 08:00"]),
        ("0 8 * * 0", ["29. 08:00", "06. 08:00"]),
        ("0 8 * * 7", ["29. 08:00", "06. 08:00"]),
    ],
)
def test_expressions_of_the_page_mean_what_it_says(every: str, days: list[str]) -> None:
    assert list(islice(runs_of_bide(every, datetime(2026, 11, 24, tzinfo=UTC), ZoneInfo("UTC")), 2)) == days
