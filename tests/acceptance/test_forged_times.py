"""Forged times: the ends of the calendar, invalid values, and time zones around UTC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pika
import pytest

from tests.acceptance.test_cli import Program, lines
from tests.support import Vhost

FIRST = -62_135_596_800_000
LAST = 253_402_300_799_999
"""Milliseconds from 1970 to the ends of the years 1 and 9999."""

BEYOND = (FIRST - 1, LAST + 1, -(1 << 63), (1 << 63) - 1)
YEAR_9999 = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


@pytest.fixture(params=["Asia/Tokyo", "America/New_York", "UTC"])
def program(vhost: Vhost, request: pytest.FixtureRequest) -> Program:
    made = Program(vhost)
    made.environment["TZ"] = request.param
    return made


@pytest.fixture
def channel(vhost: Vhost) -> Iterator[Any]:
    with closing(pika.BlockingConnection(pika.URLParameters(vhost.idle_url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


def forge(channel: Any) -> int:
    """Fill an error queue with forged times in all fields for times; return the number of messages."""
    channel.queue_declare("error", durable=True)
    forged: list[dict[str, Any]] = [
        dict.fromkeys(("bide-failed-at", "bide-first-failure", "bide-due", "bide-sent", "bide-expires"), value)
        | {"bide-attempt-times": [value, 1, value]}
        for value in (FIRST, LAST, *BEYOND)
    ]
    death = {"reason": "rejected", "queue": "orders", "count": 1, "exchange": "", "routing-keys": ["orders"]}
    forged += [{"x-death": [{**death, "time": time}]} for time in (YEAR_9999, datetime(1970, 1, 1, tzinfo=UTC))]
    forged += [
        {"NServiceBus.TimeOfFailure": time, "NServiceBus.FailedQ": "orders"}
        for time in ("0001-01-01 00:00:00:000000 Z", "9999-12-31 23:59:59:999999 Z")
    ]
    for number, headers in enumerate(forged):
        properties = pika.BasicProperties(message_id=f"m-{number}", headers=headers)
        channel.basic_publish("", "error", b"body", properties, mandatory=True)
    return len(forged)


def test_forged_times_do_not_break_the_errors_commands(program: Program, channel: Any) -> None:
    count = forge(channel)
    listed = program.ok("errors", "list").splitlines()
    assert len(listed) == count
    assert any("0001-01-01 " in line for line in listed)
    assert any("9999-12-31 " in line for line in listed)
    if program.environment["TZ"] == "Asia/Tokyo":
        assert any("9999-12-31 23:59:59Z" in line for line in listed), listed
        assert any("0001-01-01 09:" in line for line in listed), listed
    if program.environment["TZ"] == "America/New_York":
        assert any("0001-01-01 00:00:00Z" in line for line in listed), listed
    # The first two have the first and the last moment in all places.
    for message in lines(program.ok("errors", "list", "--json"))[:2]:
        program.ok("errors", "show", message["id"])
    stats = program.ok("errors", "stats")
    assert "9,999" not in stats
    assert "0001-01-01 00:00Z" in stats
    assert json.loads(program.ok("errors", "stats", "--json"))["first"] == "0001-01-01T00:00:00.000+00:00"
    groups = program.ok("errors", "groups")
    assert "0001-01-01" in groups
    program.ok("errors", "groups", "--json")
    for selection in ("--older-than", "--newer-than"):
        program.ok("errors", "list", selection, "1s")


def test_a_schedule_at_the_end_of_the_calendar_is_shown(program: Program) -> None:
    shown = program.ok("schedule", "add", "k", "--to", "reminders", "--at", "9999-12-31T23:59:59Z")
    local = "18:59:59.000-05:00" if program.environment["TZ"] == "America/New_York" else "23:59:59.000+00:00"
    assert f"k: scheduled, due 9999-12-31 {local}" in shown


RECORD = {
    "at": "2026-11-21T12:00:00.000+00:00",
    "who": "ann@ops",
    "user": "ann",
    "operation": "retry",
    "run": "r-1",
    "step": "ended",
    "queue": "error",
    "done": 3,
}
WHOLE = [
    RECORD,
    {**RECORD, "at": "0001-01-01T00:00:00+00:00"},
    {**RECORD, "at": "9999-12-31T23:59:59+00:00"},
    {**RECORD, "step": "ids", "ids": ["a", 5, None]},
    {**RECORD, "what\n": {"else": "\ud800"}},
]
MALFORMED = [
    b"",
    b"\xff",
    b"null",
    b"[]",
    b"5",
    b"{}",
    b"[" * 100_000,
    *(
        json.dumps(one).encode()
        for one in (
            {**RECORD, "at": "2026-11-21T12:00:00"},
            {**RECORD, "at": "0001-01-01T00:00:00+14:00"},
            {**RECORD, "at": "9999-12-31T23:59:59-12:00"},
            {**RECORD, "at": "yesterday"},
            {**RECORD, "at": 1_700_000_000},
            {**RECORD, "at": None},
            {**RECORD, "who": {"name": "ann"}},
            {**RECORD, "queue": None},
            {**RECORD, "step": "ids", "ids": 5},
            {**RECORD, "ids": {"a": 1}},
        )
    ),
]


def test_a_malformed_record_does_not_hide_the_others(program: Program, channel: Any) -> None:
    channel.queue_declare("bide.audit", durable=True, arguments={"x-queue-type": "stream"})
    for body in (*MALFORMED, *(json.dumps(one).encode() for one in WHOLE)):
        channel.basic_publish("", "bide.audit", body)
    done = program.run("errors", "history")
    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout.splitlines()) == len(WHOLE)
    assert done.stderr.decode().splitlines() == [
        f"bide: left out {len(MALFORMED)} messages that are not records of an operation: see the stream 'bide.audit'"
    ]
    done = program.run("errors", "history", "--json")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, len(WHOLE))
