"""Queues of the Spark tests."""

from __future__ import annotations

from itertools import count

import bide
from bide.client.message_sync import SyncMessage
from tests.broker.receiving import ready_at

_names = count(1)


def new_queue(url: str) -> str:
    """A new quorum queue."""
    name = f"q-{next(_names)}"
    with bide.connect_sync(url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum(name)]))
    return name


def drain(url: str, queue: str, number: int, *, quiet: str = "60s") -> list[SyncMessage]:
    """Acknowledge up to ``number`` messages; stop early if none arrives for a while and none is ready."""
    found: list[SyncMessage] = []
    more = number > 0
    while more:
        with bide.connect_sync(url) as client, client.consume(queue, timeout=quiet, prefetch=2_000) as messages:
            for message in messages:
                found.append(message)
                message.ack()
                if len(found) == number:
                    return found
            more = client.wait_for(ready_at(url, queue)) > 0
    return found


def rest(url: str, queue: str) -> list[SyncMessage]:
    """All remaining messages of a queue to which no more are sent.

    A loaded broker may forget the last acknowledgements of a channel that closes, and deliver those messages again.
    """
    return [one for one in drain(url, queue, 10_000_000, quiet="1s") if not one.redelivered]
