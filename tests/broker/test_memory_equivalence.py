"""The broker in memory does what RabbitMQ does: made-up cases are played on both, and what clients see is compared.

``BIDE_SOAK=1`` (``make test-equivalence``) compares more than 2,000 cases rather than some eighty.
"""

from __future__ import annotations

import asyncio
import itertools
import pprint
from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.broker import LocalBroker
from tests.broker.equivalence_cases import Case, cases
from tests.broker.equivalence_play import Player, RealTime
from tests.broker.equivalence_races import FIFTH, play_in_memory
from tests.support import SOAK

BATCH: Final = 50 if SOAK else 30
BATCHES: Final = 44 if SOAK else 3
ENOUGH: Final = 2000 if SOAK else 60

_numbers = itertools.count(1)
_compared: list[Case] = []


class Game:
    """A case, what is seen of it in memory, and what of it on RabbitMQ."""

    def __init__(self, case: Case, url: str) -> None:
        self.case = case
        self.prefix = f"k{next(_numbers)}-"
        self._url = BrokerUrl.parse(url)
        self.in_memory: Any = None
        self.in_rabbitmq: Any = None
        self.is_late = False

    async def is_chance(self, release: tuple[int, ...]) -> bool:
        """Play it in memory, and tell whether it depends on chance."""
        self.in_memory, is_chance = await play_in_memory(self.case, self.prefix, release=release)
        return is_chance

    async def play(self, connection: Connection, fifth: int) -> None:
        """Play it on RabbitMQ.

        Args:
            fifth: of a step, in milliseconds.
        """
        pace = RealTime(fifth)
        player = Player(self.case, connection, pace, self.prefix)
        try:
            self.in_rabbitmq = await player.play()
            self.is_late = pace.late > fifth / 2000
        finally:
            await player.clean_up()

    @property
    def is_equal(self) -> bool:
        """Whether both saw the same."""
        return bool(self.in_memory == self.in_rabbitmq)

    async def play_alone(self) -> None:
        """Play it again, by itself and ever slower, for as long as the machine is too slow for it."""
        for slower in (2, 4, 8):
            connection = await Connection.open(self._url)
            try:
                await self.play(connection, FIFTH * slower)
            finally:
                await connection.close()
            if self.is_equal or not self.is_late:
                return

    def __str__(self) -> str:
        found = "\n".join(differences(self.in_memory, self.in_rabbitmq))
        return f"{pprint.pformat(self.case, width=120)}\n{found}"


def differences(memory: Any, rabbitmq: Any, where: str = "") -> Iterator[str]:
    """Where two results differ."""
    if isinstance(memory, dict) and isinstance(rabbitmq, dict):
        for name in {**memory, **rabbitmq}:
            yield from differences(memory.get(name), rabbitmq.get(name), f"{where}.{name}")
    elif isinstance(memory, list) and isinstance(rabbitmq, list) and len(memory) == len(rabbitmq):
        for place, (one, other) in enumerate(zip(memory, rabbitmq, strict=True)):
            yield from differences(one, other, f"{where}[{place}]")
    elif memory != rabbitmq:
        yield f"{where}\n  in memory: {memory}\n  RabbitMQ:  {rabbitmq}"


@pytest.mark.timeout(3600 if SOAK else 240)
@settings(
    max_examples=BATCHES,
    deadline=None,
    print_blob=False,
    # A case that differs is played again by itself, and shown whole: making it smaller would take minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
async def test_made_up_cases(broker: LocalBroker, release: tuple[int, ...], data: st.DataObject) -> None:
    made_up = data.draw(st.lists(cases(release), min_size=BATCH, max_size=BATCH))
    games = [Game(case, broker.url) for case in made_up]
    games = [game for game in games if not await game.is_chance(release)]
    connection = await Connection.open(BrokerUrl.parse(broker.url))
    try:
        await asyncio.gather(*(game.play(connection, FIFTH) for game in games))
    finally:
        await connection.close()
    for game in games:
        if not game.is_equal:
            await game.play_alone()
        if not game.is_equal:
            pytest.fail(str(game), pytrace=False)
        _compared.append(game.case)


def test_enough_was_compared() -> None:
    """After the test above: what was left out as chance must not be most of it."""
    compared = len(_compared)
    assert compared >= ENOUGH
