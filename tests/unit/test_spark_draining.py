"""Draining a queue of the in-memory broker, as far as it needs no Spark."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest

import bide
import bide.testing
from bide.amqp.delivery import Delivery
from bide.client.subscription import Subscription
from bide.errors import BrokerError
from bide.spark import draining
from bide.spark.draining import drain
from tests.timeouts import TIMEOUT

NO_SPARK: Any = None
"""A session is needed only for messages that arrive."""


@pytest.mark.parametrize("quiet", ["0s", "200ms"])
def test_a_drain_that_another_consumer_keeps_from_messages_fails(monkeypatch: pytest.MonkeyPatch, quiet: str) -> None:
    monkeypatch.setattr(draining, "_TIMEOUT", 0.5)  # nothing comes, however long it waits
    queue = bide.Queue("single", durable=True, arguments={"x-single-active-consumer": True})
    with bide.testing.broker() as broker, broker.connect_sync() as client:
        client.declare(bide.Topology(queues=[queue]))
        for body in ("held", "ready"):
            client.publish(body, to="single")
        with client.consume("single", prefetch=1) as messages:
            assert next(messages).body == b"held"
            with pytest.raises(
                BrokerError, match=r"'single' has 1 message and delivered none .* the single active consumer"
            ):
                drain(NO_SPARK, "single", write=print, url=broker.url, quiet=quiet)


class _Tables:
    """A session that makes no data frames: ``write`` gets the Arrow table."""

    def createDataFrame(self, table: Any, schema: Any) -> Any:  # noqa: N802 (Spark's name)
        return table


def test_a_message_that_is_on_its_way_when_the_quiet_time_ends_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker without processor time counts it as unacknowledged, and no message as ready."""
    tables: Any = _Tables()
    receive, waits = Subscription.next, 0

    async def receive_late(self: Subscription) -> tuple[Delivery, datetime]:
        nonlocal waits
        waits += 1
        if waits == 1:
            await asyncio.sleep(TIMEOUT)  # longer than the drain waits
        return await receive(self)

    monkeypatch.setattr(Subscription, "next", receive_late)
    bodies: list[bytes] = []

    def write(table: Any) -> None:
        bodies.extend(table["value"].to_pylist())

    with bide.testing.broker() as broker, broker.connect_sync() as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("slow")]))
        client.publish("late", to="slow")
        done = drain(tables, "slow", write=write, url=broker.url, quiet="200ms")
    assert (done.messages, bodies) == (1, [b"late"])
