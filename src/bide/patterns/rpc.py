"""Pattern 18: request and reply, with four kinds of reply queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bide.delay.protocol import check_name
from bide.durations import DelayLike
from bide.errors import InvalidInputError, InvalidNameError
from bide.patterns.building import distinct, finished, make_queue, milliseconds, one_of
from bide.topology import Queue, Topology

DIRECT_REPLY_TO: Final = "amq.rabbitmq.reply-to"
"""The pseudo-queue of direct reply-to, which stands for the channel that consumes from it."""

REPLIES: Final = ("direct", "fixed", "instance", "ephemeral")
"""The kinds of reply queues; see :func:`rpc`."""


def instance_queue(reply_queue: str, instance: str) -> str:
    """The name of the reply queue of one instance of the caller."""
    return f"{reply_queue}.{instance}"


def rpc(
    queue: str,
    *,
    replies: str = "direct",
    reply_queue: str | None = None,
    instances: Sequence[str] = (),
    expires: DelayLike | None = None,
    queue_type: str = "quorum",
) -> Topology:
    """Pattern 18, request and reply: a queue for the servers, and a reply queue for the callers.

    ====================  ==============================================================================================
    ``direct``            RabbitMQ's direct reply-to: no queue and no disk; replies are lost with the caller's channel
    ``fixed``             one durable queue for all callers, and a correlation id: for callers that keep no state in
                          memory, because any of them can get any reply
    ``instance``          a queue for each instance of the caller, and a correlation id
    ``ephemeral``         a queue for each request; it needs no correlation id, and costs the most
    ====================  ==============================================================================================

    :mod:`bide.messaging.rpc` declares queues for the last two when it needs them, exclusive to its connection. In this
    topology they have fixed names, and expire.

    Caveats: if a server does not answer, the caller cannot know whether the work was done: make requests repeatable. A
    request stays in the queue after its caller has timed out, unless it has an expiration, as bide's requests do.

    Args:
        queue: the queue that requests are sent to.
        replies: kind of reply queue: direct, fixed, instance or ephemeral.
        reply_queue: reply queue, or start of names, <queue>.replies by default. Not for direct.
        instances: callers with their own queue (instance).
        expires: time without use before deletion, 1 min by default. For reply queues of instance and ephemeral.
        queue_type: type of request and fixed reply queues: quorum or classic.

    Raises:
        InvalidInputError: an option does not belong to this kind of reply queue.
    """
    check_name("queue", queue)
    one_of("replies", replies, REPLIES)
    topology = Topology(queues=[make_queue(queue, queue_type)])
    if replies != "instance" and instances:
        raise InvalidInputError(f"replies={replies!r} has no queues for instances: leave out instances=[...]")
    if replies in ("direct", "fixed") and expires is not None:
        raise InvalidInputError(f"replies={replies!r} has no queue that expires: leave out expires=...")
    if replies == "direct":
        if reply_queue is not None:
            raise InvalidInputError(
                f"reply_queue={reply_queue!r} is given, and direct replies have no queue: leave it out, or choose "
                "another kind with replies=..."
            )
        return finished(topology)
    name = f"{queue}.replies" if reply_queue is None else reply_queue
    check_name("queue", name)
    if name == queue:
        raise InvalidNameError(f"the reply queue {name!r} is also the request queue: give it another name")
    if replies == "fixed":
        return finished(topology | Topology(queues=[make_queue(name, queue_type)]))
    names = [name]
    if replies == "instance":
        names = [instance_queue(name, one) for one in distinct("instance", instances, option="instances")]
    lease = milliseconds("expires", "1m" if expires is None else expires)
    return finished(topology | Topology(queues=[Queue(one, arguments={"x-expires": lease}) for one in names]))
