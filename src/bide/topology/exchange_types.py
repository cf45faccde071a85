"""Matching rules of exchange types.

The bindings of each exchange are indexed once, so that many messages can be matched against thousands of bindings.
:mod:`bide.topology.routing` decides which exchange is next, and where a message without a match goes.
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
    """The parts of a message that routing depends on.

    Attributes:
        keys: the routing key, then the keys of CC and BCC, without duplicates. All exchanges treat them alike.
        headers: the headers without BCC, which receivers do not see.
    """

    __slots__ = ("_values", "_words", "headers", "keys")

    def __init__(self, keys: tuple[str, ...], headers: Mapping[str, Any]) -> None:
        self.keys = keys
        self.headers = headers
        self._words: list[list[str]] | None = None
        self._values: dict[str, _Comparable] | None = None

    @classmethod
    def published(cls, routing_key: str, headers: Mapping[str, Any] | None) -> RoutedMessage:
        """The message that the broker gets from a publisher.

        Raises:
            InvalidInputError: the CC or BCC header is not a list.
        """
        given = dict(headers or {})
        keys = dict.fromkeys((routing_key, *_extra_keys(given, "CC"), *_extra_keys(given, "BCC")))
        given.pop("BCC", None)
        return cls(tuple(keys), given)

    def with_key(self, key: str) -> RoutedMessage:
        """The message with one key that replaces all others."""
        return RoutedMessage((key,), self.headers)

    @property
    def words(self) -> list[list[str]]:
        """The words of each key, as a topic exchange splits them."""
        if self._words is None:
            self._words = [_split(key) for key in self.keys]
        return self._words

    @property
    def values(self) -> dict[str, _Comparable]:
        """The headers in the form that a headers exchange compares."""
        if self._values is None:
            self._values = {name: _comparable(value) for name, value in self.headers.items()}
        return self._values


def _extra_keys(headers: Mapping[str, Any], name: str) -> list[str]:
    keys = headers.get(name, ())
    if not isinstance(keys, (list, tuple)):
        raise InvalidInputError(
            f"header {name} is {keys!r}, but the broker accepts only a list of routing keys: give a list of texts"
        )
    # The broker ignores entries that are not text, too.
    return [key for key in keys if isinstance(key, str)]


class BindingTable(Protocol):
    """The bindings of one exchange, indexed for its type."""

    def matches(self, message: RoutedMessage) -> Collection[Destination]:
        """The destinations of all matching bindings, without duplicates.

        Raises:
            UnsupportedTargetError: this exchange type is not modelled.
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
    """A state of the automaton, after some words of a binding key."""

    __slots__ = ("after", "destinations", "repeats")

    def __init__(self, *, repeats: bool = False) -> None:
        self.after: dict[str, _TopicNode] = {}
        self.destinations: set[Destination] = set()
        self.repeats = repeats


class _TopicTable:
    """All binding keys as one automaton, which reads a routing key word by word.

    ``*`` matches one word, which can be empty; ``#`` matches any number of words, including none. The empty key has no
    words, so ``#`` matches it and ``*`` does not. The key ``a..b`` has three words, of which the second is empty.
    """

    def __init__(self, bindings: Iterable[Binding]) -> None:
        self._root = _TopicNode()
        for one in bindings:
            node = self._root
            for word in _split(one.routing_key):
                following = node.after.get(word)
                if following is None:
                    following = node.after[word] = _TopicNode(repeats=word == "#")
                node = following
            node.destinations.add(_destination(one))

    def matches(self, message: RoutedMessage) -> Collection[Destination]:
        found: set[Destination] = set()
        for words in message.words:
            states: set[_TopicNode] = set()
            _enter(self._root, states, found)
            for word in words:
                following: set[_TopicNode] = set()
                for state in states:
                    after = state.after
                    if state.repeats:
                        following.add(state)
                        if "#" in after:
                            _enter(after["#"], following, found)
                    if word in after:
                        _enter(after[word], following, found)
                    if "*" in after:
                        _enter(after["*"], following, found)
                states = following
                if not states:
                    break
            for state in states:
                found |= state.destinations
        return found


def _enter(node: _TopicNode, states: set[_TopicNode], found: set[Destination]) -> None:
    """Add a state, and the states that a ``#`` reaches from it without reading a word."""
    if node in states:
        return
    if node.repeats and not node.after:
        found |= node.destinations  # a final "#" matches all remaining words
        return
    states.add(node)
    if "#" in node.after:
        _enter(node.after["#"], states, found)


def _split(key: str) -> list[str]:
    return key.split(".") if key else []


class _HeadersTable:
    """RabbitMQ's rule: ``x-match`` is ``all`` by default; headers named ``x-...`` count only with ``...-with-x``."""

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
    """A header value with its AMQP type, because 1, 1.0 and True are equal in Python but not in RabbitMQ.

    (Below 4.0, 1 and 1.0 are equal in RabbitMQ too.) A binding argument without a value only requires the header.
    """
    if isinstance(value, bytes):
        return str, value.decode("utf-8", "surrogateescape")
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind, value
    return type(value), value


_ANY_VALUE: Final = _comparable(None)


class _HashTable:
    """The rule of RabbitMQ's consistent-hash plugin: the key of a binding is its weight, a number of buckets.

    If a destination has several bindings, the first one counts. Each message goes to one destination, chosen by its
    first key or by the header that the exchange names.
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
                    f"exchange {self._name!r} hashes the header {self._header!r}, which is {value!r}, but the model "
                    "supports only text: send the header as text"
                )
            key = value
        return (self._buckets[bucket(key, len(self._buckets))],)


class _UnknownTable:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def matches(self, message: RoutedMessage) -> Collection[Destination]:
        raise UnsupportedTargetError(
            f"exchange {self._exchange.name!r} has the type {self._exchange.type!r}, which the model does not support: "
            "use a direct, topic, fanout, headers or consistent-hash exchange"
        )
