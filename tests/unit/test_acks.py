"""Gathered acknowledgements, against a broker that settles what each frame says and refuses what RabbitMQ refuses."""

from __future__ import annotations

import asyncio
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.amqp.acks import ACK_DELAY, Acks, AckSender


def frames(acks: Acks) -> list[tuple[int, bool]]:
    """Tag and the flag for many, of each frame."""
    return [struct.unpack(">QB", payload[4:]) for payload in acks.take()]


@given(st.integers(1, 30), st.data())
def test_what_is_said_is_what_was_meant(deliveries: int, data: st.DataObject) -> None:
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


def test_in_order_it_is_one_frame() -> None:
    acks = Acks()
    for tag in range(1, 1_001):
        acks.add(tag)
    assert frames(acks) == [(1_000, True)]
    acks.add(1_001)
    assert frames(acks) == [(1_001, False)]


def test_a_gap_holds_back_what_comes_after_it_and_no_more() -> None:
    acks = Acks()
    for tag in (1, 2, 4, 5):
        acks.add(tag)
    assert frames(acks) == [(2, True), (4, False), (5, False)]
    acks.add(6)
    acks.add(3)
    assert frames(acks) == [(6, True)]


def test_a_message_that_is_kept_costs_no_more_with_time() -> None:
    acks = Acks()
    for tag in range(2, 10_000):
        acks.add(tag)
    assert len(frames(acks)) == 9_998
    assert len(acks._ends) == len(acks._starts) == 1
    acks.add(1)
    acks.add(10_000)
    assert frames(acks) == [(10_000, True)]
    assert not acks._ends
    assert not acks._starts


def test_all_up_to_one() -> None:
    acks = Acks()
    acks.add(5)
    acks.settled(4, multiple=True)
    acks.add(6)
    assert frames(acks) == [(6, True)]
    for tag in (8, 9, 11):
        acks.add(tag)
    acks.settled(8, multiple=True)
    assert frames(acks) == [(9, True), (11, False)]


def test_a_second_settlement_is_the_brokers_to_refuse() -> None:
    acks = Acks()
    acks.add(1)
    acks.add(1)
    assert frames(acks) == [(1, False), (1, False)]
    acks.add(77)
    assert frames(acks) == [(77, False)]


async def test_acknowledgements_wait_a_moment_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sent = asyncio.get_running_loop(), list[bytes]()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    sender = AckSender(loop, sent.append)
    sender.expect(100)
    for tag in range(1, 11):
        sender.add(tag)
        await asyncio.sleep(0)
    assert not sent
    # The loop runs a timer that is due within the resolution of its clock, one turn after it has looked at the clock.
    now += ACK_DELAY
    for _ in range(3):
        await asyncio.sleep(0)
    assert [struct.unpack(">QB", payload[4:]) for payload in sent] == [(10, True)]


@pytest.mark.parametrize(("prefetch", "most"), [(1, 1), (7, 1), (8, 2), (100, 25), (0, 16_383)])
async def test_a_quarter_of_the_prefetch_does_not_wait(prefetch: int, most: int) -> None:
    sent: list[bytes] = []
    sender = AckSender(asyncio.get_running_loop(), sent.append)
    sender.expect(prefetch)
    for tag in range(1, most + 3):
        sender.add(tag)
    assert not sent
    await asyncio.sleep(0)
    assert [struct.unpack(">QB", payload[4:]) for payload in sent] == [(most + 2, True)]


async def test_what_is_dropped_is_never_sent() -> None:
    sent: list[bytes] = []
    sender = AckSender(asyncio.get_running_loop(), sent.append)
    sender.expect(8)
    sender.add(1)
    sender.drop()
    sender.add(2)
    sender.add(3)
    sender.drop()
    await asyncio.sleep(3 * ACK_DELAY)
    assert not sent
