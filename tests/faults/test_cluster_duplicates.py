"""Duplicates with equal ids when leaders of delay queues move."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

import pytest

import bide
from bide.local_broker import LocalBroker, LocalCluster
from tests.broker.endpoints import Recorder, running
from tests.faults.cluster import cluster
from tests.faults.conftest import CLOCK
from tests.support import Rabbitmq
from tests.timeouts import TIMEOUT

MESSAGES = 3_000
ROUNDS = 8

MOVE_LEADERS = """
    [begin
        {Name, _} = amqqueue:get_pid(Queue),
        case ra_leaderboard:lookup_leader(Name) of
            {_, Node} = Leader ->
                [Other | _] = [Id || {_, N} = Id <- ra_leaderboard:lookup_members(Name), N =/= Node],
                ra:transfer_leadership(Leader, Other);
            undefined -> ok % an election is under way
        end
    end || Queue <- rabbit_amqqueue:list(<<"/">>),
           {resource, _, _, <<"bide.", _/binary>>} <- [amqqueue:get_name(Queue)]].
"""
"""Have every queue of the infrastructure led by another node."""


@pytest.fixture(scope="module")
def three_nodes(rabbitmq: Rabbitmq) -> Iterator[LocalCluster]:
    with cluster(rabbitmq) as three_nodes:
        yield three_nodes


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_deduplicate_handles_messages_duplicated_by_leader_changes_once(three_nodes: LocalCluster) -> None:
    recorder = Recorder()
    app = bide.Endpoint("handled", retry=bide.Retry(immediate=0, delays=[]), deduplicate="10m", observers=[recorder])
    handled: Counter[str | None] = Counter()

    @app.handler
    async def handle(message: bide.Message) -> None:
        handled[message.message_id] += 1

    timeout = timedelta(seconds=TIMEOUT)
    async with bide.connect(three_nodes.nodes[0].url, infrastructure=CLOCK, timeout=timeout) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(name) for name in ("handled", "plain")]))
        received: list[bide.Message] = []
        doubled = 0
        # One consumer for all rounds: when it closes, duplicates that it has not taken come back as redelivered.
        async with running(app, client, recorder), client.consume("plain") as messages:
            for _ in range(ROUNDS):
                before = len({one.message_id for one in received})
                async with leaders_that_move(three_nodes.nodes[0]):
                    async for outcome in client.publish_many(outgoing()):
                        assert outcome.error is None
                        assert outcome.attempts == 1
                    async with asyncio.timeout(TIMEOUT):
                        while len({one.message_id for one in received}) < before + MESSAGES:
                            message = await anext(messages)
                            await message.ack()
                            received.append(message)
                    await recorder.until("processed", count=before + MESSAGES)
                doubled = len(received) - len({one.message_id for one in received})
                if doubled and "duplicate" in recorder.kinds():
                    break
    # The broker does not mark duplicates: only the message id shows them.
    assert doubled
    assert not any(one.redelivered for one in received)
    assert "duplicate" in recorder.kinds()
    assert set(handled.values()) == {1}


def outgoing() -> Iterator[bide.OutgoingMessage]:
    for number in range(2 * MESSAGES):
        yield bide.OutgoingMessage(b"", to=("plain", "handled")[number % 2], delay=timedelta(seconds=3 + number % 7))


@asynccontextmanager
async def leaders_that_move(node: LocalBroker) -> AsyncIterator[None]:
    async def move() -> None:
        while True:
            await asyncio.to_thread(node.rabbitmqctl, "eval", MOVE_LEADERS)

    moving = asyncio.create_task(move())
    try:
        yield
    finally:
        moving.cancel()
        with suppress(asyncio.CancelledError):
            await moving
