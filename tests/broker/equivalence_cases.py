"""Generated topologies and client actions, to compare the in-memory broker with RabbitMQ.

A case is plain data. Time is counted in steps: something happens at the beginning of each, and times to live are a
fifth of a step longer than whole steps, so that nothing expires just when something else happens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from hypothesis import strategies as st

from bide.topology import Argument, Binding, Exchange, Queue

QUEUES: Final = ("q0", "q1", "q2", "q3")
EXCHANGES: Final = ("e0", "e1", "e2")
KEYS: Final = ("a", "a", "b", "a.b", "")
PATTERNS: Final = ("a", "#", "a.#", "*", "a.*", "b", "*.b.#")

How = Literal["ack", "nack", "reject", "requeue", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fifths:
    """A time to live, in fifths of a step."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Publish messages, one after the other."""

    exchange: str
    routing_key: str
    headers: dict[str, Any] = field(default_factory=dict)
    ttl: Fifths | None = None
    priority: int | None = None
    size: int = 0
    number: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Ask a queue for one message, and settle it."""

    queue: str
    how: How


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Start a consumer on a channel of its own.

    Attributes:
        offset: where it begins to read a stream.
    """

    queue: str
    prefetch: int
    priority: int = 0
    offset: str | int = "first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Settle an unsettled message of a consumer.

    Attributes:
        consumer: the number of the consumer, counted round.
        message: the number of the message, counted round.
    """

    consumer: int
    message: int
    how: How
    multiple: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """End a consumer: cancel it, or close its channel."""

    consumer: int
    close: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Purge:
    """Purge the ready messages of a queue."""

    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete a queue or an exchange."""

    kind: Literal["queue", "exchange"]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbind:
    """Remove a binding, counted round."""

    binding: int


@dataclass(frozen=True, slots=True)
class Rest:
    """Do nothing for a step."""


Step = Send | Take | Listen | Settle | Leave | Purge | Delete | Unbind | Rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something to declare, and something to do."""

    exchanges: tuple[Exchange, ...]
    queues: tuple[Queue, ...]
    ttls: tuple[Fifths | None, ...]
    bindings: tuple[Binding, ...]
    steps: tuple[Step, ...]


def fifths(most: int = 3) -> st.SearchStrategy[Fifths]:
    """Times to live a fifth longer than whole steps."""
    return st.integers(0, most).map(lambda steps: Fifths(number=steps * 5 + 1))


def maybe(name: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An argument that may be left out."""
    return st.one_of(st.just({}), st.just({}), values.map(lambda value: {name: value}))


def merged(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments from several strategies."""
    return st.tuples(*parts).map(lambda found: {name: value for part in found for name, value in part.items()})


DEAD_LETTERS: Final = st.one_of(
    merged(
        st.sampled_from(["", *EXCHANGES]).map(lambda name: {"x-dead-letter-exchange": name}),
        maybe("x-dead-letter-routing-key", st.sampled_from([*QUEUES, *KEYS])),
    ),
    st.sampled_from(QUEUES).map(lambda name: {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": name}),
    st.just({}),
)

CLASSIC: Final = merged(
    DEAD_LETTERS,
    maybe("x-max-length", st.integers(0, 3)),
    maybe("x-max-length-bytes", st.integers(0, 40)),
    maybe("x-overflow", st.sampled_from(["drop-head", "reject-publish", "reject-publish-dlx"])),
    maybe("x-max-priority", st.integers(1, 5)),
    maybe("x-single-active-consumer", st.booleans()),
)


@st.composite
def quorum(draw: st.DrawFn, release: tuple[int, ...]) -> dict[str, Any]:
    """Arguments of a quorum queue."""
    arguments: dict[str, Any] = draw(
        merged(
            DEAD_LETTERS,
            maybe("x-max-length", st.integers(0, 5)),
            maybe("x-overflow", st.sampled_from(["drop-head", "reject-publish"])),
            maybe("x-delivery-limit", st.integers(0 if release < (4, 0) else -1, 3)),
            maybe("x-single-active-consumer", st.booleans()),
        )
    )
    if release >= (4, 3) and draw(st.integers(0, 4)) == 0:
        arguments["x-delayed-retry-type"] = draw(st.sampled_from(["all", "failed", "returned"]))
    if "x-dead-letter-exchange" in arguments and draw(st.booleans()):
        arguments |= {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    return {"x-queue-type": "quorum", **arguments}


STREAM: Final[dict[str, Any]] = {"x-queue-type": "stream"}


@st.composite
def headers(draw: st.DrawFn, *, on_binding: bool = False) -> dict[str, Any]:
    """Headers of a message, or arguments of a binding to a headers exchange."""
    found = draw(st.dictionaries(st.sampled_from(["h", "i", "x-h"]), st.sampled_from([1, 2, "1", True]), max_size=2))
    if on_binding:
        found |= draw(maybe("x-match", st.sampled_from(["all", "any", "all-with-x", "any-with-x"])))
        return found
    for name in ("CC", "BCC"):
        if draw(st.integers(0, 5)) == 0:
            found[name] = draw(st.lists(st.sampled_from([*KEYS, *QUEUES]), max_size=2))
    if draw(st.integers(0, 11)) == 0:
        death = {
            "queue": draw(st.sampled_from(QUEUES)),
            "reason": draw(st.sampled_from(["expired", "rejected", "maxlen"])),
            "count": draw(st.integers(1, 3)),
            "exchange": "",
            "routing-keys": ["a"],
        }
        found["x-death"] = [death]
    return found


@st.composite
def bindings(draw: st.DrawFn, exchange: Exchange, queues: tuple[str, ...]) -> tuple[Binding, ...]:
    """The bindings of one exchange, to queues and sometimes to another exchange."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        to_exchange = draw(st.integers(0, 4)) == 0
        destination = draw(st.sampled_from(EXCHANGES if to_exchange else queues))
        arguments: dict[str, Argument] = {}
        key = draw(st.sampled_from(PATTERNS if exchange.type == "topic" else KEYS))
        if exchange.type == "headers":
            arguments = draw(headers(on_binding=True))
        elif exchange.type == "x-consistent-hash":
            key = str(draw(st.integers(1, 3)))
        found.append(Binding(exchange.name, destination, key, "exchange" if to_exchange else "queue", arguments))
    return tuple(dict.fromkeys(found))


def sends(queues: tuple[str, ...]) -> st.SearchStrategy[Send]:
    """Messages to an exchange, or straight to a queue."""
    options: dict[str, st.SearchStrategy[Any]] = {
        "headers": headers(),
        "ttl": st.one_of(st.none(), st.none(), fifths()),
        "priority": st.one_of(st.none(), st.integers(0, 6)),
        "size": st.integers(0, 30),
        "number": st.integers(1, 3),
    }
    return st.one_of(
        st.builds(Send, exchange=st.just(""), routing_key=st.sampled_from(queues), **options),
        st.builds(Send, exchange=st.just(""), routing_key=st.sampled_from(queues), **options),
        st.builds(Send, exchange=st.sampled_from(EXCHANGES), routing_key=st.sampled_from(KEYS), **options),
    )


def steps(queues: tuple[str, ...]) -> st.SearchStrategy[Step]:
    """One thing to do; mostly publishing."""
    how = st.sampled_from(["reject", "requeue", "nack", "reject", "ack", "keep"])
    some: st.SearchStrategy[Any] = st.sampled_from(queues)
    number = st.integers(0, 3)
    return st.one_of(
        sends(queues),
        sends(queues),
        st.builds(Take, queue=some, how=how),
        st.builds(Take, queue=some, how=how),
        st.builds(Listen, queue=some, prefetch=st.integers(1, 3), priority=st.sampled_from([0, 0, 0, 1])),
        st.builds(
            Listen, queue=some, prefetch=st.integers(1, 3), offset=st.sampled_from(["first", "last", "next", 1, 3])
        ),
        st.builds(Settle, consumer=number, message=number, how=how, multiple=st.booleans()),
        st.builds(Settle, consumer=number, message=number, how=how),
        st.builds(Settle, consumer=st.just(0), message=number, how=how),
        st.builds(Leave, consumer=number, close=st.booleans()),
        st.one_of(
            st.builds(Purge, queue=some),
            st.builds(Delete, kind=st.just("queue"), name=some),
            st.builds(Delete, kind=st.just("exchange"), name=st.sampled_from(EXCHANGES)),
            st.builds(Unbind, binding=number),
            st.just(Rest()),
        ),
    )


@st.composite
def cases(draw: st.DrawFn, release: tuple[int, ...]) -> Case:
    """A case that RabbitMQ of this release accepts."""
    names = QUEUES[: draw(st.sampled_from([2, 3, 4, 1]))]
    queues, ttls = [], []
    for name in names:
        arguments = draw(st.one_of(CLASSIC, quorum(release), CLASSIC, quorum(release), st.just(STREAM)))
        if arguments.get("x-single-active-consumer") is False:
            del arguments["x-single-active-consumer"]
        queues.append(Queue(name, arguments=arguments))
        ttls.append(None if arguments is STREAM else draw(st.one_of(st.none(), fifths())))
    exchanges = []
    for name in EXCHANGES:
        kind = draw(st.sampled_from(["direct", "fanout", "topic", "headers", "fanout", "x-consistent-hash"]))
        alternate = draw(maybe("alternate-exchange", st.sampled_from(EXCHANGES)))
        exchanges.append(Exchange(name, kind, arguments=alternate))
    found = tuple(one for exchange in exchanges for one in draw(bindings(exchange, names)))
    return Case(
        exchanges=tuple(exchanges),
        queues=tuple(queues),
        ttls=tuple(ttls),
        bindings=found,
        # Something has to be there before anything can be done to it.
        steps=(draw(sends(names)), draw(sends(names)), *draw(st.lists(steps(names), min_size=2, max_size=9))),
    )
