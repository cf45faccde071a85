"""Confirmed publishing through a connection that comes and goes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypeVar

from bide.admin.apply import apply, check_release, check_streams, exists
from bide.amqp import faults
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delay.clock import Clock, carrier_for
from bide.delay.infrastructure import DelayInfrastructure, DelayRoute, ExchangeTarget, Target
from bide.errors import (
    BideError,
    BrokerError,
    BrokerUnreachableError,
    ClosedError,
    MessageTooLargeError,
    NotAppliedError,
    PublishError,
    PublishInDoubtError,
    TargetNotFoundError,
)
from bide.link import Link
from bide.outgoing import Outgoing
from bide.topology import Exchange, Topology

log = logging.getLogger(__name__)

REBIND_AFTER: Final = timedelta(seconds=30)
"""A queue that is deleted and made again loses its bindings: they are made anew this often while they are used."""

_REMEMBERED: Final = 10_000

_Key = TypeVar("_Key")

OnLost = Literal["repeat", "raise"]
"""What to do with a message whose confirm was lost with the connection: send it again, or tell the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The broker has the message.

    Attributes:
        due: when it will be delivered; None for a message that was not delayed.
        hops: queues that it waits in.
        attempts: how often it was sent; more than one may mean that it arrives more than once.
    """

    message_id: str
    due: datetime | None
    hops: int
    attempts: int


@dataclass(slots=True)
class _Session:
    """What is known of the broker as long as one connection lasts."""

    connection: Connection
    infrastructure: DelayInfrastructure
    channel: Channel | None = None
    applied: bool = False
    targets: dict[tuple[Target, bool], float] = field(default_factory=dict)
    requirements: dict[Topology, float] = field(default_factory=dict)
    exchanges: dict[str, float] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Publisher:
    """Sends messages, each confirmed by the broker.

    Args:
        declare: put the delay infrastructure on the broker where it is missing; else its absence is an error.
        timeout: for one message, reconnecting and repeating included.
        on_lost: see ``OnLost``.
        max_in_flight: messages sent and not yet confirmed; further publishes wait.
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
        self._link = Link(url)
        self._infrastructure = infrastructure
        self._declare = declare
        self._timeout = timeout
        self._on_lost = on_lost
        self._window = asyncio.Semaphore(max_in_flight)
        self._session: _Session | None = None
        self._opening = asyncio.Lock()

    async def connection(self) -> Connection:
        """The publishing connection."""
        return (await self._ready()).connection

    async def infrastructure(self) -> DelayInfrastructure:
        """The delay infrastructure as it is used on this broker's release."""
        return (await self._ready()).infrastructure

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()

    async def publish(self, message: Outgoing, *, mandatory: bool = True) -> Receipt:
        """Send one message and wait for its confirm.

        Raises:
            UnroutableError: no queue takes it.
            PublishRefusedError: no queue stored it.
            PublishInDoubtError: the connection broke before the confirm, and repeating is off or out of time.
            TargetNotFoundError: its queue or exchange does not exist.
            NotAppliedError: the delay infrastructure is missing and may not be declared.
            MessageTooLargeError: the body is over the broker's limit.
            BrokerError: the broker cannot be reached, or refuses.
        """
        attempts = 0
        doubt = False
        reason = "it was not reached"
        try:
            async with asyncio.timeout(self._timeout.total_seconds()), self._window:
                while True:
                    session = await self._ready()
                    try:
                        await self._prepare(session, message)
                        channel = await self._channel(session)
                        # The delay counts from here: a first sending waits all of it, a repeated one the rest.
                        now = datetime.now(UTC)
                        message = message.starting(now)
                        route = message.route(session.infrastructure, now)
                        confirm = self._send(session, channel, message, route, now, mandatory)
                    except ClosedError:
                        raise
                    except BideError as error:
                        # Nothing was sent in this round.
                        if self._is_final(session, error):
                            raise
                        reason = str(error)
                        continue
                    attempts += 1
                    try:
                        await confirm
                    except PublishError:
                        raise
                    except BideError as error:
                        doubt = True
                        reason = str(error)
                        self._raise_if_caused(session, channel, message, route, error)
                        if self._on_lost == "raise" or isinstance(error, ClosedError):
                            raise self._in_doubt(message, reason) from error
                        log.info("sending the message %s again: %s", message.message_id, error)
                        continue
                    return Receipt(
                        message_id=message.message_id,
                        due=message.due,
                        hops=route.hops if route else 0,
                        attempts=attempts,
                    )
        except TimeoutError as error:
            raise self._out_of_time(message, attempts, doubt, reason) from error

    def _out_of_time(self, message: Outgoing, attempts: int, doubt: bool, reason: str) -> PublishError:
        seconds = self._timeout.total_seconds()
        session = self._session
        if session is not None and session.connection.blocked_by is not None:
            reason = f"the broker takes no publishes at the moment: {session.connection.blocked_by}"
        if attempts:
            return self._in_doubt(message, reason if doubt else f"the broker did not confirm it within {seconds:g} s")
        return PublishError(
            f"the message {message.message_id!r} was not sent within {seconds:g} s: {reason}",
            message_id=message.message_id,
        )

    def _in_doubt(self, message: Outgoing, reason: str) -> PublishInDoubtError:
        return PublishInDoubtError(
            f"it is not known whether the broker has the message {message.message_id!r}: {reason}; send it again with "
            "the same message id",
            message_id=message.message_id,
        )

    @staticmethod
    def _is_final(session: _Session, error: BideError) -> bool:
        """Whether an error before the sending would only come again."""
        return session.connection.is_open or not isinstance(error, BrokerError | BrokerUnreachableError)

    async def _ready(self) -> _Session:
        session = self._session
        if session is not None and session.connection.is_open:
            return session
        async with self._opening:
            session = self._session
            if session is not None and session.connection.is_open:
                return session
            connection = await self._link.connection()
            check_release(connection)
            infrastructure = self._infrastructure
            if isinstance(infrastructure, Clock) and infrastructure.carrier is None:
                infrastructure = replace(infrastructure, carrier=carrier_for(connection.release))
            session = _Session(connection, infrastructure)
            self._session = session
            return session

    async def _prepare(self, session: _Session, message: Outgoing) -> None:
        """See to it that everything stands that this message needs on its way."""
        now = datetime.now(UTC)
        route = message.starting(now).route(session.infrastructure, now)
        if route is None:
            if isinstance(message.target, ExchangeTarget):
                await self._expect(session, message.target.exchange)
            return
        if route.hops and not session.applied:
            await self._ensure_applied(session)
        await self._ensure_bound(session, message.target, route)

    async def _ensure_applied(self, session: _Session) -> None:
        async with session.lock:
            if session.applied:
                return
            infrastructure = session.infrastructure
            if not await exists(session.connection, infrastructure.probes()):
                if not self._declare:
                    raise NotAppliedError(
                        f"the delay infrastructure {infrastructure.name!r} is not on the virtual host "
                        f"{session.connection.url.vhost!r} of {session.connection.address}: run 'bide delay apply', "
                        "or connect with declare=True"
                    )
                await check_streams(session.connection)
                applied = await apply(session.connection, infrastructure.topology())
                log.info("put the delay infrastructure %s on the broker: %s", infrastructure.name, applied)
            session.applied = True

    async def _ensure_bound(self, session: _Session, target: Target, route: DelayRoute) -> None:
        # A route without delay needs less than one with, so each kind is remembered for itself.
        key = (target, bool(len(route.requires)))
        if session.targets.get(key, 0.0) > session.connection.loop.time():
            return
        async with session.lock:
            now = session.connection.loop.time()
            if session.targets.get(key, 0.0) > now:
                return
            await self._check(session, route.expects)
            if session.requirements.get(route.requires, 0.0) <= now and len(route.requires):
                external = {one.source for one in route.requires.bindings} | {
                    one.destination for one in route.requires.bindings
                }
                external |= {str(one.arguments.get("x-dead-letter-exchange", "")) for one in route.requires.queues}
                try:
                    await apply(session.connection, route.requires, external=external)
                except TargetNotFoundError as error:
                    raise _missing(error, "nothing can be delivered to it") from error
                _remember(session.requirements, route.requires, now + REBIND_AFTER.total_seconds())
            _remember(session.targets, key, now + REBIND_AFTER.total_seconds())

    async def _expect(self, session: _Session, exchange: str) -> None:
        # A publish to a missing exchange closes the channel, and takes the confirms of others with it.
        now = session.connection.loop.time()
        if session.exchanges.get(exchange, 0.0) > now:
            return
        await self._check(session, Topology([Exchange(exchange)]))
        _remember(session.exchanges, exchange, now + REBIND_AFTER.total_seconds())

    @staticmethod
    async def _check(session: _Session, expected: Topology) -> None:
        for topology in (
            *(Topology([one]) for one in expected.exchanges),
            *(Topology(queues=[one]) for one in expected.queues),
        ):
            if not await exists(session.connection, topology):
                kind, name = (
                    ("exchange", topology.exchanges[0].name)
                    if topology.exchanges
                    else ("queue", topology.queues[0].name)
                )
                raise TargetNotFoundError(
                    f"the {kind} {name!r} does not exist on the virtual host {session.connection.url.vhost!r}: "
                    "declare it before messages are sent to it",
                    reply_code=faults.NOT_FOUND,
                )

    @staticmethod
    async def _channel(session: _Session) -> Channel:
        """The publishing channel, once the broker and the socket take more."""
        channel = session.channel
        if channel is None or not channel.is_open:
            async with session.lock:
                channel = session.channel
                if channel is None or not channel.is_open:
                    channel = session.channel = await session.connection.channel(confirms=True)
        await session.connection.writable()
        return channel

    @staticmethod
    def _send(
        session: _Session,
        channel: Channel,
        message: Outgoing,
        route: DelayRoute | None,
        now: datetime,
        mandatory: bool,
    ) -> asyncio.Future[None]:
        exchange, routing_key = (
            (route.exchange, route.routing_key) if route is not None else _plain_address(message.target)
        )
        expected = session.infrastructure.sender_headers(
            message_id=message.message_id, now=now, due=message.due, values=message.values
        )
        return channel.publish(
            exchange=exchange,
            routing_key=routing_key,
            values=message.wire_values(route, expected),
            body=message.body,
            mandatory=mandatory,
        )

    @staticmethod
    def _raise_if_caused(
        session: _Session, channel: Channel, message: Outgoing, route: DelayRoute | None, error: BideError
    ) -> None:
        """Raise if this very message made the broker close the channel; the others are only in its company."""
        text = channel.close_text
        code = error.reply_code if isinstance(error, BrokerError) else None
        if code is None or not session.connection.is_open:
            return
        size = faults.size_limit(text)
        if size is not None:
            if len(message.body) == size[0]:
                raise MessageTooLargeError(
                    f"the body of the message {message.message_id!r} has {size[0]} bytes, the broker's limit is "
                    f"{size[1]}: send less, or raise max_message_size on the broker"
                ) from error
            return
        name = faults.subject(text)
        exchange = route.exchange if route is not None else _plain_address(message.target)[0]
        if name is None or name == exchange:
            session.exchanges.pop(exchange, None)
            session.targets.clear()
            raise error


def _plain_address(target: Target) -> tuple[str, str]:
    return (target.exchange, target.routing_key) if isinstance(target, ExchangeTarget) else ("", target.queue)


def _missing(error: TargetNotFoundError, why: str) -> TargetNotFoundError:
    return TargetNotFoundError(f"{error} ({why})", reply_code=error.reply_code)


def _remember(known: dict[_Key, float], key: _Key, until: float) -> None:
    if len(known) >= _REMEMBERED:
        known.clear()
    known[key] = until
