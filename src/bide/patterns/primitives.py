"""Primitives of the patterns: copies by CC, expiry, limits, dead letters, alternates."""

from __future__ import annotations

from collections.abc import Sequence

from bide.arguments import whole_number
from bide.delay.protocol import check_name
from bide.durations import DelayLike
from bide.errors import InvalidInputError
from bide.patterns.building import distinct, finished, make_queue, milliseconds, refuse_same
from bide.topology import Argument, Binding, Exchange, Queue, Topology


def carbon_copies(exchange: str, *, queues: Sequence[str], queue_type: str = "quorum") -> Topology:
    """CC and BCC: a direct exchange in which a message reaches every queue that one of its keys names.

    The keys of the headers CC and BCC, lists of texts, count like the routing key. Receivers see CC, and not BCC.

    Args:
        exchange: the direct exchange.
        queues: the queues, each bound by its own name.
        queue_type: of the queues: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds.
    """
    names = distinct("queue", queues, option="queues")
    return finished(
        Topology(
            [Exchange(exchange, "direct")],
            [make_queue(name, queue_type) for name in names],
            [Binding(exchange, name, name) for name in names],
        )
    )


def ephemeral(exchange: str, *, queue: str, expires: DelayLike) -> Topology:
    """Expiry and auto-delete: a queue that is deleted when it is unused for a time, and its exchange with it.

    Use is a consumer, a get, or another declaration, but not a publish: the queue goes with the messages in it. The
    exchange goes when its last binding does.

    Args:
        exchange: the fanout exchange.
        queue: the queue; a classic one, since a declaration does not count as use for a quorum queue.
        expires: how long the queue may be unused.

    Raises:
        InvalidInputError: in one of its kinds.
    """
    check_name("queue", queue)
    return finished(
        Topology(
            [Exchange(exchange, "fanout", auto_delete=True)],
            [Queue(queue, arguments={"x-expires": milliseconds("expires", expires)})],
            [Binding(exchange, queue)],
        )
    )


def auto_delete_queue(queue: str) -> Topology:
    """Auto-delete: a queue that goes when its last consumer does; one that never had a consumer stays.

    Args:
        queue: the queue; a classic one, the only type that can.

    Raises:
        InvalidInputError: in one of its kinds.
    """
    check_name("queue", queue)
    return finished(Topology(queues=[Queue(queue, auto_delete=True)]))


def exclusive_queue(queue: str) -> Topology:
    """Exclusive: a queue that one connection alone can use, and that goes with it.

    Args:
        queue: the queue; a classic one, the only type that can.

    Raises:
        InvalidInputError: in one of its kinds.
    """
    check_name("queue", queue)
    return finished(Topology(queues=[Queue(queue, durable=False, exclusive=True)]))


def bounded_queue(
    queue: str,
    *,
    dead_letter_queue: str,
    max_length: int | None = None,
    max_bytes: int | None = None,
    queue_type: str = "quorum",
) -> Topology:
    """Length limits: a full queue lets its oldest message go, to the dead letters, and takes the new one.

    Quorum queues do it by at-most-once dead-lettering, since a queue that lets messages go cannot hold them until
    another has them: a message is lost if the dead-letter queue refuses it.

    Args:
        queue: the queue.
        dead_letter_queue: where the oldest messages go; its fanout exchange has the same name.
        max_length: how many messages the queue holds.
        max_bytes: how many bytes of bodies it holds.
        queue_type: of both queues: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds: no limit at all, or names that collide.
    """
    refuse_same([("the queue", queue), ("the dead-letter queue", dead_letter_queue)])
    check_name("queue", queue)
    check_name("queue", dead_letter_queue)
    arguments: dict[str, Argument] = {"x-dead-letter-exchange": dead_letter_queue, "x-overflow": "drop-head"}
    if max_length is None and max_bytes is None:
        raise InvalidInputError("no limit is given: give max_length, max_bytes or both")
    if max_length is not None:
        arguments["x-max-length"] = whole_number("max_length", max_length, 1, 2**31)
    if max_bytes is not None:
        arguments["x-max-length-bytes"] = whole_number("max_bytes", max_bytes, 1, 2**50)
    if queue_type == "quorum":
        arguments["x-dead-letter-strategy"] = "at-most-once"
    return finished(
        Topology(
            [Exchange(dead_letter_queue, "fanout")],
            [make_queue(queue, queue_type, arguments), make_queue(dead_letter_queue, queue_type)],
            [Binding(dead_letter_queue, dead_letter_queue)],
        )
    )


def central_dead_letters(
    exchange: str, *, queues: Sequence[str], dead_letter_queue: str, queue_type: str = "quorum"
) -> Topology:
    """A central dead-letter exchange: whatever is rejected or expires anywhere comes to one place.

    Each queue dead-letters with its own name as the routing key, so that the topic exchange can be bound by it; the
    header x-death has the rest.

    Args:
        exchange: the topic exchange of the dead letters.
        queues: the queues that dead-letter to it.
        dead_letter_queue: where all of them end.
        queue_type: of all queues: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds: names that collide.
    """
    names = distinct("queue", queues, option="queues")
    check_name("queue", dead_letter_queue)
    refuse_same([*(("a queue", name) for name in names), ("the dead-letter queue", dead_letter_queue)])
    return finished(
        Topology(
            [Exchange(exchange, "topic")],
            [
                *(
                    make_queue(
                        name, queue_type, {"x-dead-letter-exchange": exchange, "x-dead-letter-routing-key": name}
                    )
                    for name in names
                ),
                make_queue(dead_letter_queue, queue_type),
            ],
            [Binding(exchange, dead_letter_queue, "#")],
        )
    )


def waiting_queue(queue: str, *, to: str, ttl: DelayLike | None = None, queue_type: str = "quorum") -> Topology:
    """TTL: a queue whose messages go on to another queue when their time is over.

    With a TTL of the queue all messages wait alike, and go in order. Without one each waits as long as its own
    ``expiration`` says, but only what is next in line expires: a short wait behind a long one is as long as that.

    Args:
        queue: where messages wait.
        to: the queue that they go on to, by the default exchange.
        ttl: of the queue; with a message's own expiration, the shorter of the two counts.
        queue_type: of both queues: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds: both queues are the same.
    """
    check_name("queue", queue)
    check_name("queue", to)
    refuse_same([("the waiting queue", queue), ("the queue after it", to)])
    arguments: dict[str, Argument] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": to}
    if ttl is not None:
        arguments["x-message-ttl"] = milliseconds("ttl", ttl)
    return finished(Topology(queues=[make_queue(queue, queue_type, arguments), make_queue(to, queue_type)]))


def catch_all(exchange: str, *, queues: Sequence[str], unmatched: str, queue_type: str = "quorum") -> Topology:
    """An alternate exchange: what no binding matches is not lost, but comes to a queue of its own.

    Args:
        exchange: a direct exchange.
        queues: the queues, each bound by its own name.
        unmatched: the queue for the rest; its fanout exchange has the same name.
        queue_type: of all queues: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds: names that collide.
    """
    names = distinct("queue", queues, option="queues")
    check_name("queue", unmatched)
    refuse_same([*(("a queue", name) for name in names), ("the queue for the rest", unmatched)])
    refuse_same([("the exchange", exchange), ("its alternate exchange", unmatched)])
    return finished(
        Topology(
            [
                Exchange(exchange, "direct", arguments={"alternate-exchange": unmatched}),
                Exchange(unmatched, "fanout"),
            ],
            [make_queue(name, queue_type) for name in (*names, unmatched)],
            [*(Binding(exchange, name, name) for name in names), Binding(unmatched, unmatched)],
        )
    )
