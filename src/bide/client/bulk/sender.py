"""The sender of a bulk publish: a window of messages on one channel."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final

from bide.amqp.channel import Channel
from bide.client.broker_state import BrokerState
from bide.client.bulk.in_flight import InFlightMessage, unsendable
from bide.client.bulk.input import NOTHING, BulkInput, source_of
from bide.client.bulk.preparing import Preparing, is_verdict
from bide.client.bulk.unreachable import Unreachable
from bide.client.channel_closure import ChannelClosure, final_error
from bide.client.publish_result import in_doubt, not_sent, with_unsent
from bide.client.publisher import OnLost, Publisher
from bide.errors import (
    BideError,
    BrokerError,
    BulkInDoubtError,
    ClosedError,
    ConnectionLostError,
    InvalidInputError,
    NotAppliedError,
    PublishError,
    UnsupportedBrokerError,
)
from bide.messages.outgoing import OutgoingMessage
from bide.runtime.logs import logger

log = logger(__name__)

MAX_BYTES: Final = 64 << 20
"""The maximum size of unconfirmed bodies in bytes. They are kept in memory to be sent again."""

_TURN: Final = 256
"""The number of messages sent in one iteration of the event loop."""

_TURN_SECONDS: Final = 0.01
"""The time limit of an iteration, so that a slow input holds up neither earlier messages nor other tasks."""

_UNPREPARED: Final = "the queues and bindings that they need were not declared yet"


class _OutOfReachError(Exception):
    """No connection can be opened, for a reason that does not change with another attempt."""

    def __init__(self, reason: BideError) -> None:
        self.reason = reason


class BulkSender:
    """Sends messages and reports their results. It runs once.

    Args:
        window: the maximum number of messages that were taken from the input and have no result yet.
        timeout: seconds without any confirm after which the publish ends. Time in which the broker blocks publishers
            does not count.
    """

    def __init__(
        self,
        publisher: Publisher,
        messages: Iterable[OutgoingMessage] | AsyncIterable[OutgoingMessage],
        *,
        window: int,
        on_lost: OnLost,
        timeout: float,
    ) -> None:
        self._publisher = publisher
        self._messages = messages
        # The limit is lower while it is not known for which message the broker closes the channel.
        self._window = self._limit = window
        self._on_lost = on_lost
        self._timeout = timeout
        self._state: BrokerState | None = None
        self._channel: Channel | None = None
        self._taken = 0
        self._in_flight = 0
        self._bytes = 0
        self._known: list[InFlightMessage] = []
        self._lost: list[InFlightMessage] = []
        self._again: deque[InFlightMessage] = deque()
        self._unreachable = Unreachable()
        self._news = asyncio.Event()
        self._preparing = Preparing(self._news.set)
        self._end: BideError | None = None
        self._has_moved = True
        self._since = self._deadline = 0.0
        self._reason = ""
        self._trouble = ""

    def count_from(self, position: int) -> None:
        """Give the first message this position instead of 0."""
        self._taken = position

    async def rounds(self) -> AsyncGenerator[list[InFlightMessage], None]:
        """Send messages, and yield new results.

        An error that ends the publish early is raised after all known results. An exception of the input is raised
        after the results of all earlier messages.
        """
        source = source_of(self._messages, self._news.set)
        self._publisher.trials.sources.add(self._unconfirmed)
        failure: Exception | None = None
        try:
            while True:
                if self._known:
                    known, self._known = self._known, []
                    yield known
                    # The time that the caller took does not count as silence of the broker.
                    self._has_moved = True
                    continue
                if failure is not None or self._is_done(source):
                    break
                try:
                    await self._round(source)
                except Exception as error:  # noqa: BLE001 (raised below)
                    failure = error
            for cause in (failure, self._end, source.error):
                if cause is not None:
                    left = [] if cause is source.error else source.left()
                    raise with_unsent(cause, left, first=self._taken) if isinstance(cause, BideError) else cause
        finally:
            self._publisher.trials.sources.discard(self._unconfirmed)
            if self._channel is not None:
                self._channel.abandon()
            await self._preparing.close()
            await source.close()

    def _unconfirmed(self) -> Iterable[InFlightMessage]:
        """The messages that wait for their confirm or first sending, if they may be sent again."""
        sent = self._channel.confirms.waiting if self._channel is not None else ()
        waiting = (*(one for one in sent if isinstance(one, InFlightMessage)), *self._again, *self._preparing)
        return waiting if self._on_lost == "repeat" else ()

    def _is_done(self, source: BulkInput) -> bool:
        return (source.ended or self._end is not None) and not self._is_waiting()

    def settled(self, in_flight: InFlightMessage, error: BideError | None) -> None:
        """Handle the confirm of one message, or the close of its channel."""
        self._in_flight -= 1
        self._bytes -= len(in_flight.body)
        self._news.set()
        if error is None or isinstance(error, PublishError):
            self._has_moved = True
            if error is None:
                self._known.append(in_flight)
                return
            in_flight.refusals += 1
            if self._state is not None and self._state.is_worth_repeating(in_flight, error):
                in_flight.prepared_in = None
                self._again.append(in_flight)
            else:
                self._denied(in_flight, error)
        else:
            self._lost.append(in_flight)

    async def _round(self, source: BulkInput) -> None:
        """One round: send messages that may be sent, or wait for the next event."""
        try:
            await self._send_available(source)
        except TimeoutError as error:
            connection = self._state.connection if self._state is not None else None
            if connection is not None and connection.is_open and connection.blocked_by is not None:
                # The broker is running, and reports when it accepts messages again.
                self._has_moved = True
            elif self._is_waiting():
                raise self._in_doubt(self._out_of_time()) from error
            else:
                raise PublishError(
                    f"the broker was not reached within {self._timeout:g} s: check that it is running"
                ) from error
        except BulkInDoubtError:
            raise
        except _OutOfReachError as error:
            if self._is_waiting():
                raise self._in_doubt(str(error)) from error.reason
            raise error.reason from error.reason.__cause__
        except BideError as error:
            is_final = isinstance(error, ClosedError) or not isinstance(error, BrokerError)
            if self._state is not None and not self._state.connection.is_open and not is_final:
                self._trouble = self._state.connection.trouble
                log.debug("publishing goes on over another connection after: %s", error)
            elif self._is_waiting():
                raise self._in_doubt(str(error)) from error
            else:
                raise
        except Exception as error:
            # For any error, the messages in flight have to be listed.
            if not self._is_waiting():
                raise
            raise self._in_doubt(f"{type(error).__name__}: {error}") from error

    async def _send_available(self, source: BulkInput) -> None:
        self._take_back()
        if self._lost:
            self._sort()
        if not self._again and not self._in_flight:
            self._limit = self._window
        state, channel = self._state, self._channel
        if state is None or channel is None or not state.connection.is_open or not channel.is_open:
            self._trouble = state.connection.trouble if state is not None else self._trouble
            async with self._confirm_timeout("the broker was not reached"):
                state = self._state = await self._connected()
                channel = self._channel = await state.connection.channel(confirms=True)
        elif state.is_outdated:
            async with self._confirm_timeout("the broker was not reached"):
                state = self._state = await self._connected()
        loop = asyncio.get_running_loop()
        started = loop.time()
        unprepared: list[InFlightMessage] = []
        is_interrupted = self._send(source, state, channel, unprepared)
        # Confirms are not processed while the input is read.
        took = loop.time() - started
        self._since += took
        self._deadline += took
        if unprepared:
            async with self._confirm_timeout(_UNPREPARED):
                await self._preparing.start(state, unprepared)
        elif is_interrupted:
            # Let confirms and other tasks run.
            await asyncio.sleep(0)
        elif not (self._known or self._lost or self._preparing.has_ended or self._is_done(source)):
            self._news.clear()
            if not state.connection.is_writable:
                state.connection.when_writable(self._has_room)
            if self._is_waiting():
                async with self._confirm_timeout(_UNPREPARED if self._preparing else ""):
                    await self._news.wait()
            else:
                # The publish now waits for the input, which has no time limit.
                await self._news.wait()
                self._has_moved = True

    async def _connected(self) -> BrokerState:
        """The state of an open connection. A lost connection is opened again unless the failure is permanent."""
        try:
            return await self._publisher.state()
        except BideError as error:
            raise _OutOfReachError(error) from error

    def _is_waiting(self) -> bool:
        """Whether there are messages without a result."""
        return bool(self._in_flight or self._lost or self._again or self._preparing)

    @asynccontextmanager
    async def _confirm_timeout(self, reason: str = "") -> AsyncIterator[None]:
        """A timeout until the broker has to confirm a message, or to answer at all.

        Args:
            reason: an additional text for the error.
        """
        if self._has_moved:
            self._has_moved = False
            self._since = asyncio.get_running_loop().time()
            self._deadline = self._since + self._timeout
        self._reason = reason
        async with asyncio.timeout_at(self._deadline):
            yield

    def _out_of_time(self) -> str:
        was_sent = self._in_flight or any(one.attempts for one in (*self._lost, *self._again, *self._preparing))
        what = "no confirm" if was_sent else "nothing was sent"
        reason = (self._state.connection.trouble if self._state else "") or self._trouble or self._reason
        return f"{what} within {self._deadline - self._since:g} s{reason and ': '}{reason}"

    def _has_room(self) -> None:
        self._has_moved = True
        self._news.set()

    def _send(self, source: BulkInput, state: BrokerState, channel: Channel, unprepared: list[InFlightMessage]) -> bool:
        """Send messages that may be sent now, collect unprepared ones, and return whether there may be more to send."""
        connection, number, clock = state.connection, channel.number, asyncio.get_running_loop().time
        end, held = clock() + _TURN_SECONDS, 0
        for _ in range(_TURN):
            if clock() >= end:
                return True
            number_held = self._in_flight + len(unprepared) + len(self._preparing)
            is_full = number_held >= self._limit or self._bytes + held + self._preparing.size >= MAX_BYTES
            if is_full or not connection.is_writable:
                return False
            in_flight = self._again.popleft() if self._again else self._take(source)
            if in_flight is None:
                return False
            message, made = in_flight.message, None
            if in_flight.elsewhere:
                self._known.append(in_flight)
                continue
            if message is None:
                continue
            if in_flight.prepared_in is state or state.is_prepared(message):
                try:
                    made = state.encode(
                        message, channel=number, mandatory=in_flight.outgoing.mandatory, prepared=in_flight.preparation
                    )
                except Exception as error:  # noqa: BLE001 (what is wrong with one message does not harm the others)
                    self._denied(in_flight, unsendable(in_flight.position, error))
                    continue
            elif (unreachable := self._unreachable.error(message.template)) is not None:
                self._denied(in_flight, unreachable)
                continue
            if made is None:
                in_flight.prepared_in = None
                unprepared.append(in_flight)
                held += len(message.body)
                continue
            channel.post(in_flight.begin(*made), in_flight)
            self._in_flight += 1
            self._bytes += len(message.body)
        return True

    def _take(self, source: BulkInput) -> InFlightMessage | None:
        """The next message of the input, checked; None if none is available or no new ones may be sent now."""
        if self._limit < self._window or self._end is not None:
            return None
        outgoing = source.take()
        if outgoing is NOTHING:
            return None
        position = self._taken
        self._taken += 1
        try:
            if not isinstance(outgoing, OutgoingMessage):
                raise InvalidInputError(f"item {position} is a {type(outgoing).__name__}: give a bide.OutgoingMessage")
            return InFlightMessage(outgoing, position, self._publisher.checker.check(outgoing), self.settled)
        except Exception as error:  # noqa: BLE001 (an error of one message must not affect the others)
            in_flight = InFlightMessage(outgoing, position, None, self.settled)
            self._failed(in_flight, unsendable(position, error))
            return in_flight

    def _failed(self, in_flight: InFlightMessage, error: BideError) -> None:
        in_flight.error = error
        self._known.append(in_flight)

    def _denied(self, in_flight: InFlightMessage, error: BideError) -> None:
        """Report an error of a message that the broker may have accepted at an earlier attempt without a confirm."""
        self._failed(in_flight, final_error(in_flight, error))

    def _take_back(self) -> None:
        """Queue messages whose preparation has ended before others, or report their errors."""
        ended = self._preparing.ended()
        if not ended:
            return
        assert self._state is not None
        again = [in_flight for in_flight, error in ended if not is_verdict(error, self._state)]
        self._again = deque(sorted((*again, *self._again), key=lambda one: one.position))
        for in_flight, error in ended:
            if isinstance(error, BideError) and is_verdict(error, self._state):
                self._denied(in_flight, error)
                if isinstance(error, NotAppliedError | UnsupportedBrokerError):
                    # The next message would fail in the same way.
                    self._end = error
                if isinstance(error, BrokerError) and in_flight.message is not None:
                    self._unreachable.add(in_flight.message.template, error)
        for _, error in ended:
            # If only a separate connection for checks was lost, the message is tried again.
            is_lost = isinstance(error, ConnectionLostError) and self._state.connection.is_open
            if error is not None and not is_lost and not is_verdict(error, self._state):
                raise error
        # The broker has answered.
        self._has_moved = True

    def _sort(self) -> None:
        """Settle or queue again the messages that were unconfirmed when their channel closed."""
        lost, self._lost = self._lost, []
        state, channel = self._state, self._channel
        assert state is not None
        assert channel is not None
        assert channel.closed_with is not None
        error = channel.closed_with
        if channel.connection.is_open and not isinstance(error, ClosedError):
            # The broker closed only the channel, for one of the messages on it.
            lost = self._without_rejected(
                ChannelClosure(error, channel.close_text, Counter(one.exchange for one in lost)), state, lost
            )
        else:
            for one in lost:
                one.was_lost = True
        self._again = deque(sorted((*lost, *self._again), key=lambda one: one.position))
        if lost and (self._on_lost == "raise" or isinstance(error, ClosedError)):
            raise self._in_doubt(str(error)) from error

    def _without_rejected(
        self, closure: ChannelClosure, state: BrokerState, lost: list[InFlightMessage]
    ) -> list[InFlightMessage]:
        """Settle the messages for which the broker closed the channel, if these are known; return the others.

        If they are not known, fewer and fewer messages are sent at once, until the rejected one is alone.
        """
        rejected = [one for one in lost if closure.applies_to(one.exchange, one.body)]
        if rejected:
            closure.record(state)
        for one in rejected:
            error = closure.verdict(one, may_return=True)
            if error is not None:
                self._failed(one, error)
            else:
                one.prepared_in = None
        self._has_moved = self._has_moved or bool(rejected)
        self._limit = self._window if rejected else max(1, len(lost) // 4)
        return [one for one in lost if one.error is None]

    def _in_doubt(self, reason: str) -> BulkInDoubtError:
        """The error with the messages in doubt: those that were sent and not confirmed."""
        if self._channel is not None and self._channel.is_open:
            # Closing the channel settles the messages in flight.
            self._channel.abandon()
        waiting = sorted((*self._lost, *self._again, *self._preparing.give_up()), key=lambda one: one.position)
        self._lost, self._again = [], deque()
        for one in waiting:
            assert one.message is not None
            one.error = (in_doubt if one.attempts else not_sent)(one.message.message_id, reason)
        return BulkInDoubtError(
            reason,
            in_doubt=tuple(one.outcome() for one in waiting if one.attempts),
            unsent=tuple(one.outcome() for one in waiting if not one.attempts),
        )
