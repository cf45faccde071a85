"""A player of generated cases, which records all that clients see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.errors import BideError, PublishRefusedError, UnroutableError
from bide.topology import Argument, Binding
from tests.broker.equivalence_cases import (
    EXCHANGES,
    QUEUES,
    Case,
    Delete,
    Fifths,
    How,
    Leave,
    Listen,
    Purge,
    Rest,
    Send,
    Settle,
    Step,
    Take,
    Unbind,
)
from tests.broker.equivalence_pace import Pace

_NAMES: Final = frozenset((*QUEUES, *EXCHANGES))
AFTERWARDS: Final = 4
"""Steps that pass before the queues are emptied."""

_BETWEEN: Final = 0.05
"""Of a step, between the messages of one :class:`Send`."""


@dataclass(slots=True, kw_only=True)
class _Consumer:
    queue: str
    channel: Channel
    tag: str
    in_hand: list[Delivery] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""


class Player:
    """Plays one case.

    Args:
        prefix: makes its names its own.
    """

    def __init__(self, case: Case, connection: Connection, pace: Pace, prefix: str) -> None:
        self._case = case
        self._connection = connection
        self._pace = pace
        self._prefix = prefix
        self._consumers: list[_Consumer] = []
        self._sent = 0

    async def play(self) -> dict[str, Any]:
        """Play it, and return what was seen."""
        seen: list[Any] = []
        async with self._channel() as channel, self._channel() as publishing:
            await self._declare(channel)
            await self._pace.until(1)
            for number, step in enumerate(self._case.steps, 2):
                seen.append(await self._act(step, channel, publishing, number))
                await self._pace.until(number)
            end = len(self._case.steps) + 1 + AFTERWARDS
            for consumer in self._consumers:
                await self._pace.until(end)
                await self._leave(consumer, close=True)
                end += 1
            await self._pace.until(end)
            left = await self._empty([queue.name for queue in self._case.queues])
        return {
            "steps": seen,
            "consumers": [{"seen": one.seen, "ended": one.ended} for one in self._consumers],
            "left": left,
        }

    async def clean_up(self) -> None:
        """Remove all that the case declared."""
        async with self._channel() as channel:
            for queue in self._case.queues:
                await channel.delete_queue(self._named(queue.name))
            for exchange in self._case.exchanges:
                await channel.delete_exchange(self._named(exchange.name))

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[Channel]:
        channel = await self._connection.channel(confirms=True)
        try:
            yield channel
        finally:
            await channel.close()

    async def _declare(self, channel: Channel) -> None:
        for exchange in self._case.exchanges:
            arguments = self._all_named(exchange.arguments)
            await channel.declare_exchange(replace(exchange, name=self._named(exchange.name), arguments=arguments))
        for queue, ttl in zip(self._case.queues, self._case.ttls, strict=True):
            arguments = self._all_named(queue.arguments)
            if ttl is not None:
                arguments["x-message-ttl"] = self._milliseconds(ttl)
            if "x-delayed-retry-type" in arguments:
                shortest, longest = Fifths(number=6), Fifths(number=11)
                arguments["x-delayed-retry-min"] = self._milliseconds(shortest)
                arguments["x-delayed-retry-max"] = self._milliseconds(longest)
            await channel.declare_queue(replace(queue, name=self._named(queue.name), arguments=arguments))
        for binding in self._case.bindings:
            await channel.bind(self._own(binding))

    async def _act(self, step: Step, channel: Channel, publishing: Channel, number: int) -> Any:
        match step:
            case Send():
                return await self._send(step, publishing, number)
            case Listen():
                return await self._missing_or(lambda: self._listen(step))
            case Settle():
                self._settle(step)
            case Leave() if self._consumers:
                await self._leave(self._consumers[step.consumer % len(self._consumers)], close=step.close)
            case Take() | Purge() if self._is_stream(step.queue):
                # It closes the connection; tests/broker/test_memory_streams.py has it.
                return None
            case Take():
                return await self._missing_or(lambda: self._take(step))
            case Purge():
                return await self._missing_or(lambda: self._purge(step.queue))
            case Delete(kind="queue"):
                return (await channel.delete_queue(self._named(step.name))).message_count
            case Delete():
                await channel.delete_exchange(self._named(step.name))
            case Unbind() if self._case.bindings:
                binding = self._case.bindings[step.binding % len(self._case.bindings)]
                return await self._missing_or(lambda: self._unbind(binding))
            case Leave() | Unbind() | Rest():
                return None
        return None

    async def _send(self, step: Send, channel: Channel, number: int) -> list[str]:
        outcomes = []
        for count in range(step.number):
            if count:
                await self._pace.until(number - 1 + count * _BETWEEN)
            self._sent += 1
            values: dict[str, Any] = {
                "message_id": str(self._sent),
                "delivery_mode": 2,
                "priority": step.priority,
                "expiration": None if step.ttl is None else str(self._milliseconds(step.ttl)),
                "headers": self._all_named(step.headers) or None,
            }
            try:
                await self._connection.writable()
                await (channel if channel.is_open else await self._new_channel()).publish(
                    exchange=self._named(step.exchange),
                    routing_key=self._named(step.routing_key),
                    values=values,
                    body=b"x" * step.size,
                )
            except (PublishRefusedError, UnroutableError) as error:
                outcomes.append(type(error).__name__)
            except BideError as error:
                outcomes.append(type(error).__name__)
            else:
                outcomes.append("stored")
        return outcomes

    async def _new_channel(self) -> Channel:
        return await self._connection.channel(confirms=True)

    async def _missing_or(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """The result of a call, or the name of its error."""
        try:
            return await work()
        except BideError as error:
            return type(error).__name__

    async def _take(self, step: Take) -> dict[str, Any] | None:
        channel = await self._connection.channel()
        delivery = await channel.get(self._named(step.queue))
        if delivery is None:
            await channel.close()
            return None
        settle(channel, delivery, step.how)
        if step.how != "keep":
            # Otherwise the message stays unsettled until the connection closes.
            await channel.close()
        return {**self._seen(delivery), "left": delivery.message_count}

    async def _listen(self, step: Listen) -> str:
        channel = await self._connection.channel()
        await channel.qos(step.prefetch)
        consumer = _Consumer(queue=step.queue, channel=channel, tag="")

        def on_message(delivery: Delivery) -> None:
            consumer.in_hand.append(delivery)
            consumer.seen.append(self._seen(delivery))

        def on_end(error: BideError) -> None:
            consumer.ended = type(error).__name__

        arguments: dict[str, Argument] = {}
        if self._is_stream(step.queue):
            arguments = {"x-stream-offset": step.offset}
        elif step.priority and not self._is_single(step.queue):
            arguments = {"x-priority": step.priority}
        consumer.tag = await channel.consume(
            self._named(step.queue), on_message=on_message, on_end=on_end, arguments=arguments
        )
        self._consumers.append(consumer)
        return "listening"

    def _is_single(self, queue: str) -> bool:
        return any("x-single-active-consumer" in one.arguments for one in self._case.queues if one.name == queue)

    def _is_stream(self, queue: str) -> bool:
        return any(one.type == "stream" for one in self._case.queues if one.name == queue)

    def _settle(self, step: Settle) -> None:
        if not self._consumers:
            return
        consumer = self._consumers[step.consumer % len(self._consumers)]
        if not consumer.in_hand or not consumer.channel.is_open or step.how == "keep":
            return
        place = step.message % len(consumer.in_hand)
        delivery = consumer.in_hand[place]
        multiple = step.multiple and step.how != "requeue"
        # Below 4.0 a stream takes acks only.
        how = "ack" if self._is_stream(consumer.queue) else step.how
        settle(consumer.channel, delivery, how, multiple=multiple)
        consumer.in_hand = (
            consumer.in_hand[place + 1 :] if multiple else [one for one in consumer.in_hand if one is not delivery]
        )

    async def _leave(self, consumer: _Consumer, *, close: bool) -> None:
        if not consumer.channel.is_open:
            return
        if close:
            await consumer.channel.close()
        elif not consumer.ended:
            await consumer.channel.cancel(consumer.tag)
            consumer.ended = "cancelled"

    async def _purge(self, queue: str) -> int:
        async with self._channel() as channel:
            count: int = (await channel.purge_queue(self._named(queue))).message_count
            return count

    async def _unbind(self, binding: Binding) -> str:
        async with self._channel() as channel:
            await channel.unbind(self._own(binding))
            return "unbound"

    async def _empty(self, queues: list[str]) -> dict[str, Any]:
        """All messages of the queues, by consumers: a queue with a single active one gives none otherwise."""
        found: dict[str, Any] = {queue: [] for queue in queues}
        channels = {queue: await self._connection.channel() for queue in queues}

        async def listen(queue: str, seen: list[dict[str, Any]]) -> None:
            arguments: dict[str, Argument] = {}
            if self._is_stream(queue):
                arguments = {"x-stream-offset": "first"}
                await channels[queue].qos(1000)
            await channels[queue].consume(
                self._named(queue),
                on_message=lambda delivery: seen.append(self._seen(delivery)),
                on_end=lambda _: None,
                arguments=arguments,
            )

        outcomes = await asyncio.gather(*(listen(queue, found[queue]) for queue in queues), return_exceptions=True)
        for queue, outcome in zip(queues, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                found[queue] = type(outcome).__name__
        await self._pace.quiet(lambda: sum(map(len, found.values())))
        # What comes back to its queue now is not looked at any more.
        left = {queue: list(seen) if isinstance(seen, list) else seen for queue, seen in found.items()}
        for channel in channels.values():
            await channel.close()
        return left

    def _seen(self, delivery: Delivery) -> dict[str, Any]:
        """What a client sees of a message, without the name of the case and the time."""
        values = {name: value for name, value in delivery.values.items() if value is not None}
        return {
            "exchange": self._plain(delivery.exchange),
            "routing_key": self._plain(delivery.routing_key),
            "redelivered": delivery.redelivered,
            "values": self._plain(values),
            "body": delivery.body,
        }

    def _plain(self, value: Any) -> Any:
        match value:
            case str():
                return value.replace(self._prefix, "")
            case datetime():
                return "a time"
            case Mapping():
                # Times to live differ, where the brokers run at another pace.
                return {
                    self._plain(name): "a time" if name == "original-expiration" else self._plain(one)
                    for name, one in value.items()
                    if name != "expiration"
                }
            case list():
                return [self._plain(one) for one in value]
            case _:
                return value

    def _named(self, name: str) -> str:
        return f"{self._prefix}{name}" if name in _NAMES else name

    def _all_named(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        def named(value: Any) -> Any:
            match value:
                case str():
                    return self._named(value)
                case list():
                    return [named(one) for one in value]
                case dict():
                    return {name: named(one) for name, one in value.items()}
                case _:
                    return value

        return {name: named(value) for name, value in arguments.items()}

    def _own(self, binding: Binding) -> Binding:
        arguments: dict[str, Argument] = dict(binding.arguments)
        return Binding(
            self._named(binding.source),
            self._named(binding.destination),
            self._named(binding.routing_key),
            binding.destination_type,
            arguments,
        )

    def _milliseconds(self, ttl: Fifths) -> int:
        return ttl.number * self._pace.fifth


def settle(channel: Channel, delivery: Delivery, how: How, *, multiple: bool = False) -> None:
    """Settle a delivery."""
    match how:
        case "ack":
            channel.ack(delivery.delivery_tag, multiple=multiple)
        case "nack":
            channel.nack(delivery.delivery_tag, multiple=multiple)
        case "reject":
            channel.nack(delivery.delivery_tag, multiple=multiple, requeue=False)
        case "requeue":
            channel.reject(delivery.delivery_tag)
        case "keep":
            return
