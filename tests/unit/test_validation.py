from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import InvalidTopologyError
from bide.topology import Binding, Exchange, Queue, Topology
from bide.topology.queue_arguments import RULES
from bide.topology.validation import EXCHANGE_TYPES, MATCH_MODES, problems, validate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bide.topology import Argument
    from bide.topology.queue_arguments import Release


def of_exchange(exchange: Exchange, release: Release | None = None) -> list[str]:
    return problems(Topology([exchange]), release=release)


def of_binding(exchange: Exchange, key: str = "", arguments: Mapping[str, Argument] | None = None) -> list[str]:
    return problems(Topology([exchange], [Queue("q")], [Binding(exchange.name, "q", key, arguments=arguments or {})]))


def test_a_valid_topology_has_no_problems() -> None:
    topology = Topology(
        [Exchange("x", "topic", arguments={"alternate-exchange": "rest"}), Exchange("rest", "fanout")],
        [
            Queue.quorum(
                "wait",
                {
                    "x-message-ttl": 267_840_000_000,
                    "x-dead-letter-exchange": "x",
                    "x-dead-letter-strategy": "at-least-once",
                    "x-overflow": "reject-publish",
                    "x-queue-leader-locator": "balanced",
                },
            ),
            Queue("rest"),
            Queue("", exclusive=True, durable=False),
        ],
        [
            Binding("x", "wait", "*.1.#"),
            Binding("rest", "rest"),
            Binding("x", "rest", "0.#", "exchange"),
            Binding("amq.topic", "rest", "#"),
        ],
    )

    assert problems(topology) == []
    assert problems(topology, release=(3, 10, 8)) == []
    assert problems(topology, release=(4, 3, 6)) == []
    validate(topology)


def test_all_problems_are_raised_together() -> None:
    with pytest.raises(InvalidTopologyError) as caught:
        validate(Topology(queues=[Queue("amq.q", arguments={"x-message-ttl": -1, "x-max-age": "1D"})]))

    assert len(caught.value.problems) == 3
    assert str(caught.value) == "; ".join(caught.value.problems)


# --- references


def test_bindings_of_missing_exchanges_and_queues_are_problems() -> None:
    topology = Topology(
        [Exchange("x")],
        [Queue("q")],
        [Binding("gone", "q", "k"), Binding("x", "away", "k"), Binding("x", "lost", "k", "exchange")],
    )

    way_out = "does not exist: add it to the topology, or name it as external"
    assert problems(topology) == [
        f"the binding from exchange 'gone' to queue 'q' with key 'k': exchange 'gone' {way_out}",
        f"the binding from exchange 'x' to queue 'away' with key 'k': queue 'away' {way_out}",
        f"the binding from exchange 'x' to exchange 'lost' with key 'k': exchange 'lost' {way_out}",
    ]
    assert problems(topology, external=["gone", "away", "lost"]) == []


def test_a_queue_is_not_accepted_as_an_exchange() -> None:
    assert problems(Topology(queues=[Queue("q"), Queue("p")], bindings=[Binding("q", "p")])) != []
    assert problems(Topology([Exchange("x"), Exchange("y")], bindings=[Binding("x", "y")])) != []


def test_missing_dead_letter_and_alternate_exchanges_are_problems() -> None:
    topology = Topology(
        [Exchange("x", arguments={"alternate-exchange": "gone"})],
        [Queue("q", arguments={"x-dead-letter-exchange": "away"})],
    )

    assert problems(topology) == [
        "exchange 'x': alternate-exchange 'gone' does not exist: add it to the topology, or name it as external",
        "queue 'q': x-dead-letter-exchange 'away' does not exist: add it to the topology, or name it as external",
    ]
    assert problems(topology, external={"gone", "away"}) == []


@pytest.mark.parametrize(("key", "sound"), [("q", True), ("elsewhere", True), ("gone", False)])
def test_dead_lettering_to_a_missing_queue_is_a_problem(key: str, sound: bool) -> None:
    topology = Topology(queues=[Queue("q", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": key})])
    found = problems(topology, external=["elsewhere"])

    assert found == ([] if sound else [found[0]])
    assert sound or "to queue 'gone', which does not exist" in found[0]


def test_the_default_exchange_cannot_be_bound_or_declared() -> None:
    topology = Topology(
        [Exchange(""), Exchange("x")],
        [Queue("q")],
        [Binding("", "q", "q"), Binding("x", "", "k", "exchange"), Binding("", "x", "k", "exchange")],
    )

    found = problems(topology)

    assert len(found) == 4
    assert all("default exchange" in one for one in found)


@pytest.mark.parametrize(
    ("value", "words"),
    [("", "the default exchange routes nothing"), ("x", "is the exchange itself"), (5, "must be a text")],
)
def test_invalid_alternates_are_refused(value: Argument, words: str) -> None:
    (found,) = of_exchange(Exchange("x", arguments={"alternate-exchange": value}))

    assert words in found


# --- names


@pytest.mark.parametrize(("length", "sound"), [(255, True), (256, False)])
@pytest.mark.parametrize("character", ["a", "é"])
def test_names_and_keys_are_limited_in_bytes(length: int, sound: bool, character: str) -> None:
    text = character * (length // len(character.encode())) + "a" * (length % len(character.encode()))
    assert len(text.encode()) == length

    for topology in (
        Topology([Exchange(text)]),
        Topology(queues=[Queue(text)]),
        Topology([Exchange("x")], [Queue("q")], [Binding("x", "q", text)]),
        Topology([Exchange("x", "topic")], [Queue("q")], [Binding("x", "q", text)]),
    ):
        found = problems(topology)
        assert (found == []) is sound
        assert sound or "takes 256 bytes, the limit is 255: use a shorter one" in found[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("amq.mine", "reserved for the broker"),
        ("two\nlines", "line break"),
        ("two\rlines", "line break"),
        ("\ud800", "UTF-8 cannot encode"),
    ],
)
def test_names_that_the_broker_refuses_or_changes_are_problems(name: str, words: str) -> None:
    (of_the_queue,) = problems(Topology(queues=[Queue(name)]))
    (of_the_exchange,) = problems(Topology([Exchange(name)]))

    assert words in of_the_queue
    assert words in of_the_exchange


def test_predeclared_exchanges_can_be_listed_with_their_type() -> None:
    assert of_exchange(Exchange("amq.topic", "topic")) == []
    (found,) = of_exchange(Exchange("amq.topic", "direct"))
    assert "declares it as topic" in found


# --- exchanges


@pytest.mark.parametrize("exchange_type", ["direct", "topic", "fanout", "headers", "x-random", "x-jms-topic"])
def test_known_exchange_types_are_accepted(exchange_type: str) -> None:
    assert of_exchange(Exchange("x", exchange_type)) == []


@pytest.mark.parametrize("exchange_type", ["", "Topic", "x-unknown"])
def test_unknown_exchange_types_are_refused(exchange_type: str) -> None:
    (found,) = of_exchange(Exchange("x", exchange_type))

    assert f"the type {exchange_type!r} is unknown: use one of direct, fanout, headers, topic, x-" in found


def test_local_random_exchanges_need_release_4() -> None:
    exchange = Exchange("x", "x-local-random")

    assert of_exchange(exchange) == []
    assert of_exchange(exchange, (4, 0, 5)) == []
    assert "needs RabbitMQ 4.0" in of_exchange(exchange, (3, 13))[0]


@pytest.mark.parametrize(
    ("exchange_type", "arguments", "words"),
    [
        ("direct", {"hash-header": "a"}, "hash-header is for exchanges of type x-consistent-hash"),
        ("topic", {"x-delayed-type": "direct"}, "x-delayed-type is for exchanges of type x-delayed-message"),
        ("fanout", {"x-message-ttl": 5}, "x-message-ttl is for queues, and exchanges ignore it"),
        ("x-consistent-hash", {"hash-header": "a", "hash-property": "message_id"}, "exclude each other"),
        ("x-consistent-hash", {"hash-property": "priority"}, "hash-property is 'priority', but must be one of"),
        ("x-delayed-message", {}, "x-delayed-type is None, but must be another exchange type"),
        ("x-delayed-message", {"x-delayed-type": "x-delayed-message"}, "must be another exchange type"),
        ("x-recent-history", {"x-recent-history-length": 0}, "must be a whole number of 1 or more"),
        ("x-recent-history", {"x-recent-history-length": True}, "must be a whole number of 1 or more"),
    ],
)
def test_invalid_exchange_arguments_are_refused(exchange_type: str, arguments: dict[str, Argument], words: str) -> None:
    (found,) = of_exchange(Exchange("x", exchange_type, arguments=arguments))

    assert words in found


@pytest.mark.parametrize(
    ("exchange_type", "arguments"),
    [
        ("x-consistent-hash", {"hash-header": "a"}),
        ("x-consistent-hash", {"hash-property": "timestamp"}),
        ("x-delayed-message", {"x-delayed-type": "topic"}),
        ("x-recent-history", {"x-recent-history-length": 5}),
        ("direct", {"x-unknown": 1}),
    ],
)
def test_valid_exchange_arguments_are_accepted(exchange_type: str, arguments: dict[str, Argument]) -> None:
    assert of_exchange(Exchange("x", exchange_type, arguments=arguments)) == []


# --- bindings


@pytest.mark.parametrize("match", MATCH_MODES)
def test_valid_headers_bindings_are_accepted(match: str) -> None:
    assert of_binding(Exchange("x", "headers"), "", {"x-match": match, "a": 1}) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x-match": "some", "a": 1}, "x-match is 'some', but must be one of all, any, all-with-x, any-with-x"),
        ({"x-match": True, "a": 1}, "x-match is True"),
        ({"x-match": "any"}, "it never matches: add headers"),
        ({"x-match": "all", "x-a": 1}, "header x-a is ignored unless x-match is 'all-with-x'"),
        ({"x-a": 1}, "header x-a is ignored unless x-match is 'all-with-x'"),
        ({"x-match": "any", "a": 1, "x-a": 1}, "header x-a is ignored unless x-match is 'any-with-x'"),
    ],
)
def test_invalid_headers_bindings_are_refused(arguments: dict[str, Argument], words: str) -> None:
    (found,) = of_binding(Exchange("x", "headers"), "", arguments)

    assert words in found


@pytest.mark.parametrize("exchange_type", sorted(EXCHANGE_TYPES - {"headers"}))
def test_x_match_is_for_headers_exchanges(exchange_type: str) -> None:
    (found,) = of_binding(Exchange("x", exchange_type), "", {"x-match": "all"})

    assert f"a {exchange_type} exchange ignores it" in found


@pytest.mark.parametrize(("key", "sound"), [("#.a.#", True), ("#.a.#.b.#", False), ("#.##.a#.#", True)])
def test_a_topic_key_with_three_hash_wildcards_is_a_problem_from_4_3_on(key: str, sound: bool) -> None:
    topology = Topology([Exchange("x", "topic")], [Queue("q")], [Binding("x", "q", key)])

    assert (problems(topology) == []) is sound
    assert (problems(topology, release=(4, 3, 5)) == []) is sound
    assert problems(topology, release=(4, 2)) == []


@pytest.mark.parametrize(("key", "sound"), [("1", True), ("10000", True), ("0", False), ("10001", False), ("a", False)])
def test_the_key_of_a_consistent_hash_binding_is_its_weight(key: str, sound: bool) -> None:
    found = of_binding(Exchange("x", "x-consistent-hash"), key)

    assert (found == []) is sound
    assert sound or "its key is its weight" in found[0]


def test_local_random_exchanges_accept_only_classic_queues_without_key() -> None:
    exchange = Exchange("x", "x-local-random")
    topology = Topology(
        [exchange, Exchange("y")],
        [Queue("classic"), Queue.quorum("quorum")],
        [
            Binding("x", "classic"),
            Binding("x", "classic", "key"),
            Binding("x", "quorum"),
            Binding("x", "y", "", "exchange"),
        ],
    )

    first, second, third = problems(topology)

    assert "accepts only empty keys" in first
    assert "accepts only classic queues" in second
    assert "accepts only classic queues" in third


# --- queues


def test_a_queue_neither_durable_nor_exclusive_is_a_problem_from_4_3_on() -> None:
    topology = Topology(queues=[Queue("q", durable=False)])

    assert problems(topology) == []
    assert problems(topology, release=(4, 2)) == []
    assert "neither durable nor exclusive: make it durable" in problems(topology, release=(4, 3))[0]
    assert problems(Topology(queues=[Queue("q", durable=False, exclusive=True)]), release=(4, 3)) == []


@pytest.mark.parametrize("queue_type", ["quorum", "stream"])
@pytest.mark.parametrize(
    ("properties", "word"),
    [({"exclusive": True}, "exclusive"), ({"auto_delete": True}, "auto-delete"), ({"durable": False}, "not durable")],
)
def test_quorum_queues_and_streams_are_durable_and_shared(
    queue_type: str, properties: dict[str, Any], word: str
) -> None:
    arguments = {"x-queue-type": queue_type}

    (found,) = problems(Topology(queues=[Queue("q", arguments=arguments, **properties)]))

    assert f"a {queue_type} queue cannot be {word}: change that, or make it a classic queue" in found
    assert problems(Topology(queues=[Queue("q", **properties)])) == []


@pytest.mark.parametrize("queue_type", ["quorum", "stream"])
def test_the_broker_names_classic_queues_only(queue_type: str) -> None:
    (found,) = problems(Topology(queues=[Queue("", arguments={"x-queue-type": queue_type})]))

    assert f"this is a {queue_type} queue: give it a name" in found


def test_numbers_and_texts_that_amqp_cannot_carry_are_problems() -> None:
    topology = Topology(
        [Exchange("x", "headers", arguments={"large": 2**63})],
        [Queue("q", arguments={"small": -(2**63) - 1, "broken": "\ud800", "n" * 256: 1})],
        [Binding("x", "q", arguments={"large": 2**64})],
    )

    found = problems(topology)

    assert [one.partition(":")[0] for one in found] == [
        "exchange 'x'",
        "queue 'q'",
        "queue 'q'",
        "queue 'q'",
        "the binding from exchange 'x' to queue 'q' with key ''",
    ]


anything = st.one_of(
    st.text(max_size=5), st.integers(), st.booleans(), st.floats(), st.sampled_from(["quorum", "stream"])
)


@given(
    st.dictionaries(st.sampled_from([*RULES, "alternate-exchange", "x-match", "a"]), anything),
    st.text(max_size=3),
    st.booleans(),
)
def test_any_topology_gives_problems_that_name_the_way_out(held: dict[str, Argument], name: str, flag: bool) -> None:
    topology = Topology(
        [Exchange(name, name, arguments=held)],
        [Queue(name, durable=flag, exclusive=flag, auto_delete=flag, arguments=held)],
        [Binding(name, name, name, "exchange" if flag else "queue", held)],
    )

    for release in (None, (3, 10), (4, 3, 6)):
        for one in problems(topology, release=release):
            assert one.startswith((f"exchange {name!r}: ", f"queue {name!r}: ", f"the binding from exchange {name!r} "))
            assert ": " in one.partition(": ")[2], "each problem names the way out"
