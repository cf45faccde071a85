"""The copy of a message that a replay chooses, with reused ids and skewed clocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bide.pipelines.audit import facts
from bide.pipelines.audit.folder import Folder
from bide.pipelines.replay.fact_tables import fact_tables
from bide.pipelines.replay.from_audit import failures, locate
from tests.spark.test_audit_tables import at, digits, happened, ms, native, tapped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WEEK = 604_800

Copies = list[dict[str, Any]]


@pytest.fixture
def folder(spark: SparkSession, tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(str(tmp_path / "audit"))
    folder.begin()
    yield folder
    spark.catalog.clearCache()


def taken(
    spark: SparkSession, folder: Folder, *, ends: Copies, delivered: Copies, scheduled: Copies | None = None
) -> dict[str, str | None]:
    """The name of the copy that is taken of each message that failed, by both engines."""
    for table, copies in (("scheduled", scheduled or []), ("delivered", delivered)):
        # Each copy is in a stream of its own, by which it is known here.
        messages = tapped(spark, *({**one, "stream": one["name"]} for one in copies))
        layouts = {one["name"]: one.get("layout", "clock") for one in copies} or {"none": "clock"}
        folder.append(getattr(facts, table)(messages, layouts), table, 0)
    events = facts.events(tapped(spark, *ends))
    folder.append(facts.failed(events), "failed", 0)
    folder.append(facts.processed(events), "processed", 0)
    found = {row["message_id"]: row["stream"] for row in locate(failures(spark, folder), folder).collect()}
    with fact_tables(folder) as tables:
        here = {row["message_id"]: row["stream"] for row in tables.locate(tables.failures())}
    assert here == found
    return found


def copy(name: str, message_id: str, *, due: float, sent: float, **more: Any) -> dict[str, Any]:
    """What a tap sees of a message of bide, at its due time."""
    return {"name": name, "timestamp": at(due), **native(message_id, due=due, sent=sent, **more)}


def strange(name: str, message_id: str, when: float, *, delay: int = 9) -> dict[str, Any]:
    """The tap's record of a message without a time of sending."""
    return {"name": name, "timestamp": at(when), "message_id": message_id, "routing_key": f"{digits(delay)}.orders"}


def from_net(name: str, message_id: str, *, due: float, sent: str) -> dict[str, Any]:
    """What a tap sees of a message of NServiceBus."""
    headers = {"NServiceBus.MessageId": message_id, "NServiceBus.TimeSent": f"2026-11-21 {sent} Z"}
    return {**strange(name, "", due), "message_id": None, "headers": headers, "layout": "nservicebus"}


def retry(name: str, message_id: str, *, due: float, sent: float) -> dict[str, Any]:
    return copy(name, message_id, due=due, sent=sent, headers={"bide-retries": "1", "bide-first-due": str(ms(due - 9))})


def test_a_reused_message_id_is_resolved_by_the_time_of_sending(spark: SparkSession, folder: Folder) -> None:
    """By the time of sending; a copy for a retry does not count as newer than a message sent a week later."""
    last = -WEEK
    delivered = [
        copy("last", "order-7", due=last, sent=last - 60),
        retry("last, retried", "order-7", due=last + 9, sent=last - 60),
        copy("this", "order-7", due=0, sent=-60),
        # It failed a week ago, and has not failed since.
        copy("last", "order-8", due=last, sent=last - 60),
        copy("this", "order-8", due=0, sent=-60),
        # To an exchange, and back to one of its queues.
        copy("last", "event", due=last, sent=last - 60, headers={"bide-to": "x:shop"}),
        retry("last, retried", "event", due=last + 9, sent=last - 60),
        copy("this", "event", due=0, sent=-60, headers={"bide-to": "x:shop"}),
        copy("last", "not delayed", due=last, sent=last - 60),
        copy("first", "replayed", due=0, sent=-60),
        retry("first, retried", "replayed", due=9, sent=-60),
        copy("again", "replayed", due=50, sent=-60),
    ]
    ends = [
        happened("retried", "order-7", ended=last + 1, sent=ms(last - 60), due=ms(last)),
        happened("processed", "order-7", ended=last + 10, sent=ms(last - 60), due=ms(last), retries=1),
        happened("discarded", "order-7", ended=1, sent=ms(-60), due=ms(0)),
        happened("discarded", "order-8", ended=last + 1, sent=ms(last - 60), due=ms(last)),
        happened("retried", "event", ended=last + 1, sent=ms(last - 60), due=ms(last)),
        happened("processed", "event", ended=last + 10, sent=ms(last - 60), due=ms(last), retries=1),
        happened("discarded", "event", ended=1, sent=ms(-60), due=ms(0)),
        happened("discarded", "not delayed", ended=1, sent=ms(0)),
        happened("retried", "replayed", ended=1, sent=ms(-60), due=ms(0)),
        happened("discarded", "replayed", ended=10, sent=ms(-60), due=ms(0), retries=1),
        happened("discarded", "replayed", ended=51, sent=ms(-60), due=ms(50)),
    ]
    assert taken(spark, folder, ends=ends, delivered=delivered) == {
        "order-7": "this",
        "order-8": "last",
        "event": "this",
        "not delayed": None,
        "replayed": "again",
    }


def test_without_a_time_of_sending_the_time_of_the_failure_decides(spark: SparkSession, folder: Folder) -> None:
    """By the time of the failure, as well as clocks agree."""
    delivered = [
        strange("before", "again", -100),
        strange("it", "again", 4),
        strange("after", "again", 100),
        strange("it", "the endpoint's clock is slow", 8),
        strange("after", "used later", 100),
        copy("it", "the endpoint's clock is an hour slow", due=3_600, sent=3_540),
        copy("it", "seen twice", due=0, sent=-60) | {"timestamp": at(-0.1)},
        from_net("first", "of .NET", due=-20, sent="11:58:59:250750"),
        from_net("it", "of .NET", due=0, sent="11:58:59:250750"),
        from_net("it, retried", "of .NET, retried", due=0, sent="11:58:59:250750"),
    ]
    scheduled = [
        strange("it, scheduled", "again", -5),
        strange("it", "only scheduled", -5),
        strange("due after the failure", "only scheduled", 0, delay=60),
        copy("it, scheduled", "seen twice", due=0, sent=-60),
    ]
    names = ("again", "the endpoint's clock is slow", "used later", "only scheduled", "seen twice")
    ends = [happened("discarded", name, ended=5) for name in names]
    ends.append(happened("discarded", "of .NET", ended=5, sent=ms(-60.749)))
    # An operator's retry of it, with the time of that.
    ends.append(happened("discarded", "of .NET, retried", ended=5, sent=ms(1)))
    ends.append(happened("discarded", "the endpoint's clock is an hour slow", ended=5, sent=ms(3_540)))
    assert taken(spark, folder, ends=ends, delivered=delivered, scheduled=scheduled) == {
        "again": "it",
        "the endpoint's clock is slow": "it",
        "used later": None,
        "the endpoint's clock is an hour slow": "it",
        "only scheduled": "it",
        "seen twice": "it",
        "of .NET": "it",
        "of .NET, retried": "it, retried",
    }
