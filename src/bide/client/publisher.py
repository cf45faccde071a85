"""Confirmed publishing through a connection that comes and goes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from bide.admin.apply import check_release
from bide.amqp import reply_codes
from bide.amqp.channel import Channel
from bide.amqp.confirms import Awaited
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.broker_state import BrokerState, Preparation, too_large
from bide.client.publish_result import denied, in_doubt
from bide.client.reconnecting import ReconnectingConnection
from bide.client.trials import Trials
from bide.delay.protocol import DelayInfrastructure
from bide.errors import (
    BideError,
    BrokerError,
    ClosedError,
    ConnectionLostError,
    InvalidInputError,
    MessageTooLargeError,
    PublishError,
    PublishInDoubtError,
    TargetNotFoundError,
    UnroutableError,
)
from bide.messages.checker import MessageChecker
from bide.messages.prepared import PreparedMessage
from bide.runtime.logs import logger
from bide.runtime.shared_tasks import SharedTasks

log = logger(__name__)

OnLost = Literal["repeat", "raise"]
"""What to do with a message whose confirm was lost with the connection: send it again, or tell the caller."""


def checked_on_lost(value: OnLost) -> OnLost:
    """The value, if it is one.

    Raises:
        InvalidInputError: it is not.
    """
    if value not in ("repeat", "raise"):
        raise InvalidInputError(f"on_lost={value!r}: give 'repeat' or 'raise'")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The broker has the message.

    Attributes:
        due: when it will be delivered; None for a message that was not delayed.
        hops: queues that it waits in.
        attempts: how often it was sent; more than one may mean that it arrives more than once. One does not mean that
            it arrives once: brokers dead-letter some messages twice when leaders of queues change.
    """

    message_id: str
    due: datetime | None
    hops: int
    attempts: int


@dataclass(slots=True)
class _Sending:
    """One message on its way to the broker.

    Attributes:
        attempts: how often it was sent.
        was_lost: whether the connection broke after it was sent.
        reason: why it is not confirmed yet.
        failure: the error of the last round that failed before it was sent.
        suspect: whether it may be the one for which the broker closed a channel.
        blamed: whether it certainly is.
        lacks_digits: whether it could not be encoded, because digits of its delay were not ready.
        preparation: of its next sending; see :meth:`bide.client.broker_state.BrokerState.prepare`.
        elsewhere: whether another host confirmed it.
        unroutable: whether the delay infrastructure had no way for it, and was looked after since.
        trouble: what was known of the node, when a connection broke that it waited on.
    """

    message: PreparedMessage
    mandatory: bool
    reason: str
    attempts: int = 0
    failure: str = ""
    was_lost: bool = False
    suspect: bool = False
    blamed: bool = False
    lacks_digits: bool = False
    preparation: Preparation | None = None
    elsewhere: bool = False
    unroutable: bool = False
    trouble: str = ""
    hops: int = 0

    def receipt(self) -> Receipt:
        """What the caller gets once the broker has it."""
        message = self.message
        return Receipt(message_id=message.message_id, due=message.due, hops=self.hops, attempts=self.attempts)

    def in_doubt(self, reason: str) -> PublishInDoubtError:
        """The error for a message that was sent and not confirmed."""
        return in_doubt(self.message.message_id, reason)

    def may_be_there(self, error: BideError) -> bool:
        """Whether the broker may have it from an earlier sending, though it refuses it now."""
        if isinstance(error, TargetNotFoundError):
            # What it goes to was there before.
            return self.attempts > 1
        return self.was_lost and not isinstance(error, MessageTooLargeError)

    def out_of_time(self, seconds: float, connection: Connection | None) -> PublishError:
        """The error for a message whose time is up."""
        reason = (connection.trouble if connection is not None else "") or self.trouble or self.reason
        if connection is not None and connection.is_open and connection.blocked_by is not None:
            reason = f"the broker takes no publishes at the moment: {connection.blocked_by}"
        if self.attempts:
            return self.in_doubt(f"no confirm within {seconds:g} s: {reason}")
        message_id = self.message.message_id
        return PublishError(
            f"the message {message_id!r} was not sent within {seconds:g} s: {reason}", message_id=message_id
        )


class Publisher:
    """Sends messages, each confirmed by the broker.

    Args:
        declare: put the delay infrastructure on the broker where it is missing; else its absence is an error.
        timeout: for one message; declaring what it needs, reconnecting and repeating included.
        on_lost: see ``OnLost``.
        max_in_flight: messages sent and not yet confirmed; further publishes wait.

    Attributes:
        checker: checks what is to be sent.
        link: the publishing connection, as it comes and goes.
        trials: send messages that wait to another host, where this one confirms nothing.
        timeout, on_lost, max_in_flight: as given.
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
        self.trials = Trials(self._session_on)
        self.trials.sources.add(self._unconfirmed)
        self.link = ReconnectingConnection(url, trials=self.trials.of_targets)
        self._infrastructure = infrastructure
        self._declare = declare
        self.timeout = timeout
        self.on_lost = on_lost
        self.max_in_flight = max_in_flight
        self._waiting: dict[int, _Sending] = {}
        self._window = asyncio.Semaphore(max_in_flight)
        self._session: BrokerState | None = None
        self._tasks = SharedTasks()
        self._opening = asyncio.Lock()

    async def connection(self) -> Connection:
        """The publishing connection."""
        return (await self.session()).connection

    async def infrastructure(self) -> DelayInfrastructure:
        """The delay infrastructure as it is used on this broker's release."""
        return (await self.session()).infrastructure

    async def close(self) -> None:
        """Close the connection."""
        try:
            await self._tasks.stop()
        finally:
            await self.link.close()

    async def prepare(self, message: PreparedMessage) -> None:
        """See to it that such a message can be delivered after its delay, without sending it.

        Raises:
            BideError: as :meth:`publish`, but for what only a sending can meet.
        """
        async with asyncio.timeout(self.timeout.total_seconds()):
            while True:
                session = await self.session()
                try:
                    await session.prepare(message, digits=False)
                except BrokerError:
                    if session.connection.is_open:
                        raise
                else:
                    if not session.is_outdated:
                        return

    async def publish(self, message: PreparedMessage, *, mandatory: bool = True) -> Receipt:
        """Send one message and wait for its confirm.

        The broker answers a message that it cannot accept by closing the channel, with all that is unconfirmed on it,
        and does not always say for which. Then each of these is sent again on a channel of its own, one at a time: the
        one to blame fails, the others go through. If an exchange is gone, the broker may have some of those that were
        on their way to it: they are sent again where it can be put back.

        Raises:
            UnroutableError: no queue takes it.
            PublishRefusedError: no queue stored it.
            PublishInDoubtError: the connection broke before the confirm, and repeating is off, out of time, or met with
                another error, which is the cause then.
            PublishError: it was not sent in time.
            TargetNotFoundError: its queue or exchange does not exist.
            NotAppliedError: the delay infrastructure is missing and may not be declared.
            MessageTooLargeError: the body is over the broker's limit.
            ClosedError: the client was closed before it was sent.
            BrokerError: the broker cannot be reached, or refuses.
        """
        sending = _Sending(message, mandatory, f"{self.max_in_flight} messages before it are not confirmed yet")
        seconds = self.timeout.total_seconds()
        try:
            async with asyncio.timeout(seconds), self._window:
                self._waiting[id(sending)] = sending
                sending.reason = "the broker was not reached"
                while True:
                    session = await self._session_for(sending)
                    if await self._round(session, sending):
                        return sending.receipt()
                    log.debug("the message %s is not confirmed yet: %s", message.message_id, sending.reason)
        except TimeoutError as error:
            if sending.elsewhere:
                return sending.receipt()
            connection = self._session.connection if self._session is not None else None
            if connection is not None and connection.lost.done():
                lost = str(connection.lost.result())
                sending.reason = sending.reason if lost in sending.reason else f"{sending.reason}: {lost}"
            raise sending.out_of_time(seconds, connection) from error
        finally:
            self._waiting.pop(id(sending), None)

    async def _session_for(self, sending: _Sending) -> BrokerState:
        try:
            return await self.session()
        except BideError as error:
            if not sending.attempts:
                raise
            raise denied(sending.message.message_id, error) from error

    async def _round(self, session: BrokerState, sending: _Sending) -> bool:
        """Try to send a message once, and tell whether it was confirmed; False if it is worth another try."""
        before = sending.attempts
        try:
            missing = "what it needs on its way was not there yet"
            sending.reason = f"{missing}: {sending.failure}" if sending.failure else missing
            if sending.lacks_digits or not session.is_prepared(sending.message):
                sending.preparation = await session.prepare(sending.message, sending.preparation)
                if session.is_outdated:
                    return False
            if not sending.suspect:
                return await self._send(session, await session.channel(), sending)
            async with session.suspects, await session.connection.channel(confirms=True) as channel:
                await session.connection.writable()
                return await self._send(session, channel, sending)
        except PublishError as error:
            if sending.elsewhere:
                return True
            if isinstance(error, UnroutableError) and sending.hops and not sending.unroutable:
                # Somebody deleted an exchange or a binding behind the exchange that it enters by.
                sending.unroutable = True
                sending.reason = str(error)
                session.forget(session.infrastructure.delivery_exchange)
                return False
            if sending.attempts < (3 if sending.unroutable else 2):
                raise
            # The broker may have taken it before, and that was not heard.
            raise denied(sending.message.message_id, error) from error
        except BideError as error:
            if sending.elsewhere:
                return True
            sending.reason = str(error)
            sending.trouble = session.connection.trouble
            if sending.attempts == before:
                sending.failure = str(error)
                # Nothing was sent: what the broker, or our own checks, said before would only come again.
                # (That a connection broke that only checked the broker is not its last word.)
                is_open = session.connection.is_open and not isinstance(error, ConnectionLostError)
                if is_open or not isinstance(error, BrokerError):
                    if not before or isinstance(error, MessageTooLargeError):
                        raise
                    raise denied(sending.message.message_id, error) from error
            elif sending.blamed:
                if not sending.may_be_there(error):
                    raise
                raise denied(sending.message.message_id, error) from error
            elif self.on_lost == "raise" or isinstance(error, ClosedError):
                raise sending.in_doubt(str(error)) from error
            else:
                sending.was_lost = sending.was_lost or not session.connection.is_open
            return False

    def _unconfirmed(self) -> Iterable[_Sending]:
        return self._waiting.values() if self.on_lost == "repeat" else ()

    async def _send(self, session: BrokerState, channel: Channel, sending: _Sending) -> bool:
        """Send it and wait for the confirm; False if nothing was sent, because digits of its delay are not ready."""
        made = session.encode(
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
            encoded.exchange, encoded.routing_key, message.message_id, message.body, loop=session.connection.loop
        )
        channel.post(encoded.frames, confirm)
        sending.attempts += 1
        sending.reason = "the broker has not confirmed it"
        try:
            await confirm.future
            return True
        except PublishError:
            raise
        except BrokerError as error:
            if session.connection.is_open:
                # The broker closed the channel alone: one of the messages on it is to blame.
                self._judge(session, channel, sending, encoded.exchange, error)
            raise

    def _judge(
        self, session: BrokerState, channel: Channel, sending: _Sending, exchange: str, error: BrokerError
    ) -> None:
        """Find out whether this message made the broker close the channel, or was only on it too."""
        text, failed = channel.close_text, channel.confirms.failed
        size = reply_codes.size_limit(text)
        if size is not None:
            _, limit = size
            session.remember_limit(limit)
            sending.blamed = len(sending.message.body) > limit
            if sending.blamed:
                raise too_large(sending.message, limit) from error
            return
        refused = reply_codes.subject(text)
        if refused == exchange:
            session.forget(exchange)
            if isinstance(error, TargetNotFoundError) and sending.attempts == 1:
                is_alone = failed[exchange] == 1
                may_return = session.infrastructure.owns(exchange) and self.on_lost == "repeat"
                if may_return or not is_alone:
                    # The exchange was there before, and may have taken it. It is looked for once more, or put there.
                    return
        if sending.suspect or failed.total() == 1:
            sending.blamed = True
        elif refused is not None:
            # Whether an exchange may be written to, the broker asks for the first message of a channel to it.
            sending.blamed = refused == exchange
        else:
            sending.suspect = True

    async def session(self) -> BrokerState:
        """What is known of the broker, on an open connection.

        Raises:
            ClosedError: the publisher was closed.
            BrokerError: the first connection could not be opened, or the broker is none that can be used.
        """
        session = self._session
        if session is not None and session.connection.is_open and not session.is_outdated:
            if session.connection.loop is not asyncio.get_running_loop():
                await self.link.connection()
            return session
        async with self._opening:
            session = self._session
            if session is not None and session.connection.is_open and not session.is_outdated:
                return session
            while True:
                connection = await self.link.connection()
                try:
                    session = self._session = self._session_on(connection, self._session)
                    return session
                except BrokerError:
                    if connection.is_open:
                        raise

    def _session_on(self, connection: Connection, replacing: BrokerState | None) -> BrokerState:
        """What is not known yet of the broker on a connection.

        Args:
            replacing: the session that was used before. Where it found NServiceBus, this one spares NServiceBus.
        """
        check_release(connection)
        infrastructure = self._infrastructure.for_release(connection.release)
        beside = infrastructure.beside_nservicebus(connection.release)
        spares_neighbours = beside != infrastructure and (replacing is None or not replacing.is_outdated)
        if not spares_neighbours:
            infrastructure = beside
        return BrokerState(
            connection,
            infrastructure,
            declare=self._declare,
            tasks=self._tasks,
            spares_neighbours=spares_neighbours,
        )
