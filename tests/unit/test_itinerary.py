from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import AccessRefusedError, InvalidTopologyError, TargetNotFoundError
from bide.patterns.catalogue import find_pattern
from bide.patterns.primitives import waiting_queue
from bide.topology import Binding, DestinationType, Exchange, Queue, Topology
from bide.topology.itinerary import Itinerary, plan
from bide.topology.routing import Model


def reasons(itinerary: Itinerary) -> dict[str, str]:
    """Place -> why, or why not."""
    return {one.name: one.reason for visit in itinerary.exchanges for one in visit.decisions}


def test_a_message_is_followed_through_two_layers_with_reasons() -> None:
    pet = {"entity.type": "pet", "change.type": "sold"}
    way = plan(find_pattern("2").sample_topology(), "travel", "extras.pet", pet)
    assert [visit.name for visit in way.exchanges] == ["travel", "changes"]
    assert way.queues == ()
    assert reasons(way) == {
        "bookings": "its pattern 'booking.#' does not match: 'extras.pet' lacks the word 'booking'",
        "changes": "its pattern '#' matches the key 'extras.pet'",
        "pets": "it requires all of change.type='new', entity.type='pet', but change.type is 'sold'",
    }


def test_alternates_say_whether_they_are_asked() -> None:
    topology = find_pattern("11").sample_topology()
    first = plan(topology, "clients", "acme")
    assert first.queues == ("acme",)
    assert reasons(first)["clients.else1"] == "alternate exchange: not used, because a binding matches"
    last = plan(topology, "clients", "hooli")
    assert last.queues == ("everybody-else",)
    assert reasons(last)["clients.else1"] == "alternate exchange: used, because no binding matches"
    assert reasons(last)["acme"] == "its binding key is 'acme', which is not the key 'hooli'"


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("a.*", "a.b.c", "'a.b.c' has 3 words, but the pattern has 2"),
        ("a.*", "a", "'a' has 1 word, but the pattern has 2"),
        ("a.b.*", "a.x.c", "'a.x.c' has 'x' as word 2, but the pattern has 'b'"),
        ("#.b", "a.c", "'a.c' lacks the word 'b'"),
        ("*.*.#", "a", "'a' has 1 word, but the pattern needs at least 2"),
        ("#.a.b", "b.a", "'b.a' has its words at other positions"),
        ("*", "", "'' has 0 words, but the pattern has 1"),
        ("", "a", "'a' has 1 word, but the pattern has 0"),
    ],
)
def test_a_mismatch_of_a_pattern_is_explained(pattern: str, key: str, expected: str) -> None:
    topology = Topology([Exchange("x", "topic")], [Queue("q")], [Binding("x", "q", pattern)])
    way = plan(topology, "x", key)
    assert way.queues == ()
    assert reasons(way)["q"] == f"its pattern {pattern!r} does not match: {expected}"


@pytest.mark.parametrize(
    ("arguments", "headers", "expected"),
    [
        ({"a": 1}, {}, "it requires all of a=1, but there is no header a"),
        ({"a": 1}, {"a": "1"}, "it requires all of a=1, but a is '1', text rather than a whole number"),
        ({"a": 1, "b": 2}, {"a": 2}, "it requires all of a=1, b=2, but a is 2 and there is no header b"),
        ({"a": True, "x-match": "any"}, {"a": 1.5}, "but a is 1.5, a number with decimals rather than a boolean"),
        ({"x-match": "any"}, {"a": 1}, "it requires no header, so x-match any never matches"),
    ],
)
def test_a_mismatch_of_headers_is_explained(arguments: dict[str, Any], headers: dict[str, Any], expected: str) -> None:
    topology = Topology([Exchange("x", "headers")], [Queue("q")], [Binding("x", "q", arguments=arguments)])
    way = plan(topology, "x", headers=headers)
    assert way.queues == ()
    assert expected in reasons(way)["q"]


def test_cc_and_bcc_keys_are_followed() -> None:
    topology = find_pattern("carbon-copies").sample_topology()
    way = plan(topology, "desk", "front", {"CC": ["back"], "BCC": ["cellar"]})
    assert way.queues == ("back", "front")
    assert reasons(way)["back"] == "its binding key is 'back', which is a CC or BCC key"
    unmatched = plan(topology, "desk", "a", {"CC": ["b"]})
    assert (
        reasons(unmatched)["front"]
        == "its binding key is 'front', which is not the key 'a' and the CC and BCC keys 'b'"
    )


def test_queues_chosen_by_the_broker_are_possible_queues() -> None:
    topology = find_pattern("7").sample_topology()
    way = plan(topology, "clicks", "k")
    assert way.queues == ()
    assert way.possible == ("clicks.1", "clicks.2", "clicks.3")
    assert reasons(way)["clicks.2"] == "one of these, which the broker chooses by the hash of the header 'user-id'"
    behind = Topology(
        [Exchange("in", "x-random"), Exchange("a", "fanout"), Exchange("b", "direct")],
        [Queue("p"), Queue("q")],
        [Binding("in", "a", destination_type="exchange"), Binding("in", "b", destination_type="exchange"),
         Binding("a", "p"), Binding("b", "q", "other")],
    )  # fmt: skip
    way = plan(behind, "in", "k")
    assert (way.queues, way.possible) == ((), ("p",))
    assert [(visit.name, visit.certain) for visit in way.exchanges] == [("in", True), ("a", False), ("b", False)]


def test_a_queue_reached_by_two_possible_paths_is_listed_once() -> None:
    names = ("in", "a", "b", "c")
    topology = Topology(
        [Exchange(name, "x-random" if name == "in" else "fanout") for name in names],
        [Queue("q")],
        [
            *(
                Binding(source, destination, destination_type="exchange")
                for source, destination in (("in", "a"), ("in", "b"), ("a", "c"), ("b", "c"))
            ),
            Binding("c", "q"),
        ],
    )
    way = plan(topology, "in")
    assert sorted(visit.name for visit in way.exchanges) == sorted(names)
    assert way.possible == ("q",)


def test_the_plugin_routes_by_its_inner_type() -> None:
    way = plan(find_pattern("15").sample_topology(), "reminders", "user.7")
    assert way.queues == ("mail",)
    assert reasons(way)["mail"].startswith("after the delay in x-delay: ")


def test_dead_lettering_after_the_wait_is_explained() -> None:
    topology = find_pattern("17").sample_topology() | Topology(
        [Exchange("bookings", "fanout")], [Queue("crm")], [Binding("bookings", "crm")]
    )
    way = plan(topology, "publisher3", "new")
    assert way.queues == ("publisher3.delay",)
    assert way.later == ("after 0:05:00 in 'publisher3.delay': in the queue 'crm', with the key 'new'",)
    alone = plan(find_pattern("17").sample_topology(), "publisher3", "new")
    (expected,) = alone.later
    assert expected == (
        "after 0:05:00 in 'publisher3.delay': its exchange 'bookings' is not in the topology, and the queue "
        "'publisher3.delay' keeps it"
    )
    unbound = plan(replace(topology, bindings=topology.bindings[:1]), "publisher3", "new")
    assert unbound.later[0].split(": ")[1].startswith("no binding of its exchange 'bookings' matches, and the queue")
    for queue_type, fate in (("quorum", "the queue 'wait' keeps it"), ("classic", "it is lost")):
        waiting = waiting_queue("wait", to="next", ttl="1s", queue_type=queue_type)
        (expected,) = plan(replace(waiting, queues=waiting.queues[:1]), "", "wait").later
        assert expected == f"after 0:00:01 in 'wait': its queue 'next' is not in the topology, and {fate}"


def test_the_default_exchange_routes_by_queue_name() -> None:
    topology = find_pattern("5").sample_topology()
    assert plan(topology, "", "charge-card").queues == ("charge-card",)
    wrong = plan(topology, "", "charge-cart")
    assert wrong.queues == ()
    assert reasons(wrong) == {"charge-cart": "no queue has the name 'charge-cart', which is the key"}


def test_missing_or_internal_exchanges_and_invalid_topologies_are_refused() -> None:
    topology = Topology([Exchange("in", "direct", internal=True)])
    with pytest.raises(TargetNotFoundError, match="'nowhere' is not in the topology"):
        plan(topology, "nowhere")
    with pytest.raises(AccessRefusedError, match="internal"):
        plan(topology, "in")
    with pytest.raises(InvalidTopologyError):
        plan(Topology(bindings=[Binding("a", "b")]), "a")


def test_a_plan_can_be_written_as_json() -> None:
    written = json.loads(json.dumps(plan(find_pattern("11").sample_topology(), "clients", "hooli").to_dict()))
    assert written["queues"] == ["everybody-else"]
    assert all(one.keys() == {"name", "type", "certain", "decisions"} for one in written["exchanges"])
    routed = {one["name"] for exchange in written["exchanges"] for one in exchange["decisions"] if one["routed"]}
    assert "everybody-else" in routed


# -- against the model of the routing

NAMES = ("a", "b", "c", "d")
KEYS = st.sampled_from(["", "k", "k.l", "#", "*", "*.l", "k.#", "l.k"])
HEADERS = st.dictionaries(st.sampled_from(["h", "i", "x-j"]), st.sampled_from([1, "1", True, 1.0]), max_size=2)
KINDS: list[DestinationType] = ["queue", "exchange"]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    exchanges = [
        Exchange(
            name,
            draw(st.sampled_from(["direct", "topic", "fanout", "headers"])),
            arguments=draw(st.sampled_from([{}, *({"alternate-exchange": one} for one in ("", "a", "d"))])),
        )
        for name in NAMES
    ]
    bindings = draw(
        st.lists(
            st.builds(
                Binding,
                st.sampled_from(NAMES),
                st.sampled_from(NAMES),
                KEYS,
                st.sampled_from(KINDS),
                st.builds(
                    lambda headers, match: {**headers, **match},
                    HEADERS,
                    st.sampled_from([{}, {"x-match": "any"}, {"x-match": "all-with-x"}]),
                ),
            ),
            max_size=10,
        )
    )
    return Topology(exchanges, [Queue(name) for name in NAMES], bindings)


@given(topologies(), KEYS, HEADERS, st.lists(KEYS, max_size=2))
def test_a_plan_reaches_the_queues_of_the_routing_model(
    topology: Topology, key: str, headers: dict[str, Any], copies: list[str]
) -> None:
    sent = {**headers, "CC": copies}
    way = plan(topology, "a", key, sent)
    assert set(way.queues) == Model(topology).route("a", key, sent).queues
    assert not way.possible
    assert all(one.reason for visit in way.exchanges for one in visit.decisions)
