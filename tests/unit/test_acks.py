"""Batched acks, against a channel that settles and refuses like RabbitMQ."""

from __future__ import annotations

import asyncio
import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.amqp.acks import ACK_DELAY, Acks, AckSender


def frames(acks: Acks) -> list[tuple[int, bool]]:
    """Tag and the flag for many, of each frame."""
    return [struct.unpack(">QB", payload[4:]) for payload in acks.take()]


@given(st.integers(1, 30), st.data())
def test_every_acknowledged_message_and_no_other_is_acknowledged_to_the_broker(
    deliveries: int, data: st.DataObject
) -> None:
    """Whatever is acknowledged and otherwise settled, in whatever order, nothing else is, and nothing is left out."""
    acks = Acks()
    order = data.draw(st.permutations(range(1, deliveries + 1)))
    unsettled, acknowledged = set(order), set[int]()
    for tag in order:
        match data.draw(st.sampled_from(["ack", "ack", "ack", "other", "keep", "send"])):
            case "ack":
                acks.add(tag)
                acknowledged.add(tag)
            case "other":
                acks.settled(tag)
                unsettled.remove(tag)
            case "send":
                _apply(acks, unsettled, acknowledged)
            case _:
                pass
    _apply(acks, unsettled, acknowledged)
    assert not acks


def _apply(acks: Acks, unsettled: set[int], acknowledged: set[int]) -> None:
    for tag, multiple in frames(acks):
        # RabbitMQ closes the channel for a tag that it does not wait for, that of many included.
        assert tag in unsettled
        settled = {one for one in unsettled if one <= tag} if multiple else {tag}
        assert settled <= acknowledged
        unsettled -= settled
    assert not unsettled & acknowledged


def test_acks_in_order_are_sent_as_one_frame() -> None:
    acks = Acks()
    for tag in range(1, 1_001):
        acks.add(tag)
    assert frames(acks) == [(1_000, True)]
    acks.add(1_001)
    assert frames(acks) == [(1_001, False)]


def test_a_gap_keeps_later_acks_out_of_the_multiple_frame() -> None:
    acks = Acks()
    for tag in (1, 2, 4, 5):
        acks.add(tag)
    assert frames(acks) == [(2, True), (4, False), (5, False)]
    acks.add(6)
    acks.add(3)
    assert frames(acks) == [(6, True)]


def test_one_unacknowledged_message_does_not_make_memory_grow() -> None:
    acks = Acks()
    for tag in range(2, 10_000):
        acks.add(tag)
    assert len(frames(acks)) == 9_998
    assert len(pickle.dumps(acks)) < 1_000
    acks.add(1)
    acks.add(10_000)
    assert frames(acks) == [(10_000, True)]
    assert len(pickle.dumps(acks)) < 1_000


def test_settling_multiple_covers_every_earlier_delivery_tag() -> None:
    acks = Acks()
    acks.add(5)
    acks.settled(4, multiple=True)
    acks.add(6)
    assert frames(acks) == [(6, True)]
    for tag in (8, 9, 11):
        acks.add(tag)
    acks.settled(8, multiple=True)
    assert frames(acks) == [(9, True), (11, False)]


def test_a_duplicate_ack_is_sent_for_the_broker_to_reject() -> None:
    acks = Acks()
    acks.add(1)
    acks.add(1)
    assert frames(acks) == [(1, False), (1, False)]
    acks.add(77)
    assert frames(acks) == [(77, False)]


async def test_acks_are_collected_for_the_ack_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sent = asyncio.get_running_loop(), list[bytes]()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    sender = AckSender(loop, sent.append)
    sender.expect(100)
    for tag in range(1, 11):
        sender.add(tag)
        await asyncio.sleep(0)  # a turn of the loop for each
    assert not sent
    # The loop runs a timer that is due within the resolution of its clock, one turn after it has looked at the clock.
    now += ACK_DELAY
    for _ in range(3):
        await asyncio.sleep(0)
    assert [struct.unpack(">QB", payload[4:]) for payload in sent] == [(10, True)]


@pytest.mark.parametrize(("prefetch", "most"), [(1, 1), (7, 1), (8, 2), (100, 25), (0, 16_383)])
async def test_acks_of_a_quarter_of_the_prefetch_are_sent_at_once(prefetch: int, most: int) -> None:
    sent: list[bytes] = []
    sender = AckSender(asyncio.get_running_loop(), sent.append)
    sender.expect(prefetch)
    for tag in range(1, most + 3):
        sender.add(tag)
    assert not sent
    await asyncio.sleep(0)  # the turn in which it sends
    assert [struct.unpack(">QB", payload[4:]) for payload in sent] == [(most + 2, True)]


async def test_dropped_acks_are_never_sent() -> None:
    sent: list[bytes] = []
    sender = AckSender(asyncio.get_running_loop(), sent.append)
    sender.expect(8)
    sender.add(1)
    sender.drop()
    sender.add(2)
    sender.add(3)
    sender.drop()
    await asyncio.sleep(3 * ACK_DELAY)  # time for an acknowledgement that was not dropped
    assert not sent


def sender_at(now: list[float], monkeypatch: pytest.MonkeyPatch) -> AckSender:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: now[0])
    return AckSender(loop, lambda _: None)


def held_back(sender: AckSender) -> bool:
    return sender.may_be_held_back


async def test_acks_may_be_held_back_after_32_frames_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000.0]
    sender = sender_at(now, monkeypatch)
    for tag in range(2, 66, 2):
        sender.add(tag)
        sender.flush()
    assert not held_back(sender)
    now[0] += 11
    sender.add(66)
    sender.flush()
    # The queue had time to answer.
    assert not held_back(sender)
    for tag in range(68, 132, 2):
        sender.add(tag)
        sender.flush()
    assert held_back(sender)
    now[0] += 11
    assert not held_back(sender)


async def test_an_answer_of_the_queue_ends_the_doubt_about_earlier_acks(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = sender_at([0.0], monkeypatch)
    for tag in range(1, 100):
        sender.settled(2 * tag)
    assert held_back(sender)
    sender.add_barrier()
    assert not held_back(sender)
    sender.settled(200)
    assert not held_back(sender)


async def test_requeues_are_not_missed_but_may_hold_an_ack_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = sender_at([0.0], monkeypatch)
    for tag in range(1, 100):
        sender.settled(tag, requeued=True)
    assert not held_back(sender)
    sender.add(100)
    sender.flush()
    assert held_back(sender)


@pytest.mark.parametrize("got", [False, True])
async def test_one_frame_is_a_command_for_each_message_of_a_get(monkeypatch: pytest.MonkeyPatch, got: bool) -> None:
    sender = sender_at([0.0], monkeypatch)
    if got:
        sender.got()
    for tag in range(1, 41):
        sender.add(tag)
    sender.flush()
    assert held_back(sender) == got


@given(st.lists(st.integers(1, 30), unique=True), st.integers(0, 30))
def test_settled_deliveries_are_counted(tags: list[int], together: int) -> None:
    acks = Acks()
    for tag in tags:
        acks.add(tag)
    if together:
        acks.settled(together, multiple=True)
    assert acks.settled_count == len({*tags, *range(1, together + 1)})
