"""Turning a classic queue into a quorum queue while publishers send to it.

A queue cannot change its type, so the messages wait in a holding queue meanwhile. The broker's state shows how far an
interrupted conversion got, and the next run continues there:

=============  =============  =================================================================================
queue          holding queue  next steps
=============  =============  =================================================================================
classic        any            declare the holding queue, move the bindings to it, move the messages to it, then
                              delete the classic queue and declare the quorum queue
missing        exists         declare the quorum queue, with the arguments that the holding queue keeps
quorum         exists         move the bindings back, then the messages, and delete the holding queue
quorum         missing        none
=============  =============  =================================================================================
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from bide.admin.exclusive_access import without_other_connections
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.amqp.queue_counts import queue_counts
from bide.amqp.reply_codes import PRECONDITION_FAILED
from bide.delay import recognition
from bide.delay.forwarding import carry_user_id
from bide.delay.protocol import MAX_NAME_BYTES, check_name
from bide.errors import BideError, BrokerError, InvalidInputError, TargetNotFoundError
from bide.management.api import FoundQueue, ManagementApi
from bide.recoverability.copies import sendable
from bide.runtime.logs import logger
from bide.runtime.wording import quantity
from bide.topology import Argument, Binding, Exchange, Queue

log = logger(__name__)

HOLDING: Final = ".to-quorum"
"""End of the name of the holding queue, and of the exchange that moves messages."""

_WINDOW: Final = 2000
"""Messages that are moved at a time. A crash can duplicate these messages."""

_IDLE_PAUSE: Final = 0.05
_EMPTY_WITHIN: Final = 30.0
"""Seconds within which the classic queue has to be empty once, after its older messages were moved."""

_KEPT_ARGUMENT: Final = "bide-to-quorum"
"""Argument of the holding queue: the arguments of the quorum queue as JSON. The broker ignores and keeps it."""

_DROPPED: Final = frozenset({"x-queue-type", "x-queue-mode", "x-queue-version", "x-queue-master-locator"})
"""Arguments of classic queues that are left out of the quorum queue."""

_REFUSED: Final = {
    "x-max-priority": "quorum queues have no such argument, so the order of its messages would change",
}
_ON_HOLDING: Final = ("x-dead-letter-exchange", "x-dead-letter-routing-key")
"""Arguments of the holding queue, for messages with an expiration of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumConversion:
    """A conversion: what is left to do, or what was done.

    Attributes:
        queue: the queue's name.
        found: the queue's type before: ``classic``, ``quorum`` or ``missing``.
        holding: the name of the holding queue; empty if the queue is a quorum queue already.
        arguments: the arguments of the quorum queue.
        dropped: arguments of the classic queue that the quorum queue does not have.
        bindings: number of bindings to move.
        consumers: number of consumers of the classic queue, which have to stop before the conversion.
        messages: number of ready messages in both queues.
        moved: number of messages moved into the quorum queue.
    """

    queue: str
    found: str
    holding: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    bindings: int = 0
    consumers: int = 0
    messages: int = 0
    moved: int = 0


async def plan_conversion(connection: Connection, api: ManagementApi, name: str) -> QuorumConversion:
    """What :func:`convert` would do. Nothing is changed.

    Raises:
        TargetNotFoundError: the queue does not exist.
        InvalidInputError: the queue cannot become a quorum queue.
        BrokerError: the broker refuses.
    """
    check_name("queue", name, limit=MAX_NAME_BYTES - len(HOLDING))
    recognition.refuse(name)
    vhost = connection.url.vhost
    main, held = await api.queue(vhost, name), await api.queue(vhost, name + HOLDING)
    if main is None and held is None:
        raise TargetNotFoundError(f"the queue {name!r} does not exist on the virtual host {vhost!r}: correct the name")
    if main is not None and main.type == "quorum" and held is None:
        return QuorumConversion(queue=name, found="quorum", holding="")
    arguments = _quorum_arguments(main) if main is not None and main.type != "quorum" else _kept_arguments(held)
    dropped = tuple(sorted(_DROPPED & main.queue.arguments.keys())) if main is not None else ()
    holding = name + HOLDING
    bindings = [*await _bindings(api, vhost, name, holding), *await _bindings(api, vhost, holding, holding)]
    counts = [await _counts(connection, one.queue.name) for one in (main, held) if one is not None]
    return QuorumConversion(
        queue=name,
        found=main.type if main is not None else "missing",
        holding=holding,
        arguments=arguments,
        dropped=tuple(one for one in dropped if one != "x-queue-type"),
        bindings=len({(one.source, one.routing_key, json.dumps(dict(one.arguments))) for one in bindings}),
        consumers=counts[0][1] if main is not None and main.type == "classic" else 0,
        messages=sum(ready for ready, _ in counts),
    )


async def convert(
    connection: Connection, api: ManagementApi, name: str, *, pause_publishers: bool = False
) -> QuorumConversion:
    """Turn a classic queue into a quorum queue, or finish an interrupted conversion.

    Publishers can continue. No message that is published through an exchange is lost. Messages that are published at
    the moment when a binding moves arrive twice, and so may messages that were being moved when a conversion was
    killed. Messages that arrive during the conversion may overtake older ones.

    Messages published through the default exchange may be lost in the milliseconds in which the queue is replaced,
    because RabbitMQ confirms messages on their way to a queue that is being deleted. ``pause_publishers`` prevents
    this.

    Args:
        connection: a connection to the virtual host.
        api: the management API.
        name: the queue.
        pause_publishers: close the other connections of the virtual host, and refuse new ones, while the queue is
            replaced. The user has to be an administrator.

    Raises:
        TargetNotFoundError: the queue does not exist.
        InvalidInputError: the queue cannot become a quorum queue, or has consumers.
        BrokerError: the broker refuses, or the connection was lost. Run the conversion again.
    """
    plan = await plan_conversion(connection, api, name)
    if not plan.holding:
        return plan
    if plan.consumers:
        raise InvalidInputError(
            f"the queue {name!r} has {quantity(plan.consumers, 'consumer')}, which would lose it: stop consumers "
            "first; publishers can continue"
        )
    work = _Conversion(connection, api, plan)
    if plan.found == "classic":
        await work.hold()
    if plan.found == "classic" and pause_publishers:
        async with without_other_connections(connection, api):
            await work.declare()
    elif plan.found != "quorum":
        await work.declare()
    return replace(plan, moved=await work.give_back())


class _Conversion:
    def __init__(self, connection: Connection, api: ManagementApi, plan: QuorumConversion) -> None:
        self._connection = connection
        self._api = api
        self._vhost = connection.url.vhost
        self._name, self._holding = plan.queue, plan.holding
        self._wanted = Queue.quorum(plan.queue, plan.arguments)

    async def hold(self) -> None:
        """Declare the holding queue, and move the bindings and the messages of the classic queue to it."""
        arguments = {name: value for name, value in self._wanted.arguments.items() if name in _ON_HOLDING}
        arguments[_KEPT_ARGUMENT] = json.dumps(dict(self._wanted.arguments), sort_keys=True)
        async with await self._connection.channel() as channel:
            # A fanout exchange, so that messages keep their routing keys, and their CC keys lead nowhere else.
            await asyncio.gather(
                channel.declare_exchange(Exchange(self._holding, "fanout")),
                channel.declare_queue(Queue.quorum(self._holding, arguments)),
                channel.bind(Binding(self._holding, self._holding)),
            )
            log.info("declared the holding queue %s", self._holding)
            await self._move_bindings(channel, self._name, self._holding)
        # Publishers may keep filling the queue, so the rest is moved when the queue is replaced.
        await self._move(self._name, most=(await _counts(self._connection, self._name))[0])

    async def declare(self) -> None:
        """Replace the classic queue, once it is empty, by the quorum queue."""
        loop = self._connection.loop
        deadline = loop.time() + _EMPTY_WITHIN
        while True:
            async with await self._connection.channel() as channel:
                deleting = channel.delete_queue(self._name, if_empty=True, if_unused=True)
                declaring = channel.declare_queue(self._wanted)
                replies: Sequence[Any] = await asyncio.gather(deleting, declaring, return_exceptions=True)
            deleted, declared = replies
            if not isinstance(deleted, BaseException):
                if isinstance(declared, BaseException):
                    raise declared
                log.info("declared the quorum queue %s", self._name)
                return
            if not isinstance(deleted, BrokerError) or deleted.reply_code != PRECONDITION_FAILED:
                raise deleted
            ready, consumers = await _counts(self._connection, self._name)
            if consumers:
                raise InvalidInputError(
                    f"the queue {self._name!r} has a new consumer, which would lose it: stop it, and run this again"
                )
            if loop.time() > deadline:
                raise BrokerError(
                    f"publishers fill the queue {self._name!r} faster than it can be emptied, through the default "
                    "exchange: run this again with pause_publishers=True, or when they send less"
                )
            log.info("%d more messages arrived in %s", ready, self._name)
            await self._move(self._name, most=ready)

    async def give_back(self) -> int:
        """Move the bindings and the messages to the quorum queue, and delete the holding queue."""
        async with await self._connection.channel() as channel:
            await self._move_bindings(channel, self._holding, self._name)
            await asyncio.gather(
                channel.bind(Binding(self._holding, self._name)),
                channel.unbind(Binding(self._holding, self._holding)),
            )
        moved = await self._move(self._holding)
        # A quorum queue is deleted whether it is empty or not.
        while (await _counts(self._connection, self._holding))[0]:
            moved += await self._move(self._holding)
        async with await self._connection.channel() as channel:
            await channel.delete_queue(self._holding)
            await channel.delete_exchange(self._holding)
        log.info("deleted the holding queue %s", self._holding)
        return moved

    async def _move_bindings(self, channel: Channel, source: str, destination: str) -> None:
        """Move the bindings of one queue to another. Bind and unbind are sent together, one pair for each binding."""
        bindings = await _bindings(self._api, self._vhost, source, self._holding)
        calls = []
        for one in bindings:
            new = Binding(one.source, destination, one.routing_key, arguments=one.arguments)
            calls += [channel.bind(new), channel.unbind(one)]
        await asyncio.gather(*calls)
        # Over AMQP, an unbind needs the exact types of the arguments, which the management API does not report.
        for one in await self._api.call("GET", "queues", self._vhost, source, "bindings") or []:
            if one["source"] not in ("", self._holding):
                path = ("bindings", self._vhost, "e", one["source"], "q", source, one["properties_key"])
                await self._api.call("DELETE", *path)
        log.info("moved %d bindings from %s to %s", len(bindings), source, destination)

    async def _move(self, queue: str, *, most: int | None = None) -> int:
        """Move the messages of a queue through the exchange, each acknowledged after its confirm.

        Args:
            queue: the queue.
            most: about how many messages to move; None for all messages of a queue that gets no new ones.
        """
        log.info("moving the messages of %s", queue)
        async with (
            await self._connection.channel() as taking,
            await self._connection.channel(confirms=True) as sending,
        ):
            mover = _Mover(taking, sending, self._holding, self._connection.url.user)
            await taking.qos(_WINDOW)
            tag = await taking.consume(queue, on_message=mover.take, on_end=mover.fail)
            while mover.is_busy() or (await _counts(self._connection, queue))[0]:
                if most is not None and mover.moved >= most:
                    break
                await mover.wait()
            await taking.cancel(tag)
            while mover.is_busy():
                await mover.wait()
        log.info("moved %d messages of %s", mover.moved, queue)
        return mover.moved


class _Mover:
    """Publishes deliveries again, unchanged as far as AMQP allows, and acknowledges them."""

    def __init__(self, taking: Channel, sending: Channel, exchange: str, user: str | None) -> None:
        self._taking, self._sending, self._exchange, self._user = taking, sending, exchange, user
        self._in_flight = 0
        self.moved = 0
        self._failed: asyncio.Future[BideError] = asyncio.get_running_loop().create_future()

    def is_busy(self) -> bool:
        return self._in_flight > 0

    async def wait(self) -> None:
        """Wait for a moment, or until an error, which is raised."""
        await asyncio.wait([self._failed], timeout=_IDLE_PAUSE)
        if self._failed.done():
            raise self._failed.result()

    def take(self, delivery: Delivery) -> None:
        values = sendable(delivery.values)
        headers = dict(values.pop("headers", {}))
        carry_user_id(values, headers, self._user)
        try:
            sent = self._sending.publish(
                exchange=self._exchange,
                routing_key=delivery.routing_key,
                values={**values, "headers": headers} if headers else values,
                body=delivery.body,
            )
        except BideError as error:
            self.fail(error)
            return
        self._in_flight += 1
        sent.add_done_callback(partial(self._settled, delivery.delivery_tag))

    def _settled(self, tag: int, sent: asyncio.Future[None]) -> None:
        self._in_flight -= 1
        error = sent.exception()
        if error is None and self._taking.is_open:
            self._taking.ack(tag)
            self.moved += 1
        elif isinstance(error, BideError):
            self.fail(error)

    def fail(self, error: BideError) -> None:
        if not self._failed.done():
            self._failed.set_result(error)


def _quorum_arguments(found: FoundQueue) -> dict[str, Argument]:
    queue = found.queue
    problems: list[str] = [f"it has {name}: {why}" for name, why in _REFUSED.items() if name in queue.arguments]
    if found.type != "classic":
        problems.append(f"it is a {found.type} queue")
    if queue.exclusive or queue.auto_delete:
        problems.append("it is exclusive or auto-delete, so it belongs to its client, which has to declare another one")
    if queue.arguments.get("x-overflow") == "reject-publish-dlx":
        problems.append("it has x-overflow 'reject-publish-dlx', which quorum queues treat like 'drop-head'")
    if problems:
        raise InvalidInputError(f"the queue {queue.name!r} cannot become a quorum queue: {'; '.join(problems)}")
    return {name: value for name, value in queue.arguments.items() if name not in _DROPPED}


def _kept_arguments(held: FoundQueue | None) -> dict[str, Argument]:
    kept = None if held is None else held.queue.arguments.get(_KEPT_ARGUMENT)
    if not isinstance(kept, str):
        raise InvalidInputError(
            f"the queue {held.queue.name if held else ''!r} does not belong to a conversion: delete it if it is not "
            "needed"
        )
    return {name: value for name, value in json.loads(kept).items() if name != "x-queue-type"}


async def _bindings(api: ManagementApi, vhost: str, queue: str, holding: str) -> list[Binding]:
    """The bindings of a queue that move with it: all but those of the default exchange and of the moving exchange."""
    found: Sequence[Mapping[str, Any]] = await api.call("GET", "queues", vhost, queue, "bindings") or []
    bindings = []
    for one in found:
        if one["source"] in ("", holding):
            continue
        for name, value in (one["arguments"] or {}).items():
            if not isinstance(value, str | int | float | bool):
                raise InvalidInputError(
                    f"the binding from {one['source']!r} to {queue!r} has the argument {name!r}, whose value is not a "
                    "scalar, which the management API does not report exactly: replace that binding first"
                )
        bindings.append(Binding(one["source"], queue, one["routing_key"], arguments=one["arguments"] or {}))
    return bindings


async def _counts(connection: Connection, queue: str) -> tuple[int, int]:
    """The numbers of ready messages and of consumers."""
    async with await connection.channel() as channel:
        reply = await queue_counts(channel, queue)
    return int(reply.message_count), int(reply.consumer_count)
