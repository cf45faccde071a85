from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import InvalidTopologyError
from bide.topology import Arguments, Binding, Change, Exchange, Queue, Topology

names = st.sampled_from(["a", "b", "c", "d"])
values = st.one_of(st.integers(0, 3), st.booleans(), st.sampled_from(["x", "y"]))
arguments = st.dictionaries(st.sampled_from(["k", "l"]), values, max_size=2)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Topologies over few names, so that two of them overlap and differ often."""
    exchanges = draw(st.dictionaries(names, st.tuples(st.sampled_from(["direct", "topic"]), arguments), max_size=4))
    queues = draw(st.dictionaries(names, st.tuples(st.booleans(), arguments), max_size=4))
    bindings = draw(st.lists(st.builds(Binding, names, names, names, arguments=arguments), max_size=4))
    return Topology(
        (Exchange(name, kind, arguments=held) for name, (kind, held) in exchanges.items()),
        (Queue(name, durable=durable, arguments=held) for name, (durable, held) in queues.items()),
        bindings,
    )


def test_arguments_behave_as_a_mapping() -> None:
    held = Arguments({"b": 2, "a": "1"})

    assert dict(held) == {"a": "1", "b": 2}
    assert held == {"b": 2, "a": "1"}
    assert len(held) == 2
    assert list(held) == ["a", "b"]
    assert repr(held) == "{'a': '1', 'b': 2}"
    assert held != 5


def test_arguments_are_copied_and_cannot_be_changed() -> None:
    given_ones = {"x-message-ttl": 1}
    queue = Queue("q", arguments=given_ones)
    given_ones["x-message-ttl"] = 2

    assert queue.arguments == {"x-message-ttl": 1}
    with pytest.raises(TypeError):
        queue.arguments["x-message-ttl"] = 3  # type: ignore[index]  # wrong on purpose


@pytest.mark.parametrize("thing", [Exchange("a"), Queue("a"), Binding("a", "b"), Topology()])
def test_topology_objects_are_frozen(thing: Exchange | Queue | Binding | Topology) -> None:
    first = dataclasses.fields(thing)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(thing, first, "other")


def test_equal_objects_have_equal_hashes_in_any_order_of_arguments() -> None:
    one = Queue("q", arguments={"a": 1, "b": 2})
    other = Queue("q", arguments={"b": 2, "a": 1})

    assert one == other
    assert len({one, other}) == 1
    assert len({Topology(queues=[one]), Topology(queues=[other])}) == 1


def test_a_quorum_queue_is_durable_and_has_its_type() -> None:
    queue = Queue.quorum("q", {"x-message-ttl": 1})

    assert queue.durable
    assert queue.type == "quorum"
    assert queue.arguments == {"x-queue-type": "quorum", "x-message-ttl": 1}
    assert Queue("q").type == "classic"


def test_duplicates_are_dropped_in_order() -> None:
    topology = Topology(
        [Exchange("b"), Exchange("a"), Exchange("b")],
        [Queue("z"), Queue("y"), Queue("z")],
        [Binding("b", "z"), Binding("a", "y"), Binding("b", "z")],
    )

    assert [one.name for one in topology.exchanges] == ["b", "a"]
    assert [one.name for one in topology.queues] == ["z", "y"]
    assert topology.bindings == (Binding("b", "z"), Binding("a", "y"))
    assert len(topology) == 6


def test_every_contradiction_is_named() -> None:
    with pytest.raises(InvalidTopologyError) as caught:
        Topology([Exchange("x"), Exchange("x", "topic")], [Queue("q"), Queue("q", durable=False)])

    assert [problem.partition(" is")[0] for problem in caught.value.problems] == ["exchange 'x'", "queue 'q'"]
    assert "keep one definition" in str(caught.value)


def test_the_union_of_contradicting_topologies_is_refused() -> None:
    with pytest.raises(InvalidTopologyError, match="queue 'q' is defined twice"):
        Topology(queues=[Queue("q")]) | Topology(queues=[Queue("q", arguments={"x-message-ttl": 1})])


def test_an_exchange_and_a_queue_can_share_a_name() -> None:
    topology = Topology([Exchange("both")], [Queue("both")])

    assert topology.exchange("both") == Exchange("both")
    assert topology.queue("both") == Queue("both")
    assert topology.exchange("neither") is None
    assert topology.queue("neither") is None


def test_several_queues_can_be_named_by_the_broker() -> None:
    assert len(Topology(queues=[Queue("", exclusive=True), Queue("", auto_delete=True)]).queues) == 2


def test_a_diff_names_additions_removals_and_changes() -> None:
    before = Topology(
        [Exchange("stays"), Exchange("goes"), Exchange("turns", "direct")],
        [Queue("waits", arguments={"x-message-ttl": 1, "x-expires": 5})],
        [Binding("stays", "waits", "old")],
    )
    after = Topology(
        [Exchange("stays"), Exchange("comes"), Exchange("turns", "topic", internal=True)],
        [Queue("waits", arguments={"x-message-ttl": 2, "x-queue-type": "quorum"})],
        [Binding("stays", "waits", "new")],
    )

    diff = before.diff(after)

    assert diff.added == Topology([Exchange("comes")], bindings=[Binding("stays", "waits", "new")])
    assert diff.removed == Topology([Exchange("goes")], bindings=[Binding("stays", "waits", "old")])
    assert diff.changed == (
        Change(
            kind="exchange",
            name="turns",
            differences={"type": ("direct", "topic"), "internal": (False, True)},
        ),
        Change(
            kind="queue",
            name="waits",
            differences={
                "x-expires": (5, None),
                "x-message-ttl": (1, 2),
                "x-queue-type": (None, "quorum"),
            },
        ),
    )


@given(topologies())
def test_a_topology_does_not_differ_from_itself(topology: Topology) -> None:
    assert not topology.diff(topology)
    assert topology | topology == topology
    assert topology | Topology() == topology


@given(topologies(), topologies())
def test_a_diff_is_empty_only_between_equals(before: Topology, after: Topology) -> None:
    def content(one: Topology) -> tuple[frozenset[Exchange], frozenset[Queue], frozenset[Binding]]:
        return frozenset(one.exchanges), frozenset(one.queues), frozenset(one.bindings)

    assert bool(before.diff(after)) == (content(before) != content(after))


@given(topologies(), topologies())
def test_a_diff_backwards_swaps_added_and_removed(before: Topology, after: Topology) -> None:
    forward, backward = before.diff(after), after.diff(before)

    assert set(forward.added.queues) == set(backward.removed.queues)
    assert set(forward.removed.exchanges) == set(backward.added.exchanges)
    assert set(forward.added.bindings) == set(backward.removed.bindings)
    assert {one.name: one.differences for one in forward.changed if one.kind == "queue"} == {
        one.name: {name: (old, new) for name, (new, old) in one.differences.items()}
        for one in backward.changed
        if one.kind == "queue"
    }


@given(topologies(), topologies())
def test_a_diff_leads_from_one_topology_to_the_other(before: Topology, after: Topology) -> None:
    diff = before.diff(after)
    changed = {(one.kind, one.name) for one in diff.changed}
    kept = Topology(
        (
            one
            for one in before.exchanges
            if one not in diff.removed.exchanges and ("exchange", one.name) not in changed
        ),
        (one for one in before.queues if one not in diff.removed.queues and ("queue", one.name) not in changed),
        (one for one in before.bindings if one not in diff.removed.bindings),
    )
    made_anew = Topology(
        (one for one in after.exchanges if ("exchange", one.name) in changed),
        (one for one in after.queues if ("queue", one.name) in changed),
    )
    result = kept | diff.added | made_anew

    assert set(result.exchanges) == set(after.exchanges)
    assert set(result.queues) == set(after.queues)
    assert set(result.bindings) == set(after.bindings)
