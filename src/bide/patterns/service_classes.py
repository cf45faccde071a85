"""Patterns 9 and 10: service classes by a priority queue or a topic exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bide.delay.protocol import check_name
from bide.errors import InvalidInputError
from bide.patterns.building import distinct, finished, literal_word, make_queue, one_of
from bide.runtime.arguments import whole_number
from bide.topology import Argument, Binding, Exchange, Topology

MAX_PRIORITIES: Final = 10
"""Each priority costs a sub-queue inside the queue; RabbitMQ recommends no more than 10."""


def priority_queue(
    queue: str,
    *,
    priorities: int | None = None,
    max_length: int | None = None,
    overflow: str | None = None,
    queue_type: str = "classic",
) -> Topology:
    """Pattern 9, class of service by a priority queue: urgent messages overtake the others.

    A classic queue has as many priorities as it is declared with. A quorum queue has priorities from RabbitMQ 4.0 on,
    without an argument: priorities 0 to 31 from 4.3 on, and two classes before (it delivers about two messages of
    priority 5 or more for each other message). On 3.x a quorum queue ignores priorities.

    Caveats: starvation: while urgent messages keep arriving, the others wait, even past their TTL, because only the
    head of a queue expires (RabbitMQ 4.3 checks each priority of a quorum queue). Overflow: a full queue drops messages
    at its head, where the urgent ones are. So a message of low priority can push out one of high priority, and an
    urgent message that arrives at a queue full of others is dropped at once. With overflow=reject-publish the queue
    refuses the new message instead. Prefer pattern 10 if you can.

    Args:
        queue: the queue.
        priorities: highest priority of a classic queue, 1 to 10; 10 by default.
        max_length: maximum number of messages.
        overflow: when full: drop-head (RabbitMQ's default) or reject-publish.
        queue_type: classic, or quorum (RabbitMQ 4.0 or later).

    Raises:
        InvalidInputError: priorities are given for a quorum queue, or overflow without a length.
    """
    check_name("queue", queue)
    arguments: dict[str, Argument] = {}
    if queue_type == "quorum" and priorities is not None:
        raise InvalidInputError(
            f"priorities=... is {priorities}, which is for classic queues only: a quorum queue has fixed priorities "
            "from RabbitMQ 4.0 on. Leave it out, or choose a classic queue with queue_type=..."
        )
    if queue_type == "classic":
        highest = MAX_PRIORITIES if priorities is None else priorities
        arguments["x-max-priority"] = whole_number("priorities", highest, 1, MAX_PRIORITIES)
    if overflow is not None and max_length is None:
        raise InvalidInputError(f"overflow={overflow!r} has no effect without a length: add max_length=...")
    if max_length is not None:
        arguments["x-max-length"] = whole_number("max_length", max_length, 1, 2**31)
    if overflow is not None:
        arguments["x-overflow"] = one_of("overflow", overflow, ("drop-head", "reject-publish"))
    return finished(Topology(queues=[make_queue(queue, queue_type, arguments)]))


def class_queue(queue: str, level: str) -> str:
    """The name of the queue of a service class."""
    return f"{queue}.{level}"


def classes_of_service(
    exchange: str, *, queue: str, levels: Sequence[str], otherwise: str | None = None, queue_type: str = "quorum"
) -> Topology:
    """Pattern 10, class of service by topic: the last word of the routing key chooses the queue of a class.

    Each class has its own consumers, as many as it needs, and no class waits for another: there is no starvation, and a
    full queue drops or refuses messages of its own class only.

    Caveat: a routing key whose last word is not a class matches nothing. ``otherwise`` names the class for such keys.

    Args:
        exchange: the topic exchange.
        queue: the start of the queues' names: queue.<level>.
        levels: classes, such as high and low; they are the last words of routing keys.
        otherwise: class for all other keys, through an alternate exchange.
        queue_type: type of the queues: quorum or classic.

    Raises:
        InvalidInputError: a class is given twice, or *otherwise* is not a class.
    """
    check_name("queue", queue)
    names = distinct("class", levels, option="levels")
    for level in names:
        literal_word("class", level)
        if "." in level:
            raise InvalidInputError(f"the class {level!r} is more than one word, and keys end in one: remove the dots")
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
