"""Put a topology on a broker, and take it away again, over AMQP."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.errors import (
    AccessRefusedError,
    BrokerError,
    DeclarationMismatchError,
    NotEmptyError,
    TargetNotFoundError,
    UnsupportedBrokerError,
)
from bide.topology import Queue, Topology

log = logging.getLogger(__name__)

MINIMUM_RELEASE: Final = (3, 10)
"""The first release whose quorum queues dead-letter at least once."""

_IN_FLIGHT: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What :func:`apply` declared; declaring what exists already counts too."""

    exchanges: int
    queues: int
    bindings: int

    def __str__(self) -> str:
        return f"{self.exchanges} exchanges, {self.queues} queues, {self.bindings} bindings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What :func:`destroy` deleted.

    Attributes:
        messages: that were thrown away with their queues.
    """

    exchanges: int
    queues: int
    messages: int


def check_release(connection: Connection) -> None:
    """Check that the broker is new enough.

    Raises:
        UnsupportedBrokerError: it is older than 3.10.
    """
    product = str(connection.server.get("product", ""))
    if product != "RabbitMQ":
        raise UnsupportedBrokerError(f"the broker at {connection.address} is {product or 'unknown'}, not RabbitMQ")
    if connection.release < MINIMUM_RELEASE:
        release = ".".join(map(str, connection.release))
        raise UnsupportedBrokerError(
            f"the broker at {connection.address} is RabbitMQ {release}, older than 3.10: upgrade it; only from 3.10 on "
            "do quorum queues dead-letter without losing messages"
        )


async def check_streams(connection: Connection) -> None:
    """Check that the feature flag ``stream_queue`` is on, which at-least-once dead-lettering needs.

    Without it RabbitMQ 3.x falls back to at-most-once in silence. From 4.0 on it is always on.

    Raises:
        UnsupportedBrokerError: it is off.
    """
    if connection.release >= (4, 0):
        return
    name = f"bide.probe.{secrets.token_hex(8)}"
    # On a connection of its own, because some releases close the whole connection where the flag is off.
    probing = await Connection.open(connection.url)
    try:
        channel = await probing.channel()
        await channel.declare_queue(Queue(name, arguments={"x-queue-type": "stream"}))
        await channel.delete_queue(name)
    except BrokerError as error:
        if isinstance(error, AccessRefusedError) or "feature flag" not in str(error):
            raise
        raise UnsupportedBrokerError(
            f"the broker at {connection.address} has the feature flag stream_queue switched off, without which "
            "dead-lettering may lose messages: run 'rabbitmqctl enable_feature_flag stream_queue'"
        ) from error
    finally:
        await probing.close()


async def apply(connection: Connection, topology: Topology, *, external: Iterable[str] = ()) -> Applied:
    """Declare everything in a topology. What exists as wanted is left as it is.

    Args:
        external: names of exchanges and queues outside the topology that its bindings may use.

    Raises:
        InvalidTopologyError: the topology contradicts itself; nothing was declared.
        DeclarationMismatchError: something exists with other properties. It names the argument, and in ``applied``
            what had been declared by then.
        AccessRefusedError: the user may not declare it.
        TargetNotFoundError: a binding names something that does not exist.
    """
    # Only here, because it brings a model of the routing with it, which "import bide" should not pay for.
    from bide.validation import validate

    validate(topology, external=frozenset(external))
    done = {"exchanges": 0, "queues": 0, "bindings": 0}
    channel = await connection.channel()
    try:
        await _declare(channel, (channel.declare_exchange, topology.exchanges), done, "exchanges")
        await _declare(channel, (channel.declare_queue, topology.queues), done, "queues")
        await _declare(channel, (channel.bind, topology.bindings), done, "bindings")
    except DeclarationMismatchError as error:
        applied = ", ".join(f"{count} {kind}" for kind, count in done.items() if count) or "nothing"
        raise DeclarationMismatchError(
            f"{error}; declared before that: {applied}",
            kind=error.kind,
            name=error.name,
            argument=error.argument,
            wanted=error.wanted,
            found=error.found,
            applied=applied,
            reply_code=error.reply_code,
        ) from error
    await channel.close()
    return Applied(**done)


async def _declare(channel: Channel, work: tuple[Any, tuple[Any, ...]], done: dict[str, int], kind: str) -> None:
    call, items = work
    for batch in _batches(items):
        futures = [call(item) for item in batch]
        # All settle: when the channel closes, the first in line failed with the reason and the others after it.
        results = await asyncio.gather(*futures, return_exceptions=True)
        done[kind] += sum(1 for one in results if not isinstance(one, BaseException))
        for one in results:
            if isinstance(one, BaseException):
                raise one


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(items)
    while batch := list(islice(rest, _IN_FLIGHT)):
        yield batch


async def exists(connection: Connection, topology: Topology) -> bool:
    """Whether all exchanges and queues of a topology exist, with whatever arguments."""
    channel = await connection.channel()
    futures = [
        *(channel.declare_exchange(one, passive=True) for one in topology.exchanges),
        *(channel.declare_queue(one, passive=True) for one in topology.queues),
    ]
    results = await asyncio.gather(*futures, return_exceptions=True)
    for one in results:
        if isinstance(one, TargetNotFoundError):
            return False
        if isinstance(one, BaseException):
            raise one
    await channel.close()
    return True


async def destroy(
    connection: Connection, topology: Topology, *, force: bool = False, external: Iterable[str] = ()
) -> Removed:
    """Delete a topology's queues and exchanges; what is gone already is no error.

    Args:
        force: delete queues that hold messages, and the messages with them.
        external: names outside the topology that its bindings use, as for :func:`apply`.

    Raises:
        NotEmptyError: queues hold messages and ``force`` is off; nothing was deleted.
    """
    _refuse_messages(await message_counts(connection, topology.queues), force)
    channel = await connection.channel()
    for batch in _batches(topology.exchanges):
        await asyncio.gather(*(channel.delete_exchange(one.name) for one in batch))
    # Now nothing can enter any more. What came in since the first count is still there to be seen.
    counts = await message_counts(connection, topology.queues)
    try:
        _refuse_messages(counts, force)
    except NotEmptyError:
        await apply(connection, topology, external=external)
        raise
    removed = messages = 0
    for names in _batches(counts):
        replies = await asyncio.gather(*(channel.delete_queue(name) for name in names))
        removed += len(replies)
        messages += sum(reply.message_count or 0 for reply in replies)
    await channel.close()
    return Removed(exchanges=len(topology.exchanges), queues=removed, messages=messages)


def _refuse_messages(counts: Mapping[str, int], force: bool) -> None:
    held = {name: count for name, count in counts.items() if count}
    if held and not force:
        shown = ", ".join(f"{name} ({count})" for name, count in list(held.items())[:5])
        more = f" and {len(held) - 5} more queues" if len(held) > 5 else ""
        raise NotEmptyError(
            f"{sum(held.values())} messages wait in {shown}{more}: let them be delivered, or delete them with --force",
            counts=held,
        )


async def message_counts(connection: Connection, queues: tuple[Queue, ...]) -> dict[str, int]:
    """Ready messages by queue name; queues that do not exist are left out."""
    counts: dict[str, int] = {}
    pending = list(queues)
    while pending:
        channel = await connection.channel()
        batch = pending[:_IN_FLIGHT]
        results = await asyncio.gather(
            *(channel.declare_queue(one, passive=True) for one in batch), return_exceptions=True
        )
        answered = 0
        for queue, result in zip(batch, results, strict=True):
            if isinstance(result, TargetNotFoundError):
                answered += 1
                break
            if isinstance(result, BaseException):
                raise result
            counts[queue.name] = result.message_count or 0
            answered += 1
        pending = pending[answered:]
        if channel.is_open:
            await channel.close()
    return counts
