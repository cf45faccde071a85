"""Generated cases on RabbitMQ and on the in-memory broker, with equal results for clients.

``BIDE_SOAK=1`` (``make test-equivalence``) compares more than 2,000 new cases rather than the same ninety each time.
``BIDE_TEST_START`` repeats the cases of a failed run, with the start that it printed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pprint
import random
from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import BrokerError
from bide.local_broker import LocalBroker
from bide.topology import Queue
from tests.broker.equivalence_cases import Case, Fifths, Rest, Send, Step, Take, cases
from tests.broker.equivalence_pace import RealTime
from tests.broker.equivalence_play import Player
from tests.broker.equivalence_races import FIFTH, play_in_memory
from tests.support import SOAK

CASES: Final = 2000 if SOAK else 90
"""The minimum number of compared cases; cases with a race do not count."""

BATCH: Final = 50 if SOAK else 30

START: Final = 0
"""The start of short runs, which repeat the same cases: new ones could have a race that was not found."""

_numbers = itertools.count(1)


class Comparison:
    """A case with its results in memory and on RabbitMQ."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.prefix = f"k{next(_numbers)}-"
        self.in_memory: Any = None
        self.in_rabbitmq: Any = None
        self.is_late = False

    async def has_race(self, release: tuple[int, ...]) -> bool:
        """Play the case in memory, and return whether its outcome depends on a race."""
        self.in_memory, has_race = await play_in_memory(self.case, self.prefix, release=release)
        return has_race

    async def play(self, url: BrokerUrl, fifth: int) -> None:
        """Play it on RabbitMQ, over a connection of its own.

        Args:
            fifth: of a step, in milliseconds.
        """
        connection = await Connection.open(url)
        pace = RealTime(fifth)
        player = Player(self.case, connection, pace, self.prefix)
        try:
            self.in_rabbitmq = await player.play()
            self.is_late = pace.late > fifth / 2000
            await player.clean_up()
        except BrokerError as error:
            # A queue that cannot be reached for seconds, on a machine that is far too slow.
            self.in_rabbitmq = f"{type(error).__name__}: {error}"
            self.is_late = True
            await self._clean_up(url)
        finally:
            await connection.close()

    async def _clean_up(self, url: BrokerUrl) -> None:
        connection = await Connection.open(url)
        try:
            await Player(self.case, connection, RealTime(FIFTH), self.prefix).clean_up()
        finally:
            await connection.close()

    @property
    def is_equal(self) -> bool:
        """Whether both saw the same."""
        return bool(self.in_memory == self.in_rabbitmq)

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


async def play(comparisons: list[Comparison], url: str) -> None:
    """Play them on RabbitMQ, all at once, and what differs again, ever slower.

    The machine may have been too slow, or the case has a race that was not found: then RabbitMQ sometimes does what the
    in-memory broker does. A difference that stays is one of the rules. If a step came too late each time, the case is
    played some more times.
    """
    for number, slower in enumerate((1, 2, 4, *[8] * 12), 1):
        await asyncio.gather(*(comparison.play(BrokerUrl.parse(url), FIFTH * slower) for comparison in comparisons))
        comparisons = [one for one in comparisons if not one.is_equal and (number < 6 or one.is_late)]
        if not comparisons:
            return


def generated_cases(release: tuple[int, ...], start: int) -> Iterator[Case]:
    """Endless cases from several runs of hypothesis, because one run varies its earlier cases.

    Args:
        start: of the random numbers.
    """
    goes = (one_run(release, start + go) for go in itertools.count())
    return itertools.chain.from_iterable(goes)


def one_run(release: tuple[int, ...], start: int) -> list[Case]:
    """Some cases."""
    found: list[Case] = []

    @seed(start)
    @settings(
        max_examples=15,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(release))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


@pytest.mark.timeout(3600 if SOAK else 900)
async def test_random_cases_have_the_same_outcome_in_memory_and_on_the_broker(
    broker: LocalBroker, release: tuple[int, ...]
) -> None:
    start = int(os.environ.get("BIDE_TEST_START") or (random.randrange(1 << 32) if SOAK else START))
    compared = chance = 0
    different: list[Comparison] = []
    all_cases = generated_cases(release, start)
    while compared < CASES:
        batch = [Comparison(case) for case in itertools.islice(all_cases, BATCH)]
        # Where the end depends on chance there is nothing to compare.
        comparisons = [comparison for comparison in batch if not await comparison.has_race(release)]
        await play(comparisons, broker.url)
        # A step that came too late even at the slowest pace is another case.
        comparisons = [comparison for comparison in comparisons if comparison.is_equal or not comparison.is_late]
        compared += len(comparisons)
        chance += len(batch) - len(comparisons)
        assert chance <= CASES * 0.2, "a harness that leaves out this many proves nothing"
        different += [comparison for comparison in comparisons if not comparison.is_equal]
    if different:
        shown = "\n\n".join(map(str, different))
        pytest.fail(f"{shown}\n{len(different)} of {compared} cases differ (BIDE_TEST_START={start})", pytrace=False)
    left_out = f"{chance} left to chance not compared"
    print(f"{compared} cases are equal, {left_out} (BIDE_TEST_START={start})")  # noqa: T201 (shown where asked for, with -rP)


def two_lines(urgent: Send, *more: Step) -> Case:
    """A quorum queue in which two messages wait in different lines, and a queue for its dead letters."""
    dead_letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q1"}
    return Case(
        exchanges=(),
        queues=(Queue("q0", arguments={"x-queue-type": "quorum", **dead_letters}), Queue("q1")),
        ttls=(None, None),
        bindings=(),
        steps=(urgent, *more),
    )


def with_priorities(first: int, second: int) -> Case:
    """The first message has a higher priority. The second comes a step later.

    Args:
        first: fifths of a step until the first message expires, and *second* those of the second one.
    """
    return two_lines(send(first, priority=6), send(second))


def with_a_returned_message(first: int, second: int) -> Case:
    """The first message is requeued. The second comes two steps later."""
    return two_lines(send(first), Take(queue="q0", how="requeue"), send(second))


def send(ttl: int, priority: int | None = None) -> Send:
    """Publish to the queue in which messages expire."""
    return Send(exchange="", routing_key="q0", ttl=Fifths(number=ttl), priority=priority)


def dead_letters(result: Any) -> list[dict[str, Any]]:
    """The dead letters in the order of their arrival."""
    found: list[dict[str, Any]] = result["left"]["q1"]
    return found


def message_id(message: dict[str, Any]) -> str:
    """The id of a message, which counts the messages of a case."""
    return str(message["values"]["message_id"])


async def test_from_4_3_on_a_message_does_not_wait_for_one_of_another_priority_to_expire(
    broker: LocalBroker, release: tuple[int, ...]
) -> None:
    # rabbit_fifo:expire_batch of 4.3 expires the head of each priority and of the returned messages. Below 4.3, a
    # message expires when it would be the next to be delivered.
    in_order = [with_priorities(6, 6), with_a_returned_message(11, 11)]
    overtaking = [with_priorities(16, 6), with_a_returned_message(21, 6)]
    comparisons = [Comparison(case) for case in (*in_order, *overtaking)]
    assert not any([await comparison.has_race(release) for comparison in comparisons])
    await play(comparisons, broker.url)
    assert not [str(comparison) for comparison in comparisons if not comparison.is_equal]
    overtaken = ["2", "1"] if release >= (4, 3) else ["1", "2"]
    orders = [[message_id(one) for one in dead_letters(comparison.in_memory)] for comparison in comparisons]
    assert orders == [["1", "2"], ["1", "2"], overtaken, overtaken]


async def test_two_messages_that_expire_at_once_are_a_race_from_4_3_on(
    broker: LocalBroker, release: tuple[int, ...]
) -> None:
    # Both expire at the same time if both take equally long to the queue. If the first takes a millisecond longer, it
    # expires a millisecond after the second, and is dead-lettered after it: 31 of 79 times on 4.3.6. Below 4.3, the
    # second waits for the first.
    comparisons = [Comparison(with_priorities(11, 6)), Comparison(with_a_returned_message(16, 6))]
    is_race = [await comparison.has_race(release) for comparison in comparisons]
    assert is_race == [release >= (4, 3)] * 2
    await play(comparisons, broker.url)
    if release < (4, 3):
        assert not [str(comparison) for comparison in comparisons if not comparison.is_equal]
    for comparison in comparisons:
        in_memory, in_rabbitmq = dead_letters(comparison.in_memory), dead_letters(comparison.in_rabbitmq)
        assert sorted(in_rabbitmq, key=message_id) == sorted(in_memory, key=message_id)


async def test_a_full_queue_accepts_all_dead_letters_that_are_sent_at_once(
    broker: LocalBroker, release: tuple[int, ...]
) -> None:
    # rabbit_fifo_client learns that the queue is full after rabbit_fifo_dlx_worker has sent what expired at once: the
    # first message, and those behind it, which had expired before. The message after them is refused.
    quorum = {"x-queue-type": "quorum", "x-overflow": "reject-publish"}
    at_least_once = {"x-dead-letter-strategy": "at-least-once", "x-dead-letter-exchange": ""}
    source = Queue("q0", arguments={**quorum, **at_least_once, "x-dead-letter-routing-key": "q1"})
    full = Queue("q1", arguments={**quorum, "x-max-length": 2})
    behind = Send(exchange="", routing_key="q0", ttl=Fifths(number=1), number=4)
    steps = (send(8), behind, Rest(), Send(exchange="", routing_key="q1"))
    case = Case(exchanges=(), queues=(source, full), ttls=(None, None), bindings=(), steps=steps)
    comparison = Comparison(case)
    # The search for races is cautious about queues that have two classes of messages, as those of 4.0.
    assert await comparison.has_race(release) == ((4, 0) <= release < (4, 3))
    await play([comparison], broker.url)
    assert comparison.is_equal, str(comparison)
    assert [message_id(one) for one in dead_letters(comparison.in_memory)] == ["1", "2", "3", "4", "5"]
