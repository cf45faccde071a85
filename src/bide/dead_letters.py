"""Dead-letter paths that never end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from bide.errors import BideError
from bide.routing import Model
from bide.topology import Queue, Topology


def endless_retries(topology: Topology) -> Iterator[str]:
    """Retry queues that send messages back by themselves, although there is a delay queue to do that.

    A queue that rejected messages are dead-lettered into, and that dead-letters them back, is where somebody counts
    attempts. If it has a TTL, the broker brings every message back without anybody counting, for ever. The same pair
    of queues without a separate delay queue is a retry with a fixed pause, in which the consumer counts: that is left
    alone.
    """
    ways: dict[tuple[str, str], list[Queue]] = defaultdict(list)
    for queue in topology.queues:
        exchange, key = (queue.arguments.get(f"x-dead-letter-{one}") for one in ("exchange", "routing-key"))
        if isinstance(exchange, str) and isinstance(key, str):
            ways[exchange, key].append(queue)
    suspects = [found for found in ways.values() if sum(_expires(one) for one in found) > 1]
    if not suspects:
        return
    try:
        model = Model(topology)
    except BideError:
        # What is wrong with its bindings is said elsewhere.
        return
    for found in suspects:
        for retry in filter(_expires, found):
            for work in topology.queues:
                if retry.name in _dead_lettered(model, work) and work.name in _dead_lettered(model, retry):
                    delay = next(one.name for one in found if one is not retry and _expires(one))
                    yield (
                        f"queue {retry.name!r}: its x-message-ttl sends what {work.name!r} rejected back for ever, and "
                        f"nobody counts: take the TTL away, and let its consumer send messages over {delay!r}"
                    )


def _expires(queue: Queue) -> bool:
    return "x-message-ttl" in queue.arguments


def _dead_lettered(model: Model, queue: Queue) -> frozenset[str]:
    exchange, key = (queue.arguments.get(f"x-dead-letter-{one}") for one in ("exchange", "routing-key"))
    if not isinstance(exchange, str) or not isinstance(key, str):
        return frozenset()
    try:
        return frozenset(model.route(exchange, key).queues)
    except BideError:
        return frozenset()
