"""Deleting a topology over AMQP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

from bide.admin.apply import apply, is_into, message_counts, replies_by_name
from bide.admin.declaring import RETRY_FOR, Declaring
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.errors import NotEmptyError, QueueBusyError
from bide.runtime.wording import quantity
from bide.topology import PREDECLARED_EXCHANGES, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """The counts of :func:`destroy`.

    Attributes:
        messages: the number of messages deleted with their queues.
    """

    exchanges: int
    queues: int
    messages: int


async def destroy(
    connection: Connection,
    topology: Topology,
    *,
    force: bool = False,
    external: Iterable[str] = (),
    retry_for: timedelta = RETRY_FOR,
) -> Removed:
    """Delete a topology's queues and exchanges. Missing ones are not an error.

    The entry exchanges are deleted first, and then the messages are counted again. AMQP counts only ready messages;
    messages that are being dead-lettered are known only to the management API.

    Args:
        force: also delete queues that hold messages.
        external: names outside the topology that its bindings use, as for :func:`apply`.
        retry_for: how long refusals are retried, as for :func:`apply`.

    Raises:
        NotEmptyError: queues hold messages and ``force`` is false. Everything that was deleted was declared again.
        QueueBusyError: a queue was too busy to count, and ``force`` is false. Everything that was deleted was declared
            again.
    """
    async with Declaring(connection, retry_for=retry_for) as declaring:
        there = await _counts(connection, topology, force=force)
        # To restore the previous state, queues that do not exist now are not declared.
        missing = {one.name for one in topology.queues}.difference(there)
        topology = Topology(
            topology.exchanges,
            (one for one in topology.queues if one.name in there),
            (one for one in topology.bindings if not is_into(one, missing)),
        )
        own = await replies_by_name(
            declaring, [one for one in topology.exchanges if one.name not in PREDECLARED_EXCHANGES]
        )
        counts: dict[str, int] = {}
        for names in _entry_exchanges(topology):
            await declaring.all(Channel.delete_exchange, names)
            try:
                counts = await _counts(connection, topology, force=force)
            except (NotEmptyError, QueueBusyError):
                await apply(connection, topology, external=external, retry_for=retry_for)
                raise
        replies = await declaring.all(Channel.delete_queue, counts)
        await declaring.all(Channel.delete_exchange, own)
    messages = sum(reply.message_count or 0 for reply in replies)
    return Removed(exchanges=len(own), queues=len(replies), messages=messages)


async def _counts(connection: Connection, topology: Topology, *, force: bool) -> dict[str, int]:
    """The messages of the queues that exist, which have none unless ``force``."""
    counts = await message_counts(connection, topology.queues, exact=not force)
    if not force:
        check_empty(counts)
    return counts


def _entry_exchanges(topology: Topology) -> Iterator[list[str]]:
    """The entry exchanges of the topology: first those that only publishers use, then the others.

    Exchanges with bindings of other programs would lose these bindings, so they are deleted after the queues.
    """
    sources = {one.source for one in topology.bindings} - PREDECLARED_EXCHANGES
    fed = {one.destination for one in topology.bindings if one.destination_type == "exchange"}
    fed |= {str(one.arguments.get("x-dead-letter-exchange")) for one in topology.queues}
    fed |= {str(one.arguments.get("alternate-exchange")) for one in topology.exchanges}
    leading = [one.name for one in topology.exchanges if one.name in sources]
    yield [name for name in leading if name not in fed]
    yield [name for name in leading if name in fed]


def check_empty(counts: Mapping[str, int | None]) -> None:
    """Refuse to delete queues that have messages.

    Args:
        counts: messages by queue name; None if unknown.

    Raises:
        NotEmptyError: there are messages.
    """
    held = {name: count for name, count in counts.items() if count}
    if held:
        shown = ", ".join(f"{name} ({count})" for name, count in list(held.items())[:5])
        more = f" and {len(held) - 5} more queues" if len(held) > 5 else ""
        raise NotEmptyError(
            f"{quantity(sum(held.values()), 'message waits', 'messages wait')} in {shown}{more}: let them be "
            "delivered, or delete them with force=True",
            counts=held,
        )
