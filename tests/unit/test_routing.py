from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import AccessRefusedError, InvalidTopologyError, TargetNotFoundError
from bide.topology import Binding, DestinationType, Exchange, Queue, Topology
from bide.topology.routing import Arrival, Model, Routed, route, travel
from tests.topics import topic_matches

if TYPE_CHECKING:
    from bide.topology import Argument


def waiting(name: str, milliseconds: int, to: str, **more: Argument) -> Queue:
    """A queue that keeps messages for a time and dead-letters them at least once."""
    return Queue.quorum(
        name,
        {
            "x-message-ttl": milliseconds,
            "x-dead-letter-exchange": to,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
            **{f"x-{argument.replace('_', '-')}": value for argument, value in more.items()},
        },
    )


# --- CC and BCC


def test_cc_and_bcc_keys_match_at_every_exchange() -> None:
    topology = Topology(
        [Exchange("first"), Exchange("second", "topic")],
        [Queue("a"), Queue("b"), Queue("c")],
        [
            Binding("first", "second", "cc", "exchange"),
            Binding("first", "a", "key"),
            Binding("second", "b", "*.hidden"),
            Binding("second", "c", "cc"),
        ],
    )

    assert route(topology, "first", "key", {"CC": ["cc"], "BCC": ["bcc.hidden"]}).queues == {"a", "b", "c"}


def test_a_queue_gets_a_message_once_for_all_its_keys_and_bindings() -> None:
    model = Model(Topology([Exchange("x")], [Queue("q")], [Binding("x", "q", "a"), Binding("x", "q", "b")]))

    assert [one.queue for one in model.travel("x", "a", {"CC": ["b", "a"]})] == ["q"]


def test_the_default_exchange_routes_every_key_to_the_queue_of_that_name() -> None:
    model = Model(Topology(queues=[Queue("a"), Queue("b"), Queue("c")]))

    assert model.route("", "a", {"CC": ["b", "nowhere"]}).queues == {"a", "b"}
    assert model.route("", "nowhere") == Routed(queues=frozenset(), unmatched=("",))


# --- exchanges bound to exchanges, alternate exchanges


def test_a_cycle_of_exchanges_is_visited_once() -> None:
    topology = Topology(
        [Exchange("a", "fanout"), Exchange("b", "fanout"), Exchange("c", "fanout")],
        [Queue("q")],
        [
            Binding("a", "b", "", "exchange"),
            Binding("b", "c", "", "exchange"),
            Binding("c", "a", "", "exchange"),
            Binding("c", "q"),
        ],
    )

    assert route(topology, "a").queues == {"q"}
    assert not route(Topology(topology.exchanges, bindings=topology.bindings[:3]), "a").queues


def with_alternates(*pairs: tuple[str, str | None]) -> list[Exchange]:
    return [Exchange(name, arguments={} if other is None else {"alternate-exchange": other}) for name, other in pairs]


def test_the_alternate_exchange_is_used_only_without_a_match() -> None:
    topology = Topology(
        with_alternates(("x", "other"), ("other", None)),
        [Queue("q"), Queue("lost")],
        [Binding("x", "q", "known"), Binding("other", "lost", "known"), Binding("other", "lost", "unknown")],
    )

    assert route(topology, "x", "known") == Routed(queues=frozenset({"q"}), unmatched=())
    assert route(topology, "x", "unknown") == Routed(queues=frozenset({"lost"}), unmatched=())
    assert route(topology, "x", "strange") == Routed(queues=frozenset(), unmatched=("other",))


def test_alternate_exchanges_can_be_chained() -> None:
    topology = Topology(with_alternates(("a", "b"), ("b", "c"), ("c", None)), [Queue("q")], [Binding("c", "q", "k")])

    assert route(topology, "a", "k").queues == {"q"}


def test_a_match_without_a_queue_is_still_a_match() -> None:
    topology = Topology(
        [*with_alternates(("x", "other"), ("empty", None)), Exchange("other", "fanout")],
        [Queue("q")],
        [Binding("x", "empty", "k", "exchange"), Binding("other", "q")],
    )

    assert route(topology, "x", "k") == Routed(queues=frozenset(), unmatched=("empty",))


def test_each_exchange_uses_its_own_alternate() -> None:
    """Half of a message's way may fail: the alternate of the half gets it, and the other half is not disturbed."""
    topology = Topology(
        [*with_alternates(("deaf", "other")), Exchange("x", "fanout"), Exchange("other", "fanout")],
        [Queue("q"), Queue("rest")],
        [Binding("x", "q"), Binding("x", "deaf", "", "exchange"), Binding("other", "rest")],
    )

    assert route(topology, "x").queues == {"q", "rest"}


@pytest.mark.parametrize("alternate", ["missing", "", "x"])
def test_invalid_alternates_route_nothing(alternate: str) -> None:
    topology = Topology(with_alternates(("x", alternate)), [Queue("q")])

    assert not route(topology, "x", "q").queues


def test_a_cycle_of_alternates_is_visited_once() -> None:
    assert not route(Topology(with_alternates(("a", "b"), ("b", "a"))), "a").queues


def test_predeclared_exchanges_exist() -> None:
    topology = Topology(
        queues=[Queue("q")],
        bindings=[Binding("amq.topic", "q", "a.#"), Binding("amq.match", "q", arguments={"a": 1})],
    )

    assert route(topology, "amq.topic", "a.b").queues == {"q"}
    assert route(topology, "amq.match", "", {"a": 1}).queues == {"q"}
    assert not route(topology, "amq.fanout").queues


# --- what cannot be routed at all


def test_an_unknown_exchange_is_named() -> None:
    for send in (route, travel):
        with pytest.raises(TargetNotFoundError, match="exchange 'nowhere' is not in the topology"):
            send(Topology(), "nowhere", "key")


def test_an_internal_exchange_takes_messages_from_exchanges_only() -> None:
    topology = Topology(
        [Exchange("inner", "fanout", internal=True), Exchange("outer", "fanout")],
        [Queue("q")],
        [Binding("outer", "inner", "", "exchange"), Binding("inner", "q")],
    )

    assert route(topology, "outer").queues == {"q"}
    with pytest.raises(AccessRefusedError, match="'inner' is internal"):
        route(topology, "inner")


@pytest.mark.parametrize(
    ("binding", "missing"),
    [(Binding("gone", "q", "k"), "gone"), (Binding("x", "gone", "k", "exchange"), "gone")],
)
def test_bindings_of_missing_exchanges_are_refused(binding: Binding, missing: str) -> None:
    with pytest.raises(InvalidTopologyError, match=f"exchange '{missing}' is not in the topology"):
        Model(Topology([Exchange("x")], [Queue("q")], [binding]))


def test_a_bound_queue_counts_as_existing() -> None:
    model = Model(Topology([Exchange("x")], bindings=[Binding("x", "elsewhere", "k")]))

    assert model.route("x", "k").queues == {"elsewhere"}
    assert model.route("", "elsewhere").queues == {"elsewhere"}


# --- travelling


def test_a_message_without_waits_arrives_at_once() -> None:
    topology = Topology([Exchange("x")], [Queue("q")], [Binding("x", "q", "k")])

    assert travel(topology, "x", "k", {"a": 1, "BCC": ["z"]}) == [
        Arrival(queue="q", at=timedelta(0), routing_key="k", headers={"a": 1}, exchange="x")
    ]


def test_waits_add_up_and_keys_are_kept() -> None:
    topology = Topology(
        [Exchange("in"), Exchange("half"), Exchange("out", "topic")],
        [waiting("first", 1_500, "half"), waiting("second", 250, "out"), Queue("target")],
        [
            Binding("in", "first", "~1"),
            Binding("half", "second", "~2"),
            Binding("out", "target", "order.*"),
        ],
    )

    assert travel(topology, "in", "order.created", {"CC": ["~1"], "BCC": ["~2"]}) == [
        Arrival(
            queue="target",
            at=timedelta(seconds=1.75),
            routing_key="order.created",
            headers={"CC": ["~1"]},
            hops=("first", "second"),
            exchange="out",
        )
    ]


def test_a_dead_letter_routing_key_replaces_all_keys() -> None:
    topology = Topology(
        [Exchange("in", "fanout"), Exchange("out", "topic")],
        [waiting("wait", 10, "out", dead_letter_routing_key="new"), Queue("new"), Queue("any"), Queue("old")],
        [
            Binding("in", "wait"),
            Binding("out", "new", "new"),
            Binding("out", "any", "#"),
            Binding("out", "old", "old"),
            Binding("out", "old", "copy"),
            Binding("out", "old", "hidden"),
        ],
    )

    arrivals = travel(topology, "in", "old", {"CC": ["copy"], "BCC": ["hidden"]})

    assert [(one.queue, one.routing_key) for one in arrivals] == [("any", "new"), ("new", "new")]


def test_dead_letters_can_be_routed_by_the_default_exchange() -> None:
    topology = Topology(
        queues=[
            waiting("wait", 5, "", dead_letter_routing_key="target"),
            waiting("echo", 5, ""),
            Queue("target"),
        ]
    )

    assert [(one.queue, one.hops) for one in travel(topology, "", "wait")] == [("target", ("wait",))]
    with pytest.raises(InvalidTopologyError, match="dead-letter cycle 'echo' -> 'echo'"):
        travel(topology, "", "echo")


def test_copies_are_followed_separately_and_sorted_by_time() -> None:
    topology = Topology(
        [Exchange("in", "fanout"), Exchange("out", "fanout")],
        [waiting("long", 100, "out"), waiting("short", 1, "out"), Queue("now"), Queue("later")],
        [
            Binding("in", "long"),
            Binding("in", "short"),
            Binding("in", "now"),
            Binding("out", "later"),
        ],
    )

    arrivals = travel(topology, "in")

    assert [(one.queue, one.at / timedelta(milliseconds=1), one.hops) for one in arrivals] == [
        ("now", 0, ()),
        ("later", 1, ("short",)),
        ("later", 100, ("long",)),
    ]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"x-message-ttl": 10}, {"x-dead-letter-exchange": "x"}],
)
def test_a_queue_without_ttl_or_dead_letter_exchange_keeps_messages(arguments: dict[str, Argument]) -> None:
    topology = Topology([Exchange("x", "fanout")], [Queue("q", arguments=arguments)], [Binding("x", "q")])

    assert [one.fate for one in travel(topology, "x")] == ["arrived"]


def test_an_unroutable_message_is_reported_at_the_exchange() -> None:
    assert travel(Topology([Exchange("x")]), "x", "k") == [
        Arrival(queue="", at=timedelta(0), routing_key="k", headers={}, exchange="x", fate="unroutable")
    ]


@pytest.mark.parametrize(
    ("change", "fate"),
    [
        ({}, "stuck"),
        ({"x-dead-letter-strategy": "at-most-once"}, "lost"),
        ({"x-overflow": "drop-head"}, "lost"),
        ({"x-queue-type": "classic"}, "lost"),
    ],
)
@pytest.mark.parametrize("dead_letter_exchange", ["out", "missing"])
def test_an_unroutable_dead_letter_is_stuck_or_lost_by_its_strategy(
    change: dict[str, Argument], fate: str, dead_letter_exchange: str
) -> None:
    queue = waiting("wait", 20, dead_letter_exchange)
    topology = Topology(
        [Exchange("in", "fanout"), Exchange("out")],
        [Queue("wait", arguments={**queue.arguments, **change}), Queue("q")],
        [Binding("in", "wait"), Binding("in", "q")],
    )

    arrived, failed = travel(topology, "in", "k")

    assert (arrived.queue, arrived.fate) == ("q", "arrived")
    assert (failed.queue, failed.fate, failed.exchange) == ("wait", fate, dead_letter_exchange)
    assert failed.at == timedelta(milliseconds=20)
    assert failed.hops == ("wait",)


def test_dead_letter_cycles_are_refused_with_their_path() -> None:
    topology = Topology(
        [Exchange("a", "fanout"), Exchange("b", "fanout")],
        [waiting("one", 1, "b"), waiting("two", 1, "a")],
        [Binding("a", "one"), Binding("b", "two")],
    )

    with pytest.raises(InvalidTopologyError, match=r"dead-letter cycle 'one' -> 'two' -> 'one'.*break the cycle"):
        travel(topology, "a")


def test_two_copies_may_pass_the_same_queue() -> None:
    """Only a copy that comes back is a cycle."""
    topology = Topology(
        [Exchange("in", "fanout"), Exchange("join", "fanout"), Exchange("out", "fanout")],
        [waiting("left", 1, "join"), waiting("right", 2, "join"), waiting("both", 10, "out"), Queue("q")],
        [
            Binding("in", "left"),
            Binding("in", "right"),
            Binding("join", "both"),
            Binding("out", "q"),
        ],
    )

    assert [one.hops for one in travel(topology, "in")] == [("left", "both"), ("right", "both")]


def test_arrivals_are_hashable() -> None:
    topology = Topology([Exchange("x")], [Queue("q")], [Binding("x", "q", "k")])

    assert len({*travel(topology, "x", "k"), *travel(topology, "x", "k")}) == 1


# --- against a model of the model

NAMES = ["a", "b", "c", "d"]
KEYS = ["k", "l", "k.l", ""]
destination_types: st.SearchStrategy[DestinationType] = st.sampled_from(["queue", "exchange"])
networks = st.builds(
    Topology,
    st.tuples(
        *(
            st.builds(
                Exchange,
                st.just(name),
                st.sampled_from(["direct", "fanout", "topic"]),
                arguments=st.sampled_from([{}, *({"alternate-exchange": other} for other in NAMES)]),
            )
            for name in NAMES
        )
    ),
    st.just([Queue(name) for name in NAMES]),
    st.lists(
        st.builds(
            Binding,
            st.sampled_from(NAMES),
            st.sampled_from(NAMES),
            st.sampled_from([*KEYS, "#", "*"]),
            destination_types,
        ),
        max_size=12,
    ),
)


def by_fixed_point(topology: Topology, start: str, keys: list[str]) -> set[str]:
    """The queues reached, by widening the set of exchanges reached until nothing is added."""

    def matches(binding: Binding) -> bool:
        source = topology.exchange(binding.source)
        assert source is not None
        match source.type:
            case "fanout":
                return True
            case "direct":
                return binding.routing_key in keys
            case _:
                return any(topic_matches(binding.routing_key, key) for key in keys)

    matching = [one for one in topology.bindings if matches(one)]
    reached = {start}
    while True:
        wider = set(reached)
        for name in reached:
            leaving = [one for one in matching if one.source == name]
            wider |= {one.destination for one in leaving if one.destination_type == "exchange"}
            exchange = topology.exchange(name)
            if not leaving and exchange is not None and "alternate-exchange" in exchange.arguments:
                wider.add(str(exchange.arguments["alternate-exchange"]))
        if wider == reached:
            return {one.destination for one in matching if one.source in reached and one.destination_type == "queue"}
        reached = wider


@given(networks, st.sampled_from(NAMES), st.lists(st.sampled_from(KEYS), min_size=1, max_size=3))
def test_routing_equals_a_fixed_point_computation(topology: Topology, start: str, keys: list[str]) -> None:
    routed = route(topology, start, keys[0], {"CC": keys[1:]})

    assert routed.queues == by_fixed_point(topology, start, keys)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=6), st.sets(st.integers(0, 5)))
def test_arrival_time_is_the_sum_of_the_waits_taken(waits: list[int], taken: set[int]) -> None:
    """A chain of levels, each with a wait and a way round it, as the delay infrastructures have."""
    last = len(waits)
    topology = Topology(
        [Exchange(str(level)) for level in range(last + 1)],
        [*(waiting(f"wait{level}", wait, str(level + 1)) for level, wait in enumerate(waits)), Queue("target")],
        [
            *(Binding(str(level), f"wait{level}", f"take{level}") for level in range(last)),
            *(Binding(str(level), str(level + 1), f"skip{level}", "exchange") for level in range(last)),
            Binding(str(last), "target", "k"),
        ],
    )
    keys = [f"{'take' if level in taken else 'skip'}{level}" for level in range(last)]

    (arrival,) = travel(topology, "0", "k", {"CC": keys})

    assert arrival.queue == "target"
    assert arrival.at == timedelta(milliseconds=sum(wait for level, wait in enumerate(waits) if level in taken))
    assert arrival.hops == tuple(f"wait{level}" for level in range(last) if level in taken)
