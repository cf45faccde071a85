"""The known state of the broker on one publishing connection."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from bide.admin.apply import apply, exists, names_in
from bide.admin.settling import settle
from bide.amqp import reply_codes
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.client.addresses import REBIND_AFTER, Addresses
from bide.client.declared_infrastructure import DeclaredInfrastructure
from bide.client.encoding import Encoded, Encoder
from bide.client.growth import Growth
from bide.delay.protocol import DelayInfrastructure, ExchangeTarget, Target
from bide.delay.routes import DelayRoute
from bide.durations import sending_time
from bide.errors import (
    BideError,
    MessageTooLargeError,
    TargetNotFoundError,
    UnroutableError,
    UnsupportedTargetError,
)
from bide.messages.prepared import MessageTemplate, Moment, PreparedMessage
from bide.runtime.bounded_cache import BoundedCache
from bide.runtime.shared_tasks import SharedTasks
from bide.topology import Exchange, Topology

_MAX_CHECKS: Final = 100
"""The number of concurrent checks of exchanges, each on its own channel. RabbitMQ allows 2,047 channels by default."""

_MAX_BINDINGS: Final = 100
"""The number of targets bound concurrently, which limits the declarations that a busy broker gets at once."""

MAX_RELEASE_QUEUES: Final = 1000
"""The maximum number of release queues of exchange targets, per connection. Thousands harm the broker."""

_MAX_DIGIT_AGE: Final = 0.1
"""Seconds after which the digits of a due time are computed again. Older digits make the message late by their age."""

_MAX_PREPARATIONS: Final = 3
"""The maximum number of preparations of a message, if each declaration takes longer than ``_MAX_DIGIT_AGE``."""

_Key = TypeVar("_Key", bound=Hashable)


class Preparation(NamedTuple):
    """The result of :meth:`BrokerState.prepare`: everything that a message needs exists on the broker.

    Attributes:
        moment: the time for which digits were declared. The digits of a due time change as time passes.
        number: the number of preparations for this sending, including this one.
    """

    moment: Moment
    number: int


class Returnable(Protocol):
    """A message that was sent, and that the broker may return.

    Attributes:
        hops: the number of queues that it waits in.
        unroutable: whether the broker has returned it before.
    """

    hops: int
    unroutable: bool


class BrokerState:
    """Declares or checks everything that messages need, and remembers it.

    Args:
        infrastructure: the infrastructure in its variant for this broker's release.
        declare: whether to declare missing items; if not, they are an error.
        tasks: shared tasks, so that items which several messages need are declared once.
        seeks_nservicebus: look for NServiceBus at the first delayed message, and again when targets are bound again.

    Attributes:
        encoder: the encoder for messages on this connection.
        declared: the delay infrastructure on this connection.
        size_limit: the broker's limit for bodies, in bytes; None while it is not known.
        is_outdated: whether a new state is needed, because NServiceBus now uses the virtual host.
        suspects: a lock, held while a message is sent on its own channel; see :meth:`Publisher.publish`.
    """

    def __init__(
        self,
        connection: Connection,
        infrastructure: DelayInfrastructure,
        *,
        declare: bool,
        tasks: SharedTasks,
        seeks_nservicebus: bool = False,
    ) -> None:
        self.connection = connection
        self.infrastructure = infrastructure
        grows = infrastructure.growing() is not None
        self._growth = Growth(connection, infrastructure, tasks, declare=declare) if grows else None
        ready = self._growth.ready if self._growth is not None else None
        self.encoder = Encoder(infrastructure, frame_max=connection.frame_max, ready=ready)
        self.suspects = asyncio.Lock()
        self._seeks_nservicebus = seeks_nservicebus
        self._nservicebus_checked_until = 0.0
        self.is_outdated = False
        self._channel: Channel | None = None
        self.declared = DeclaredInfrastructure(
            connection,
            infrastructure,
            self._growth,
            declare=declare,
            tasks=tasks,
            on_core_declared=self.forget_targets,
        )
        self.size_limit: int | None = None
        self._targets = BoundedCache[tuple[Target, bool], float]()
        self._requirements = BoundedCache[Topology, float]()
        self._release_queues: set[str] = set()
        self._exchanges = BoundedCache[str, float]()
        self._templates = BoundedCache[tuple[MessageTemplate, bool], float]()
        self._channel_lock = asyncio.Lock()
        self._bind_slots = asyncio.Semaphore(_MAX_BINDINGS)
        self._check_slots = asyncio.Semaphore(_MAX_CHECKS)
        self._tasks = tasks
        self._addresses = Addresses(connection, infrastructure, tasks, self.encoder.addressed, self._check_slots)

    async def channel(self) -> Channel:
        """The publishing channel, once broker and socket accept more.

        Raises:
            BideError: the connection was lost.
        """
        while True:
            channel = self._channel
            if channel is None or not channel.is_open:
                async with self._channel_lock:
                    channel = self._channel
                    if channel is None or not channel.is_open:
                        channel = self._channel = await self.connection.channel(confirms=True)
            await self.connection.writable()
            if channel.is_open:
                return channel

    def moment(self) -> Moment:
        """The current time, for sending a message."""
        return Moment(sending_time(self.connection.now()), self.connection.monotonic())

    def is_prepared(self, message: PreparedMessage) -> bool:
        """Whether :meth:`prepare` has nothing to do, according to the known state."""
        if self.size_limit is not None and len(message.body) > self.size_limit:
            return False
        now = self.connection.loop.time()
        if now >= self.declared.recheck_at:
            self.declared.require_recheck(now)
        if message.template is None:
            return False
        if message.due is None:
            waits = bool(message.delay)
        else:
            moment = self.moment()
            due = message.starting(*moment).due
            waits = due is not None and due > moment.now
        return self._templates.get((message.template, waits), 0.0) > now

    async def prepare(
        self, message: PreparedMessage, previous: Preparation | None = None, *, digits: bool = True
    ) -> Preparation:
        """Declare or check everything that this message needs.

        Args:
            previous: the previous result for the same sending, if :meth:`encode` found it too old.
            digits: whether to include the queues that the message waits in.

        Returns:
            A value for :meth:`encode`. If the digits of the delay at the time of sending have no queues, the message is
            sent with the digits of its preparation: late by the time since then, but never early.

        Raises:
            MessageTooLargeError: the broker's limit is known, and the message exceeds it.
            TargetNotFoundError: the target queue or exchange does not exist.
            NotAppliedError: the delay infrastructure is missing and may not be declared.
            UnsupportedBrokerError: the broker lacks a required feature.
            BrokerError: the broker refuses, or the connection was lost.
        """
        if self.size_limit is not None and len(message.body) > self.size_limit:
            raise too_large(message, self.size_limit)
        moment = self.moment()
        prepared = Preparation(moment, previous.number + 1 if previous is not None else 1)
        route = message.starting(*moment).route(self.infrastructure, moment.now)
        if route is None:
            if isinstance(message.target, ExchangeTarget):
                await self._ensure_exchange(message.target.exchange)
                until = self._exchanges.get(message.target.exchange, 0.0)
                self._remember_template(message.template, until, waits=False)
            else:
                until = await self._addresses.find(message.target.queue)
                self._remember_template(message.template, until, waits=False)
            return prepared
        if route.hops and not self.declared.is_ensured:
            await self.declared.ensure()
        if route.hops and self._seeks_nservicebus and self._nservicebus_checked_until <= self.connection.loop.time():
            await self._tasks.run((self, "neighbours"), self._check_for_nservicebus)
        if self.is_outdated:
            # A new state binds the target in the way that NServiceBus needs.
            return prepared
        if self._growth is not None and digits:
            try:
                await self._growth.ensure(route.digits)
            except TargetNotFoundError:
                # Exchanges of the infrastructure were deleted.
                self.forget(self.infrastructure.delivery_exchange)
                await self.declared.ensure()
                await self._growth.ensure(route.digits)
        key = await self._ensure_bound(message.target, route)
        self._remember_template(message.template, self._targets.get(key, 0.0), waits=route.hops > 0)
        return prepared

    def encode(
        self, message: PreparedMessage, *, channel: int, mandatory: bool, prepared: Preparation | None
    ) -> tuple[PreparedMessage, Encoded] | None:
        """Encode a message that is sent now. Its delay, or the rest of it for a repeated sending, counts from now.

        Args:
            prepared: the result of :meth:`prepare` for this sending, if it was called.

        Returns:
            The message with its due time, and its frames. None if the message has to be prepared again: digits of its
            delay are not ready, or were prepared so long ago that the message would be late.

        Raises:
            InvalidInputError: this message cannot be delayed in this way or for this long, or a value cannot be
                encoded.
        """
        now = sending_time(self.connection.now())
        # Bulk publishing calls this for most messages, so the second clock is read only if needed.
        started = message if message.delay is None else message.starting(now, self.connection.monotonic())
        encoded = self.encoder.encode(started, now, channel=channel, mandatory=mandatory)
        if encoded is None and prepared is not None:
            age = self.connection.monotonic() - prepared.moment.monotonic
            if age <= _MAX_DIGIT_AGE or prepared.number >= _MAX_PREPARATIONS:
                started = message.starting(*prepared.moment)
                encoded = self.encoder.encode(started, prepared.moment.now, channel=channel, mandatory=mandatory)
        return None if encoded is None else (started, encoded)

    def forget(self, exchange: str) -> None:
        """Forget an exchange that was deleted, or that this user may no longer use."""
        self._exchanges.pop(exchange, None)
        self._addresses.forget()
        if self.infrastructure.owns(exchange):
            # The infrastructure was deleted, and is declared again at its next use.
            self.declared.forget()
        self.forget_targets()

    def forget_targets(self) -> None:
        """Bind each target again before its next use."""
        self._targets.clear()
        self._requirements.clear()
        self._templates.clear()

    def is_worth_repeating(self, sent: Returnable, error: BideError) -> bool:
        """Whether a returned message should be sent again after its delay infrastructure was declared again.

        The broker returns a delayed message if an exchange or a binding after the entry exchange was deleted, or does
        not exist yet. Each message is sent again once for this reason.
        """
        if not isinstance(error, UnroutableError) or not sent.hops or sent.unroutable:
            return False
        sent.unroutable = True
        self.forget(self.infrastructure.delivery_exchange)
        return True

    async def _check_for_nservicebus(self) -> None:
        # Imported here, because few clients need the layout of NServiceBus.
        from bide.admin.neighbours import uses_nservicebus

        self.is_outdated = await uses_nservicebus(self.connection)
        self._nservicebus_checked_until = self.connection.loop.time() + REBIND_AFTER.total_seconds()

    async def _ensure_bound(self, target: Target, route: DelayRoute) -> tuple[Target, bool]:
        # An undelayed route needs less than a delayed one, so both are remembered separately.
        key = (target, bool(len(route.requires)))
        if not self._is_known(self._targets, key):
            await self._tasks.run((self, "target", key), partial(self._bind, key, route))
        return key

    async def _bind(self, key: tuple[Target, bool], route: DelayRoute) -> None:
        async with self._bind_slots:
            new = self._keyed_release_queues(key[0], route.requires) - self._release_queues
            self._release_queues |= new
            try:
                await self._check_exists(route.expects)
                if len(route.requires) and not self._is_known(self._requirements, route.requires):
                    make = partial(self._declare_all, route.requires)
                    await self._tasks.run((self, "requires", route.requires), make)
            except BaseException:
                self._release_queues -= new
                raise
            self._remember_for_now(self._targets, key)

    async def _declare_all(self, requires: Topology) -> None:
        delivery = self.infrastructure.delivery_exchange
        try:
            try:
                await apply(self.connection, requires, external=names_in(requires), can_move=False)
            except TargetNotFoundError:
                if await exists(self.connection, Topology([Exchange(delivery)])):
                    raise
                # The infrastructure was deleted, not the target.
                self.forget(delivery)
                await self.declared.ensure()
                await apply(self.connection, requires, external=names_in(requires), can_move=False)
            if requires.queues and requires not in self._requirements:
                await settle(self.connection, prefix=delivery, can_move=False)
        except TargetNotFoundError as error:
            raise TargetNotFoundError(
                f"{error} (messages cannot be delivered to it)", reply_code=error.reply_code
            ) from error
        self._remember_for_now(self._requirements, requires)

    def _keyed_release_queues(self, target: Target, requires: Topology) -> set[str]:
        """The release queues of a pair of exchange and routing key, checked against the limit of a connection."""
        if not isinstance(target, ExchangeTarget):
            return set()
        keyed = {one.name for one in requires.queues if "x-dead-letter-routing-key" in one.arguments}
        if len(self._release_queues | keyed) > MAX_RELEASE_QUEUES:
            raise UnsupportedTargetError(
                f"the exchange {target.exchange!r} with the routing key {target.routing_key!r} needs a release queue, "
                f"and this connection has declared {len(self._release_queues)}, which is the limit: use fewer "
                "routing keys, name queues as targets (to=...), or use the clock layout on a virtual host without "
                "NServiceBus"
            )
        return keyed

    async def _ensure_exchange(self, exchange: str) -> None:
        # A publish to a missing exchange closes the channel, and other messages lose their confirms.
        if not self._is_known(self._exchanges, exchange):
            await self._tasks.run((self, "exchange", exchange), partial(self._check_exchange, exchange))

    async def _check_exchange(self, exchange: str) -> None:
        async with self._check_slots:
            await self._check_exists(Topology([Exchange(exchange)]))
            self._remember_for_now(self._exchanges, exchange)

    async def _check_exists(self, expected: Topology) -> None:
        for kind, topology in (
            *((f"exchange {one.name!r}", Topology([one])) for one in expected.exchanges),
            *((f"queue {one.name!r}", Topology(queues=[one])) for one in expected.queues),
        ):
            if not await exists(self.connection, topology):
                raise TargetNotFoundError(
                    f"the {kind} does not exist on the virtual host {self.connection.url.vhost!r}: declare it before "
                    "messages are sent to it",
                    reply_code=reply_codes.NOT_FOUND,
                )

    def _is_known(self, known: dict[_Key, float], key: _Key) -> bool:
        return known.get(key, 0.0) > self.connection.loop.time()

    def _remember_template(self, template: MessageTemplate | None, until: float, *, waits: bool) -> None:
        if template is not None:
            self._templates[template, waits] = until

    def _remember_for_now(self, known: dict[_Key, float], key: _Key) -> None:
        known[key] = self.connection.loop.time() + REBIND_AFTER.total_seconds()


def too_large(message: PreparedMessage, limit: int) -> MessageTooLargeError:
    """The error for a body over the broker's limit."""
    return MessageTooLargeError(
        f"the body of the message {message.message_id!r} has {len(message.body)} bytes, the broker's limit is {limit}: "
        "send a smaller body, or raise max_message_size on the broker"
    )
