"""Dead-letter paths that never end."""

from __future__ import annotations

from collections.abc import Iterator

from bide.errors import BideError
from bide.topology import Queue, Topology
from bide.topology.routing import Model


def endless_retries(topology: Topology) -> Iterator[str]:
    """Retry queues whose TTL brings messages back before the worker that stands there has counted them.

    A cycle of dead letters with a TTL in it is not a mistake by itself: a work queue that rejects into a wait queue,
    whose TTL sends back to it, is a usual retry, in which the consumer of the work queue counts. So is one with several
    wait queues, of which the first takes what is rejected. These are left alone. With the shape of an event bus it is
    one:

    * a *delay queue* has a TTL, dead-letters to an exchange with a routing key of its own, and is bound to that very
      exchange: programs choose to send messages there;
    * a *work queue* gets what it releases, and dead-letters into a *retry queue*, by another exchange;
    * the retry queue dead-letters back by the exchange and key of the delay queue.

    There the waiting is the delay queue's, so the retry queue is where a worker decides: once more, or never again. If
    it has a TTL as well, the broker sends on what the worker has not yet taken, and all of it while the worker is away:
    what always fails is tried for ever, and no attempt is counted.

    Yields:
        one sentence for each such retry queue and work queue.
    """
    expiring = [one for one in topology.queues if "x-message-ttl" in one.arguments]
    bound = {(one.source, one.destination) for one in topology.bindings if one.destination_type == "queue"}
    pairs = [
        (retry, delay, way)
        for delay in expiring
        if (way := _way(delay)) is not None and (way[0], delay.name) in bound
        for retry in expiring
        if retry is not delay and _way(retry) == way
    ]
    if not pairs:
        return
    try:
        model = Model(topology)
    except BideError:
        # What is wrong with its bindings is said elsewhere.
        return
    reported: set[tuple[str, str]] = set()
    for retry, delay, way in pairs:
        for work in topology.queues:
            out = _way(work)
            if out is None or out[0] == way[0] or (retry.name, work.name) in reported:
                continue
            if work.name in _queues(model, way) and retry.name in _queues(model, out):
                reported.add((retry.name, work.name))
                yield (
                    f"queue {retry.name!r}: its x-message-ttl sends what {work.name!r} rejected back for ever, and "
                    f"no worker counts: take the TTL away, and let its consumer send messages over {delay.name!r}"
                )


def _way(queue: Queue) -> tuple[str, str] | None:
    """The exchange and the key that a queue dead-letters with, where it sets both."""
    exchange, key = (queue.arguments.get(f"x-dead-letter-{one}") for one in ("exchange", "routing-key"))
    return (exchange, key) if isinstance(exchange, str) and isinstance(key, str) else None


def _queues(model: Model, way: tuple[str, str]) -> frozenset[str]:
    try:
        return model.route(*way).queues
    except BideError:
        return frozenset()
