"""The sender of a bulk publish: a window of messages on a few channels."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from bide.client.broker_state import BrokerState
from bide.client.bulk.channels import BulkChannels
from bide.client.bulk.in_flight import InFlightMessage, unsendable
from bide.client.bulk.input import NOTHING, BulkInput, open_input
from bide.client.bulk.preparing import Preparing, is_final_error
from bide.client.bulk.unreachable import Unreachable
from bide.client.channel_closure import ChannelClosure, final_error
from bide.client.publish_result import in_doubt, unsent_error, with_unsent
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
    TargetNotFoundError,
    UnsupportedBrokerError,
)
from bide.messages.outgoing import OutgoingMessage
from bide.runtime.logs import logger
from bide.schedules.outgoing import OutgoingSchedule

if TYPE_CHECKING:
    from bide.client.bulk.schedules import BulkSchedules

log = logger(__name__)

MAX_BYTES: Final = 64 << 20
"""The maximum size of unconfirmed bodies in bytes. They are kept in memory to be sent again."""

_MAX_PER_TURN: Final = 256
"""The number of messages sent in one iteration of the event loop."""

_MAX_TURN_SECONDS: Final = 0.01
"""Seconds after which an iteration ends, so that a slow input holds up neither earlier messages nor other tasks."""

_UNPREPARED: Final = "the queues and bindings that they need were not declared yet"


class _CannotConnectError(Exception):
    """No connection can be opened, for a reason that does not change with another attempt."""

    def __init__(self, reason: BideError) -> None:
        self.reason = reason


class BulkSender:
    """Sends messages and reports their results. It runs once.

    Args:
        make_schedules: called at the first schedule.
        window: the maximum number of messages that were taken from the input and have no result yet.
        timeout: seconds without any confirm after which the publish ends. Time in which the broker blocks publishers
            does not count.
    """

    def __init__(
        self,
        publisher: Publisher,
        messages: Iterable[OutgoingMessage | OutgoingSchedule] | AsyncIterable[OutgoingMessage | OutgoingSchedule],
        *,
        make_schedules: Callable[[], BulkSchedules],
        window: int,
        on_lost: OnLost,
        timeout: float,
    ) -> None:
        self._publisher = publisher
        self._messages = messages
        self._make_schedules = make_schedules
        self._schedules: BulkSchedules | None = None
        # The limit is lower while it is not known for which message the broker closes the channel.
        self._window = self._current_window = window
        self._on_lost = on_lost
        self._timeout = timeout
        self._state: BrokerState | None = None
        self._channels = BulkChannels()
        self._next_position = 0
        self._in_flight = 0
        self._in_flight_bytes = 0
        self._results: list[InFlightMessage] = []
        self._lost: list[InFlightMessage] = []
        self._to_resend: deque[InFlightMessage] = deque()
        self._unreachable = Unreachable()
        self._changed = asyncio.Event()
        self._preparing = Preparing(self._changed.set)
        self._fatal_error: BideError | None = None
        self._has_progressed = True
        self._waiting_since = self._deadline = 0.0
        self._timeout_reason = ""
        self._trouble = ""

    def count_from(self, position: int) -> None:
        """Give the first message this position instead of 0."""
        self._next_position = position

    async def rounds(self) -> AsyncGenerator[list[InFlightMessage], None]:
        """Send messages, and yield new results.

        An error that ends the publish early is raised after all known results. An exception of the input is raised
        after the results of all earlier messages.
        """
        source = open_input(self._messages, self._changed.set)
        self._publisher.trials.sources.add(self._unconfirmed)
        failure: Exception | None = None
        try:
            while True:
                if self._results:
                    known, self._results = self._results, []
                    yield known
                    # The time that the caller took does not count as silence of the broker.
                    self._has_progressed = True
                    continue
                if failure is not None or self._is_done(source):
                    break
                try:
                    await self._round(source)
                except Exception as error:  # noqa: BLE001 (raised below)
                    failure = error
            for cause in (failure, self._fatal_error, source.error):
                if cause is not None:
                    left = [] if cause is source.error else source.left()
                    raise with_unsent(cause, left, first=self._next_position) if isinstance(cause, BideError) else cause
        finally:
            self._publisher.trials.sources.discard(self._unconfirmed)
            self._channels.abandon()
            for one in (*self._lost, *self._to_resend, *self._preparing):
                one.give_up()
            await self._preparing.close()
            await source.close()

    def _unconfirmed(self) -> Iterable[InFlightMessage]:
        """The messages that wait for their confirm or first sending, if they may be sent again."""
        sent = self._channels.waiting()
        waiting = (*(one for one in sent if isinstance(one, InFlightMessage)), *self._to_resend, *self._preparing)
        return waiting if self._on_lost == "repeat" else ()

    def _is_done(self, source: BulkInput) -> bool:
        return (source.ended or self._fatal_error is not None) and not self._has_pending()

    def settled(self, in_flight: InFlightMessage, error: BideError | None) -> None:
        """Handle the result of one message: a confirm, a refusal, or the close of its channel."""
        self._in_flight -= 1
        self._in_flight_bytes -= len(in_flight.body)
        self._changed.set()
        if error is None or isinstance(error, PublishError):
            self._has_progressed = True
            if error is None:
                self._results.append(in_flight)
                return
            in_flight.refusals += 1
            if self._state is not None and in_flight.is_worth_repeating(self._state, error):
                in_flight.forget_preparation()
                self._to_resend.append(in_flight)
            else:
                self._report_final_error(in_flight, error)
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
                self._has_progressed = True
            elif self._has_pending():
                raise self._in_doubt(self._timeout_text()) from error
            else:
                raise PublishError(
                    f"the broker was not reached within {self._timeout:g} s: check that it is running"
                ) from error
        except BulkInDoubtError:
            raise
        except _CannotConnectError as error:
            if self._has_pending():
                raise self._in_doubt(str(error)) from error.reason
            raise error.reason from error.reason.__cause__
        except BideError as error:
            is_final = isinstance(error, ClosedError) or not isinstance(error, BrokerError)
            if self._state is not None and not self._state.connection.is_open and not is_final:
                self._trouble = self._state.connection.trouble
                log.debug("publishing goes on over another connection after: %s", error)
            elif self._has_pending():
                raise self._in_doubt(str(error)) from error
            else:
                raise
        except Exception as error:
            # For any error, the messages in flight have to be listed.
            if not self._has_pending():
                raise
            raise self._in_doubt(f"{type(error).__name__}: {error}") from error

    async def _send_available(self, source: BulkInput) -> None:
        self._collect_prepared()
        if self._lost:
            self._handle_lost()
        if not self._to_resend and not self._in_flight:
            self._current_window = self._window
        state, closed = self._state, self._channels.closed()
        if state is None or closed or not state.connection.is_open:
            self._trouble = state.connection.trouble if state is not None else self._trouble
            async with self._confirm_timeout("the broker was not reached"):
                state = self._state = await self._connected()
                await self._channels.open(state.connection, closed)
        elif state.is_outdated:
            async with self._confirm_timeout("the broker was not reached"):
                state = self._state = await self._connected()
        loop = asyncio.get_running_loop()
        started = loop.time()
        unprepared: list[InFlightMessage] = []
        is_interrupted = self._send(source, state, unprepared)
        # Confirms are not processed while the input is read.
        took = loop.time() - started
        self._waiting_since += took
        self._deadline += took
        if unprepared:
            async with self._confirm_timeout(_UNPREPARED):
                await self._preparing.start(state, unprepared)
        elif is_interrupted:
            # Let confirms and other tasks run.
            await asyncio.sleep(0)
        elif not (self._results or self._lost or self._preparing.has_ended or self._is_done(source)):
            self._changed.clear()
            if not state.connection.is_writable:
                state.connection.when_writable(self._on_writable)
            if self._has_pending():
                async with self._confirm_timeout(_UNPREPARED if self._preparing else ""):
                    await self._changed.wait()
            else:
                # The publish now waits for the input, which has no time limit.
                await self._changed.wait()
                self._has_progressed = True

    async def _connected(self) -> BrokerState:
        """The state of an open connection. A lost connection is opened again unless the failure is permanent."""
        try:
            return await self._publisher.state()
        except BideError as error:
            raise _CannotConnectError(error) from error

    def _has_pending(self) -> bool:
        """Whether there are messages without a result."""
        return bool(self._in_flight or self._lost or self._to_resend or self._preparing)

    @asynccontextmanager
    async def _confirm_timeout(self, reason: str = "") -> AsyncIterator[None]:
        """A timeout while the broker confirms nothing, or does not answer.

        Args:
            reason: an additional text for the error.
        """
        if self._has_progressed:
            self._has_progressed = False
            self._waiting_since = asyncio.get_running_loop().time()
            self._deadline = self._waiting_since + self._timeout
        self._timeout_reason = reason
        async with asyncio.timeout_at(self._deadline):
            yield

    def _timeout_text(self) -> str:
        was_sent = self._in_flight or any(one.attempts for one in (*self._lost, *self._to_resend, *self._preparing))
        what = "no confirm" if was_sent else "nothing was sent"
        reason = (self._state.connection.trouble if self._state else "") or self._trouble or self._timeout_reason
        return f"{what} within {self._deadline - self._waiting_since:g} s{reason and ': '}{reason}"

    def _on_writable(self) -> None:
        self._has_progressed = True
        self._changed.set()

    def _send(self, source: BulkInput, state: BrokerState, unprepared: list[InFlightMessage]) -> bool:
        """Send messages that may be sent now, collect unprepared ones, and return whether there may be more to send."""
        connection, clock = state.connection, asyncio.get_running_loop().time
        end, held = clock() + _MAX_TURN_SECONDS, 0
        for _ in range(_MAX_PER_TURN):
            if clock() >= end:
                return True
            number_held = self._in_flight + len(unprepared) + len(self._preparing)
            is_full = (
                number_held >= self._current_window or self._in_flight_bytes + held + self._preparing.size >= MAX_BYTES
            )
            if is_full or not connection.is_writable:
                return False
            in_flight = self._to_resend.popleft() if self._to_resend else self._next_message(source)
            if in_flight is None:
                return False
            message, made = in_flight.message, None
            if in_flight.confirmed_elsewhere:
                self._results.append(in_flight)
                continue
            if message is None:
                continue
            if not self._channels.is_open(in_flight.partition):
                self._to_resend.appendleft(in_flight)
                return True
            channel = self._channels[in_flight.partition]
            if in_flight.is_ready(state):
                try:
                    made = in_flight.encode(state, channel.number)
                except Exception as error:  # noqa: BLE001 (an error of one message must not affect the others)
                    self._report_final_error(in_flight, unsendable(in_flight.position, error))
                    continue
            elif (unreachable := self._unreachable.error(message.template)) is not None:
                self._report_final_error(in_flight, unreachable)
                continue
            if made is None:
                in_flight.prepared_in = None
                unprepared.append(in_flight)
                held += len(message.body)
                continue
            channel.post(in_flight.begin(*made), in_flight)
            self._in_flight += 1
            self._in_flight_bytes += len(message.body)
        return True

    def _next_message(self, source: BulkInput) -> InFlightMessage | None:
        """The next message of the input, checked; None if none is available or no new ones may be sent now."""
        if self._current_window < self._window or self._fatal_error is not None:
            return None
        outgoing = source.take()
        if outgoing is NOTHING:
            return None
        position = self._next_position
        self._next_position += 1
        try:
            if isinstance(outgoing, OutgoingSchedule):
                if self._schedules is None:
                    self._schedules = self._make_schedules()
                    self._channels.has_schedules = True
                return self._schedules.check(outgoing, position, self.settled)
            if not isinstance(outgoing, OutgoingMessage):
                raise InvalidInputError(
                    f"item {position} is a {type(outgoing).__name__}: give a bide.OutgoingMessage or a "
                    "bide.OutgoingSchedule"
                )
            return InFlightMessage(outgoing, position, self._publisher.checker.check(outgoing), self.settled)
        except Exception as error:  # noqa: BLE001 (an error of one message must not affect the others)
            in_flight = InFlightMessage(outgoing, position, None, self.settled)
            self._report_failure(in_flight, unsendable(position, error))
            return in_flight

    def _report_failure(self, in_flight: InFlightMessage, error: BideError) -> None:
        in_flight.error = error
        in_flight.give_up()
        self._results.append(in_flight)

    def _report_final_error(self, in_flight: InFlightMessage, error: BideError) -> None:
        """Report an error of a message that the broker may have accepted at an earlier attempt without a confirm."""
        self._report_failure(in_flight, final_error(in_flight, error))

    def _collect_prepared(self) -> None:
        """Queue messages whose preparation has ended, in the order of the input, or report their errors."""
        ended = self._preparing.ended()
        if not ended:
            return
        assert self._state is not None
        again = [in_flight for in_flight, error in ended if not is_final_error(error, self._state)]
        self._to_resend = deque(sorted((*again, *self._to_resend), key=lambda one: one.position))
        for in_flight, error in ended:
            if isinstance(error, BideError) and is_final_error(error, self._state):
                self._report_final_error(in_flight, error)
                if isinstance(error, NotAppliedError | UnsupportedBrokerError):
                    # The next message would fail in the same way.
                    self._fatal_error = error
                # Other errors may concern only a queue of this message's delay, and not its target.
                if isinstance(error, TargetNotFoundError) and in_flight.message is not None:
                    self._unreachable.add(in_flight.message.template, error)
        for _, error in ended:
            # If only a separate connection for checks was lost, the message is tried again.
            is_lost = isinstance(error, ConnectionLostError) and self._state.connection.is_open
            if error is not None and not is_lost and not is_final_error(error, self._state):
                raise error
        # The broker has answered.
        self._has_progressed = True

    def _handle_lost(self) -> None:
        """Settle or queue again the messages that were unconfirmed when their channel closed."""
        lost, self._lost = self._lost, []
        state = self._state
        assert state is not None
        doubt: BideError | None = None
        for partition in dict.fromkeys(one.partition for one in lost):
            channel = self._channels[partition]
            error = channel.closed_with
            assert error is not None
            of_channel = [one for one in lost if one.partition == partition]
            if channel.connection.is_open and not isinstance(error, ClosedError):
                # The broker closed only the channel, for one of the messages on it.
                closure = ChannelClosure(error, channel.close_text, Counter(one.exchange for one in of_channel))
                of_channel = self._settle_rejected(closure, state, of_channel)
            else:
                for one in of_channel:
                    one.was_lost = True
            self._to_resend.extend(of_channel)
            if of_channel and (self._on_lost == "raise" or isinstance(error, ClosedError)):
                doubt = error
        self._to_resend = deque(sorted(self._to_resend, key=lambda one: one.position))
        if doubt is not None:
            raise self._in_doubt(str(doubt)) from doubt

    def _settle_rejected(
        self, closure: ChannelClosure, state: BrokerState, lost: list[InFlightMessage]
    ) -> list[InFlightMessage]:
        """Settle the messages for which the broker closed the channel, if these are known; return the others.

        If they are not known, fewer and fewer messages are sent at once, until the rejected one is alone.
        """
        rejected = [one for one in lost if closure.applies_to(one.exchange, one.body)]
        if rejected:
            closure.record(state)
        for one in rejected:
            error = closure.verdict(one, may_resend=True)
            if error is not None:
                self._report_failure(one, error)
            else:
                one.forget_preparation()
        self._has_progressed = self._has_progressed or bool(rejected)
        self._current_window = self._window if rejected else max(1, len(lost) // 4)
        return [one for one in lost if one.error is None]

    def _in_doubt(self, reason: str) -> BulkInDoubtError:
        """The error that lists the messages in doubt, which were sent and not confirmed, and the unsent ones."""
        # Closing the channels settles the messages in flight.
        self._channels.abandon()
        waiting = sorted((*self._lost, *self._to_resend, *self._preparing.give_up()), key=lambda one: one.position)
        self._lost, self._to_resend = [], deque()
        for one in waiting:
            assert one.message is not None
            one.error = (in_doubt if one.attempts else unsent_error)(one.message.message_id, reason)
            one.give_up()
        return BulkInDoubtError(
            reason,
            in_doubt=tuple(one.result() for one in waiting if one.attempts),
            unsent=tuple(one.result() for one in waiting if not one.attempts),
        )
