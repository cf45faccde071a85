"""Draining a queue of the in-memory broker, as far as it needs no Spark."""

from __future__ import annotations

from typing import Any

import pytest

import bide
import bide.testing
from bide.errors import BrokerError
from bide.spark.draining import drain

NO_SPARK: Any = None
"""A session is needed only for messages that arrive."""


@pytest.mark.parametrize("quiet", ["0s", "200ms"])
def test_a_drain_that_another_consumer_keeps_from_messages_fails(quiet: str) -> None:
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
