"""Patterns 9 and 10: classes of service, by a priority queue or by a topic exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bide.arguments import whole_number
from bide.delay.protocol import check_name
from bide.errors import InvalidInputError
from bide.patterns.building import distinct, finished, literal_word, make_queue, one_of
from bide.topology import Argument, Binding, Exchange, Topology

HIGHEST_SENSIBLE: Final = 10
"""Each priority costs a queue of its own inside the queue; RabbitMQ recommends not more than these."""


def priority_queue(
    queue: str,
    *,
    priorities: int | None = None,
    max_length: int | None = None,
    overflow: str | None = None,
    queue_type: str = "classic",
) -> Topology:
    """Pattern 9, class of service by a priority queue: what is urgent overtakes what is not.

    A classic queue has as many priorities as it is declared with. A quorum queue has them from RabbitMQ 4.0 on, without
    being asked: two classes below 4.3 (priorities over 4 come first, about two for each of the others), and the
    priorities 0 to 31 from 4.3 on. On 3.x it takes no notice of them.

    Caveats: starvation: while urgent messages keep coming, the others wait, and their TTL does not free them, because
    only what is next in line expires (a quorum queue of RabbitMQ 4.3 looks at each priority, and frees them). Overflow:
    a full queue makes room at its head, where the urgent messages are. So a message of low priority pushes out one of
    high priority, and an urgent one that comes to a queue full of others is dropped itself, at once;
    overflow=reject-publish refuses the new one instead. Prefer pattern 10 where you can.

    Args:
        queue: the queue.
        priorities: of a classic queue, 1 to 10: the highest priority; 10 if not given.
        max_length: how many messages it holds.
        overflow: what a full queue does: drop-head (RabbitMQ's default) or reject-publish.
        queue_type: classic, or quorum (RabbitMQ 4.0 or later).

    Raises:
        InvalidInputError: in one of its kinds: priorities for a quorum queue, which has its own; overflow without
            a length.
    """
    check_name("queue", queue)
    arguments: dict[str, Argument] = {}
    if queue_type == "quorum" and priorities is not None:
        raise InvalidInputError(
            f"priorities={priorities} is for classic queues, and a quorum queue has priorities of its own from "
            "RabbitMQ 4.0 on: leave it out, or make the queue a classic one"
        )
    if queue_type == "classic":
        highest = HIGHEST_SENSIBLE if priorities is None else priorities
        arguments["x-max-priority"] = whole_number("priorities", highest, 1, HIGHEST_SENSIBLE)
    if overflow is not None and max_length is None:
        raise InvalidInputError(
            f"overflow={overflow!r} says what a full queue does, and there is no max_length: add it"
        )
    if max_length is not None:
        arguments["x-max-length"] = whole_number("max_length", max_length, 1, 2**31)
    if overflow is not None:
        arguments["x-overflow"] = one_of("overflow", overflow, ("drop-head", "reject-publish"))
    return finished(Topology(queues=[make_queue(queue, queue_type, arguments)]))


def class_queue(queue: str, level: str) -> str:
    """The queue of a class of service."""
    return f"{queue}.{level}"


def classes_of_service(
    exchange: str, *, queue: str, levels: Sequence[str], otherwise: str | None = None, queue_type: str = "quorum"
) -> Topology:
    """Pattern 10, class of service by topic: a queue for each class, which the last word of the routing key names.

    Each class has consumers of its own, as many as it deserves, and neither waits for the other: no starvation, and a
    full queue drops or refuses messages of its own class only.

    Caveat: a routing key whose last word is not a class matches nothing. ``otherwise`` names the class for these.

    Args:
        exchange: the topic exchange.
        queue: the start of the queues' names: queue.<level>.
        levels: the classes, such as high and low; each takes the keys that end in it.
        otherwise: the class that takes all other keys, by an alternate exchange.
        queue_type: of the queues: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds: a class that is named twice, or an unknown one for the rest.
    """
    check_name("queue", queue)
    names = distinct("class", levels, option="levels")
    for level in names:
        literal_word("class", level)
        if "." in level:
            raise InvalidInputError(
                f"the class {level!r} is more than one word, and keys end in one: leave out the dots"
            )
    rest = f"{exchange}.otherwise"
    topology = Topology(
        [Exchange(exchange, "topic", arguments={} if otherwise is None else {"alternate-exchange": rest})],
        [make_queue(class_queue(queue, level), queue_type) for level in names],
        [Binding(exchange, class_queue(queue, level), f"#.{level}") for level in names],
    )
    if otherwise is not None:
        one_of("otherwise", otherwise, names)
        topology |= Topology([Exchange(rest, "fanout")], bindings=[Binding(rest, class_queue(queue, otherwise))])
    return finished(topology)
