from __future__ import annotations

import html
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import InvalidTopologyError
from bide.foreign_text import visible
from bide.topology import Binding, DestinationType, Exchange, Queue, Topology
from bide.topology.rendering import COLLAPSE_FROM, definitions, from_definitions, graphviz, mermaid, picture

if TYPE_CHECKING:
    from bide.topology import Argument

SMALL = Topology(
    [Exchange("in", arguments={"alternate-exchange": "rest"}), Exchange("out", "topic"), Exchange("rest", "fanout")],
    [Queue.quorum("wait", {"x-message-ttl": 90_000, "x-dead-letter-exchange": "out"}), Queue("orders"), Queue("rest")],
    [
        Binding("in", "wait", "90s"),
        Binding("in", "out", "now", "exchange"),
        Binding("out", "orders", "order.#"),
        Binding("out", "orders", "order"),
        Binding("rest", "rest"),
    ],
)


def levels(count: int) -> Topology:
    """Delay levels of parallel queues, and the queue at their end."""
    return Topology(
        [Exchange("m"), Exchange("out")],
        [
            *(
                Queue.quorum(f"m{value}", {"x-message-ttl": value * 60_000, "x-dead-letter-exchange": "out"})
                for value in range(1, count + 1)
            ),
            Queue("target"),
        ],
        [*(Binding("m", f"m{value}", f"~m{value}") for value in range(1, count + 1)), Binding("out", "target", "t")],
    )


def test_mermaid_draws_exchanges_queues_and_bindings() -> None:
    assert (
        mermaid(SMALL)
        == """\
flowchart LR
    e1(["in<br/>direct"])
    e2(["out<br/>topic"])
    e3(["rest<br/>fanout"])
    q1[("wait<br/>quorum<br/>TTL 0:01:30")]
    q2[("orders<br/>classic")]
    q3[("rest<br/>classic")]
    e1 -.->|"alternate"| e3
    e1 -->|"90s"| q1
    e1 -->|"now"| e2
    e2 -->|"order.#35;, order"| q2
    e3 --> q3
    q1 -.->|"dead letter"| e2
    linkStyle 0 stroke-dasharray:1 4
    linkStyle 5 stroke-dasharray:6 4
"""
    )


def test_graphviz_draws_exchanges_queues_and_bindings() -> None:
    assert (
        graphviz(SMALL)
        == """\
digraph topology {
    rankdir=LR
    node [fontname=sans]
    edge [fontname=sans]
    e1 [label="in\\ndirect" shape=box style=rounded]
    e2 [label="out\\ntopic" shape=box style=rounded]
    e3 [label="rest\\nfanout" shape=box style=rounded]
    q1 [label="wait\\nquorum\\nTTL 0:01:30" shape=cylinder]
    q2 [label="orders\\nclassic" shape=cylinder]
    q3 [label="rest\\nclassic" shape=cylinder]
    e1 -> e3 [label="alternate" style=dotted]
    e1 -> q1 [label="90s"]
    e1 -> e2 [label="now"]
    e2 -> q2 [label="order.#, order"]
    e3 -> q3 [label=""]
    q1 -> e2 [label="dead letter" style=dashed]
}
"""
    )


def test_an_empty_topology_is_drawn_empty() -> None:
    assert mermaid(Topology()) == "flowchart LR\n"
    assert graphviz(Topology()).count("\n") == 5


def test_undeclared_exchanges_and_queues_are_drawn_as_unknown() -> None:
    topology = Topology(
        queues=[Queue("q", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "away"})],
        bindings=[Binding("amq.topic", "target", "a.*", arguments={"x": 1})],
    )

    drawn = picture(topology)

    assert [(one.id, one.kind, one.lines, one.known) for one in drawn.nodes] == [
        ("q1", "queue", ("q", "classic"), True),
        ("e1", "exchange", ("amq.topic",), False),
        ("q2", "queue", ("target",), False),
        ("e2", "exchange", ("(default)",), False),
    ]
    assert [(one.source, one.target, one.kind, one.label) for one in drawn.edges] == [
        ("e1", "q2", "binding", "a.* (x=1)"),
        ("q1", "e2", "dead letter", "dead letter, key away"),
    ]
    assert "class e1,q2,e2 elsewhere" in mermaid(topology)
    assert graphviz(topology).count("color=gray") == 3


def test_parallel_queues_are_drawn_as_one() -> None:
    drawn = picture(levels(59))

    assert [one.lines for one in drawn.nodes if one.kind == "queue"] == [
        ("m1 ... m59", "59 quorum queues, TTL 0:01:00 to 0:59:00"),
        ("target", "classic"),
    ]
    assert [(one.source, one.target, one.label) for one in drawn.edges] == [
        ("e1", "q1", "~m1, ~m2 ... ~m59 (59)"),
        ("e2", "q2", "t"),
        ("q1", "e2", "dead letter"),
    ]
    assert len(mermaid(levels(59)).splitlines()) < 12


def test_few_parallel_queues_are_drawn_one_by_one() -> None:
    assert len(picture(levels(59), collapse=False).nodes) == 2 + 60
    assert len(picture(levels(COLLAPSE_FROM - 1)).nodes) == 2 + COLLAPSE_FROM
    assert len(picture(levels(COLLAPSE_FROM)).nodes) == 2 + 2


def test_queues_that_differ_in_more_than_their_ttl_are_not_parallel() -> None:
    few = COLLAPSE_FROM - 1
    topology = Topology(
        [Exchange("x", "fanout"), Exchange("y", "fanout")],
        [
            *(
                Queue(f"to-x-{one}", arguments={"x-message-ttl": one, "x-dead-letter-exchange": "x"})
                for one in range(few)
            ),
            *(
                Queue(f"to-y-{one}", arguments={"x-message-ttl": one, "x-dead-letter-exchange": "y"})
                for one in range(few)
            ),
            *(Queue(f"own-{one}") for one in range(COLLAPSE_FROM)),
        ],
        [
            *(Binding("x", f"to-{end}-{one}") for end in "xy" for one in range(few)),
            *(Binding("x", f"own-{one}") for one in range(COLLAPSE_FROM)),
        ],
    )

    assert len(picture(topology).nodes) == 2 + len(topology.queues)


# --- escaping

awkward = st.text(
    st.one_of(
        st.sampled_from("\"'#;&<>|\\[](){}*_`~$%@:.-=+/!?,^ \n\t"),
        st.characters(codec="utf-8", exclude_categories=["Cs"]),
        st.sampled_from("abnNG019"),
    ),
    min_size=1,
    max_size=20,
)
NAMES = ["<script>alert(1)</script>", 'a"b', "a|b", "#35;", "&#39;", "\\N", "end", "style:1#;", "*.*.#", "ü€😀", "a\\"]


def drawn_with(name: str) -> Topology:
    return Topology([Exchange(name, "fanout")], [Queue("q")], [Binding(name, "q", name)])


def check_mermaid(name: str) -> None:
    lines = mermaid(drawn_with(name)).removesuffix("\n").split("\n")

    assert len(lines) == 4
    node = re.fullmatch(r'    e1\(\["([^"]*)<br/>fanout"\]\)', lines[1])
    edge = re.fullmatch(r'    e1 -->\|"([^"]*)"\| q1', lines[3])
    assert node is not None
    assert edge is not None
    for label in (node[1], edge[1]):
        assert not re.search(r"[<>&|\[\]{}*`$\\\"']", label)
        # Every "#" starts a character code, and with the codes read back the name is whole.
        assert re.sub(r"#(\d+);", lambda code: chr(int(code[1])), label) == visible(name)
        assert "#" not in re.sub(r"#\d+;", "", label)


def check_graphviz(name: str) -> None:
    lines = graphviz(drawn_with(name)).removesuffix("\n").split("\n")

    assert len(lines) == 8
    node = re.fullmatch(r'    e1 \[label="((?:[^"\\]|\\.)*)\\nfanout" shape=box style=rounded\]', lines[4])
    edge = re.fullmatch(r'    e1 -> q1 \[label="((?:[^"\\]|\\.)*)"\]', lines[6])
    assert node is not None
    assert edge is not None
    for label in (node[1], edge[1]):
        assert html.unescape(re.sub(r"\\(.)", r"\1", label)) == visible(name)


@pytest.mark.parametrize("name", NAMES)
def test_names_with_special_characters_are_escaped(name: str) -> None:
    check_mermaid(name)
    check_graphviz(name)


@given(awkward)
def test_any_name_is_escaped(name: str) -> None:
    check_mermaid(name)
    check_graphviz(name)


@pytest.mark.parametrize("start", ["- ", "+ ", "1. "])
def test_a_name_is_not_a_list_to_mermaid(start: str) -> None:
    assert not mermaid(drawn_with(start + "x")).splitlines()[1].startswith(f'    e1(["{start}')


# --- definitions


def test_definitions_hold_exchanges_queues_and_bindings() -> None:
    assert definitions(
        Topology(
            [
                Exchange("x", "topic", internal=True, arguments={"alternate-exchange": "y"}),
                Exchange("amq.topic", "topic"),
            ],
            [Queue.quorum("q", {"x-message-ttl": 5})],
            [Binding("x", "q", "a.#"), Binding("amq.match", "x", "", "exchange", {"a": 1, "x-match": "any"})],
        )
    ) == {
        "exchanges": [
            {
                "name": "x",
                "type": "topic",
                "durable": True,
                "auto_delete": False,
                "internal": True,
                "arguments": {"alternate-exchange": "y"},
            }
        ],
        "queues": [
            {
                "name": "q",
                "durable": True,
                "auto_delete": False,
                "arguments": {"x-message-ttl": 5, "x-queue-type": "quorum"},
            }
        ],
        "bindings": [
            {"source": "x", "destination": "q", "destination_type": "queue", "routing_key": "a.#", "arguments": {}},
            {
                "source": "amq.match",
                "destination": "x",
                "destination_type": "exchange",
                "routing_key": "",
                "arguments": {"a": 1, "x-match": "any"},
            },
        ],
    }


def test_definitions_for_a_whole_broker_name_the_virtual_host_everywhere() -> None:
    document = definitions(SMALL, "v")

    assert document["vhosts"] == [{"name": "v"}]
    entries = [*document["exchanges"], *document["queues"], *document["bindings"]]
    assert len(entries) == len(SMALL)
    assert all(entry["vhost"] == "v" for entry in entries)


@pytest.mark.parametrize(
    ("queue", "words"),
    [(Queue("q", exclusive=True), "queue 'q' is exclusive"), (Queue(""), "queue '' is named by the broker")],
)
def test_exclusive_and_unnamed_queues_are_refused_in_definitions(queue: Queue, words: str) -> None:
    with pytest.raises(InvalidTopologyError, match=words):
        definitions(Topology(queues=[queue]))


arguments = st.dictionaries(
    st.text(min_size=1, max_size=5),
    st.one_of(st.text(max_size=5), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats(allow_nan=False)),
    max_size=3,
)
some_names = st.text(min_size=1, max_size=8).filter(lambda name: not name.startswith("amq."))
destination_types: st.SearchStrategy[DestinationType] = st.sampled_from(["queue", "exchange"])


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    flag = st.booleans()
    exchanges = st.builds(
        Exchange,
        some_names,
        st.sampled_from(["direct", "topic", "fanout", "headers"]),
        durable=flag,
        auto_delete=flag,
        internal=flag,
        arguments=arguments,
    )
    queues = st.builds(Queue, some_names, durable=flag, auto_delete=flag, arguments=arguments)
    bindings = st.builds(Binding, some_names, some_names, st.text(max_size=5), destination_types, arguments)
    return Topology(
        draw(st.lists(exchanges, max_size=4, unique_by=lambda one: one.name)),
        draw(st.lists(queues, max_size=4, unique_by=lambda one: one.name)),
        draw(st.lists(bindings, max_size=4)),
    )


@given(topologies(), st.sampled_from([None, "/", "v"]))
def test_definitions_are_read_as_the_same_topology(topology: Topology, vhost: str | None) -> None:
    document = json.loads(json.dumps(definitions(topology, vhost)))

    assert from_definitions(document) == topology
    assert from_definitions(document, "v") == (Topology() if vhost == "/" else topology)


def test_definitions_are_read_for_one_virtual_host() -> None:
    one, other = Topology(queues=[Queue("q")]), Topology(queues=[Queue.quorum("q")])
    both = {"queues": [*definitions(one, "a")["queues"], *definitions(other, "b")["queues"]]}

    assert from_definitions(both, "a") == one
    assert from_definitions(both, "b") == other
    with pytest.raises(InvalidTopologyError, match="queue 'q' is defined twice"):
        from_definitions(both)


def test_an_export_of_the_broker_is_read_as_a_topology() -> None:
    assert from_definitions(
        {
            "rabbit_version": "3.10.8",
            "rabbitmq_version": "3.10.8",
            "users": [{"name": "guest"}],
            "policies": [],
            "queues": [{"name": "q", "vhost": "/", "durable": True, "auto_delete": False, "arguments": {}}],
            "exchanges": [{"name": "x", "type": "direct", "arguments": []}],
            "bindings": [{"source": "x", "destination": "q", "destination_type": "queue", "routing_key": "k"}],
        }
    ) == Topology([Exchange("x")], [Queue("q")], [Binding("x", "q", "k")])


BAD_ENTRIES: list[tuple[str, Any]] = [
    ("exchanges", {"type": "direct"}),
    ("exchanges", {"name": "x"}),
    ("exchanges", {"name": 5, "type": "direct"}),
    ("queues", {"durable": True}),
    ("queues", "q"),
    ("queues", {"name": "q", "arguments": {"a": [1]}}),
    ("queues", {"name": "q", "arguments": {"a": None}}),
    ("bindings", {"source": "x", "destination": "q"}),
    ("bindings", {"source": "x", "destination": "q", "destination_type": "topic"}),
]


@pytest.mark.parametrize(("kind", "entry"), BAD_ENTRIES)
@pytest.mark.parametrize("vhost", [None, "/"])
def test_invalid_entries_of_definitions_are_refused_by_position(kind: str, entry: Any, vhost: str | None) -> None:
    with pytest.raises(
        InvalidTopologyError, match=rf"^{kind}\[0\] is not a definition of RabbitMQ .*: export the file again$"
    ):
        from_definitions({kind: [entry]}, vhost)


@given(st.integers(-(10**20), 10**20))
def test_any_ttl_can_be_drawn(ttl: int) -> None:
    wait: dict[str, Argument] = {"x-message-ttl": ttl}

    assert picture(Topology(queues=[Queue("q", arguments=wait)])).nodes[0].lines[:2] == ("q", "classic")
