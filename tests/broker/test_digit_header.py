"""The header for the digits of a delay, and its routing keys after a second dead-lettering."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delay.clock_keys import carrier_for
from tests.broker.receiving import eventually, ready
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from tests.support import Vhost

MESSAGES = 5


async def redelivered(vhost: Vhost, carrier: str, *, expected: int) -> int:
    """Messages that arrive after their dead-letter exchange had no route for them at first.

    Args:
        expected: how many are sent, and waited for. If none, one is sent, and counts if it comes within ten seconds.
    """
    hold: dict[str, str | int] = {
        "x-message-ttl": 100,
        "x-dead-letter-exchange": "onwards",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    channel = await connection.channel(confirms=True)
    for exchange in ("entry", "onwards"):
        await channel.declare_exchange(bide.Exchange(exchange))
    await channel.declare_queue(bide.Queue.quorum("hold", hold))
    await channel.declare_queue(bide.Queue.quorum("target"))
    await channel.bind(bide.Binding("entry", "hold", "~h5"))
    # The broker logs the first message only that it tries in vain.
    for number in range(expected or 1):
        await channel.publish(
            exchange="entry",
            routing_key="own.key",
            values={"headers": {carrier: ["~h5", "~q:target"]}, "message_id": str(number)},
            body=b"",
        )

    async def has_expired() -> bool:
        return await ready(connection, "hold") == 0

    async def was_tried() -> bool:
        lines = (vhost.broker.folder / "log" / "rabbitmq.log").read_text().splitlines()
        return any("Cannot forward any dead-letter" in line and f"'{vhost.name}'" in line for line in lines)

    await eventually(has_expired)
    if not expected:
        # A message that was not tried yet would still have its keys.
        await eventually(was_tried)
    await channel.bind(bide.Binding("onwards", "target", "~q:target"))

    async def arrived() -> bool:
        return await ready(connection, "target") == (expected or 1)

    with suppress(AssertionError):
        await eventually(arrived, seconds=TIMEOUT if expected else 10)
    count = await ready(connection, "target")
    await connection.close()
    return count


@pytest.mark.usefixtures("quick_redelivery")
async def test_cc_keys_survive_a_redelivery(vhost: Vhost) -> None:
    assert await redelivered(vhost, "CC", expected=MESSAGES) == MESSAGES


@pytest.mark.usefixtures("quick_redelivery")
async def test_bcc_keys_survive_a_redelivery_where_they_are_used(vhost: Vhost, release: tuple[int, ...]) -> None:
    expected = MESSAGES if carrier_for(release) == "BCC" else 0
    assert await redelivered(vhost, "BCC", expected=expected) == expected
