"""Validation of topologies: what a broker would refuse, or accept with an unwanted effect.

Each problem is one sentence that names the object, the value, the limit and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bide.errors import InvalidTopologyError
from bide.topology import DEFAULT_EXCHANGE, PREDECLARED_EXCHANGES
from bide.topology.dead_letters import endless_retries
from bide.topology.queue_arguments import QUEUE_TYPES, RULES, argument_problems
from bide.topology.routing import PREDECLARED, describe

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from bide.topology import Argument, Binding, Exchange, Queue, Topology
    from bide.topology.queue_arguments import Release

MAX_NAME_BYTES: Final = 255
"""The longest name, type or key: a short string of AMQP 0-9-1."""

EXCHANGE_TYPES: Final = frozenset({"direct", "topic", "fanout", "headers"})
"""Exchange types that every broker has."""

PLUGIN_EXCHANGE_TYPES: Final = frozenset(
    {
        "x-consistent-hash",
        "x-delayed-message",
        "x-jms-topic",
        "x-local-random",
        "x-modulus-hash",
        "x-random",
        "x-recent-history",
    }
)
"""Exchange types of well-known plugins, some of which are part of newer brokers."""

MATCH_MODES: Final = ("all", "any", "all-with-x", "any-with-x")
"""Values of ``x-match`` in a binding of a headers exchange."""

_OWN_ARGUMENTS: Final = {
    "hash-header": "x-consistent-hash",
    "hash-property": "x-consistent-hash",
    "x-delayed-type": "x-delayed-message",
    "x-recent-history-length": "x-recent-history",
}
_HASH_PROPERTIES: Final = ("correlation_id", "message_id", "timestamp")
_MAX_HASH_WEIGHT: Final = 10_000
_MAX_TOPIC_HASHES: Final = 2


def validate(topology: Topology, *, external: Collection[str] = (), release: Release | None = None) -> None:
    """Check a topology; see :func:`problems`.

    Raises:
        InvalidTopologyError: with all the problems found.
    """
    found = problems(topology, external=external, release=release)
    if found:
        raise InvalidTopologyError(found)


def problems(topology: Topology, *, external: Collection[str] = (), release: Release | None = None) -> list[str]:
    """Find all problems of a topology, one sentence each.

    Args:
        topology: the topology to check.
        external: names of exchanges and queues that exist without being part of the topology.
        release: the broker's release, such as ``(4, 3, 5)``; if it is None, arguments that any release from 3.10 on
            accepts are valid.
    """
    return list(_Checker(topology, external, release).problems())


class _Checker:
    def __init__(self, topology: Topology, external: Collection[str], release: Release | None) -> None:
        self._topology = topology
        self._release = release
        self._external = frozenset(external)
        self._exchanges = {one.name: one for one in (*PREDECLARED, *topology.exchanges)}
        self._queues = {one.name: one for one in topology.queues if one.name}

    def problems(self) -> Iterator[str]:
        for exchange in self._topology.exchanges:
            yield from (f"exchange {exchange.name!r}: {text}" for text in self._exchange(exchange))
        for queue in self._topology.queues:
            yield from (f"queue {queue.name!r}: {text}" for text in self._queue(queue))
        for binding in self._topology.bindings:
            yield from (f"{describe(binding)}: {text}" for text in self._binding(binding))
        yield from endless_retries(self._topology)

    def _has_exchange(self, name: object) -> bool:
        return name in self._exchanges or name in PREDECLARED_EXCHANGES or name in self._external

    def _exchange(self, exchange: Exchange) -> Iterator[str]:
        if exchange.name == DEFAULT_EXCHANGE:
            yield "the default exchange exists from the start and cannot be declared: remove it"
            return
        known = next((one for one in PREDECLARED if one.name == exchange.name), None)
        if known is None:
            yield from _name_problems(exchange.name)
        elif known != exchange:
            yield f"the broker declares it as {known.type} and durable: remove it, or declare it with these properties"
        if exchange.type not in EXCHANGE_TYPES | PLUGIN_EXCHANGE_TYPES:
            known_types = ", ".join((*sorted(EXCHANGE_TYPES), *sorted(PLUGIN_EXCHANGE_TYPES)))
            yield f"the type {exchange.type!r} is unknown: use one of {known_types}"
        elif exchange.type == "x-local-random" and self._release is not None and self._release < (4, 0):
            yield "the type 'x-local-random' needs RabbitMQ 4.0 or later: use another, or upgrade the broker"
        yield from _argument_value_problems(exchange.arguments)
        yield from self._alternate(exchange)
        yield from _exchange_argument_problems(exchange)

    def _alternate(self, exchange: Exchange) -> Iterator[str]:
        name = exchange.arguments.get("alternate-exchange")
        if name is None:
            return
        if not isinstance(name, str):
            yield f"alternate-exchange is {name!r}, but must be a text: name an exchange"
        elif name == DEFAULT_EXCHANGE:
            yield "alternate-exchange is '', but the default exchange routes nothing as an alternate: name another"
        elif name == exchange.name:
            yield "alternate-exchange is the exchange itself, which does not route a message twice: name another"
        elif not self._has_exchange(name):
            yield f"alternate-exchange {name!r} does not exist: add it to the topology, or name it as external"

    def _queue(self, queue: Queue) -> Iterator[str]:
        yield from _argument_value_problems(queue.arguments)
        if queue.type not in QUEUE_TYPES:
            yield f"x-queue-type is {queue.type!r}, but must be one of {', '.join(map(repr, QUEUE_TYPES))}: correct it"
            return
        yield from self._queue_name(queue)
        if queue.type != "classic":
            for name, wrong in (
                ("exclusive", queue.exclusive),
                ("auto-delete", queue.auto_delete),
                ("not durable", not queue.durable),
            ):
                if wrong:
                    yield f"a {queue.type} queue cannot be {name}: change that, or make it a classic queue"
        elif not queue.durable and not queue.exclusive and self._release is not None and self._release >= (4, 3):
            yield "RabbitMQ 4.3 refuses queues that are neither durable nor exclusive: make it durable"
        yield from argument_problems(queue.arguments, queue.type, self._release)
        if "alternate-exchange" in queue.arguments:
            yield "alternate-exchange is for exchanges, and queues ignore it: use x-dead-letter-exchange, or remove it"
        yield from self._dead_letters(queue)

    def _queue_name(self, queue: Queue) -> Iterator[str]:
        if not queue.name:
            if queue.type != "classic":
                yield f"the broker names only classic queues, and this is a {queue.type} queue: give it a name"
            return
        yield from _name_problems(queue.name)

    def _dead_letters(self, queue: Queue) -> Iterator[str]:
        name = queue.arguments.get("x-dead-letter-exchange")
        if not isinstance(name, str):
            return
        if not self._has_exchange(name):
            yield f"x-dead-letter-exchange {name!r} does not exist: add it to the topology, or name it as external"
        key = queue.arguments.get("x-dead-letter-routing-key")
        if name == DEFAULT_EXCHANGE and isinstance(key, str) and not self._has_queue(key):
            yield (
                f"it dead-letters through the default exchange to queue {key!r}, which does not exist: add it to the "
                "topology, or name it as external"
            )

    def _has_queue(self, name: str) -> bool:
        return name in self._queues or name in self._external

    def _binding(self, binding: Binding) -> Iterator[str]:
        if DEFAULT_EXCHANGE in (binding.source, binding.destination) and binding.destination_type == "exchange":
            yield "the default exchange cannot be bound: use another exchange"
        elif binding.source == DEFAULT_EXCHANGE:
            yield "the default exchange has every queue bound already: use another exchange, or remove the binding"
        elif not self._has_exchange(binding.source):
            yield f"exchange {binding.source!r} does not exist: add it to the topology, or name it as external"
        if binding.destination_type == "queue":
            if not self._has_queue(binding.destination):
                yield f"queue {binding.destination!r} does not exist: add it to the topology, or name it as external"
        elif binding.destination != DEFAULT_EXCHANGE and not self._has_exchange(binding.destination):
            yield f"exchange {binding.destination!r} does not exist: add it to the topology, or name it as external"
        yield from _text_problems("key", binding.routing_key)
        yield from _argument_value_problems(binding.arguments)
        source = self._exchanges.get(binding.source)
        if source is not None:
            yield from self._by_type(binding, source.type)

    def _by_type(self, binding: Binding, exchange_type: str) -> Iterator[str]:
        key = binding.routing_key
        if exchange_type == "headers":
            yield from _headers_problems(binding.arguments)
        elif "x-match" in binding.arguments and exchange_type in EXCHANGE_TYPES:
            yield f"x-match is for headers exchanges, and a {exchange_type} exchange ignores it: remove it"
        if exchange_type == "topic" and (self._release is None or self._release >= (4, 3)):
            hashes = key.split(".").count("#")
            if hashes > _MAX_TOPIC_HASHES:
                yield (
                    f"its key has {hashes} words '#', and RabbitMQ 4.3.5 and later allow {_MAX_TOPIC_HASHES}: "
                    "use fewer, or several bindings"
                )
        if exchange_type == "x-consistent-hash" and not (key.isascii() and key.isdigit() and int(key) >= 1):
            yield f"its key is its weight, and must be a whole number from 1 to {_MAX_HASH_WEIGHT}: correct it"
        elif exchange_type == "x-consistent-hash" and int(key) > _MAX_HASH_WEIGHT:
            yield f"its key is its weight, {key}, and must not exceed {_MAX_HASH_WEIGHT}: use smaller weights"
        if exchange_type == "x-local-random":
            queue = self._queues.get(binding.destination)
            if key:
                yield "an x-local-random exchange accepts only empty keys: remove the key"
            if binding.destination_type == "exchange" or (queue is not None and queue.type != "classic"):
                yield "an x-local-random exchange accepts only classic queues: bind a classic queue"


def _name_problems(name: str) -> Iterator[str]:
    yield from _text_problems("name", name)
    if name.startswith("amq."):
        yield "names that start with 'amq.' are reserved for the broker: choose another"
    if "\r" in name or "\n" in name:
        yield "the name has a line break, which the broker silently removes: choose another"


def _text_problems(kind: str, text: str) -> Iterator[str]:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        yield f"the {kind} has characters that UTF-8 cannot encode: remove them"
        return
    if size > MAX_NAME_BYTES:
        yield f"the {kind} takes {size} bytes, the limit is {MAX_NAME_BYTES}: use a shorter one"


def _argument_value_problems(arguments: Mapping[str, Argument]) -> Iterator[str]:
    """Find values that an AMQP table cannot contain."""
    for name, value in arguments.items():
        yield from _text_problems(f"name of argument {name!r}", name)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            yield f"{name} is {value}, but AMQP integers have 64 bits: use a smaller one"
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                yield f"{name} is {value!r}, which has characters that UTF-8 cannot encode: remove them"


def _exchange_argument_problems(exchange: Exchange) -> Iterator[str]:
    arguments = exchange.arguments
    for name in arguments:
        if name in RULES:
            yield f"{name} is for queues, and exchanges ignore it: move it to the queue, or remove it"
        owner = _OWN_ARGUMENTS.get(name)
        if owner is not None and owner != exchange.type:
            yield f"{name} is for exchanges of type {owner}, and this is a {exchange.type} exchange: remove it"
    if exchange.type == "x-consistent-hash":
        if "hash-header" in arguments and "hash-property" in arguments:
            yield "hash-header and hash-property exclude each other: keep one"
        hashed = arguments.get("hash-property", _HASH_PROPERTIES[0])
        if hashed not in _HASH_PROPERTIES:
            yield f"hash-property is {hashed!r}, but must be one of {', '.join(_HASH_PROPERTIES)}: correct it"
    if exchange.type == "x-delayed-message":
        inner = arguments.get("x-delayed-type")
        if inner not in (EXCHANGE_TYPES | PLUGIN_EXCHANGE_TYPES) - {"x-delayed-message"}:
            yield f"x-delayed-type is {inner!r}, but must be another exchange type, such as 'direct': correct it"
    length = arguments.get("x-recent-history-length", 1)
    if exchange.type == "x-recent-history" and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        yield f"x-recent-history-length is {length!r}, but must be a whole number of 1 or more: correct it"


def _headers_problems(arguments: Mapping[str, Argument]) -> Iterator[str]:
    match = arguments.get("x-match", "all")
    if match not in MATCH_MODES:
        yield f"x-match is {match!r}, but must be one of {', '.join(MATCH_MODES)}: correct it"
        return
    names = [name for name in arguments if name != "x-match"]
    if not names and str(match).startswith("any"):
        yield f"x-match is {match!r} and there are no headers to compare, so it never matches: add headers"
    if match in ("all", "any"):
        for name in names:
            if name.startswith("x-"):
                yield f"header {name} is ignored unless x-match is '{match}-with-x': set that, or remove the header"
