"""Patterns 1 to 3: fanout broadcast, layers of exchanges, and routing by headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from bide.delay.protocol import check_name
from bide.errors import InvalidInputError, InvalidNameError
from bide.patterns.building import Rules, distinct, finished, make_queue, one_of, refuse_same
from bide.topology import Binding, Exchange, Topology

if TYPE_CHECKING:
    from collections.abc import Sequence
    from email.message import Message as Mail

ENTRY_TYPES: Final = ("topic", "direct", "fanout")
"""Exchange types of an entry exchange in front of a layer of exchanges."""


def fanout_broadcast(exchange: str, *, queues: Sequence[str], queue_type: str = "quorum") -> Topology:
    """Pattern 1, simple broadcast: every queue gets a copy of every message, whatever its routing key.

    Consumers that should each get every message have a queue each; consumers that share the work share a queue.

    Caveat: a queue gets only messages that are published after it was bound. An exchange without a queue drops
    messages, unless they are published as mandatory.

    Args:
        exchange: the fanout exchange to publish to.
        queues: the queues, one for each subscriber.
        queue_type: type of the queues: quorum or classic.

    Raises:
        InvalidInputError: no queue is given, one is given twice, or a name is invalid.
    """
    names = distinct("queue", queues, option="queues")
    return finished(
        Topology(
            [Exchange(exchange, "fanout")],
            [make_queue(name, queue_type) for name in names],
            [Binding(exchange, name) for name in names],
        )
    )


def layered_exchanges(
    exchange: str,
    *,
    layers: Mapping[str, str],
    queues: Mapping[str, str],
    rules: Rules | None = None,
    entry: str = "topic",
    queue_type: str = "quorum",
) -> Topology:
    """Pattern 2, layers of exchanges: the first layer routes cheaply, so that fewer messages need costly routing.

    The entry exchange has few bindings, and routes each message to an exchange of the second layer. There a fanout
    exchange passes the message to all queues, and a headers exchange only to queues whose rule the headers match.

    Caveat: a queue that is reached over two layers gets only one copy, because the broker delivers a published message
    to a queue once.

    Args:
        exchange: the entry exchange.
        layers: exchange -> its binding key. The exchanges of the second layer, bound to the entry exchange.
        queues: queue -> its exchange; an exchange of the second layer.
        rules: queue -> headers to match; all of them by default (x-match). The exchange of such a queue is a headers
            exchange, and queues without a rule get all of its messages.
        entry: type of the entry exchange: topic, direct or fanout; fanout sends everything to every layer.
        queue_type: type of the queues: quorum or classic.

    Raises:
        InvalidInputError: a queue is bound to no layer, a rule belongs to no queue, or names collide.
    """
    one_of("entry", entry, ENTRY_TYPES)
    rules = rules or {}
    distinct("exchange", layers, option="layers")
    refuse_same([("the entry exchange", exchange), *(("an exchange of the second layer", name) for name in layers)])
    for queue, layer in queues.items():
        if layer not in layers:
            raise InvalidInputError(
                f"the queue {queue!r} is bound to {layer!r}, which is not a layer: add it to layers={{...}}, or give "
                f"one of {', '.join(map(repr, layers))}"
            )
    for queue in rules:
        if queue not in queues:
            raise InvalidInputError(
                f"there is a rule for {queue!r}, which is not one of the queues: add it to queues={{...}}"
            )
    if entry == "fanout" and any(layers.values()):
        raise InvalidInputError(
            "the entry exchange is a fanout exchange, which ignores the keys in layers={...}: leave them empty"
        )
    ruled = {queues[queue] for queue in rules}
    return finished(
        Topology(
            [
                Exchange(exchange, entry),
                *(Exchange(name, "headers" if name in ruled else "fanout") for name in layers),
            ],
            [make_queue(name, queue_type) for name in distinct("queue", queues, option="queues")],
            [
                *(Binding(exchange, name, key, "exchange") for name, key in layers.items()),
                *(Binding(layer, queue, arguments=rules.get(queue, {})) for queue, layer in queues.items()),
            ],
        )
    )


def email_routing(exchange: str, *, rules: Rules, others: str | None = None, queue_type: str = "quorum") -> Topology:
    """Pattern 3, routing of e-mail by a headers exchange: each application names the mails that it wants.

    One program reads the mailbox and publishes every mail with :func:`mail_headers`. Applications neither poll the
    mailbox nor remember which mails they have read.

    Caveat: a headers exchange compares whole values and their types: there are no wildcards, and 2 differs from "2".
    So a mail to several people has a header for each of them.

    Args:
        exchange: the headers exchange.
        rules: queue -> headers to match; with x-match any, one of them is enough.
        others: a queue for all other mails; an alternate exchange has the same name.
        queue_type: type of the queues: quorum or classic.

    Raises:
        InvalidInputError: there is no rule, a rule is empty, or names collide.
    """
    names = distinct("queue", rules, option="rules")
    for queue, rule in rules.items():
        if not {name for name in rule if name != "x-match"}:
            raise InvalidInputError(
                f"the rule of {queue!r} has no header: add one, or bind the queue to a fanout exchange"
            )
    topology = Topology(
        [Exchange(exchange, "headers", arguments={"alternate-exchange": others} if others is not None else {})],
        [make_queue(name, queue_type) for name in names],
        [Binding(exchange, queue, arguments=rule) for queue, rule in rules.items()],
    )
    if others is not None:
        if others in rules:
            raise InvalidNameError(f"others={others!r} is a queue with a rule: give another queue for the rest")
        check_name("queue", others)
        topology |= Topology([Exchange(others, "fanout")], [make_queue(others, queue_type)], [Binding(others, others)])
    return finished(topology)


def mail_headers(mail: Mail) -> dict[str, Any]:
    """Headers for routing a mail: ``from``, ``subject``, and ``to:<address>`` for each recipient.

    Addresses are in lower case and without names. Recipients in Cc have ``cc:<address>``. ``attachments`` is the number
    of attachments, so that ``attachments=0`` matches mails without any.
    """
    from email.utils import getaddresses

    headers: dict[str, Any] = {"subject": str(mail.get("Subject", ""))}
    senders = getaddresses([str(one) for one in mail.get_all("From", [])])
    if senders:
        headers["from"] = senders[0][1].lower()
    for name in ("To", "Cc"):
        for _, address in getaddresses([str(one) for one in mail.get_all(name, [])]):
            headers[f"{name.lower()}:{address.lower()}"] = True
    headers["attachments"] = sum(part.get_content_disposition() == "attachment" for part in mail.walk())
    return headers
