"""Primitives of the patterns: copies by CC, expiry, limits, dead letters, alternates."""

from __future__ import annotations

from collections.abc import Sequence

from bide.delay.protocol import check_name
from bide.durations import DelayLike
from bide.errors import InvalidInputError
from bide.patterns.building import distinct, finished, make_queue, milliseconds, refuse_same
from bide.runtime.arguments import whole_number
from bide.topology import Argument, Binding, Exchange, Queue, Topology


def carbon_copies(exchange: str, *, queues: Sequence[str], queue_type: str = "quorum") -> Topology:
    """CC and BCC: a direct exchange where a message reaches every queue that one of its keys names.

    The keys in the headers CC and BCC, lists of texts, count like the routing key. Receivers see CC, but not BCC.

    Args:
        exchange: the direct exchange.
        queues: queues, bound by their names.
        queue_type: type of the queues: quorum or classic.

    Raises:
        InvalidInputError: an argument is invalid.
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
    """Expiry and auto-delete: a queue that is deleted after a time without use, and its exchange with it.

    A consumer, a get or a repeated declaration counts as use, but a publish does not. The messages in the queue are
    deleted with the queue. The exchange is deleted with its last binding.

    Args:
        exchange: the fanout exchange.
        queue: the queue; a classic one, because a quorum queue does not count declarations as use.
        expires: time without use before deletion.

    Raises:
        InvalidInputError: an argument is invalid.
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
    """Auto-delete: a queue that is deleted with its last consumer; a queue that never had a consumer stays.

    Args:
        queue: the queue; a classic one, the only type that supports this.

    Raises:
        InvalidInputError: an argument is invalid.
    """
    check_name("queue", queue)
    return finished(Topology(queues=[Queue(queue, auto_delete=True)]))


def exclusive_queue(queue: str) -> Topology:
    """Exclusive: a queue that only one connection can use, and that is deleted with it.

    Args:
        queue: the queue; a classic one, the only type that supports this.

    Raises:
        InvalidInputError: an argument is invalid.
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
    """Length limits: a full queue dead-letters its oldest message to make room for a new one.

    Quorum queues dead-letter at most once here, because a queue that drops messages cannot keep them until another
    queue has confirmed them: a message is lost if the dead-letter queue refuses it.

    Args:
        queue: the queue.
        dead_letter_queue: the queue for the oldest messages; its fanout exchange has the same name.
        max_length: maximum number of messages.
        max_bytes: maximum total size of message bodies, in bytes.
        queue_type: type of both queues: quorum or classic.

    Raises:
        InvalidInputError: there is no limit, or names collide.
    """
    refuse_same([("the queue", queue), ("the dead-letter queue", dead_letter_queue)])
    check_name("queue", queue)
    check_name("queue", dead_letter_queue)
    arguments: dict[str, Argument] = {"x-dead-letter-exchange": dead_letter_queue, "x-overflow": "drop-head"}
    if max_length is None and max_bytes is None:
        raise InvalidInputError("no limit is given: give max_length=..., max_bytes=... or both")
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
    """A central dead-letter exchange: rejected and expired messages of many queues go to one queue.

    Each queue dead-letters with its own name as the routing key, which bindings of the topic exchange can match. The
    header x-death has the other details.

    Args:
        exchange: the topic exchange for dead letters.
        queues: the queues that dead-letter to it.
        dead_letter_queue: the queue for all dead letters.
        queue_type: type of all queues: quorum or classic.

    Raises:
        InvalidInputError: names collide.
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
    """TTL: a queue whose messages move to another queue when they expire.

    With a TTL of the queue, all messages wait equally long and move in order. Without a TTL, each message waits as long
    as its own ``expiration``. But only the head of a queue expires: a message with a short expiration behind one with a
    long expiration waits as long as that one.

    Args:
        queue: the queue that messages wait in.
        to: target queue, through the default exchange.
        ttl: TTL of the queue. If a message has its own expiration, the shorter one applies.
        queue_type: type of both queues: quorum or classic.

    Raises:
        InvalidInputError: both queues have the same name.
    """
    check_name("queue", queue)
    check_name("queue", to)
    refuse_same([("the waiting queue", queue), ("the queue after it", to)])
    arguments: dict[str, Argument] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": to}
    if ttl is not None:
        arguments["x-message-ttl"] = milliseconds("ttl", ttl)
    return finished(Topology(queues=[make_queue(queue, queue_type, arguments), make_queue(to, queue_type)]))


def catch_all(exchange: str, *, queues: Sequence[str], unmatched: str, queue_type: str = "quorum") -> Topology:
    """An alternate exchange: messages that match no binding go to a queue of their own.

    Args:
        exchange: a direct exchange.
        queues: queues, bound by their names.
        unmatched: the queue for all other messages; its fanout exchange has the same name.
        queue_type: type of all queues: quorum or classic.

    Raises:
        InvalidInputError: names collide.
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
