"""Pattern 18: requests and replies, in four ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bide.delay.protocol import check_name
from bide.durations import DelayLike
from bide.errors import InvalidInputError, InvalidNameError
from bide.patterns.building import distinct, finished, make_queue, milliseconds, one_of
from bide.topology import Queue, Topology

DIRECT_REPLY_TO: Final = "amq.rabbitmq.reply-to"
"""The pseudo-queue of direct reply-to: no queue at all, but a way back to the channel that consumes from it."""

REPLIES: Final = ("direct", "fixed", "instance", "ephemeral")
"""How replies come back; see :func:`rpc`."""


def instance_queue(reply_queue: str, instance: str) -> str:
    """The reply queue of an instance of the caller."""
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
    """Pattern 18, request and reply: the queue of the servers, and what their replies come back by.

    ====================  ==============================================================================================
    ``direct``            RabbitMQ's direct reply-to: no queue, no disk; the way back ends with the caller's channel
    ``fixed``             one durable queue for all callers, and a correlation id: for callers that keep no state in
                          memory, since any of them may get any reply
    ``instance``          a queue for each instance of the caller, and a correlation id
    ``ephemeral``         a queue for each request, which needs no correlation id and costs the most
    ====================  ==============================================================================================

    :mod:`bide.messaging.rpc` declares the last two as it needs them, exclusive to its connection; here they stand by
    name, and go away by expiry.

    Caveats: a caller cannot know whether a server that does not answer has done the work: make requests that can be
    repeated. A request outlives its caller's patience unless it expires with it, as bide's do.

    Args:
        queue: the servers' queue, that requests are sent to.
        replies: direct, fixed, instance or ephemeral.
        reply_queue: the reply queue, or the start of their names; <queue>.replies if not given. Not for direct.
        instances: for instance: the callers' instances, each of which has a queue.
        expires: for instance and ephemeral: how long after its last use a reply queue goes; 1 min if not given.
        queue_type: of the servers' queue, and of a fixed reply queue: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds: options that do not go with this way of replying.
    """
    check_name("queue", queue)
    one_of("replies", replies, REPLIES)
    topology = Topology(queues=[make_queue(queue, queue_type)])
    if replies != "instance" and instances:
        raise InvalidInputError(f"instances are given, and replies={replies!r} has no queues for them: leave them out")
    if replies in ("direct", "fixed") and expires is not None:
        raise InvalidInputError(f"expires is given, and replies={replies!r} has no queue that goes: leave it out")
    if replies == "direct":
        if reply_queue is not None:
            raise InvalidInputError(
                f"reply_queue={reply_queue!r} is given, and direct replies have no queue: leave it out, or choose "
                "another way with replies="
            )
        return finished(topology)
    name = f"{queue}.replies" if reply_queue is None else reply_queue
    check_name("queue", name)
    if name == queue:
        raise InvalidNameError(f"the reply queue {name!r} is the servers' queue: give it another name")
    if replies == "fixed":
        return finished(topology | Topology(queues=[make_queue(name, queue_type)]))
    names = [name]
    if replies == "instance":
        names = [instance_queue(name, one) for one in distinct("instance", instances, option="instances")]
    lease = milliseconds("expires", "1m" if expires is None else expires)
    return finished(topology | Topology(queues=[Queue(one, arguments={"x-expires": lease}) for one in names]))
