"""What a gate delivers, delivers again and reports, and how its messages look."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from bide.delay.allowed_targets import ANY_TARGET, AllowedTargets
from bide.gate.delivery_queue import (
    CROWDED,
    IN_FLIGHT,
    IN_FLIGHT_BYTES,
    REPORT_AFTER,
    REPORT_ITEMS,
    DeliveryQueue,
    OccurrenceHead,
)
from bide.gate.room import LogRoom
from bide.gate.scheduled_delivery import DeliveryRules
from bide.gate.target_windows import WINDOW, TargetWindows
from bide.schedules.entries import UnderWay
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import MAX_RESERVATIONS, ScheduleNames
from bide.schedules.state import LogPosition

NAMES = ScheduleNames()


def to(occurrences: Iterable[str], target: str = "q:mails", size: int = 10) -> list[OccurrenceHead]:
    return [OccurrenceHead(one, target, size) for one in occurrences]


def one_each(count: int, size: int = 10) -> list[OccurrenceHead]:
    """Occurrences for different targets."""
    return [OccurrenceHead(f"a-{number}", f"q:{number}", size) for number in range(count)]


# -- which occurrences


def test_an_occurrence_is_sent_once_until_its_end_was_read() -> None:
    deliveries = DeliveryQueue()
    deliveries.add(to(["a", "b"]))
    assert deliveries.take(0.0, 10) == ["a", "b"]
    deliveries.add(to(["a", "b"]))
    assert deliveries.take(0.0, 10) == []
    deliveries.ended("a", "delivered", 0.0)
    deliveries.gone("b")
    deliveries.add(to(["a"]))
    assert deliveries.take(0.0, 10) == []
    assert [one.occurrence for one in deliveries.report(0.0)] == ["a"]
    assert not deliveries.is_settled
    deliveries.read(["a"])
    assert deliveries.is_settled


def test_an_occurrence_is_sent_when_it_is_due_by_the_clock_of_the_gate() -> None:
    deliveries = DeliveryQueue()
    deliveries.add([*(OccurrenceHead(f"due at {due}", f"q:{due}", 10, due) for due in (70, 50, 60)), *to(["now"])])
    assert (deliveries.take(0.0, 10), deliveries.next_due) == (["now"], 50)
    assert (deliveries.early, deliveries.backlog, deliveries.pending) == (3, 0, 4)
    deliveries.queue_due(49)
    assert deliveries.take(0.0, 10) == []
    deliveries.queue_due(60)
    assert (deliveries.early, deliveries.backlog, deliveries.pending) == (1, 2, 4)
    # The clock is set back: what was due stays so, and what was not waits for longer.
    deliveries.queue_due(10)
    assert deliveries.take(0.0, 10) == ["due at 50", "due at 60"]
    deliveries.add([OccurrenceHead("due at 70", "q:70", 10, 70)])
    deliveries.queue_due(70)
    assert (deliveries.take(0.0, 10), deliveries.next_due) == (["due at 70"], None)


def test_what_is_not_due_when_a_gate_stops_leading_is_taken_again_when_it_leads_again() -> None:
    deliveries, early = DeliveryQueue(), [OccurrenceHead("a", "q:mails", 10, 50)]
    deliveries.add(early)
    deliveries.release()
    assert (deliveries.early, deliveries.pending, deliveries.is_settled) == (0, 0, True)
    deliveries.queue_due(50)
    assert deliveries.take(0.0, 10) == []
    deliveries.add(early)
    deliveries.queue_due(50)
    assert deliveries.take(0.0, 10) == ["a"]


def test_what_is_not_due_crowds_no_target() -> None:
    """If the clock is set back, it may wait for long, and nothing more would be claimed for the target."""
    deliveries = DeliveryQueue()
    deliveries.add(OccurrenceHead(str(number), "q:mails", 10, 50) for number in range(CROWDED))
    assert deliveries.crowded == set()
    deliveries.queue_due(50)
    assert deliveries.crowded == {"q:mails"}


def test_a_refused_occurrence_waits_longer_each_time_and_beside_the_others() -> None:
    deliveries, now, pauses = DeliveryQueue(), 0.0, list[float]()
    deliveries.add(to(["a"]))
    for _ in range(9):
        assert deliveries.take(now, 10) == ["a"]
        deliveries.refused("a", now)
        deliveries.add(to([f"other at {now}"]))
        assert deliveries.take(now, 10) == [f"other at {now}"]
        deliveries.ended(f"other at {now}", "delivered", now)
        begun = now
        while not (taken := deliveries.take(now, 10)):
            now += 0.5
        assert taken == ["a"]
        pauses.append(now - begun)
        deliveries.refused("a", now)
        now += 100
    # Each round has two refusals.
    assert pauses == [1, 4, 16, 64, 64, 64, 64, 64, 64]


def test_a_few_hundred_are_in_flight() -> None:
    deliveries = DeliveryQueue()
    deliveries.add(one_each(2 * IN_FLIGHT))
    assert len(deliveries.take(0.0, 10_000)) == IN_FLIGHT
    assert deliveries.take(0.0, 10_000) == []
    assert deliveries.backlog == IN_FLIGHT
    deliveries.ended("a-0", "delivered", 0.0)
    assert deliveries.take(0.0, 10_000) == [f"a-{IN_FLIGHT}"]


def test_a_target_with_thousands_takes_no_places_of_others() -> None:
    deliveries = DeliveryQueue()
    deliveries.add(to((f"slow {number}" for number in range(10_000)), "q:slow"))
    deliveries.add(to(["quick"], "q:quick"))
    taken = deliveries.take(0.0, 10_000)
    assert taken[1] == "quick"
    assert len(taken) == WINDOW + 1
    assert deliveries.backlog == 0
    assert deliveries.crowded == {"q:slow"}


def test_a_place_that_is_free_again_goes_to_the_next_message_of_any_partition() -> None:
    woken, windows = list[str](), TargetWindows()
    first, second = DeliveryQueue(lambda: woken.append("first")), DeliveryQueue(lambda: woken.append("second"))
    for one in (first, second):
        one.on_connection_lost(windows)
        one.add(to((f"a-{number}" for number in range(WINDOW + 1)), "q:slow"))
    assert len(first.take(0.0, 100)) == WINDOW
    assert (first.take(0.0, 100), second.take(0.0, 100), woken) == ([], [], [])
    windows.leave("q:slow")
    assert woken == ["first", "second"]
    assert (second.take(0.0, 100), first.take(0.0, 100)) == (["a-0"], [])
    windows.leave("q:slow")
    assert woken[2:] == ["second", "first"]
    assert first.take(0.0, 100) == [f"a-{WINDOW}"]


def test_messages_in_flight_have_a_limit_in_bytes() -> None:
    deliveries = DeliveryQueue()
    deliveries.add(one_each(10, size=IN_FLIGHT_BYTES // 3))
    assert len(deliveries.take(0.0, 100)) == 4
    deliveries.ended("a-0", "delivered", 0.0)
    assert deliveries.take(0.0, 100) == ["a-4"]
    deliveries.release()
    deliveries.add(to(["large"], size=10 * IN_FLIGHT_BYTES))
    for one in range(1, 5):
        deliveries.ended(f"a-{one}", "delivered", 0.0)
    assert deliveries.take(0.0, 100) == ["large"]


def test_a_target_is_crowded_until_few_wait_for_it() -> None:
    deliveries = DeliveryQueue()
    deliveries.add(to((f"a-{number}" for number in range(CROWDED)), "q:full"))
    assert deliveries.crowded == {"q:full"}
    taken = deliveries.take(0.0, 100)
    assert not deliveries.crowded
    assert deliveries.pending == CROWDED
    # Refused ones wait, too.
    for one in taken:
        deliveries.refused(one, 0.0)
    assert deliveries.crowded == {"q:full"}
    deliveries.release()
    assert (deliveries.crowded, deliveries.pending) == (set(), 0)


def test_many_ends_are_reported_together_and_single_ones_at_once() -> None:
    deliveries = DeliveryQueue()
    deliveries.add(to(f"a-{number}" for number in range(2 * REPORT_ITEMS + 1)))
    sent = 0
    while taken := deliveries.take(0.0, 100):
        sent += len(taken)
        deliveries.not_sent(taken)
        for one in taken:
            deliveries.ended(one, "delivered", 0.0)
    assert sent == 2 * REPORT_ITEMS + 1
    assert [len(deliveries.report(0.0)) for _ in range(4)] == [REPORT_ITEMS, REPORT_ITEMS, 1, 0]
    deliveries.add(to(["slow", "quick"]))
    deliveries.take(1.0, 2)
    deliveries.ended("quick", "delivered", 1.0)
    assert deliveries.report(1.0) == ()
    assert [one.occurrence for one in deliveries.report(1.0 + REPORT_AFTER)] == ["quick"]
    deliveries.ended("slow", "delivered", 2.0)
    deliveries.add([OccurrenceHead("soon", "q:mails", 10, 50)])
    assert deliveries.report(2.0) == ()
    assert [one.occurrence for one in deliveries.report(2.1)] == ["slow"]


def test_after_a_lost_connection_what_was_confirmed_is_reported_again_and_not_sent_again() -> None:
    deliveries = DeliveryQueue()
    deliveries.add(to(["reported", "ended", "in flight", "refused"]))
    deliveries.take(0.0, 4)
    deliveries.ended("reported", "delivered", 0.0)
    assert deliveries.report(REPORT_AFTER)
    deliveries.ended("ended", "undeliverable", 0.0)
    deliveries.refused("refused", 0.0)
    deliveries.on_connection_lost(TargetWindows())
    assert [one.occurrence for one in deliveries.report(0.0)] == ["reported", "ended"]
    deliveries.add(to(["reported", "ended", "in flight", "refused"]))
    assert deliveries.take(0.0, 4) == ["in flight", "refused"]


# -- how a message looks


def occurrence(target: str = "q:mails", **values: Any) -> UnderWay:
    return UnderWay(
        occurrence="a-1@5",
        key="k",
        id="a-1",
        target=target,
        routing_key="rk",
        nominal=5,
        due=6,
        is_recurring=False,
        message=ScheduledMessage.of(values, b"body"),
    )


def rules(allowed: AllowedTargets = ANY_TARGET) -> DeliveryRules:
    return DeliveryRules(NAMES, allowed, "gate")


def test_only_a_recurring_message_gets_the_id_of_its_occurrence() -> None:
    single = occurrence(message_id="own")
    assert rules().delivery(single).values["message_id"] == "own"
    assert rules().delivery(replace(single, is_recurring=True)).values["message_id"] == "a-1@5"


def test_a_user_id_stays_if_it_is_that_of_the_gate() -> None:
    assert rules().delivery(occurrence(user_id="gate")).values["user_id"] == "gate"
    other = rules().delivery(occurrence(user_id="other")).values
    assert "user_id" not in other
    assert other["headers"]["bide-user-id"] == "other"


@pytest.mark.parametrize("name", ["CC", "BCC"])
def test_copies_on_the_default_exchange_need_allowed_queues(name: str) -> None:
    allowed = AllowedTargets.of(["mails", "copies", "shop"])
    assert not rules(allowed).delivery(occurrence(headers={name: ["copies"]})).reason
    assert "secret" in rules(allowed).delivery(occurrence(headers={name: ["copies", "secret"]})).reason
    # An exchange routes them among its own bindings.
    assert not rules(allowed).delivery(occurrence("x:shop", headers={name: ["secret"]})).reason
    refused = rules(allowed).delivery(occurrence(headers={name: ["secret"]}))
    assert name not in refused.values["headers"]
    assert (refused.exchange, refused.routing_key) == ("", NAMES.undeliverable)


def test_properties_that_cannot_be_read_are_left_out_of_an_undeliverable_message() -> None:
    broken = replace(occurrence(), message=ScheduledMessage(b"\xff\xff", b"body"))
    delivery = rules().delivery(broken)
    assert "cannot be decoded" in delivery.reason
    assert delivery.values["headers"]["bide-key"] == "k"


# -- room


def test_a_gate_writes_less_the_fuller_the_log_is() -> None:
    room = LogRoom(8_000)
    levels = [room.level(LogPosition(size=size, carried_size=1000)) for size in (5_000, 5_001, 6_000, 6_001)]
    assert levels == ["free", "reserved", "reserved", "full"]
    assert not room.needs_snapshot(LogPosition(size=3_000, carried_size=1000))
    assert room.needs_snapshot(LogPosition(size=3_001, carried_size=1000))
    assert (room.may_purge(999), room.may_purge(1000)) == (True, False)


def test_many_tickets_need_a_snapshot_unless_the_state_is_too_large_to_free_them() -> None:
    room = LogRoom(8_000, reservations=MAX_RESERVATIONS // 2 + 1)
    assert room.needs_snapshot(LogPosition(size=1))
    room.last_cycle = 1000
    assert not room.needs_snapshot(LogPosition(size=1))


def test_a_large_state_is_not_carried_without_end() -> None:
    room = LogRoom(8_000, last_cycle=2_500)
    assert not room.needs_snapshot(LogPosition(size=3_000))
    assert room.needs_snapshot(LogPosition(size=3_501))
    room.last_cycle = 3_500
    assert not room.needs_snapshot(LogPosition(size=4_000))
    assert room.needs_snapshot(LogPosition(size=4_001))
