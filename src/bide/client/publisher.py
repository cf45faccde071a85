"""Confirmed publishing over a reconnecting connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from bide.admin.apply import check_release
from bide.amqp.channel import Channel
from bide.amqp.confirms import Awaited
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.broker_state import BrokerState, Preparation
from bide.client.channel_closure import ChannelClosure, final_error
from bide.client.publish_result import in_doubt
from bide.client.reconnecting import ReconnectingConnection
from bide.client.trials import Trials
from bide.delay.protocol import DelayInfrastructure
from bide.errors import (
    BideError,
    BrokerError,
    ClosedError,
    ConnectionLostError,
    InvalidInputError,
    PublishError,
    PublishInDoubtError,
)
from bide.messages.checker import MessageChecker
from bide.messages.prepared import PreparedMessage
from bide.runtime.logs import logger
from bide.runtime.shared_tasks import SharedTasks

log = logger(__name__)

OnLost = Literal["repeat", "raise"]
"""What to do with a message whose confirm was lost with the connection: send it again, or raise an error."""


Stamp = Callable[[PreparedMessage], AbstractContextManager[Mapping[str, Any]]]
"""A context manager for sending a message: entered before sending, and left after the confirm or with the error. It
returns headers to add; the message's own headers take precedence."""


def checked_on_lost(value: OnLost) -> OnLost:
    """Return the value if it is valid.

    Raises:
        InvalidInputError: the value is neither ``"repeat"`` nor ``"raise"``.
    """
    if value not in ("repeat", "raise"):
        raise InvalidInputError(f"on_lost={value!r}: give 'repeat' or 'raise'")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The confirm of a published message.

    Attributes:
        due: the due time; None for a message that was not delayed.
        hops: the number of queues that it waits in.
        attempts: the number of times it was sent. With more than one, it may arrive more than once. With one, it may
            also arrive twice, because brokers dead-letter some messages twice when leaders of queues change.
    """

    message_id: str
    due: datetime | None
    hops: int
    attempts: int


@dataclass(slots=True)
class _Sending:
    """A message that is being published.

    Attributes:
        attempts: the number of times it was sent.
        refusals: how many of these attempts the broker certainly did not accept.
        was_lost: whether the connection broke after it was sent.
        reason: why it is not confirmed yet.
        failure: the error of the last attempt that failed before the message was sent.
        suspect: whether it may be the message for which the broker closed a channel.
        verdict: the error to report, if it certainly is that message.
        lacks_digits: whether it could not be encoded, because digits of its delay were not ready.
        preparation: the preparation for its next sending; see :meth:`bide.client.broker_state.BrokerState.prepare`.
        confirmed_elsewhere: whether another host confirmed it.
        unroutable: whether the broker returned it; see
            :meth:`bide.client.broker_state.BrokerState.is_worth_repeating`.
        trouble: the trouble of the node, if a connection was lost while the message waited for its confirm.
    """

    message: PreparedMessage
    mandatory: bool
    reason: str
    attempts: int = 0
    refusals: int = 0
    failure: str = ""
    was_lost: bool = False
    suspect: bool = False
    verdict: BideError | None = None
    lacks_digits: bool = False
    preparation: Preparation | None = None
    confirmed_elsewhere: bool = False
    unroutable: bool = False
    trouble: str = ""
    hops: int = 0

    def receipt(self) -> Receipt:
        """The receipt for the caller."""
        message = self.message
        return Receipt(message_id=message.message_id, due=message.due, hops=self.hops, attempts=self.attempts)

    def in_doubt(self, reason: str) -> PublishInDoubtError:
        """The error for a message that was sent and not confirmed."""
        return in_doubt(self.message.message_id, reason)

    def out_of_time(self, seconds: float, connection: Connection | None) -> PublishError:
        """The error for a message that timed out."""
        reason = (connection.trouble if connection is not None else "") or self.trouble or self.reason
        if connection is not None and connection.is_open and connection.blocked_by is not None:
            reason = f"the broker blocks publishing at the moment: {connection.blocked_by}"
        if self.attempts > self.refusals:
            return self.in_doubt(f"no confirm within {seconds:g} s: {reason}")
        message_id = self.message.message_id
        return PublishError(
            f"the message {message_id!r} was not sent within {seconds:g} s: {reason}", message_id=message_id
        )


class Publisher:
    """Sends messages, each confirmed by the broker.

    Args:
        declare: declare the delay infrastructure if it is missing; if not, its absence is an error.
        timeout: the limit for one message, including declarations, reconnecting and sending again.
        on_lost: see ``OnLost``.
        max_in_flight: the maximum number of unconfirmed messages; further publishes wait.

    Attributes:
        checker: checks outgoing messages.
        reconnecting: the reconnecting publishing connection.
        trials: send waiting messages to another host if this one confirms nothing.
        declare, timeout, on_lost, max_in_flight: as given.
    """

    def __init__(
        self,
        url: BrokerUrl,
        infrastructure: DelayInfrastructure,
        *,
        declare: bool = True,
        timeout: timedelta = timedelta(seconds=30),
        on_lost: OnLost = "repeat",
        max_in_flight: int = 10_000,
    ) -> None:
        self.checker = MessageChecker()
        self.trials = Trials(self._state_on)
        self.trials.sources.add(self._unconfirmed)
        self.reconnecting = ReconnectingConnection(url, trials=self.trials.of_targets)
        self._infrastructure = infrastructure
        self.declare = declare
        self.timeout = timeout
        self.on_lost = on_lost
        self.max_in_flight = max_in_flight
        self._sendings: dict[int, _Sending] = {}
        self._window = asyncio.Semaphore(max_in_flight)
        self._state: BrokerState | None = None
        self._tasks = SharedTasks()
        self._state_lock = asyncio.Lock()

    async def connection(self) -> Connection:
        """The publishing connection."""
        return (await self.state()).connection

    async def infrastructure(self) -> DelayInfrastructure:
        """The delay infrastructure in its variant for this broker's release."""
        return (await self.state()).infrastructure

    async def close(self) -> None:
        """Close the connection."""
        try:
            await self._tasks.stop()
        finally:
            await self.reconnecting.close()

    async def prepare(self, message: PreparedMessage) -> None:
        """Declare or check everything that a message needs, regardless of the known state, and without sending it.

        Raises:
            BideError: as :meth:`publish`, except errors of the sending itself.
        """
        async with asyncio.timeout(self.timeout.total_seconds()):
            while True:
                state = await self.state()
                state.forget_targets()
                try:
                    await state.prepare(message, digits=False)
                except BrokerError:
                    if state.connection.is_open:
                        raise
                else:
                    if not state.is_outdated:
                        return

    async def publish(self, message: PreparedMessage, *, mandatory: bool = True) -> Receipt:
        """Send one message and wait for its confirm.

        If the broker cannot accept a message, it closes the channel with all unconfirmed messages on it, and does not
        always say which message was the cause. Then each of them is sent again on its own channel, one at a time: the
        message that was the cause fails, and the others are confirmed. If an exchange was deleted, the broker may have
        routed some of the messages in flight to it. They are sent again once, after the exchange was declared again if
        it belongs to the delay infrastructure.

        Raises:
            BideError: as :meth:`bide.Client.publish`, except the errors of checking the message.
        """
        sending = _Sending(message, mandatory, f"{self.max_in_flight} earlier messages are not confirmed yet")
        seconds = self.timeout.total_seconds()
        try:
            async with asyncio.timeout(seconds), self._window:
                self._sendings[id(sending)] = sending
                sending.reason = "the broker was not reached"
                while True:
                    state = await self._state_for(sending)
                    if await self._attempt(state, sending):
                        return sending.receipt()
                    log.debug("the message %s is not confirmed yet: %s", message.message_id, sending.reason)
        except TimeoutError as error:
            if sending.confirmed_elsewhere:
                return sending.receipt()
            connection = self._state.connection if self._state is not None else None
            if connection is not None and connection.lost.done():
                lost = str(connection.lost.result())
                sending.reason = sending.reason if lost in sending.reason else f"{sending.reason}: {lost}"
            raise sending.out_of_time(seconds, connection) from error
        finally:
            self._sendings.pop(id(sending), None)

    async def _state_for(self, sending: _Sending) -> BrokerState:
        try:
            return await self.state()
        except BideError as error:
            if (final := final_error(sending, error)) is error:
                raise
            raise final from error

    async def _attempt(self, state: BrokerState, sending: _Sending) -> bool:
        """Try to send a message once, and return whether it was confirmed; False if it should be tried again."""
        before = sending.attempts
        try:
            missing = "the queues and bindings that it needs were not declared yet"
            sending.reason = f"{missing}: {sending.failure}" if sending.failure else missing
            if sending.lacks_digits or not state.is_prepared(sending.message):
                sending.preparation = await state.prepare(sending.message, sending.preparation)
                if state.is_outdated:
                    return False
            if not sending.suspect:
                return await self._send(state, await state.channel(), sending)
            async with state.suspects, await state.connection.channel(confirms=True) as channel:
                await state.connection.writable()
                return await self._send(state, channel, sending)
        except BideError as error:
            if sending.confirmed_elsewhere:
                return True
            final = self._final_error(state, sending, error, was_sent=sending.attempts > before)
            if final is None:
                return False
            if final is error:
                raise
            raise final from error

    def _final_error(
        self, state: BrokerState, sending: _Sending, error: BideError, *, was_sent: bool
    ) -> BideError | None:
        """The error to report after a failed attempt; None if the message should be tried again."""
        sending.reason = str(error)
        if isinstance(error, PublishError):
            sending.refusals += 1
            return None if state.is_worth_repeating(sending, error) else final_error(sending, error)
        sending.trouble = state.connection.trouble
        if not was_sent:
            sending.failure = str(error)
            # The same error would come again, unless only the separate connection for checks was lost.
            is_open = state.connection.is_open and not isinstance(error, ConnectionLostError)
            return final_error(sending, error) if is_open or not isinstance(error, BrokerError) else None
        if sending.verdict is None and (self.on_lost == "raise" or isinstance(error, ClosedError)):
            return sending.in_doubt(str(error))
        sending.was_lost = sending.was_lost or not state.connection.is_open
        return sending.verdict

    def _unconfirmed(self) -> Iterable[_Sending]:
        return self._sendings.values() if self.on_lost == "repeat" else ()

    async def _send(self, state: BrokerState, channel: Channel, sending: _Sending) -> bool:
        """Send a message and wait for its confirm. False if digits of its delay are not ready: it was not sent."""
        made = state.encode(
            sending.message, channel=channel.number, mandatory=sending.mandatory, prepared=sending.preparation
        )
        sending.lacks_digits = made is None
        if made is None:
            return False
        sending.preparation = None
        message, encoded = made
        sending.message = message
        sending.hops = encoded.hops
        confirm = Awaited(
            encoded.exchange, encoded.routing_key, message.message_id, message.body, loop=state.connection.loop
        )
        channel.post(encoded.frames, confirm)
        sending.attempts += 1
        sending.reason = "the broker has not confirmed it"
        try:
            await confirm.future
            return True
        except BrokerError as error:
            if state.connection.is_open and not isinstance(error, PublishError):
                # The broker closed only the channel, for one of the messages on it.
                closure = ChannelClosure(error, channel.close_text, channel.confirms.failed)
                sending.suspect = not closure.is_known
                if closure.applies_to(encoded.exchange, message.body):
                    closure.record(state)
                    may_resend = state.infrastructure.owns(encoded.exchange) and self.on_lost == "repeat"
                    sending.verdict = closure.verdict(sending, may_resend=may_resend)
            raise

    async def state(self) -> BrokerState:
        """The known state of the broker, on an open connection.

        Raises:
            ClosedError: the publisher was closed.
            BrokerError: the first connection could not be opened, or the broker is not supported.
        """
        state = self._state
        if state is not None and state.connection.is_open and not state.is_outdated:
            if state.connection.loop is not asyncio.get_running_loop():
                await self.reconnecting.connection()
            return state
        async with self._state_lock:
            state = self._state
            if state is not None and state.connection.is_open and not state.is_outdated:
                return state
            while True:
                connection = await self.reconnecting.connection()
                try:
                    state = self._state = self._state_on(connection, self._state)
                    return state
                except BrokerError:
                    if connection.is_open:
                        raise

    def _state_on(self, connection: Connection, replacing: BrokerState | None) -> BrokerState:
        """A new state of the broker for a connection.

        Args:
            replacing: the previous state. If it found NServiceBus, the new state uses the variant for NServiceBus.
        """
        check_release(connection)
        infrastructure = self._infrastructure.for_release(connection.release)
        beside = infrastructure.beside_nservicebus(connection.release)
        seeks_nservicebus = beside != infrastructure and (replacing is None or not replacing.is_outdated)
        if not seeks_nservicebus:
            infrastructure = beside
        return BrokerState(
            connection,
            infrastructure,
            declare=self.declare,
            tasks=self._tasks,
            seeks_nservicebus=seeks_nservicebus,
        )
