"""Recognition of the queues of delay infrastructures."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import bide
from bide.delay import recognition
from bide.delay.allowed_targets import ANY_TARGET
from bide.delay.protocol import ExchangeTarget, QueueTarget
from bide.delay.waiting_hall import WaitingHall
from bide.errors import DelayQueueError
from bide.patterns.event_bus import EventBusQueue
from bide.schedules.names import ScheduleNames
from bide.topology import Queue

LAYOUTS = (
    bide.Clock(),
    bide.Clock(prefix="a.b", lanes=2),
    bide.Clock(hides_keys=True),
    bide.Clock(hides_keys=True, prefix="a.b"),
    bide.NServiceBus(),
    bide.NServiceBus(version=1),
    bide.Celery(),
    bide.Celery(prefix="shop"),
    WaitingHall(),
    WaitingHall(prefix="x", resolution=timedelta(milliseconds=250), levels=3),
)
"""One of each, with standard names and with others."""

TARGETS = (QueueTarget("q", isolated=True), ExchangeTarget("x", "k"), ExchangeTarget("x.y", "a.b"))
LONG_TARGETS = (QueueTarget("q" * 240, isolated=True), ExchangeTarget("x" * 120, "k" * 240))
"""Targets that only Clock can have: the names of their release queues end with a hash."""

LEGITIMATE = (
    *("error", "error.archive", "orders", "orders.retry", "orders.delay", "orders.parked", "bide.audit"),
    *(
        "bide.v1",
        "bide.v1.",
        "bide.v1.h",
        "bide.v1.h0",
        "bide.v1.h24",
        "bide.v1.delivery",
        "orders.v1.release.eu",
    ),
    *("orders.v1.release.k", "bide.release.orders:x", "bide.release.nsb"),
    *(
        "nsb.delay-delivery",
        "celery",
        "celery_delayed_delivery",
        "celery_delayed_",
        "nsb.delay-level-1",
        "dead.letters",
    ),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_delay_queues_are_refused_as_error_queues(layout: Any) -> None:
    queues = list(layout.topology().queues)
    for target in (*TARGETS, *LONG_TARGETS) if isinstance(layout, bide.Clock) else TARGETS:
        queues += layout.route(timedelta(seconds=5), target).requires.queues
    for queue in queues:
        if queue.name == layout.undeliverable:
            continue
        for arguments in (None, queue.arguments):
            with pytest.raises(DelayQueueError, match="belongs to a delay infrastructure"):
                recognition.refuse(queue.name, arguments)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_undeliverable_messages_can_be_read_but_not_sent(layout: Any) -> None:
    recognition.refuse(layout.undeliverable)
    with pytest.raises(DelayQueueError, match=r"undeliverable\.resend\("):
        recognition.refuse(layout.undeliverable, sends=True)


@pytest.mark.parametrize("name", LEGITIMATE)
def test_other_queues_are_accepted(name: str) -> None:
    recognition.refuse(name, sends=True)
    recognition.refuse(name, {}, sends=True)
    assert recognition.part_of(name) is recognition.part_of(name, {}) is None


def test_the_queues_of_the_schedule_log_are_refused() -> None:
    names = ScheduleNames(prefix="shop")
    for queue in names.topology().queues:
        for arguments in (None, queue.arguments):
            if queue.name == names.undeliverable:
                recognition.refuse(queue.name, arguments)
            else:
                with pytest.raises(DelayQueueError, match="belongs to the schedule log"):
                    recognition.refuse(queue.name, arguments)
            with pytest.raises(DelayQueueError):
                recognition.refuse(queue.name, arguments, sends=True)
            with pytest.raises(DelayQueueError):
                recognition.refuse_target(queue.name, arguments)
    recognition.refuse(names.log(0), {"x-queue-type": "quorum"})


@pytest.mark.parametrize("prefix", ["bide", "a.b"])
def test_processes_that_deliver_for_senders_refuse_the_exchanges_of_the_schedule_log(prefix: str) -> None:
    for exchange in ScheduleNames(prefix=prefix).topology().exchanges:
        with pytest.raises(DelayQueueError, match="belongs to the schedule log"):
            ANY_TARGET.check_delivery(ExchangeTarget(exchange.name, "0"))
    for name in ("shop", f"{prefix}.schedule.gates", f"{prefix}.v1.schedule.gates.mine"):
        ANY_TARGET.check_delivery(ExchangeTarget(name, "0"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_layout_owns_the_schedule_log(layout: Any) -> None:
    prefixes = ("bide", "a.b", "x", "bide.hall", "x.hall-250ms")
    for names in (ScheduleNames(prefix=one) for one in prefixes):
        topology = names.topology()
        every = [one.name for one in topology.exchanges] + [one.name for one in topology.queues]
        assert not any(map(layout.owns, every))


def test_the_queues_of_an_event_bus_are_not_refused() -> None:
    for queue in EventBusQueue(exchange="shop", queue="orders", delay="5s").topology().queues:
        recognition.refuse(queue.name, queue.arguments, sends=True)
        assert recognition.part_of(queue.name, queue.arguments) is None


def test_a_foreign_queue_named_like_a_delay_queue_is_accepted_by_its_arguments() -> None:
    recognition.refuse("backup.v1.s3", Queue.quorum("backup.v1.s3").arguments)
    with pytest.raises(DelayQueueError):
        recognition.refuse("backup.v1.s3")


def test_a_level_under_another_name_is_refused_by_its_arguments() -> None:
    for behind in ("bide.v1.m", "a.b.v1.released", "nsb.v2.delay-level-03", "celery_delayed_delivery"):
        with pytest.raises(DelayQueueError):
            recognition.refuse("mine", {"x-message-ttl": 1000, "x-dead-letter-exchange": behind})
    recognition.refuse("mine", {"x-message-ttl": 1000, "x-dead-letter-exchange": "shop"})


def test_a_message_is_waiting_until_it_died_in_every_queue_of_its_keys() -> None:
    keys = {"CC": ["~.~h1", "~.~m0", "~.~s5/2", "~.~x:shop"]}

    def died(*queues: str) -> dict[str, Any]:
        return {**keys, "x-death": [{"queue": queue, "reason": "expired"} for queue in queues]}

    assert recognition.is_waiting("bide.v1.in.h", "a.b", keys)
    assert recognition.is_waiting("bide.v1.m", "a.b", died("bide.v1.h1"))
    assert not recognition.is_waiting("bide.v1.released", "a.b", died("bide.v1.h1", "bide.v1.s5/2"))
    assert not recognition.is_waiting("bide.v1.c", "a.b", died("bide.v1.h1", "bide.v1.s5/2"))
    assert recognition.is_waiting("bide.v1.in.h", "a.b", {}), "its keys were BCC"
    assert not recognition.is_waiting("bide.v1.m", "a.b", {"x-death": [{"queue": "bide.v1.h1"}]})
    assert not recognition.is_waiting("", "error", keys), "a copy that another program made"

    key = ".".join("0" * 25 + "101") + ".orders"
    level = {"x-death": [{"queue": "nsb.v2.delay-level-02"}]}
    assert recognition.is_waiting("nsb.v2.delay-level-02", key, {})
    assert recognition.is_waiting("nsb.v2.delay-level-01", key, level)
    both = {"x-death": [*level["x-death"], {"queue": "nsb.v2.delay-level-00"}]}
    assert not recognition.is_waiting("nsb.v2.delay-level-00", key, both)
    assert recognition.is_waiting("bide.hall.v1.level-03", "1.0", {"bide-rest": 1000})
    assert not recognition.is_waiting("bide.hall.v1.level-03", "1.0", {"x-death": None})
