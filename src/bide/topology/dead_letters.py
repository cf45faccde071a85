"""Detection of dead-letter cycles that retry forever without a count."""

from __future__ import annotations

from collections.abc import Iterator

from bide.errors import BideError
from bide.topology import Queue, Topology
from bide.topology.routing import Model


def endless_retries(topology: Topology) -> Iterator[str]:
    """Find retry queues whose TTL returns messages before the worker of the retry queue has counted them.

    A dead-letter cycle with a TTL is not a mistake by itself. In the usual retry, a rejected message waits in a wait
    queue, whose TTL returns it to the work queue, and the consumer of the work queue counts the attempts. Such cycles
    are accepted, also with several wait queues. In an event bus, the following cycle is a mistake:

    * a *delay queue* has a TTL, dead-letters to an exchange with a routing key, and is bound to that same exchange, so
      that programs can choose to send messages to it;
    * a *work queue* gets the messages that the delay queue releases, and dead-letters into a *retry queue* through
      another exchange;
    * the retry queue dead-letters to the same exchange and with the same key as the delay queue.

    Here messages wait in the delay queue, and a worker of the retry queue decides whether to retry. If the retry queue
    has a TTL too, the broker returns messages that the worker has not processed yet, and all of them if the worker is
    down: a message that always fails is retried forever, and its attempts are not counted.

    Yields:
        one sentence for each pair of such a retry queue and a work queue.
    """
    expiring = [one for one in topology.queues if "x-message-ttl" in one.arguments]
    bound = {(one.source, one.destination) for one in topology.bindings if one.destination_type == "queue"}
    pairs = [
        (retry, delay, target)
        for delay in expiring
        if (target := _dead_letter_target(delay)) is not None and (target[0], delay.name) in bound
        for retry in expiring
        if retry is not delay and _dead_letter_target(retry) == target
    ]
    if not pairs:
        return
    try:
        model = Model(topology)
    except BideError:
        # validate() reports problems of bindings elsewhere.
        return
    reported: set[tuple[str, str]] = set()
    for retry, delay, target in pairs:
        for work in topology.queues:
            out = _dead_letter_target(work)
            if out is None or out[0] == target[0] or (retry.name, work.name) in reported:
                continue
            if work.name in _queues(model, target) and retry.name in _queues(model, out):
                reported.add((retry.name, work.name))
                yield (
                    f"queue {retry.name!r}: its x-message-ttl makes the broker retry messages of {work.name!r} "
                    f"forever, uncounted: remove the TTL, and let the consumer of {retry.name!r} send messages to "
                    f"{delay.name!r}"
                )


def _dead_letter_target(queue: Queue) -> tuple[str, str] | None:
    """The exchange and the routing key that a queue dead-letters with, or None if it does not set both."""
    exchange, key = (queue.arguments.get(f"x-dead-letter-{one}") for one in ("exchange", "routing-key"))
    return (exchange, key) if isinstance(exchange, str) and isinstance(key, str) else None


def _queues(model: Model, target: tuple[str, str]) -> frozenset[str]:
    try:
        return model.route(*target).queues
    except BideError:
        return frozenset()
