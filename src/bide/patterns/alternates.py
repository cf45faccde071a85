"""Patterns 11 and 12: if, else if, else; and not. Both use alternate exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from bide.delay.protocol import check_name
from bide.errors import InvalidInputError, InvalidNameError
from bide.patterns.building import distinct, finished, keys_of, make_queue, one_of, refuse_same
from bide.topology import Binding, Exchange, Queue, Topology

BRANCH_TYPES: Final = ("direct", "topic")
"""Types of exchange that branch by the routing key."""

SOURCE_TYPES: Final = ("fanout", "topic")
"""Types of exchange that a binding can take everything from."""


def else_exchange(exchange: str, number: int) -> str:
    """The exchange of a branch: the first is the exchange itself, those after it are alternates."""
    return f"{exchange}.else{number}" if number else exchange


def if_else(
    exchange: str,
    *,
    branches: Mapping[str, Sequence[str]],
    otherwise: str,
    type: str = "direct",
    queue_type: str = "quorum",
) -> Topology:
    """Pattern 11, if, else if, else: the first branch that matches gets the message, and no other.

    Each branch is an exchange whose alternate is the next one; the last alternate is a fanout exchange to the queue for
    everything else. A topic exchange alone cannot do that: its ``#`` takes what the special queues take, too.

    Caveat: an alternate is asked only where nothing matches at all. A queue that is deleted takes its bindings along,
    and its messages go to the next branch. And CC and BCC keys count: a message with two keys may match two bindings of
    one branch, but never two branches.

    Args:
        exchange: the exchange that messages are published to.
        branches: queue -> binding keys, in the order in which they are tried.
        otherwise: the queue for everything else.
        type: of the branches' exchanges: direct, or topic for keys with wildcards.
        queue_type: of the queues: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds: no branch, a branch without keys or behind one that takes its keys,
            names that collide.
    """
    one_of("type", type, BRANCH_TYPES)
    check_name("queue", otherwise)
    queues = distinct("queue", tuple(branches), option="branches")
    if otherwise in branches:
        raise InvalidNameError(f"otherwise={otherwise!r} is the queue of a branch: name another for the rest")
    keys = {queue: keys_of(branches[queue], option=f"branches[{queue!r}]") for queue in queues}
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
    """See to it that no branch stands behind others that leave nothing for it."""
    taken: dict[str, str] = {}
    for queue, keys in branches.items():
        if all_by := topic and taken.get("#"):
            raise InvalidInputError(
                f"the branch {queue!r} comes after {all_by!r}, whose key '#' takes everything: put {all_by!r} last"
            )
        if all(key in taken for key in keys):
            raise InvalidInputError(
                f"the branch {queue!r} gets nothing, because {taken[keys[0]]!r} before it takes the key {keys[0]!r}: "
                "give it another key, or leave it out"
            )
        taken |= {key: queue for key in keys if key not in taken}


def waste_queue(queue: str) -> str:
    """The waste bin of a consumer."""
    return f"{queue}.waste"


def not_routing(
    exchange: str,
    *,
    queue: str,
    unwanted: Sequence[str],
    source_type: str = "fanout",
    queue_type: str = "quorum",
) -> Topology:
    """Pattern 12, not: a queue gets everything but what it does not want.

    No exchange matches what is not. So the consumer's own topic exchange, ``<queue>.filter``, sends the unwanted keys
    to a waste bin, whose TTL of zero drops them at once, and everything else, which it cannot match, to its alternate
    exchange ``<queue>.rest`` and the queue.

    Caveat: the waste bin is what says no. When it, or its binding, is deleted, what is unwanted arrives. And a message
    with CC keys is dropped if one of its keys is unwanted. To drop messages in the consumer is simpler, and costs their
    way to it.

    Args:
        exchange: the exchange that everything is published to.
        queue: the consumer's queue.
        unwanted: binding keys, with wildcards, of what the queue must not get.
        source_type: the type of the exchange: fanout or topic.
        queue_type: of the consumer's queue: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds: nothing is unwanted, or everything, or names that collide.
    """
    one_of("source_type", source_type, SOURCE_TYPES)
    check_name("queue", queue)
    keys = keys_of(unwanted, option="unwanted")
    if "#" in keys:
        raise InvalidInputError(f"unwanted has '#', which is everything: the queue {queue!r} would get nothing")
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
