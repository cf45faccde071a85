"""Applying a topology over AMQP."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from bide.admin.declaring import RETRY_FOR, Declaring, is_temporary
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.queue_counts import ATTEMPTS, busy_error, have_counted, is_empty
from bide.errors import (
    AccessRefusedError,
    BrokerError,
    DeclarationMismatchError,
    TargetNotFoundError,
    UnsupportedBrokerError,
)
from bide.runtime.logs import logger
from bide.runtime.wording import quantity
from bide.topology import Binding, Exchange, Queue, Topology

log = logger(__name__)

MINIMUM_RELEASE: Final = (3, 10)
"""The first release whose quorum queues dead-letter at least once."""

_UNKNOWN_TYPE_TEXTS: Final = ("unknown exchange type", "invalid exchange type")
"""RabbitMQ's reply texts for an unknown exchange type, and for one whose plugin is not enabled."""

_BUILT_IN_TYPES: Final = frozenset({"direct", "topic", "fanout", "headers"})
"""Exchange types that need no plugin."""

_PLUGIN_OF_TYPE: Final = {
    "x-consistent-hash": "rabbitmq_consistent_hash_exchange",
    "x-jms-topic": "rabbitmq_jms_topic_exchange",
    "x-modulus-hash": "rabbitmq_sharding",
    "x-random": "rabbitmq_random_exchange",
    "x-recent-history": "rabbitmq_recent_history_exchange",
}
"""Plugins that RabbitMQ ships with, by the exchange type that they add."""

_MOST_COUNTED: Final = 64
"""How many queues to count at once, so that a batch takes far less time than a busy queue."""

_Item = Exchange | Queue | Binding
_Call = Callable[[Channel, Any], asyncio.Future[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The counts of :func:`apply`. Items that existed already are included."""

    exchanges: int
    queues: int
    bindings: int

    def __str__(self) -> str:
        exchanges, queues = quantity(self.exchanges, "exchange"), quantity(self.queues, "queue")
        return f"{exchanges}, {queues}, {quantity(self.bindings, 'binding')}"


def check_release(connection: Connection) -> None:
    """Check that the broker is new enough.

    Raises:
        UnsupportedBrokerError: the broker is older than 3.10.
    """
    product = str(connection.server.get("product", ""))
    if product != "RabbitMQ":
        raise UnsupportedBrokerError(
            f"the broker at {connection.address} is {product or 'unknown'}, not RabbitMQ: give another URL"
        )
    if connection.release < MINIMUM_RELEASE:
        release = ".".join(map(str, connection.release))
        raise UnsupportedBrokerError(
            f"the broker at {connection.address} is RabbitMQ {release}, older than 3.10: upgrade it; quorum queues "
            "dead-letter without losing messages only since 3.10"
        )


async def check_streams(connection: Connection, *, prefix: str = "bide") -> None:
    """Check that the feature flag ``stream_queue`` is on, which at-least-once dead-lettering needs.

    Without the flag, RabbitMQ 3.x silently falls back to at-most-once. Since 4.0 the flag is always on.

    Args:
        prefix: the start of the name of a temporary queue, for users with permissions for certain names only.

    Raises:
        UnsupportedBrokerError: the feature flag is off.
    """
    if connection.release >= (4, 0):
        return
    name = f"{prefix}.probe.{os.urandom(8).hex()}"
    # On a separate connection, because some releases close the whole connection if the flag is off.
    probing = await Connection.open(connection.url)
    try:
        async with Declaring(probing) as declaring:
            await declaring.all(Channel.declare_queue, [Queue(name, arguments={"x-queue-type": "stream"})])
            await declaring.all(Channel.delete_queue, [name])
    except BrokerError as error:
        if isinstance(error, AccessRefusedError) or "feature flag" not in str(error):
            raise
        raise UnsupportedBrokerError(
            f"the broker at {connection.address} has the feature flag stream_queue switched off, without which "
            "dead-lettering may lose messages: run 'rabbitmqctl enable_feature_flag stream_queue'"
        ) from error
    finally:
        await probing.close()


async def check_exchange_types(connection: Connection, topology: Topology, *, retry_for: timedelta = RETRY_FOR) -> None:
    """Check that the broker has the exchange types of a topology, by declaring the exchanges whose types need a plugin.

    Raises:
        UnsupportedBrokerError: the broker lacks an exchange type.
        BrokerError: as for :func:`apply`.
    """
    uncommon = [one for one in topology.exchanges if one.type not in _BUILT_IN_TYPES]
    if not uncommon:
        return
    # On a separate connection, because RabbitMQ 3 closes the whole connection for an unknown type.
    probing = await Connection.open(connection.url)
    try:
        for exchange in uncommon:
            try:
                async with Declaring(probing, retry_for=retry_for) as declaring:
                    await declaring.all(Channel.declare_exchange, [exchange])
            except BrokerError as error:
                if not any(text in str(error) for text in _UNKNOWN_TYPE_TEXTS):
                    raise
                raise UnsupportedBrokerError(
                    f"the broker at {connection.address} has no exchange type {exchange.type!r}, the type of the "
                    f"exchange {exchange.name!r}: {_how_to_enable(exchange.type)}"
                ) from error
    finally:
        await probing.close()


def _how_to_enable(exchange_type: str) -> str:
    if exchange_type == "x-delayed-message":
        # The plugin is archived, and does not run on 4.3 and later.
        return (
            "publish with delay=... to an exchange of the plain type instead (Client.publish), or keep the x-delay "
            "header and publish with bide.messaging.delayed_message.DelayedMessagePublisher; neither needs the plugin"
        )
    if exchange_type == "x-local-random":
        return "upgrade the broker to RabbitMQ 4.0 or later, or use another type"
    plugin = _PLUGIN_OF_TYPE.get(exchange_type)
    if plugin is None:
        return "enable the plugin that adds it, or use another type"
    return f"run 'rabbitmq-plugins enable {plugin}' on the broker's machine, or use another type"


async def apply(
    connection: Connection,
    topology: Topology,
    *,
    external: Iterable[str] = (),
    last: Topology | None = None,
    retry_for: timedelta = RETRY_FOR,
    can_move: bool = True,
) -> Applied:
    """Declare everything in a topology. Items that exist with these properties stay unchanged.

    Temporary refusals of a busy broker (see :mod:`bide.admin.declaring`) are retried. If the broker closes the
    connection with a refusal, the rest is declared over another connection, and the given one stays closed. A topology
    with an exclusive queue is the exception, because that queue belongs to its connection.

    Args:
        external: names of exchanges and queues outside the topology that its bindings may use.
        last: queues of the topology to declare only after all others exist and are bound. Their existence then shows
            that everything else exists too, even if an earlier apply was interrupted.
        retry_for: how long to keep retrying after a refusal; each success resets the time.
        can_move: whether to continue over another connection; if not, the loss of the given connection is an error.

    Raises:
        InvalidTopologyError: the topology contradicts itself; nothing was declared.
        DeclarationMismatchError: an item exists with other properties. The error names the argument, and ``applied``
            says what was declared before.
        UnsupportedBrokerError: the broker lacks an exchange type, because its plugin is not enabled.
        BrokerError: the user lacks a permission, a binding names something that does not exist, or the connection was
            lost. It can be a subclass. The message ends with what was declared before, if anything was.
    """
    # Imported here, so that "import bide" does not import the routing model.
    from bide.topology.validation import validate

    validate(topology, external=frozenset(external))
    done: list[Exchange | Queue | Binding] = []
    can_move = can_move and not any(one.exclusive for one in topology.queues)
    try:
        await check_exchange_types(connection, topology, retry_for=retry_for)
        async with Declaring(connection, retry_for=retry_for, can_move=can_move) as declaring:
            for call, items in _phases(topology, last or Topology()):
                async for item, _ in declaring.each(call, items):
                    done.append(item)
    except BrokerError as error:
        raise _with_progress(error, topology, done) from error
    return _count(done)


def _phases(topology: Topology, last: Topology) -> Iterator[tuple[_Call, Iterable[_Item]]]:
    """The phases of declaring, in order."""
    late = {one.name for one in last.queues}
    yield Channel.declare_exchange, topology.exchanges
    yield Channel.declare_queue, [one for one in topology.queues if one.name not in late]
    yield Channel.bind, [one for one in topology.bindings if not is_into(one, late)]
    yield Channel.declare_queue, [one for one in topology.queues if one.name in late]
    yield Channel.bind, [one for one in topology.bindings if is_into(one, late)]


def is_into(binding: Binding, queues: Collection[str]) -> bool:
    """Whether a binding leads to one of these queues."""
    return binding.destination_type == "queue" and binding.destination in queues


def _with_progress(error: BrokerError, topology: Topology, done: Sequence[_Item]) -> BrokerError:
    applied = f"{_count(done)}, the last of them {_describe(done[-1])}" if done else "nothing"
    message = f"{error}; declared before that: {applied}" if done else str(error)
    if not isinstance(error, DeclarationMismatchError):
        return type(error)(message, reply_code=error.reply_code)
    name = error.name
    if not name:
        # The broker truncates reply texts at 255 bytes. The refused item is the first one not declared yet.
        following: Sequence[Exchange | Queue] = topology.exchanges if error.kind == "exchange" else topology.queues
        name = next((one.name for one in following if one not in done), "")
    return DeclarationMismatchError(
        message,
        kind=error.kind,
        name=name,
        argument=error.argument,
        wanted=error.wanted,
        found=error.found,
        applied=applied,
        reply_code=error.reply_code,
    )


def counts_of(topology: Topology) -> Applied:
    """The counts of applying a topology."""
    return _count((*topology.exchanges, *topology.queues, *topology.bindings))


def _describe(item: _Item) -> str:
    if isinstance(item, Binding):
        return (
            f"the binding from the exchange {item.source!r} to the {item.destination_type} {item.destination!r} with "
            f"the key {item.routing_key!r}"
        )
    return f"the {type(item).__name__.lower()} {item.name!r}"


def _count(done: Iterable[_Item]) -> Applied:
    kinds = Counter(type(one) for one in done)
    return Applied(exchanges=kinds[Exchange], queues=kinds[Queue], bindings=kinds[Binding])


def names_in(topology: Topology) -> set[str]:
    """The names that bindings and dead-letter arguments refer to, for the argument ``external`` of :func:`apply`.

    Dead-letter routing keys are included, because with the default exchange they are names of queues.
    """
    names = {name for one in topology.bindings for name in (one.source, one.destination)}
    arguments = ("x-dead-letter-exchange", "x-dead-letter-routing-key")
    return names | {str(one.arguments.get(name, "")) for one in topology.queues for name in arguments}


async def exists(connection: Connection, topology: Topology) -> bool:
    """Whether all exchanges and queues of a topology exist, with any arguments.

    If a queue cannot be reached, for example because its node is down, the check is repeated.

    Raises:
        TargetNotFoundError: a queue exists but could not be reached within half a minute.
        BrokerError: the connection was lost.
    """
    try:
        async with Declaring(connection, can_move=False) as declaring:
            items: list[Exchange | Queue] = [*topology.exchanges, *topology.queues]
            await declaring.all(_check_item, items)
    except TargetNotFoundError as error:
        if is_temporary(error):
            raise
        return False
    return True


async def message_counts(connection: Connection, queues: Sequence[Queue], *, exact: bool = False) -> dict[str, int]:
    """Ready messages by queue name; queues that do not exist are left out.

    Args:
        exact: ask queues again that are too busy to count. If false, the count of a busy queue may be 0.

    Raises:
        QueueBusyError: a queue was too busy each time; only if *exact*.
        BrokerError: the broker cannot be reached, or refuses.
    """
    async with Declaring(connection) as declaring:
        replies = await (_exact_replies if exact else replies_by_name)(declaring, queues)
    return {name: reply.message_count or 0 for name, reply in replies.items()}


async def _exact_replies(declaring: Declaring, queues: Sequence[Queue]) -> dict[str, Any]:
    """See :func:`bide.amqp.queue_counts.queue_counts`. Many queues are asked at once, so the connection may be slow."""
    loop = asyncio.get_running_loop()
    pending, found = deque(queues), dict[str, Any]()
    size, attempts = _MOST_COUNTED, 0
    while pending:
        batch = [pending.popleft() for _ in range(min(size, len(pending)))]
        asked_at = loop.time()
        replies = await replies_by_name(declaring, batch)
        seconds = loop.time() - asked_at
        if await have_counted(seconds, lambda: declaring.all(_round_trip, [None])):
            uncounted = set[str]()
            size, attempts = min(size * 4, _MOST_COUNTED), 0
        else:
            uncounted = {name for name, reply in replies.items() if is_empty(reply)}
            size, attempts = max(size // 4, 1), attempts + 1
        if uncounted and attempts == ATTEMPTS:
            raise busy_error(min(uncounted))
        pending.extendleft(one for one in batch if one.name in uncounted)
        found |= {name: reply for name, reply in replies.items() if name not in uncounted}
    return found


async def replies_by_name(declaring: Declaring, items: Sequence[Exchange | Queue]) -> dict[str, Any]:
    """The broker's replies to passive declarations of the items that exist, by name."""
    return {item.name: reply async for item, reply in declaring.each(_check_item, items, skip_missing=True)}


def _round_trip(channel: Channel, _: None) -> asyncio.Future[Any]:
    return channel.round_trip()


def _check_item(channel: Channel, item: Exchange | Queue) -> asyncio.Future[Any]:
    if isinstance(item, Exchange):
        return channel.declare_exchange(item, passive=True)
    return channel.declare_queue(item, passive=True)
