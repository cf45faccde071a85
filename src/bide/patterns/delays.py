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
"""How much longer than its message an ephemeral classic queue lives by default.

Longer than a publish of bide may take, so that a message that the broker confirmed is never in a queue that goes first.
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
    """Pattern 13, delayed retry by a cascade: levels of delay, shared by all, that add up to any delay.

    A consumer that fails sends the message through the levels, back to its own queue; ``bide.Endpoint`` does it, counts
    the attempts, and gives up in the end. The levels are those of NServiceBus (powers of two, in seconds) or bide's own
    (``clock``: one hop for each digit of the time).

    Caveats: the levels are shared, so much load of one is felt by all. The routing key says the delay in the cascade of
    NServiceBus, so that the original one travels in a header; with clock it stays. A TTL of the message's own would cut
    its wait short: bide carries that in a header too. And retries come out of order.

    Args:
        queues: the consumers' queues; each is bound to where the levels end.
        layout: nservicebus (a cascade of powers of two) or clock (bide's own).
        levels: of nservicebus, 1 to 28: the longest delay is 2^levels - 1 seconds. 28 if not given; fewer only on a
            virtual host that no .NET endpoint uses.
        max_delay: of clock: make no queues for longer delays.
        resolution: of clock: round delays up to this.
        queue_type: of the consumers' queues: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds: options of the other layout, or a queue that a cascade cannot
            address.
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
    """Pattern 16, delayed delivery by a cascade: as pattern 13, but publishers send into the levels themselves.

    ``client.publish(..., to=queue, delay=...)`` does it, so that no publisher has to compose the routing key. Exchanges
    can be targets too (with clock); the client binds them when they are first used.

    Caveat: a publisher has to know the layout, and all of them the same one: use a library, such as this.

    Args:
        queues: the queues that are delivered to.
        layout: clock (bide's own) or nservicebus (a cascade of powers of two).
        levels: of nservicebus, 1 to 28; see pattern 13.
        max_delay: of clock: make no queues for longer delays.
        resolution: of clock: round delays up to this.
        queue_type: of the queues: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds, as for :func:`delayed_retry_cascade`.
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
        InvalidInputError: an unknown layout, or options of the other one.
    """
    if one_of("layout", layout, CASCADES) == "nservicebus":
        for name, value in (("max_delay", max_delay), ("resolution", resolution)):
            if value is not None:
                raise InvalidInputError(f"{name} is for the layout clock, and nservicebus has levels: leave it out")
        return NServiceBus(routing="direct", levels=28 if levels is None else levels)
    if levels is not None:
        raise InvalidInputError(f"levels={levels} is for the layout nservicebus, and clock has its own: leave it out")
    # CC, not BCC, which depends on the broker's release: the topology is the same.
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
    """Pattern 14, delayed retry by an ephemeral exchange and queue: one of each for one message, gone afterwards.

    The fanout exchange takes itself away when its queue is gone. A classic queue goes by its expiry, ``grace`` after
    the delay. A quorum queue must not have one: unlike a classic queue it does not count a new declaration as use, and
    it goes with the messages that are still in it, those that their target refuses included. So the receiver of the
    message deletes it: :mod:`bide.messaging.ephemeral` does both sides.

    Caveats: it costs two declarations and a deletion for each message. A classic queue loses a message that its target
    refuses, or that comes into it so late that the queue expires first; a quorum queue stays until its message
    is received. Back to a queue (``to``) the message has that queue's name as its routing key; by way of an exchange it
    keeps its own.

    Args:
        name: of the exchange and of the queue; unique, such as with a UUID.
        delay: the wait.
        to: the queue that the message comes back to.
        exchange: instead of a queue: the exchange that it comes back to, such as a consumer's private one.
        queue_type: quorum or classic.
        grace: of a classic queue: how much longer than the delay it lives; 1 min if not given.

    Raises:
        InvalidInputError: in one of its kinds: both a queue and an exchange, or neither; a grace for a quorum queue;
            names that collide.
    """
    check_name("name", name)
    if (to is None) == (exchange is None):
        raise InvalidInputError("name where the message comes back to: either to= (a queue) or exchange=")
    if queue_type == "quorum" and grace is not None:
        raise InvalidInputError(
            f"grace={grace!s} is for a classic queue: a quorum queue that expires takes messages along, so it has no "
            "expiry; leave the grace out, or make it a classic queue"
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
            raise InvalidDelayError("the grace is zero, and a message would be lost with the queue: give some seconds")
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
    """Pattern 15, the delayed-message plugin: an exchange that holds messages back by their ``x-delay`` header.

    For brokers that have the plugin rabbitmq_delayed_message_exchange, which is archived and does not run on RabbitMQ
    4.3. Elsewhere applying this is an error, and
    :class:`bide.messaging.delayed_message.DelayedMessagePublisher` does the same with an exchange of the plain type and
    the same header.

    Caveats: what waits is on one node only, and lost with it; mandatory does not work; 49 days are the most.

    Args:
        exchange: the exchange.
        bindings: queue -> binding keys.
        type: the type that it has otherwise: direct, topic, fanout or headers.
        queue_type: of the queues: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds.
    """
    one_of("type", type, sorted(EXCHANGE_TYPES))
    queues = distinct("queue", tuple(bindings), option="bindings")
    return finished(
        Topology(
            [Exchange(exchange, PLUGIN_TYPE, arguments={"x-delayed-type": type})],
            [make_queue(queue, queue_type) for queue in queues],
            [
                Binding(exchange, queue, key)
                for queue in queues
                for key in keys_of(bindings[queue], option=f"bindings[{queue!r}]")
            ],
        )
    )


def private_publisher_delay(exchange: str, *, to: str, delay: DelayLike, queue_type: str = "quorum") -> Topology:
    """Pattern 17, delayed delivery by the publisher's own exchange: one delay for everything this publisher sends.

    The publisher sends to its own fanout exchange instead of the one that all use. A queue behind it holds each message
    for the delay and dead-letters it to the exchange that all use, with its own routing key.

    Caveat: one queue, one delay. A message with a TTL of its own that is shorter comes no earlier than those before it,
    because only what is next in line expires. And the others' exchange has to have a match at the due time: a quorum
    queue keeps what finds none and tries again, and after 32 of these it stands still.

    Args:
        exchange: the publisher's own exchange.
        to: the exchange that all use. It exists already, and is not part of this topology.
        delay: the wait.
        queue_type: of the queue in between, <exchange>.delay: quorum or classic.

    Raises:
        InvalidInputError: in one of its kinds: both exchanges are the same.
    """
    check_name("exchange", to)
    if exchange == to:
        raise InvalidNameError(f"the publisher's exchange {exchange!r} is the one that all use: give it another name")
    queue = f"{exchange}.delay"
    arguments: dict[str, Argument] = {"x-message-ttl": milliseconds("delay", delay), "x-dead-letter-exchange": to}
    return finished(
        Topology(
            [Exchange(exchange, "fanout")], [make_queue(queue, queue_type, arguments)], [Binding(exchange, queue)]
        ),
        external={to},
    )
