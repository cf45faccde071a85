"""The protocol of delay infrastructures: a topology, and a route for a delay and a target.

An infrastructure is data and arithmetic; it opens no connection. Other packages declare its topology and publish along
its routes. Names of delay queues are defined only in this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from bide.delay.compiled import CompiledHeaders, CompiledRoute, UncompiledHeaders, WireFormat
from bide.delay.growing import Growing, ReadyDigits
from bide.delay.routes import DelayRoute, Step
from bide.durations import format_delay
from bide.errors import InvalidDelayError, InvalidNameError, UnsupportedTargetError
from bide.topology import DEFAULT_EXCHANGE, Exchange, Queue, Topology

if TYPE_CHECKING:
    from bide.delay.event_routing import EventRouting
    from bide.delay.levels import DelayLevels
    from bide.delay.taps import Taps

MAX_NAME_BYTES: Final = 255
"""The longest name or routing key, in bytes: the limit of a short string in AMQP 0-9-1."""

HEADER_TO: Final = "bide-to"
"""Header with the target of a delayed message: ``q:<queue>`` or ``x:<exchange>``."""

HEADER_DUE: Final = "bide-due"
"""Header with the due time of a message: milliseconds since the Unix epoch."""

HEADER_SENT: Final = "bide-sent"
"""Header with the time at which a message was sent: milliseconds since the Unix epoch."""

HEADER_EXPIRATION: Final = "bide-expiration"
"""Header with the ``expiration`` property while the message waits in delay queues: milliseconds, as text."""

HEADER_PRIORITY: Final = "bide-priority"
"""Header with the ``priority`` property while the message waits in delay queues."""

HEADER_PICK_UP_KEY: Final = "bide-pick-up-key"
"""Header with a message's own routing key in a waiting hall, where the routing key holds the digits of its delay."""

HEADER_SET_ASIDE: Final = "bide-set-aside"
"""Header of a message in the undeliverable queue: why a relay or a gate put it there."""

HEADER_EXCHANGE: Final = "bide-exchange"
"""Header of copies of a message: the exchange that the original was sent to; empty for a queue."""

HEADER_ROUTING_KEY: Final = "bide-routing-key"
"""Header of copies of a message: the routing key that the original was sent with."""

HEADER_KEY: Final = "bide-key"
"""Header of a scheduled message: the key of its schedule."""

HEADER_SCHEDULE: Final = "bide-schedule-id"
"""Header of a scheduled message: the id of its schedule."""


@dataclass(frozen=True, slots=True)
class QueueTarget:
    """A queue as the target.

    Attributes:
        queue: its name.
        isolated: reach the queue through its own release queue, so that only its own messages wait if it refuses
            messages (because it is full, or has no leader). This costs one hop.
    """

    queue: str
    isolated: bool = False

    def __str__(self) -> str:
        return f"q:{self.queue}"


@dataclass(frozen=True, slots=True)
class ExchangeTarget:
    """An exchange as the target. It routes the message as if the message were published to it at the due time.

    Attributes:
        exchange: its name.
        routing_key: the message's routing key.
        type: the exchange's type if it is known, for earlier and better errors.
    """

    exchange: str
    routing_key: str = ""
    type: str | None = None

    def __str__(self) -> str:
        return f"x:{self.exchange}"


Target = QueueTarget | ExchangeTarget


def target_name(target: Target) -> str:
    """The name of the queue or of the exchange."""
    return target.queue if isinstance(target, QueueTarget) else target.exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The wait of a message as its queue, its keys and its headers show it; see :meth:`DelayInfrastructure.wait_in`.

    Attributes:
        target: where the message goes at its due time.
        here: how long messages wait in this queue; zero if messages do not wait there.
        least: the shortest wait after this queue.
        most: the longest wait after this queue; the same as ``least`` if the keys of all levels are known.
        whole: the wait of all levels of the message together; None if that is unknown.
        previous: the queue in which the message waited before; None if this is the first one, or if that is unknown.
        owns_due: whether the header ``bide-due`` always belongs to this wait. It may belong to an earlier delivery
            where other systems publish copies of messages with all their headers.
    """

    target: Target
    here: timedelta
    least: timedelta = timedelta(0)
    most: timedelta = timedelta(0)
    whole: timedelta | None = None
    previous: str | None = None
    owns_due: bool = False


class DelayInfrastructure(Protocol):
    """The exchanges and queues in which delayed messages wait, and the routes through them.

    A subclass has to define the members up to :meth:`owns`. The others have a default for infrastructures without that
    feature.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """The layout's name on the command line: ``clock``, ``nservicebus``, ``celery``..."""

    @property
    def resolution(self) -> timedelta:
        """The resolution: delays are rounded up to a multiple of it."""

    @property
    def max_delay(self) -> timedelta:
        """The longest delay."""

    @property
    def delivery_exchange(self) -> str:
        """The exchange that targets are bound to."""

    @property
    def undeliverable(self) -> str:
        """The name of the exchange and queue for undeliverable messages."""

    def topology(self) -> Topology:
        """All exchanges, queues and bindings of the infrastructure itself, without targets."""

    def probes(self) -> Topology:
        """A few exchanges and queues of :meth:`topology`. If these exist, the whole topology was applied."""

    def route(self, delay: timedelta, target: Target, *, message_id: str = "") -> DelayRoute:
        """The route by which a message reaches ``target`` after ``delay``.

        Args:
            message_id: spreads messages over parallel queues, if the infrastructure has any.

        Raises:
            InvalidDelayError: the delay is negative or longer than :attr:`max_delay`.
            InvalidNameError: the target's name or key is too long or invalid.
            UnsupportedTargetError: this infrastructure cannot reach this kind of target.
        """

    def steps(self, delay: timedelta, target: Target) -> tuple[Step, ...]:
        """Every exchange on the route of a message, in order."""

    def owns(self, name: str) -> bool:
        """Whether an exchange or queue of this name belongs to the infrastructure."""

    def waiting_queues(self) -> tuple[Queue, ...]:
        """The queues in which messages wait, those with the longest wait first, so that messages move down the list."""
        queues = [one for one in self.topology().queues if "x-message-ttl" in one.arguments]
        return tuple(sorted(queues, key=lambda one: -int(one.arguments["x-message-ttl"])))

    def wait_in(self, queue: str, routing_key: str, headers: Mapping[str, Any]) -> Wait | None:
        """The wait of a message in one of :meth:`waiting_queues`, for :func:`bide.delay.waiting.waiting_message`.

        None (the default) if messages do not wait in the queue, or if this infrastructure cannot be migrated.

        Args:
            headers: all headers, including those of the broker.

        Raises:
            InvalidInputError: the keys or the headers do not show the target or the wait.
        """
        return None

    def sender_headers(
        self, *, message_id: str, now: datetime, due: datetime | None, values: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Headers that receivers of this system expect of every message, delayed or not.

        There are none by default.

        Args:
            now: the time of sending.
            due: the due time, or None.
            values: the message's properties by their AMQP names.
        """
        return {}

    def compile(self, target: Target, wire: WireFormat, ready: ReadyDigits | None = None) -> CompiledRoute | None:
        """:meth:`route` for many messages to one target; None (the default) if callers have to use :meth:`route`.

        Args:
            ready: for an infrastructure that grows, the digits that are ready on the broker; None if all are.

        Raises:
            InvalidInputError: the target is invalid, as for :meth:`route`.
        """
        return None

    def compile_headers(self, values: Mapping[str, Any], wire: WireFormat) -> CompiledHeaders | None:
        """:meth:`sender_headers` for many messages; None if there are no such headers.

        Args:
            values: the properties that the messages share.
        """
        return UncompiledHeaders(self.sender_headers, wire)

    def delay_levels(self) -> DelayLevels | None:
        """The levels, for ``bide pipeline plan``; None (the default) if the command cannot plan this infrastructure."""
        return None

    def taps(self) -> Taps | None:
        """The taps, see :mod:`bide.delay.taps`; None (the default) if taps are not possible."""
        return None

    def growing(self) -> Growing | None:
        """This infrastructure if clients declare parts of it at first use; None by default."""
        return None

    def for_release(self, release: tuple[int, ...]) -> Self:
        """The variant of this infrastructure for a broker of this release."""
        return self

    def beside_nservicebus(self, release: tuple[int, ...]) -> Self:
        """The variant of this infrastructure whose messages NServiceBus endpoints can receive.

        By default this infrastructure itself: NServiceBus can read everything that it adds to a message.
        """
        return self

    def address_topology(self, queue: str) -> Topology:
        """The topology that an endpoint declares so that other systems can send to its queue; empty by default.

        Raises:
            InvalidNameError: the name cannot be an address.
        """
        return Topology()

    def address_exchange(self, queue: str) -> str | None:
        """The exchange to which undelayed messages for a queue are published if it exists; none by default."""
        return None

    def event_routing(self) -> EventRouting | None:
        """The routing of events to the endpoints that subscribe to their types; None (the default) if there is none."""
        return None

    @property
    def writes_nservicebus_headers(self) -> bool:
        """Whether endpoints also write the NServiceBus headers for retries and failures."""
        return False

    @property
    def base(self) -> str:
        """The common start of all names, before a dot, if no other owner uses it; empty by default."""
        return ""

    @property
    def release_prefix(self) -> str:
        """The start of the names of release queues, which targets need besides :meth:`topology`; empty by default."""
        return ""

    @property
    def relay_queues(self) -> tuple[str, ...]:
        """The queues that a relay has to consume from; none by default, because no relay is needed."""
        return ()


def address_of(target: Target) -> tuple[str, str]:
    """Check a target, and return the exchange and the routing key of an undelayed publish to it.

    Raises:
        InvalidNameError: the target's name or the routing key is too long or invalid.
        UnsupportedTargetError: the target is the default exchange.
    """
    if isinstance(target, QueueTarget):
        check_name("queue", target.queue)
        return DEFAULT_EXCHANGE, target.queue
    if not target.exchange:
        raise UnsupportedTargetError(
            "a delayed message cannot go to the default exchange: name the queue as the target (to=...)"
        )
    check_name("exchange", target.exchange)
    check_name("routing key", target.routing_key, empty=True)
    return target.exchange, target.routing_key


def check_topic_key(target: Target) -> None:
    """Refuse an empty routing key for an exchange that is known to be a topic exchange.

    Raises:
        UnsupportedTargetError: the routing key is empty.
    """
    if isinstance(target, ExchangeTarget) and target.type == "topic" and not target.routing_key:
        raise UnsupportedTargetError(
            f"the routing key for the topic exchange {target.exchange!r} is empty: a delayed message to a topic "
            "exchange needs one of at least one word"
        )


def existing(target: Target) -> Topology:
    """The target as a topology that must exist."""
    if isinstance(target, QueueTarget):
        return Topology(queues=[Queue(target.queue)])
    return Topology([Exchange(target.exchange)])


def round_up(delay: timedelta, resolution: timedelta, *, maximum: timedelta) -> int:
    """The delay as a number of ``resolution`` steps, rounded up so that a message is never early.

    Raises:
        InvalidDelayError: the delay is negative, or longer than ``maximum`` after rounding.
    """
    if delay < timedelta(0):
        raise InvalidDelayError(f"the delay {format_delay(delay)} is negative: give zero or more")
    # Compare before rounding up, which overflows for a delay near timedelta.max.
    if delay > maximum or (units := -(-delay // resolution)) * resolution > maximum:
        raise InvalidDelayError(
            f"the delay {format_delay(delay)} is longer than this infrastructure can hold ({format_delay(maximum)}): "
            "give a shorter delay"
        )
    return units


def owned_by(base: str, name: str) -> bool:
    """Whether a name starts with the base of an infrastructure, and is not a name of the schedule log.

    The schedule log has its names under the same prefix, and must survive an infrastructure that is deleted.
    """
    log = f"{base}.schedule"
    return name.startswith(f"{base}.") and name != log and not name.startswith(f"{log}.")


def check_name(kind: str, name: object, *, limit: int = MAX_NAME_BYTES, empty: bool = False) -> None:
    """Check that a name fits into an AMQP short string.

    Args:
        kind: what the name is for, for the error: ``"queue"``, ``"exchange"``, ``"routing key"``.
        limit: the longest name, in bytes of UTF-8.
        empty: whether an empty name is allowed.

    Raises:
        InvalidNameError: the name is empty, longer than ``limit`` bytes, or cannot be encoded as UTF-8.
    """
    if not isinstance(name, str):
        raise InvalidNameError(f"the {kind} {name!r} is not text: give a str")
    if not name and not empty:
        raise InvalidNameError(f"the {kind} name is empty: name the {kind}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidNameError(f"the {kind} {name!r} holds characters that UTF-8 cannot encode: remove them") from error
    if size > limit:
        shown = name if len(name) <= 40 else name[:37] + "..."
        raise InvalidNameError(f"the {kind} {shown!r} takes {size} bytes, the limit is {limit}: use a shorter one")


def check_prefix(prefix: str, *, limit: int = 100, empty: bool = False) -> None:
    """Check the prefix of the names of an infrastructure; see :func:`check_name`.

    Raises:
        InvalidNameError: the prefix is not a valid name, or RabbitMQ reserves it.
    """
    check_name("prefix", prefix, limit=limit, empty=empty)
    if prefix.startswith("amq."):
        raise InvalidNameError(f"the prefix {prefix!r} starts with 'amq.', reserved by RabbitMQ: choose another")
