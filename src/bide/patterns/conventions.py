"""Patterns 4, 5 and 8: topologies derived from names of messages and consumers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from bide.delay.protocol import check_name
from bide.durations import DelayLike
from bide.errors import InvalidInputError, InvalidNameError
from bide.patterns.building import Rules, distinct, finished, keys_of, make_queue, milliseconds, refuse_same
from bide.topology import Argument, Binding, Exchange, Queue, Topology


def private_exchange(queue: str) -> str:
    """The name of the private exchange of a consumer, from its queue."""
    return f"{queue}.private"


def private_consumer_exchanges(
    *,
    messages: Sequence[str],
    consumers: Mapping[str, Sequence[str]],
    keys: Mapping[str, Sequence[str]] | None = None,
    rules: Rules | None = None,
    queue_type: str = "quorum",
) -> Topology:
    """Pattern 4, public message exchanges and private consumer exchanges: publishers and consumers declare their parts.

    A publisher declares a fanout exchange for each type of message. A consumer declares its queue and its own exchange,
    ``<queue>.private``, binds that exchange to the messages it wants, and filters them there. Publisher and consumer do
    not need to know each other, and :func:`wire_tap` can listen to what one consumer gets.

    Caveat: the exchange and the queue of a consumer that is shut down for good have to be deleted by hand. Publishers
    and consumers both declare the message exchanges: the broker refuses a declaration with other properties.

    Args:
        messages: message types; each has a fanout exchange of this name.
        consumers: queue -> its message types.
        keys: queue -> binding keys, of which one must match. The private exchange is a topic exchange.
        rules: queue -> headers to match. The private exchange is a headers exchange.
        queue_type: type of the queues: quorum or classic.

    Raises:
        InvalidInputError: a consumer wants an unknown message, a queue has keys and a rule, or names collide.
    """
    keys, rules = keys or {}, rules or {}
    distinct("message type", messages, option="messages")
    distinct("queue", consumers, option="consumers")
    for option, chosen in (("keys", keys), ("rules", rules)):
        for queue in chosen:
            if queue not in consumers:
                raise InvalidInputError(
                    f"{option}={{...}} has {queue!r}, which is not a consumer: add it to consumers={{...}}"
                )
    for queue in sorted(set(keys) & set(rules)):
        raise InvalidInputError(
            f"the consumer {queue!r} has keys and a rule, but its private exchange is either a topic or a headers "
            "exchange: give one of them"
        )
    refuse_same(
        [
            *(("a message exchange", name) for name in messages),
            *((f"the private exchange of {queue!r}", private_exchange(queue)) for queue in consumers),
        ]
    )
    topology = Topology(Exchange(name, "fanout") for name in messages)
    for queue, wanted in consumers.items():
        own = private_exchange(queue)
        kind = "topic" if queue in keys else "headers" if queue in rules else "fanout"
        for name in distinct("message type", wanted, option="consumers", owner=queue):
            if name not in messages:
                raise InvalidInputError(
                    f"the consumer {queue!r} wants {name!r}, which is not one of the messages: add it to messages=[...]"
                )
        chosen_by = keys_of(keys[queue], option="keys", owner=queue) if queue in keys else ("",)
        topology |= Topology(
            [Exchange(own, kind)],
            [make_queue(queue, queue_type)],
            [
                *(Binding(name, own, destination_type="exchange") for name in wanted),
                *(Binding(own, queue, key, arguments=rules.get(queue, {})) for key in chosen_by),
            ],
        )
    return finished(topology)


def wire_tap(exchange: str, *, queue: str, expires: DelayLike = "1h", max_length: int = 10_000) -> Topology:
    """A wire tap, on demand: a copy of everything that passes an exchange.

    A wire tap belongs to pattern 4, where a consumer's private exchange gets the messages before they are filtered. It
    works with every fanout, topic or headers exchange. The queue expires when it has no consumer, and a full queue
    drops its oldest messages, so it never holds up publishers.

    Caveat: on an exchange with an alternate exchange, the tap matches every message, so the alternate gets nothing.

    Args:
        exchange: the exchange to listen to. It must exist, and is not part of this topology.
        queue: the queue that gets the copies.
        expires: time without a consumer after which the queue is deleted.
        max_length: maximum number of messages in the queue.

    Raises:
        InvalidInputError: an argument is invalid.
    """
    check_name("exchange", exchange)
    check_name("queue", queue)
    arguments: dict[str, Argument] = {
        "x-expires": milliseconds("expires", expires),
        "x-max-length": max_length,
        "x-overflow": "drop-head",
    }
    # The key "#" matches everything at a topic exchange, a binding without arguments does so at a headers exchange, and
    # a fanout exchange ignores both.
    return finished(
        Topology(queues=[Queue(queue, arguments=arguments)], bindings=[Binding(exchange, queue, "#")]),
        external={exchange},
    )


def point_to_point(*, queues: Sequence[str], queue_type: str = "quorum") -> Topology:
    """Pattern 5, point to point: the sender names the queue, and the default exchange routes the message there.

    Use it for commands, which one consumer has to carry out. Events belong in exchanges.

    Caveat: if the queue does not exist, the message is lost, unless it is published as mandatory, as bide does.

    Args:
        queues: the queues that can be sent to.
        queue_type: type of the queues: quorum or classic.

    Raises:
        InvalidInputError: no queue is given, or a name is invalid.
    """
    return finished(
        Topology(queues=[make_queue(name, queue_type) for name in distinct("queue", queues, option="queues")])
    )


def hierarchical_routing(
    *, messages: Sequence[str], queues: Mapping[str, Sequence[str]], queue_type: str = "quorum"
) -> Topology:
    """Pattern 8, hierarchical routing: a queue bound to ``finance`` also gets ``finance.fraud.alert``.

    Each message type ``domain.sub-domain.action`` has a fanout exchange, which routes to the exchange
    ``domain.sub-domain``, which routes to the exchange ``domain``. A publisher declares all exchanges from its message
    type up to the domain. So new message types reach queues that are bound further up without new bindings of these
    queues.

    Caveat: a queue that is bound to ``finance`` and to ``finance.fraud`` gets a message only once. Messages published
    to a parent exchange do not go down to its children.

    Args:
        messages: message types of any number of words.
        queues: queue -> message types; the first words of a type also match.
        queue_type: type of the queues: quorum or classic.

    Raises:
        InvalidInputError: a name has an empty word, or a queue is bound to an unknown name.
    """
    topology = Topology()
    for message in distinct("message type", messages, option="messages"):
        topology |= message_line(message)
    known = {one.name for one in topology.exchanges}
    for queue, names in queues.items():
        for name in distinct("name", names, option="queues", owner=queue):
            if name not in known:
                raise InvalidInputError(
                    f"the queue {queue!r} is bound to {name!r}, which is neither a message nor the first words of one: "
                    "add such a message to messages=[...]"
                )
        topology |= Topology(queues=[make_queue(queue, queue_type)], bindings=[Binding(name, queue) for name in names])
    return finished(topology)


def message_line(message: str) -> Topology:
    """The fanout exchanges from a message type up to its domain, which the publisher of pattern 8 declares.

    Raises:
        InvalidNameError: the name is invalid, or has an empty word.
    """
    check_name("message type", message)
    words = message.split(".")
    if not all(words):
        raise InvalidNameError(f"the message type {message!r} has an empty word: write domain.sub-domain.action")
    line = [".".join(words[:count]) for count in range(len(words), 0, -1)]
    return Topology(
        [Exchange(name, "fanout") for name in line],
        bindings=[Binding(child, parent, destination_type="exchange") for child, parent in pairwise(line)],
    )
