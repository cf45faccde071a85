"""Lateness of delayed messages, and a check that 50 ms more fails the limits."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import pytest

import bide
from bide.client.encoding import Encoder
from bide.topology import Topology
from tests.faults.proxy import Proxy
from tests.support import Vhost
from tests.timing.lateness import INFRASTRUCTURES, MAX_STEAL, Delayed, Round, measure, without_steal

ADDED: Final = timedelta(milliseconds=50)
EVERY_MEDIAN: Final = dict.fromkeys(INFRASTRUCTURES, 50)


async def test_delayed_messages_are_as_punctual_as_undelayed_ones(vhost: Vhost) -> None:
    found = await without_steal(lambda: measure(vhost.url, seconds=10))
    sys.stdout.write(f"{found}\n")  # shown by -rP
    assert found.too_late() == {}, f"above the limits:\n{found}"


async def test_50_ms_more_in_the_encoder_is_too_late(vhost: Vhost, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Encoder.encode

    def encode_slowly(*args: Any, **options: Any) -> Any:
        time.sleep(ADDED.total_seconds())  # the lateness to detect
        return encode(*args, **options)

    monkeypatch.setattr(Encoder, "encode", encode_slowly)
    # The encoders of all clients share the event loop: this rate occupies it for 60 % of the time.
    found = await measure(vhost.url, seconds=4, rate=4)
    assert late_medians(found) == EVERY_MEDIAN, found


async def test_50_ms_more_in_the_levels_is_too_late(vhost: Vhost) -> None:
    assert late_medians(await measure(vhost.url, seconds=3, infrastructures=SLOW)) == EVERY_MEDIAN


async def test_50_ms_more_between_broker_and_consumer_is_too_late(vhost: Vhost) -> None:
    async with Proxy(vhost.url) as proxy:
        proxy.lag = ADDED.total_seconds()
        found = await measure(vhost.url, client_url=proxy.url, seconds=3)
    assert late_medians(found) == EVERY_MEDIAN, found


async def test_50_ms_more_in_the_consumer_is_too_late(vhost: Vhost) -> None:
    found = await measure(vhost.url, seconds=3, rate=10, consumer_pause=ADDED.total_seconds())
    assert late_medians(found) == EVERY_MEDIAN, found


def test_50_ms_more_for_one_message_in_fifty_is_too_late() -> None:
    few = Delayed(milliseconds=[5.0] * 490 + [55.0] * 10, hops=1)
    found = Round(undelayed=[2.0] * 500, delayed={"clock": few}, steal=0)
    assert found.too_late() == {"clock": [99]}


@pytest.mark.parametrize(("steals", "rounds"), [([0.0], 1), ([0.2, 0.0], 2), ([0.2, 0.2, 0.2], 3)])
async def test_a_round_is_repeated_for_its_steal_twice_at_most(steals: list[float], rounds: int) -> None:
    left = [Round(undelayed=[1.0], delayed={}, steal=steal) for steal in steals]
    measured: list[Round] = []

    async def next_round() -> Round:
        measured.append(left.pop(0))
        return measured[-1]

    assert await without_steal(next_round) is measured[-1]
    assert len(measured) == rounds


async def test_a_round_is_not_repeated_for_its_result() -> None:
    late = Round(undelayed=[1.0], delayed={"clock": Delayed(milliseconds=[500.0], hops=1)}, steal=MAX_STEAL)
    measured: list[Round] = []

    async def only_round() -> Round:
        measured.append(late)
        return late

    assert (await without_steal(only_round)).too_late() == {"clock": [50, 99]}
    assert len(measured) == 1


def late_medians(found: Round) -> dict[str, int]:
    return {name: 50 for name, percents in found.too_late().items() if 50 in percents}


def slowed(topology: Topology) -> Topology:
    """The same topology, whose queues hold every message back for 50 ms more."""
    queues = []
    for queue in topology.queues:
        ttl = queue.arguments.get("x-message-ttl")
        longer = {"x-message-ttl": ttl + ADDED // timedelta(milliseconds=1)} if isinstance(ttl, int) else {}
        queues.append(replace(queue, arguments={**queue.arguments, **longer}))
    return Topology(topology.exchanges, queues, topology.bindings)


class SlowClock(bide.Clock):
    __slots__ = ()

    def topology(self) -> Topology:
        return slowed(super().topology())


class SlowNServiceBus(bide.NServiceBus):
    __slots__ = ()

    def topology(self) -> Topology:
        return slowed(super().topology())


class SlowCelery(bide.Celery):
    __slots__ = ()

    def topology(self) -> Topology:
        return slowed(super().topology())


SLOW: Final[Mapping[str, bide.DelayInfrastructure]] = {
    "clock": SlowClock(max_delay=timedelta(seconds=5)),
    "nservicebus": SlowNServiceBus(routing="direct"),
    "celery": SlowCelery(),
}
