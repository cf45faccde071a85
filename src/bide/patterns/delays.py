"""Patterns 13 to 17: delayed retries and deliveries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal

from bide.delay.clock import Clock
from bide.delay.clock_digits import MAX_DELAY, RESOLUTION
from bide.delay.nservicebus import NServiceBus
from bide.delay.protocol import QueueTarget, check_name
from bide.durations import DelayLike, parse_delay
from bide.errors import InvalidDelayError, InvalidInputError, InvalidNameError
from bide.patterns.building import distinct, finished, keys_of, make_queue, milliseconds, one_of, refuse_same
from bide.topology import DEFAULT_EXCHANGE, Argument, Binding, Exchange, Topology
from bide.topology.validation import EXCHANGE_TYPES

if TYPE_CHECKING:
    from bide.delay.protocol import DelayInfrastructure

CascadeLayout = Literal["nservicebus", "clock"]
CASCADES: Final = ("nservicebus", "clock")

PLUGIN_TYPE: Final = "x-delayed-message"
"""The exchange type of the delayed-message plugin."""

GRACE: Final = timedelta(minutes=1)
"""How much longer than its message an ephemeral classic queue exists by default.

A publish takes less time than this, so a message that the broker confirmed expires before its queue.
"""


def delayed_retry_cascade(
    *,
    queues: Sequence[str],
    layout: str = "nservicebus",
    levels: int | None = None,
    max_delay: DelayLike | None = None,
    resolution: DelayLike | None = None,
    queue_type: str = "quorum",
) -> Topology:
    """Pattern 13, delayed retry by a cascade: shared levels of delay that add up to any delay.

    A consumer that fails sends the message through the levels, back to its own queue. ``bide.Endpoint`` does that,
    counts the attempts, and gives up after a limit. The levels are those of NServiceBus (powers of two, in seconds) or
    bide's own (``clock``: one hop for each digit of the delay).

    Caveats: the levels are shared, so heavy load from one application slows down all others. In the cascade of
    NServiceBus the routing key contains the delay, and the original routing key is in a header; with clock it is kept.
    A TTL of the message itself would shorten its delay, so bide moves it to a header. Retries arrive out of order.

    Args:
        queues: the consumers' queues; each is bound to the exchange behind the last level.
        layout: delay infrastructure, nservicebus or clock; nservicebus has powers of two, clock is bide's own.
        levels: number of levels, 1 to 28, 28 by default (nservicebus). The longest delay is 2^levels - 1 seconds. Use
            fewer only on a virtual host without .NET endpoints.
        max_delay: longest delay that gets queues (clock).
        resolution: delays are rounded up to a multiple of this (clock).
        queue_type: type of the consumers' queues: quorum or classic.

    Raises:
        InvalidInputError: an option belongs to the other layout, or a cascade cannot address a queue.
    """
    names = distinct("queue", queues, option="queues")
    infrastructure = cascade(layout, levels=levels, max_delay=max_delay, resolution=resolution)
    topology = infrastructure.topology() | Topology(queues=[make_queue(name, queue_type) for name in names])
    for name in names:
        topology |= infrastructure.route(infrastructure.resolution, QueueTarget(name)).requires
    return finished(topology)


def delayed_delivery_cascade(
    *,
    queues: Sequence[str],
    layout: str = "clock",
    levels: int | None = None,
    max_delay: DelayLike | None = None,
    resolution: DelayLike | None = None,
    queue_type: str = "quorum",
) -> Topology:
    """Pattern 16, delayed delivery by a cascade: like pattern 13, but publishers send messages into the levels.

    ``client.publish(..., to=queue, delay=...)`` does that, so publishers need not compose the routing key. Exchanges
    can be targets too (with clock); the client binds them when they are first used.

    Caveat: all publishers have to know the layout and use the same one: use a library such as bide.

    Args:
        queues: the target queues.
        layout: delay infrastructure, clock or nservicebus; clock is bide's own, nservicebus has powers of two.
        levels: number of levels, 1 to 28 (nservicebus); see pattern 13.
        max_delay: longest delay that gets queues (clock).
        resolution: delays are rounded up to a multiple of this (clock).
        queue_type: type of the queues: quorum or classic.

    Raises:
        InvalidInputError: see :func:`delayed_retry_cascade`.
    """
    return delayed_retry_cascade(
        queues=queues, layout=layout, levels=levels, max_delay=max_delay, resolution=resolution, queue_type=queue_type
    )


def cascade(
    layout: str,
    *,
    levels: int | None = None,
    max_delay: DelayLike | None = None,
    resolution: DelayLike | None = None,
) -> DelayInfrastructure:
    """The delay infrastructure of patterns 13 and 16.

    Raises:
        InvalidInputError: the layout is unknown, or an option belongs to the other layout.
    """
    if one_of("layout", layout, CASCADES) == "nservicebus":
        for name, value in (("max_delay", max_delay), ("resolution", resolution)):
            if value is not None:
                raise InvalidInputError(
                    f"{name}=... is given, and only the layout 'clock' has it: leave it out, or choose that layout"
                )
        return NServiceBus(routing="direct", levels=28 if levels is None else levels)
    if levels is not None:
        raise InvalidInputError(
            f"levels=... is {levels}, and only the layout 'nservicebus' has it: leave it out, or choose that layout"
        )
    # CC, because support for BCC depends on the broker's release; the topology is the same.
    return Clock(
        carrier="CC",
        max_delay=MAX_DELAY if max_delay is None else parse_delay(max_delay),
        resolution=RESOLUTION if resolution is None else parse_delay(resolution),
    )


def ephemeral_delay(
    name: str,
    *,
    delay: DelayLike,
    to: str | None = None,
    exchange: str | None = None,
    queue_type: str = "quorum",
    grace: DelayLike | None = None,
) -> Topology:
    """Pattern 14, delayed retry by an ephemeral exchange and queue: both exist for one message only.

    The fanout exchange is deleted with its queue (auto-delete). A classic queue expires ``grace`` after the delay. A
    quorum queue must not expire: it does not count a repeated declaration as use, and expiry would delete the messages
    in it, including those that their target refuses. So the receiver of the message deletes the queue;
    :mod:`bide.messaging.ephemeral` does both sides.

    Caveats: each message costs two declarations and a deletion. A classic queue loses a message that its target
    refuses, or that is published so late that the queue expires first; a quorum queue stays until its message is
    received. A message sent to a queue (``to``) arrives with the queue's name as its routing key; one sent to an
    exchange keeps its own.

    Args:
        name: name of the exchange and the queue; make it unique, for example with a UUID.
        delay: how long the message waits.
        to: the queue that the message returns to.
        exchange: the exchange that it returns to, instead of a queue.
        queue_type: quorum or classic.
        grace: lifetime of a classic queue after the delay, 1m by default.

    Raises:
        InvalidInputError: both a queue and an exchange are given, or neither; a grace is given for a quorum queue; or
            names collide.
    """
    check_name("name", name)
    if (to is None) == (exchange is None):
        raise InvalidInputError("the target is missing or ambiguous: give a queue with to=..., or else exchange=...")
    if queue_type == "quorum" and grace is not None:
        raise InvalidInputError(
            f"grace=... is {grace!s}, which is for a classic queue only: a quorum queue must not expire, because that "
            "deletes its messages. Leave it out, or choose a classic queue with queue_type=..."
        )
    arguments: dict[str, Argument] = {"x-message-ttl": milliseconds("delay", delay)}
    if to is not None:
        check_name("queue", to)
        refuse_same([("the queue that delays", name), ("the queue after it", to)])
        arguments |= {"x-dead-letter-exchange": DEFAULT_EXCHANGE, "x-dead-letter-routing-key": to}
    else:
        check_name("exchange", exchange)
        refuse_same([("the exchange that delays", name), ("the exchange after it", str(exchange))])
        arguments["x-dead-letter-exchange"] = str(exchange)
    if queue_type == "classic":
        lease = GRACE if grace is None else parse_delay(grace)
        if not lease:
            raise InvalidDelayError(
                "the grace is zero, and the queue could expire before its message: give some seconds"
            )
        arguments["x-expires"] = milliseconds("the delay with the grace", parse_delay(delay) + lease)
    return finished(
        Topology(
            [Exchange(name, "fanout", auto_delete=True)],
            [make_queue(name, queue_type, arguments)],
            [Binding(name, name)],
        ),
        external={to or str(exchange)},
    )


def delayed_message_exchange(
    exchange: str, *, bindings: Mapping[str, Sequence[str]], type: str = "topic", queue_type: str = "quorum"
) -> Topology:
    """Pattern 15, the delayed-message plugin: an exchange that delays messages by their ``x-delay`` header.

    It needs a broker with the plugin rabbitmq_delayed_message_exchange, which is archived and does not run on RabbitMQ
    4.3. On other brokers, applying this pattern is an error, and
    :class:`bide.messaging.delayed_message.DelayedMessagePublisher` does the same with a plain exchange and the same
    header.

    Caveats: delayed messages are on one node only. None is delivered while the node is down, and all are lost with its
    disk. The mandatory flag has no effect. The longest delay is 49 days.

    Args:
        exchange: the exchange.
        bindings: queue -> binding keys.
        type: how the exchange routes: direct, topic, fanout or headers.
        queue_type: type of the queues: quorum or classic.

    Raises:
        InvalidInputError: an argument is invalid.
    """
    one_of("type", type, sorted(EXCHANGE_TYPES))
    queues = distinct("queue", bindings, option="bindings")
    return finished(
        Topology(
            [Exchange(exchange, PLUGIN_TYPE, arguments={"x-delayed-type": type})],
            [make_queue(queue, queue_type) for queue in queues],
            [
                Binding(exchange, queue, key)
                for queue in queues
                for key in keys_of(bindings[queue], option="bindings", owner=queue)
            ],
        )
    )


def private_publisher_delay(exchange: str, *, to: str, delay: DelayLike, queue_type: str = "quorum") -> Topology:
    """Pattern 17, delayed delivery by the publisher's own exchange: one delay for all messages of this publisher.

    The publisher sends to its own fanout exchange instead of the shared one. A queue behind it holds each message for
    the delay, and then dead-letters it to the shared exchange with its own routing key.

    Caveat: a queue has only one delay. A message with a shorter TTL of its own does not arrive earlier than the
    messages before it, because only the head of a queue expires. The shared exchange must have a matching binding when
    the message is due: a quorum queue keeps messages without a match and tries again, and stops dead-lettering when 32
    of them are pending.

    Args:
        exchange: the publisher's own exchange.
        to: the shared exchange. It must exist, and is not part of this topology.
        delay: how long messages wait.
        queue_type: type of the queue <exchange>.delay: quorum or classic.

    Raises:
        InvalidInputError: both exchanges have the same name.
    """
    check_name("exchange", to)
    if exchange == to:
        raise InvalidNameError(f"the publisher's exchange {exchange!r} is also the shared one: give it another name")
    queue = f"{exchange}.delay"
    arguments: dict[str, Argument] = {"x-message-ttl": milliseconds("delay", delay), "x-dead-letter-exchange": to}
    return finished(
        Topology(
            [Exchange(exchange, "fanout")], [make_queue(queue, queue_type, arguments)], [Binding(exchange, queue)]
        ),
        external={to},
    )
