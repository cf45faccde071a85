"""The protocol of delay infrastructures: a topology, and a route for a delay and a target.

An infrastructure is pure data and arithmetic: it opens no connection. Whatever talks to a broker takes these
values and applies them; nothing else knows the name of a queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from bide.delay.clock_digits import Digit
from bide.delay.compiled import CompiledHeaders, CompiledRoute, UncompiledHeaders, WireFormat
from bide.delay.growing import Growing, ReadyDigits
from bide.durations import format_delay
from bide.errors import InvalidDelayError, InvalidNameError, UnsupportedTargetError
from bide.topology import DEFAULT_EXCHANGE, Exchange, Queue, Topology

if TYPE_CHECKING:
    from bide.delay.levels import DelayLevels
    from bide.delay.taps import Taps

MAX_NAME_BYTES: Final = 255
"""Longest name or routing key, in bytes: the short string of AMQP 0-9-1."""

HEADER_TO: Final = "bide-to"
"""Header with the target of a delayed message: ``q:<queue>`` or ``x:<exchange>``."""

HEADER_DUE: Final = "bide-due"
"""Header with the due time of a message: milliseconds since the Unix epoch."""

HEADER_SENT: Final = "bide-sent"
"""Header with the time at which a message was sent: milliseconds since the Unix epoch."""

HEADER_EXPIRATION: Final = "bide-expiration"
"""Header that carries the ``expiration`` property past the delay queues: milliseconds, as text."""

HEADER_PRIORITY: Final = "bide-priority"
"""Header that carries the ``priority`` property past the delay queues."""

HEADER_PICK_UP_KEY: Final = "bide-pick-up-key"
"""Header with a message's own routing key while it passes the levels of a waiting hall, by the digits of its delay."""

HEADER_SET_ASIDE: Final = "bide-set-aside"
"""Header of a message in the undeliverable queue: why the relay of a waiting hall put it there."""

HEADER_EXCHANGE: Final = "bide-exchange"
"""Header with the exchange that a message was first sent to; empty for a queue. Copies of the message carry it."""

HEADER_ROUTING_KEY: Final = "bide-routing-key"
"""Header with the routing key that a message was first sent with. Copies of the message carry it."""


@dataclass(frozen=True, slots=True)
class QueueTarget:
    """Deliver to one queue.

    Attributes:
        queue: its name.
        isolated: reach it through a release queue of its own, so that if it refuses messages (it is full, or has
            no leader) only its own messages wait. One hop more.
    """

    queue: str
    isolated: bool = False

    def __str__(self) -> str:
        return f"q:{self.queue}"


@dataclass(frozen=True, slots=True)
class ExchangeTarget:
    """Deliver to an exchange, which then routes by the routing key as if the message were published to it then.

    Attributes:
        exchange: its name.
        routing_key: the message's own.
        type: the exchange's type where it is known, for earlier and better errors.
    """

    exchange: str
    routing_key: str = ""
    type: str | None = None

    def __str__(self) -> str:
        return f"x:{self.exchange}"


Target = QueueTarget | ExchangeTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One exchange on a message's way, for :func:`bide.delay.explain.explain`.

    Attributes:
        exchange: the exchange that the message is in.
        segment: the key of the message that decides here.
        value: the digit of this level.
        routed_to: the queue or exchange that it goes to.
        delay: how long it waits there; zero where it does not wait.
        dead_letter_to: the exchange that it goes to after the wait, or None.
    """

    exchange: str
    segment: str
    value: str
    routed_to: str
    delay: timedelta = timedelta(0)
    dead_letter_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayRoute:
    """How to publish one delayed message.

    Attributes:
        exchange: the exchange to publish to.
        routing_key: the routing key to publish with.
        headers: headers to add to the message's own.
        delay: the wait that this route gives: the delay asked for, rounded up to the resolution.
        hops: queues that the message waits in before it reaches its target.
        requires: what must exist for this message beyond the infrastructure's own topology: the target's binding.
            It depends on the target alone.
        expects: what others must have declared: the target itself, where binding it would not show that it is missing.
        digits: what else this message needs of an infrastructure that declares the queues of a digit at its first use;
            see :meth:`bide.delay.growing.Growing.digit_topology`.
    """

    exchange: str
    routing_key: str
    headers: Mapping[str, Any] = field(default_factory=dict)
    delay: timedelta
    hops: int
    requires: Topology
    expects: Topology = field(default_factory=Topology)
    digits: tuple[Digit, ...] = ()


class DelayInfrastructure(Protocol):
    """Exchanges and queues that hold messages back, and how to send through them.

    A class that derives from this one has to define the members up to :meth:`owns`. The others have a default, which
    is right for an infrastructure that needs no such thing.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """The layout's name on the command line: ``clock``, ``nservicebus``, ``celery``..."""

    @property
    def resolution(self) -> timedelta:
        """The smallest step: delays are rounded up to a multiple of it."""

    @property
    def max_delay(self) -> timedelta:
        """The longest delay."""

    @property
    def delivery_exchange(self) -> str:
        """The exchange that targets are bound to."""

    @property
    def undeliverable(self) -> str:
        """The exchange, and its queue, for messages that nothing takes."""

    def topology(self) -> Topology:
        """All exchanges, queues and bindings of the infrastructure itself, without targets."""

    def probes(self) -> Topology:
        """A few of the exchanges and queues of :meth:`topology`: where these exist, all of it was applied."""

    def route(self, delay: timedelta, target: Target, *, message_id: str = "") -> DelayRoute:
        """Where and how to publish so that the message reaches ``target`` after ``delay``.

        Args:
            message_id: spreads messages over parallel queues, where the infrastructure has any.

        Raises:
            InvalidDelayError: the delay is negative or longer than :attr:`max_delay`.
            InvalidNameError: the target's name or key does not fit.
            UnsupportedTargetError: this infrastructure cannot reach this kind of target.
        """

    def steps(self, delay: timedelta, target: Target) -> tuple[Step, ...]:
        """Every exchange on the way of that message, in order."""

    def owns(self, name: str) -> bool:
        """Whether an exchange or queue of this name belongs to the infrastructure."""

    def sender_headers(
        self, *, message_id: str, now: datetime, due: datetime | None, values: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Headers that the receivers of this system expect of every message, delayed or not.

        None by default.

        Args:
            now: the time of the sending.
            due: the due time, or None.
            values: the message's properties by their AMQP names.
        """
        return {}

    def compile(self, target: Target, wire: WireFormat, ready: ReadyDigits | None = None) -> CompiledRoute | None:
        """:meth:`route` for many messages to one target; None, by default, where each is to be asked for a route.

        Args:
            ready: the digits that are ready on the broker, of an infrastructure that grows; None if all are.

        Raises:
            InvalidInputError: as :meth:`route` does, for what is wrong with the target.
        """
        return None

    def compile_headers(self, values: Mapping[str, Any], wire: WireFormat) -> CompiledHeaders | None:
        """:meth:`sender_headers` for many messages; None where no message has any.

        Args:
            values: the properties that the messages share.
        """
        return UncompiledHeaders(self.sender_headers, wire)

    def delay_levels(self) -> DelayLevels | None:
        """The levels, for ``bide pipeline plan``; None, by default, where it cannot be planned for."""
        return None

    def taps(self) -> Taps | None:
        """See :mod:`bide.delay.taps`; None, by default, where there can be none."""
        return None

    def growing(self) -> Growing | None:
        """The same infrastructure, if clients declare parts of it as they need them; None, by default."""
        return None

    def for_release(self, release: tuple[int, ...]) -> Self:
        """The same infrastructure, as it is used on a broker of this release."""
        return self

    def beside_nservicebus(self, release: tuple[int, ...]) -> Self:
        """The same infrastructure, as it is used where endpoints of NServiceBus may receive its messages.

        Itself, by default: they can read all that it adds to a message.
        """
        return self

    def address_topology(self, queue: str) -> Topology:
        """What an endpoint declares so that other systems can send to its queue; nothing by default.

        Raises:
            InvalidNameError: the name cannot be an address.
        """
        return Topology()

    @property
    def writes_nservicebus_headers(self) -> bool:
        """Whether endpoints count retries, and describe failures, under the header names of NServiceBus too."""
        return False

    @property
    def base(self) -> str:
        """What all names start with, before a dot, if no other owner's name starts so; empty, by default, if not."""
        return ""

    @property
    def release_prefix(self) -> str:
        """What the names of the queues start with that targets need beside :meth:`topology`; empty if none does."""
        return ""

    @property
    def relay_queues(self) -> tuple[str, ...]:
        """The queues that a relay has to consume from; none, by default, where the broker does all by itself."""
        return ()


def address_of(target: Target) -> tuple[str, str]:
    """The exchange and the routing key of an undelayed publish to this target, checked.

    Raises:
        InvalidNameError: the target's name or the routing key does not fit.
        UnsupportedTargetError: the default exchange.
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
        UnsupportedTargetError: it is empty.
    """
    if isinstance(target, ExchangeTarget) and target.type == "topic" and not target.routing_key:
        raise UnsupportedTargetError(
            f"the routing key for the topic exchange {target.exchange!r} is empty: a delayed message to a topic "
            "exchange needs one of at least one word"
        )


def existing(target: Target) -> Topology:
    """The target itself, as something that has to be there."""
    if isinstance(target, QueueTarget):
        return Topology(queues=[Queue(target.queue)])
    return Topology([Exchange(target.exchange)])


def round_up(delay: timedelta, resolution: timedelta, *, maximum: timedelta) -> int:
    """The delay as a whole number of ``resolution`` steps, rounded up: a message is never early.

    Raises:
        InvalidDelayError: negative, or more than ``maximum`` after rounding.
    """
    if delay < timedelta(0):
        raise InvalidDelayError(f"the delay {format_delay(delay)} is negative: give zero or more")
    # Compared first: a delay near the longest timedelta overflows when it is rounded up.
    if delay > maximum or (units := -(-delay // resolution)) * resolution > maximum:
        raise InvalidDelayError(
            f"the delay {format_delay(delay)} is longer than this infrastructure can hold ({format_delay(maximum)}): "
            "give a shorter delay"
        )
    return units


def check_span(what: str, value: object) -> None:
    """Check that a setting is a span of time.

    Raises:
        InvalidDelayError: it is something else.
    """
    if not isinstance(value, timedelta):
        raise InvalidDelayError(f"the {what} {value!r} is of type {type(value).__name__}: give a timedelta")


def check_name(kind: str, name: object, *, limit: int = MAX_NAME_BYTES, empty: bool = False) -> None:
    """Check that a name fits into an AMQP short string.

    Args:
        kind: what it names, for the message: ``"queue"``, ``"exchange"``, ``"routing key"``.
        limit: in bytes of UTF-8.
        empty: whether the empty name is allowed.

    Raises:
        InvalidNameError: it is empty, or longer than ``limit`` bytes, or no text that UTF-8 can carry.
    """
    if not isinstance(name, str):
        raise InvalidNameError(f"the {kind} {name!r} is not text: give a str")
    if not name and not empty:
        raise InvalidNameError(f"the {kind} name is empty: name the {kind}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidNameError(f"the {kind} {name!r} holds characters that UTF-8 cannot carry: remove them") from error
    if size > limit:
        shown = name if len(name) <= 40 else name[:37] + "..."
        raise InvalidNameError(f"the {kind} {shown!r} takes {size} bytes, the limit is {limit}: use a shorter one")
