"""The rules by which the types of exchange match a message against their bindings.

Pure, and each exchange's bindings are indexed once, so that tens of thousands of messages can be run through
thousands of bindings. Which exchange comes next, and what happens to a message that nothing matches, is
:mod:`bide.topology.routing`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, Protocol

from bide.errors import InvalidInputError, UnsupportedTargetError
from bide.topology import Binding, DestinationType, Exchange
from bide.topology.consistent_hash import bucket

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

Destination = tuple[DestinationType, str]
"""A binding's destination: its kind and its name."""

_Comparable = tuple[type, object]


class RoutedMessage:
    """What routing looks at.

    Attributes:
        keys: the routing key, then the keys of CC and BCC; each once. All count alike at every exchange.
        headers: without BCC, which receivers do not see.
    """

    __slots__ = ("_values", "_words", "headers", "keys")

    def __init__(self, keys: tuple[str, ...], headers: Mapping[str, Any]) -> None:
        self.keys = keys
        self.headers = headers
        self._words: list[list[str]] | None = None
        self._values: dict[str, _Comparable] | None = None

    @classmethod
    def published(cls, routing_key: str, headers: Mapping[str, Any] | None) -> RoutedMessage:
        """A message as its publisher hands it to the broker.

        Raises:
            InvalidInputError: the CC or BCC header is not a list.
        """
        given = dict(headers or {})
        keys = dict.fromkeys((routing_key, *_extra_keys(given, "CC"), *_extra_keys(given, "BCC")))
        given.pop("BCC", None)
        return cls(tuple(keys), given)

    def with_key(self, key: str) -> RoutedMessage:
        """The message with one key instead of all those it has."""
        return RoutedMessage((key,), self.headers)

    @property
    def words(self) -> list[list[str]]:
        """The words of each key, as a topic exchange counts them."""
        if self._words is None:
            self._words = [_split(key) for key in self.keys]
        return self._words

    @property
    def values(self) -> dict[str, _Comparable]:
        """The headers, as a headers exchange compares them."""
        if self._values is None:
            self._values = {name: _comparable(value) for name, value in self.headers.items()}
        return self._values


def _extra_keys(headers: Mapping[str, Any], name: str) -> list[str]:
    keys = headers.get(name, ())
    if not isinstance(keys, (list, tuple)):
        raise InvalidInputError(
            f"header {name} is {keys!r}, but the broker takes only a list of routing keys there: give a list of texts"
        )
    # The broker, too, passes over entries that are not text.
    return [key for key in keys if isinstance(key, str)]


class BindingTable(Protocol):
    """The bindings of one exchange, indexed for its type."""

    def matches(self, message: RoutedMessage) -> Collection[Destination]:
        """The destinations of all bindings that match, each once.

        Raises:
            UnsupportedTargetError: this type of exchange is not modelled.
        """


def binding_table(exchange: Exchange, bindings: Iterable[Binding]) -> BindingTable:
    """Index the bindings of an exchange by the rule of its type."""
    match exchange.type:
        case "direct":
            return _DirectTable(bindings)
        case "fanout":
            return _FanoutTable(bindings)
        case "topic":
            return _TopicTable(bindings)
        case "headers":
            return _HeadersTable(bindings)
        case "x-consistent-hash" if "hash-property" not in exchange.arguments:
            return _HashTable(exchange, bindings)
        case _:
            return _UnknownTable(exchange)


def _destination(binding: Binding) -> Destination:
    return binding.destination_type, binding.destination


class _DirectTable:
    def __init__(self, bindings: Iterable[Binding]) -> None:
        self._by_key: defaultdict[str, set[Destination]] = defaultdict(set)
        for one in bindings:
            self._by_key[one.routing_key].add(_destination(one))

    def matches(self, message: RoutedMessage) -> Collection[Destination]:
        found: set[Destination] = set()
        for key in message.keys:
            found.update(self._by_key.get(key, ()))
        return found


class _FanoutTable:
    def __init__(self, bindings: Iterable[Binding]) -> None:
        self._all = frozenset(map(_destination, bindings))

    def matches(self, message: RoutedMessage) -> Collection[Destination]:
        return self._all


class _TopicNode:
    """The state after some words of a binding key."""

    __slots__ = ("after", "destinations", "repeats")

    def __init__(self, *, repeats: bool = False) -> None:
        self.after: dict[str, _TopicNode] = {}
        self.destinations: set[Destination] = set()
        self.repeats = repeats


class _TopicTable:
    """All binding keys as one automaton, through which a routing key is run word by word.

    ``*`` stands for one word, which may be empty; ``#`` for any number of words, also none. The empty key has no words
    at all, so that ``#`` matches it and ``*`` does not; ``a..b`` has three, the middle one empty.
    """

    def __init__(self, bindings: Iterable[Binding]) -> None:
        self._root = _TopicNode()
        for one in bindings:
            node = self._root
            for word in _split(one.routing_key):
                node = node.after.setdefault(word, _TopicNode(repeats=word == "#"))
            node.destinations.add(_destination(one))

    def matches(self, message: RoutedMessage) -> Collection[Destination]:
        found: set[Destination] = set()
        for words in message.words:
            states: set[_TopicNode] = set()
            _enter(self._root, states, found)
            for word in words:
                following: set[_TopicNode] = set()
                for state in states:
                    if state.repeats:
                        following.add(state)
                        _enter(state.after.get("#"), following, found)
                    _enter(state.after.get(word), following, found)
                    _enter(state.after.get("*"), following, found)
                states = following
                if not states:
                    break
            for state in states:
                found |= state.destinations
        return found


def _enter(node: _TopicNode | None, states: set[_TopicNode], found: set[Destination]) -> None:
    """Add a state, and those that a ``#`` reaches from it without a word."""
    if node is None or node in states:
        return
    if node.repeats and not node.after:
        found |= node.destinations  # whatever follows, a final "#" takes it
        return
    states.add(node)
    _enter(node.after.get("#"), states, found)


def _split(key: str) -> list[str]:
    return key.split(".") if key else []


class _HeadersTable:
    """Rule of RabbitMQ: ``x-match`` is ``all`` unless given; headers ``x-...`` count only for ``...-with-x``."""

    def __init__(self, bindings: Iterable[Binding]) -> None:
        self._rules: list[tuple[Destination, bool, list[tuple[str, _Comparable]]]] = []
        for one in bindings:
            match = str(one.arguments.get("x-match", "all"))
            wanted = [
                (name, _comparable(value))
                for name, value in one.arguments.items()
                if name != "x-match" and (match.endswith("-with-x") or not name.startswith("x-"))
            ]
            self._rules.append((_destination(one), match.startswith("any"), wanted))

    def matches(self, message: RoutedMessage) -> Collection[Destination]:
        values = message.values
        found: set[Destination] = set()
        for destination, any_will_do, wanted in self._rules:
            hits = (name in values and value in (_ANY_VALUE, values[name]) for name, value in wanted)
            if any(hits) if any_will_do else all(hits):
                found.add(destination)
        return found


def _comparable(value: object) -> _Comparable:
    """A header value with its kind in AMQP, since Python takes 1, 1.0 and True for equal and RabbitMQ does not.

    (Below 4.0 RabbitMQ takes 1 and 1.0 for equal.) No value at all, in a binding, asks only for the header to exist.
    """
    if isinstance(value, bytes):
        return str, value.decode("utf-8", "surrogateescape")
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind, value
    return type(value), value


_ANY_VALUE: Final = _comparable(None)


class _HashTable:
    """Rule of RabbitMQ's consistent hash plugin: a binding's key is its weight, the number of buckets that it gets.

    Of several bindings to one destination the first counts. One destination gets the message: only the first key is
    hashed, or the header that the exchange names.
    """

    def __init__(self, exchange: Exchange, bindings: Iterable[Binding]) -> None:
        self._name = exchange.name
        header = exchange.arguments.get("hash-header")
        self._header = None if header is None else str(header)
        weights: dict[Destination, int] = {}
        for one in bindings:
            weights.setdefault(_destination(one), int(one.routing_key))
        self._buckets = [destination for destination, weight in weights.items() for _ in range(weight)]

    def matches(self, message: RoutedMessage) -> Collection[Destination]:
        if not self._buckets:
            return ()
        key: str | None = message.keys[0]
        if self._header is not None:
            value = message.headers.get(self._header)
            if value is not None and not isinstance(value, str):
                raise UnsupportedTargetError(
                    f"exchange {self._name!r} hashes the header {self._header!r}, which is {value!r}, and only text is "
                    "modelled: send it as text"
                )
            key = value
        return (self._buckets[bucket(key, len(self._buckets))],)


class _UnknownTable:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def matches(self, message: RoutedMessage) -> Collection[Destination]:
        raise UnsupportedTargetError(
            f"exchange {self._exchange.name!r} is of type {self._exchange.type!r}, whose routing is not modelled: "
            "use a direct, topic, fanout, headers or consistent hash exchange in the model"
        )
