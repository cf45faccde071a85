from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bide.errors import InvalidInputError, UnsupportedTargetError
from bide.topology import Binding, Exchange, Queue, Topology
from bide.topology.routing import Model
from tests.topics import topic_matches

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bide.topology import Argument


def bound(exchange_type: str, *bindings: tuple[str, Mapping[str, Argument]]) -> Model:
    """An exchange ``x`` with one queue for each binding: ``0``, ``1``..."""
    return Model(
        Topology(
            [Exchange("x", exchange_type)],
            [Queue(str(number)) for number in range(len(bindings))],
            [Binding("x", str(number), key, arguments=held) for number, (key, held) in enumerate(bindings)],
        )
    )


def keyed(exchange_type: str, *keys: str) -> Model:
    return bound(exchange_type, *((key, {}) for key in keys))


# --- topic

TOPIC_CASES = [
    # the documentation's tutorial on topics
    ("*.orange.*", "quick.orange.rabbit", True),
    ("*.*.rabbit", "quick.orange.rabbit", True),
    ("lazy.#", "quick.orange.rabbit", False),
    ("*.orange.*", "lazy.orange.elephant", True),
    ("lazy.#", "lazy.orange.elephant", True),
    ("*.orange.*", "quick.orange.fox", True),
    ("*.*.rabbit", "lazy.pink.rabbit", True),
    ("lazy.#", "lazy.pink.rabbit", True),
    ("*.orange.*", "quick.brown.fox", False),
    ("*.orange.*", "orange", False),
    ("*.orange.*", "quick.orange.new.rabbit", False),
    ("lazy.#", "lazy.orange.new.rabbit", True),
    # no words, empty words
    ("", "", True),
    ("", "a", False),
    ("#", "", True),
    ("*", "", False),
    ("#.#", "", True),
    ("*.#", "", False),
    ("#.*", "", False),
    ("*", "a", True),
    ("*.*", ".", True),
    ("*", ".", False),
    ("a.*.b", "a..b", True),
    ("a..b", "a..b", True),
    ("a.b", "a..b", False),
    ("a.#.b", "a..b", True),
    (".", "#.#", False),
    ("a.", "a.", True),
    ("a.*", "a.", True),
    ("a", "a.", False),
    # any number of words
    ("a.#", "a", True),
    ("#.a", "a", True),
    ("a.#.b", "a.b", True),
    ("a.#.b", "a.x.y.z.b", True),
    ("a.#.b", "a.b.a", False),
    ("#.a.#", "x.a.y", True),
    ("#.a.#.a.#", "a", False),
    ("#.a.#.a.#", "x.a.a", True),
    ("#.a.a.b", "a.a.a.b", True),
    ("#.#.#", "a.b.c.d", True),
    ("#.*.#.*", "a", False),
    ("#.*.#.*", "a.b", True),
    ("*.#.*", "a.b.c", True),
    # signs that are no wildcards
    ("a*", "ab", False),
    ("a*", "a*", True),
    ("~#", "~", False),
    ("~#", "~#", True),
    ("##", "a", False),
    ("a", "*", False),
    ("*", "*", True),
    ("a", "#", False),
    ("#", "#.#", True),
    ("*.b", "#.b", True),
    ("A", "a", False),
    ("ä.ö", "ä.ö", True),
]


@pytest.mark.parametrize(("pattern", "key", "expected"), TOPIC_CASES)
def test_topic_patterns_match_whole_words_and_wildcards(pattern: str, key: str, expected: bool) -> None:
    assert topic_matches(pattern, key) is expected


def by_regular_expression(pattern: str, key: str) -> bool:
    """The same rule found another way: each word with a full stop behind it, the pattern as a regular expression."""
    wildcards = {"*": r"[^.]*\.", "#": r"(?:[^.]*\.)*"}
    expression = "".join(wildcards.get(word, re.escape(word + ".")) for word in pattern.split(".") if pattern)
    return re.fullmatch(expression, key + "." if key else "") is not None


patterns = st.lists(st.sampled_from(["*", "#", "a", "b", ""]), max_size=6).map(".".join)
topic_keys = st.lists(st.sampled_from(["a", "b", "c", "", "*", "#"]), max_size=6).map(".".join)


@given(patterns, topic_keys)
@example("#.#", ".")
def test_topic_agrees_with_regular_expressions(pattern: str, key: str) -> None:
    assert topic_matches(pattern, key) is by_regular_expression(pattern, key)


@given(st.lists(patterns, max_size=8), topic_keys, st.lists(topic_keys, max_size=3))
def test_topic_bindings_do_not_influence_each_other(held: list[str], key: str, more: list[str]) -> None:
    expected = {
        str(number)
        for number, pattern in enumerate(held)
        if any(by_regular_expression(pattern, one) for one in (key, *more))
    }

    assert keyed("topic", *held).route("x", key, {"CC": more}).queues == expected


def test_a_topic_pattern_with_many_wildcards_takes_no_exponential_time() -> None:
    model = keyed("topic", ".".join(["#", "a"] * 15))

    assert not model.route("x", ".".join(["a"] * 60 + ["b"])).queues


# --- direct, fanout, headers


def test_direct_compares_whole_keys() -> None:
    model = keyed("direct", "a", "a.b", "*", "#", "")

    assert model.route("x", "a").queues == {"0"}
    assert model.route("x", "a.b").queues == {"1"}
    assert model.route("x", "").queues == {"4"}
    assert not model.route("x", "A").queues


def test_fanout_ignores_keys() -> None:
    assert keyed("fanout", "a", "b").route("x", "c").queues == {"0", "1"}


@pytest.mark.parametrize(
    ("wanted", "headers", "expected"),
    [
        ({}, {}, True),
        ({}, {"a": 1}, True),
        ({"x-match": "any"}, {"a": 1}, False),
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({"x-match": "all", "a": 1, "b": 2}, {"a": 1, "b": 2}, True),
        ({"x-match": "any", "a": 1, "b": 2}, {"b": 2}, True),
        ({"x-match": "any", "a": 1, "b": 2}, {"a": 2, "b": 1}, False),
        # headers that start with x-
        ({"x-a": 1}, {}, True),
        ({"x-match": "any", "x-a": 1}, {"x-a": 1}, False),
        ({"x-match": "all-with-x", "x-a": 1}, {}, False),
        ({"x-match": "all-with-x", "x-a": 1}, {"x-a": 1}, True),
        ({"x-match": "any-with-x", "x-a": 1, "b": 1}, {"x-a": 1}, True),
        ({"x-match": "any-with-x", "x-a": 1}, {"x-match": "any-with-x"}, False),
        # kinds of values
        ({"a": 1}, {"a": True}, False),
        ({"a": True}, {"a": True}, True),
        ({"a": True}, {"a": 1}, False),
        ({"a": 1}, {"a": "1"}, False),
        ({"a": 1}, {"a": 1.0}, False),
        ({"a": 1.5}, {"a": 1.5}, True),
        ({"a": "é"}, {"a": "é".encode()}, True),
        ({"a": 1}, {"a": [1]}, False),
        ({"a": 1}, {"a": None}, False),
        # a condition without a value asks for presence
        ({"a": None}, {"a": {"deep": 1}}, True),
        ({"a": None}, {"b": 1}, False),
        # names are compared with their case
        ({"a": 1}, {"A": 1}, False),
    ],
)
def test_headers_exchanges_match_all_or_any_of_the_headers(
    wanted: dict[str, Any], headers: dict[str, Any], expected: bool
) -> None:
    assert bool(bound("headers", ("ignored", wanted)).route("x", "key", headers).queues) is expected


def test_bcc_is_not_a_header_for_a_headers_exchange() -> None:
    absent: Any = None
    model = bound("headers", ("", {"BCC": absent}), ("", {"CC": absent}))

    assert model.route("x", "", {"BCC": ["k"], "CC": ["k"]}).queues == {"1"}


@pytest.mark.parametrize("exchange_type", ["x-random", "x-delayed-message"])
def test_other_types_are_refused_by_name(exchange_type: str) -> None:
    model = keyed(exchange_type, "1")

    with pytest.raises(UnsupportedTargetError, match=f"'x' has the type '{exchange_type}'.*use a direct"):
        model.route("x", "k")


# --- CC and BCC


@pytest.mark.parametrize("name", ["CC", "BCC"])
@pytest.mark.parametrize("value", ["text", 1, {"a": 1}])
def test_extra_keys_must_be_a_list(name: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=f"header {name} is .*give a list"):
        keyed("direct", "a").route("x", "a", {name: value})


def test_extra_keys_that_are_not_text_are_ignored() -> None:
    assert keyed("direct", "a", "1").route("x", "a", {"CC": [1, None, b"1"]}).queues == {"0"}


def test_routing_does_not_change_the_headers_of_the_caller() -> None:
    headers = {"BCC": ["b"], "kept": 1}
    keyed("direct", "a").travel("x", "a", headers)

    assert headers == {"BCC": ["b"], "kept": 1}
