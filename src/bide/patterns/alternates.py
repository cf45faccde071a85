"""Patterns 11 and 12, if-else and not: routing with alternate exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from bide.delay.protocol import check_name
from bide.errors import InvalidInputError, InvalidNameError
from bide.patterns.building import distinct, finished, keys_of, make_queue, one_of, refuse_same
from bide.topology import Binding, Exchange, Queue, Topology

BRANCH_TYPES: Final = ("direct", "topic")
"""Exchange types that can route a branch by the routing key."""

SOURCE_TYPES: Final = ("fanout", "topic")
"""Exchange types from which one binding can receive everything."""


def else_exchange(exchange: str, number: int) -> str:
    """The name of a branch's exchange: the first is the exchange itself, the others are alternates."""
    return f"{exchange}.else{number}" if number else exchange


def if_else(
    exchange: str,
    *,
    branches: Mapping[str, Sequence[str]],
    otherwise: str,
    type: str = "direct",
    queue_type: str = "quorum",
) -> Topology:
    """Pattern 11, if, else if, else: a message goes to the first branch that matches, and to no other.

    Each branch is an exchange, and its alternate exchange is the next branch. The last alternate is a fanout exchange
    to the queue for everything else. A single topic exchange cannot do this, because its binding ``#`` also matches the
    messages of the other queues.

    Caveat: an alternate exchange only gets a message if no binding matches. If a queue is deleted, its bindings go with
    it, and its messages go to the next branch. CC and BCC keys count too: a message with two keys can match two
    bindings of one branch, but never two branches.

    Args:
        exchange: the exchange that messages are published to.
        branches: queue -> binding keys; branches are tried in the order given.
        otherwise: the queue for everything else.
        type: exchange type: direct, or topic for wildcards.
        queue_type: type of the queues: quorum or classic.

    Raises:
        InvalidInputError: there is no branch, a branch has no keys or can never match, or names collide.
    """
    one_of("type", type, BRANCH_TYPES)
    check_name("queue", otherwise)
    queues = distinct("queue", branches, option="branches")
    if otherwise in branches:
        raise InvalidNameError(f"otherwise={otherwise!r} is the queue of a branch: give another queue for the rest")
    keys = {queue: keys_of(branches[queue], option="branches", owner=queue) for queue in queues}
    _refuse_dead_ends(keys, topic=type == "topic")
    last = f"{exchange}.otherwise"
    chain = [*(else_exchange(exchange, number) for number in range(len(queues))), last]
    topology = Topology()
    for queue, here, alternate in zip(queues, chain, chain[1:], strict=False):
        topology |= Topology(
            [Exchange(here, type, arguments={"alternate-exchange": alternate})],
            [make_queue(queue, queue_type)],
            [Binding(here, queue, key) for key in keys[queue]],
        )
    topology |= Topology([Exchange(last, "fanout")], [make_queue(otherwise, queue_type)], [Binding(last, otherwise)])
    return finished(topology)


def _refuse_dead_ends(branches: Mapping[str, Sequence[str]], *, topic: bool) -> None:
    """Refuse a branch that gets nothing because the branches before it match all of its keys."""
    taken: dict[str, str] = {}
    for queue, keys in branches.items():
        if all_by := topic and taken.get("#"):
            raise InvalidInputError(
                f"the branch {queue!r} comes after {all_by!r}, whose key '#' matches everything: put {all_by!r} last"
            )
        if all(key in taken for key in keys):
            raise InvalidInputError(
                f"the branch {queue!r} gets nothing, because {taken[keys[0]]!r} before it has the key {keys[0]!r} too: "
                "give it another key, or leave the branch out"
            )
        taken |= {key: queue for key in keys if key not in taken}


def waste_queue(queue: str) -> str:
    """The name of the queue for a consumer's unwanted messages."""
    return f"{queue}.waste"


def not_routing(
    exchange: str,
    *,
    queue: str,
    unwanted: Sequence[str],
    source_type: str = "fanout",
    queue_type: str = "quorum",
) -> Topology:
    """Pattern 12, not: a queue gets all messages except the unwanted ones.

    No binding can express "not". So the consumer has a topic exchange of its own, ``<queue>.filter``. This exchange
    routes unwanted messages to a queue with a TTL of zero, which drops them at once. Other messages match no binding
    and go to the alternate exchange ``<queue>.rest``, and from there to the consumer's queue.

    Caveat: if the queue for unwanted messages or its binding is deleted, unwanted messages reach the consumer. A
    message with CC keys is dropped if one of its keys is unwanted. It is simpler to drop messages in the consumer, but
    then the broker has to deliver them first.

    Args:
        exchange: the exchange that messages are published to.
        queue: the consumer's queue.
        unwanted: binding keys of unwanted messages; wildcards are allowed.
        source_type: type of the exchange: fanout or topic.
        queue_type: type of the consumer's queue: quorum or classic.

    Raises:
        InvalidInputError: nothing or everything is unwanted, or names collide.
    """
    one_of("source_type", source_type, SOURCE_TYPES)
    check_name("queue", queue)
    keys = keys_of(unwanted, option="unwanted")
    if "#" in keys:
        raise InvalidInputError(
            f"unwanted=[...] has '#', which matches everything, so {queue!r} would get nothing: leave it out"
        )
    own, rest, waste = f"{queue}.filter", f"{queue}.rest", waste_queue(queue)
    refuse_same([("the exchange", exchange), ("the private exchange", own), ("its alternate exchange", rest)])
    return finished(
        Topology(
            [
                Exchange(exchange, source_type),
                Exchange(own, "topic", arguments={"alternate-exchange": rest}),
                Exchange(rest, "fanout"),
            ],
            [make_queue(queue, queue_type), Queue(waste, arguments={"x-message-ttl": 0})],
            [
                Binding(exchange, own, "#" if source_type == "topic" else "", "exchange"),
                *(Binding(own, waste, key) for key in keys),
                Binding(rest, queue),
            ],
        )
    )
