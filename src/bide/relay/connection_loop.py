"""The work of a relay on one connection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.client.first_failure import FirstFailure
from bide.client.pipelined_sender import PipelinedMessage, PipelinedSender
from bide.client.target_sender import TargetSender, undeliverable_reason
from bide.delay.allowed_targets import AllowedTargets
from bide.delay.waiting_hall import WaitingHall
from bide.errors import (
    AccessRefusedError,
    BideError,
    ClosedError,
    InvalidInputError,
    PublishRefusedError,
    TargetNotFoundError,
    UnroutableError,
)
from bide.relay.decision import RelayDecision, RelayedMessage, RelayStep, set_aside
from bide.runtime.logs import RepeatedWarnings, logger
from bide.runtime.wording import quantity
from bide.topology import DEFAULT_EXCHANGE

log = logger(__name__)

_RETRY_PAUSE: Final = 1.0
"""Seconds until a part of the hall that refuses messages is tried again."""


@dataclass(slots=True, kw_only=True)
class Relayed:
    """The counts of a relay.

    Attributes:
        rounds: messages sent to the meditating queue.
        delayed: messages sent to the levels.
        delivered: messages that their target accepted.
        refused: refusals by targets; a refused message waits and is sent again.
        undeliverable: messages sent to the undeliverable queue.
    """

    rounds: int = 0
    delayed: int = 0
    delivered: int = 0
    refused: int = 0
    undeliverable: int = 0


class RelayedInFlight(PipelinedMessage):
    """A message that a relay has consumed and sends on.

    Attributes:
        delivery: the delivery to acknowledge once the broker has confirmed the copy.
        decision: how the message is sent on.
        relayed: the message as it was read; None if it could not be read, or is set aside.
    """

    __slots__ = ("decision", "delivery", "relayed")

    def __init__(self, delivery: Delivery, decision: RelayDecision, relayed: RelayedMessage | None = None) -> None:
        super().__init__(decision.exchange, decision.routing_key, decision.values, delivery.body)
        self.delivery = delivery
        self.decision = decision
        self.relayed = relayed


class ConnectionLoop:
    """Consumes and publishes on one connection."""

    def __init__(
        self,
        connection: Connection,
        hall: WaitingHall,
        done: Relayed,
        *,
        allowed: AllowedTargets,
        prefetch: int,
        grace: float,
    ) -> None:
        self._connection = connection
        self._hall = hall
        self._allowed = allowed
        self._counts = done
        self._prefetch = prefetch
        self._stop_timeout = grace
        self._user = connection.url.user
        self._consuming_channel: Channel | None = None
        self._failure = FirstFailure(connection)
        # Messages within the hall have channels of their own, because a target can make the broker close a channel.
        self._to_undeliverable = PipelinedSender(
            connection, on_result=self._on_undeliverable_result, failed=self._failure.report
        )
        self._to_hall = PipelinedSender(connection, on_result=self._on_hall_result, failed=self._failure.report)
        self._to_targets = TargetSender(
            connection,
            safe_exchanges=[hall.delivery_exchange],
            on_result=self._on_target_result,
            failed=self._failure.report,
        )
        self._all_settled = asyncio.Event()
        self._draining = False
        self._unsettled: set[int] = set()
        self._paused: dict[RelayedInFlight, asyncio.TimerHandle] = {}
        self._warnings = RepeatedWarnings(log)

    async def work(self, stopping: asyncio.Event, on_start: Callable[[Connection], None] | None) -> None:
        """Relay messages until *stopping* is set, or until an error.

        Raises:
            BideError: the connection or a channel failed.
        """
        stop = asyncio.create_task(stopping.wait())
        try:
            channel = self._consuming_channel = await self._connection.channel()
            await channel.qos(self._prefetch)
            tags = [
                await channel.consume(queue, on_message=take, on_end=self._failure.report)
                for queue, take in zip(self._hall.relay_queues, (self._on_received, self._on_released), strict=True)
            ]
            if on_start is not None:
                on_start(self._connection)
            await self._failure.wait([stop])
            self._failure.check()
            await self._stop_consuming(channel, tags)
        finally:
            stop.cancel()
            self._close()

    async def _stop_consuming(self, channel: Channel, tags: Sequence[str]) -> None:
        """Cancel the consumers, and wait for messages in flight. Paused messages go back to their queue at once."""
        finishing = asyncio.create_task(self._wait_for_results(channel, tags))
        # A broker that blocks publishers (an alarm) answers nothing at all on this connection.
        await self._failure.wait([finishing], seconds=self._stop_timeout)
        finishing.cancel()
        await asyncio.gather(finishing, return_exceptions=True)
        if self._unsettled:
            log.warning("requeueing %s, not confirmed in time", quantity(len(self._unsettled), "message"))
            # Close without the handshake, which would wait for an answer of the broker.
            self._connection.give_up(ClosedError("the relay was stopped"))

    async def _wait_for_results(self, channel: Channel, tags: Sequence[str]) -> None:
        for tag in tags:
            await channel.cancel(tag)
        for message in list(self._paused):
            self._requeue_paused(message)
        self._draining = True
        while self._unsettled:
            self._all_settled.clear()
            await self._all_settled.wait()

    def _close(self) -> None:
        self._to_undeliverable.close()
        self._to_hall.close()
        self._to_targets.close()
        for handle in self._paused.values():
            handle.cancel()
        if self._consuming_channel is not None:
            self._consuming_channel.abandon()

    # -- received messages

    def _on_received(self, delivery: Delivery) -> None:
        self._handle(delivery, lambda relayed, now: relayed.forward(now))

    def _on_released(self, delivery: Delivery) -> None:
        self._handle(delivery, lambda relayed, _: relayed.deliver())

    def _handle(self, delivery: Delivery, decide: Callable[[RelayedMessage, int], RelayDecision]) -> None:
        self._unsettled.add(delivery.delivery_tag)
        now = time.time_ns() // 1_000_000
        try:
            relayed = RelayedMessage.read(
                self._hall,
                delivery.routing_key,
                delivery.values,
                now=now,
                user=self._user,
                allowed=self._allowed,
                exchange=delivery.exchange,
            )
            decision = decide(relayed, now)
        except InvalidInputError as error:
            self._set_aside(delivery, str(error))
            return
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "%s: %s to go, %s -> %s (%s)",
                delivery.values.get("message_id"),
                f"{relayed.due - now} ms",
                decision.step,
                decision.exchange or "(default)",
                decision.routing_key,
            )
        self._send(RelayedInFlight(delivery, decision, relayed))

    def _send(self, message: RelayedInFlight) -> None:
        if message.decision.step == "target":
            self._to_targets.put(message)
        else:
            self._to_hall.put(message)

    # -- results

    def _on_hall_result(self, message: RelayedInFlight, error: BideError | None) -> None:
        match error:
            case None:
                self._count(message.decision.step)
                self._acknowledge(message.delivery)
            case PublishRefusedError() | UnroutableError():
                # A queue of the hall has no leader, or is missing: the message is still in its queue, so try again.
                self._warnings.warn(
                    f"{message.exchange!r} refuses messages at the moment: trying again every {_RETRY_PAUSE:g} s"
                )
                self._paused[message] = self._connection.loop.call_later(_RETRY_PAUSE, self._try_again, message)
                if self._draining:
                    self._requeue_paused(message)
            case InvalidInputError():
                self._set_aside(message.delivery, str(error))
            case AccessRefusedError() | TargetNotFoundError():
                self._failure.report(error)
            case _:
                self._set_aside(message.delivery, str(error))

    def _on_target_result(self, message: RelayedInFlight, error: BideError | None) -> None:
        relayed = message.relayed
        assert relayed is not None
        match error:
            case None:
                self._count(message.decision.step)
                self._acknowledge(message.delivery)
            case PublishRefusedError():
                self._counts.refused += 1
                self._warnings.warn(f"{relayed.target} refuses messages: they wait and are sent again")
                self._to_hall.put(RelayedInFlight(message.delivery, relayed.again(), relayed))
            case AccessRefusedError() if message.exchange == DEFAULT_EXCHANGE:
                # The permission for the default exchange affects all targets.
                self._failure.report(error)
            case _:
                exchange, key = message.exchange, message.routing_key
                reason = undeliverable_reason(error, str(relayed.target), exchange=exchange, routing_key=key)
                self._set_aside(message.delivery, reason)

    def _count(self, step: RelayStep) -> None:
        match step:
            case "round":
                self._counts.rounds += 1
            case "levels":
                self._counts.delayed += 1
            case "target":
                self._counts.delivered += 1
            case "aside":
                self._counts.undeliverable += 1

    def _try_again(self, message: RelayedInFlight) -> None:
        del self._paused[message]
        self._to_hall.put(message)

    def _acknowledge(self, delivery: Delivery) -> None:
        self._settle(delivery, lambda channel: channel.ack(delivery.delivery_tag))

    def _set_aside(self, delivery: Delivery, reason: str) -> None:
        """Publish a message to the undeliverable queue, with the reason."""
        self._warnings.warn(f"moving a message to {self._hall.undeliverable!r}: {reason}")
        decision = set_aside(self._hall, delivery.routing_key, delivery.values, reason=reason, user=self._user)
        self._to_undeliverable.put(RelayedInFlight(delivery, decision))

    def _on_undeliverable_result(self, message: RelayedInFlight, error: BideError | None) -> None:
        self._count(message.decision.step)
        if error is None:
            self._acknowledge(message.delivery)
            return
        # The message is too large with one more header, or this user may not write to the queue: reject it, so that the
        # queue dead-letters it without the reason.
        log.info("moving %r to the undeliverable queue without the reason: %s", message.message_id, error)
        self._settle(message.delivery, lambda channel: channel.reject(message.delivery.delivery_tag, requeue=False))

    def _requeue_paused(self, message: RelayedInFlight) -> None:
        self._paused.pop(message).cancel()
        self._settle(message.delivery, lambda channel: channel.nack(message.delivery.delivery_tag))

    def _settle(self, delivery: Delivery, how: Callable[[Channel], None]) -> None:
        if self._consuming_channel is not None and self._consuming_channel.is_open:
            how(self._consuming_channel)
        self._unsettled.discard(delivery.delivery_tag)
        if not self._unsettled:
            self._all_settled.set()
