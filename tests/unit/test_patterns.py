from __future__ import annotations

import inspect
from email.message import EmailMessage
from typing import TYPE_CHECKING, Any

import pytest

from bide.errors import InvalidInputError
from bide.patterns import alternates, broadcast, conventions, delays, partitions, primitives, rpc, service_classes
from bide.patterns.building import references
from bide.patterns.catalogue import PATTERNS, Pattern, find_pattern
from bide.patterns.options import header_value, options_of
from bide.topology import Topology
from bide.topology.rendering import definitions, from_definitions, graphviz, mermaid
from bide.topology.routing import route, travel
from bide.topology.validation import problems

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def named(pattern: Pattern) -> str:
    return pattern.name


# -- all of them


def test_the_catalogue_has_the_18_numbered_patterns() -> None:
    assert [one.number for one in PATTERNS if one.number is not None] == list(range(1, 19))
    assert len({one.name for one in PATTERNS}) == len(PATTERNS)


@pytest.mark.parametrize("pattern", PATTERNS, ids=named)
def test_every_sample_is_a_valid_topology(pattern: Pattern) -> None:
    topology = pattern.sample_topology()
    assert not problems(topology, external=references(topology))
    assert mermaid(topology).startswith("flowchart LR\n")
    assert graphviz(topology).startswith("digraph topology {")
    if not any(one.exclusive for one in topology.queues):
        assert from_definitions(definitions(topology)) == topology


@pytest.mark.parametrize("pattern", PATTERNS, ids=named)
def test_every_pattern_and_option_has_help(pattern: Pattern) -> None:
    assert pattern.summary.endswith(".")
    assert all(one.help for one in pattern.options)
    assert not any("`" in one for one in (pattern.summary, pattern.caveat, *(one.help for one in pattern.options)))
    if pattern.number is not None:
        assert pattern.caveat


@pytest.mark.parametrize("pattern", PATTERNS, ids=named)
def test_the_sample_can_be_written_as_options(pattern: Pattern) -> None:
    by_parameter = {one.parameter: one for one in pattern.options}
    texts = {by_parameter[name].name: as_texts(value) for name, value in pattern.sample.items()}
    assert pattern.topology(texts) == pattern.sample_topology()


def as_texts(value: object) -> list[str]:
    match value:
        case dict():
            return [f"{name}={text}" for name, inner in value.items() for text in as_texts(inner)]
        case list():
            return list(value)
        case bool():
            return [str(value).lower()]
        case _:
            return [str(value)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=named)
def test_missing_options_are_named(pattern: Pattern) -> None:
    needed = [one for one in pattern.options if one.required]
    with pytest.raises(InvalidInputError) as caught:
        pattern.topology({})
    for option in needed:
        assert f"--{option.name} {option.form}" in str(caught.value)


def test_a_pattern_is_found_by_name_and_by_number() -> None:
    assert find_pattern("rpc") is find_pattern("18")
    with pytest.raises(InvalidInputError, match="did you mean 'fanout-broadcast'"):
        find_pattern("fanout-brodcast")
    with pytest.raises(InvalidInputError, match="no pattern '19'"):
        find_pattern("19")


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("fanout-broadcast", {"colour": ["red"]}, "no option --colour"),
        ("fanout-broadcast", {"exchange": ["a", "b"], "queue": ["q"]}, "--exchange is given 2 times"),
        ("ordered-partitions", {"exchange": ["a"], "queue": ["q"], "partitions": ["few"]}, "not a whole number"),
        ("layered-exchanges", {"exchange": ["a"], "layer": ["b"], "queue": ["q=b"]}, "not of the form NAME=VALUE"),
        ("layered-exchanges", {"exchange": ["a"], "layer": ["b=x", "b=y"], "queue": ["q=b"]}, "twice for 'b'"),
        ("email-routing", {"exchange": ["a"], "rule": ["q=from"]}, "not of the form QUEUE=HEADER=VALUE"),
    ],
)
def test_invalid_options_are_refused(name: str, texts: Mapping[str, Sequence[str]], expected: str) -> None:
    with pytest.raises(InvalidInputError, match=expected):
        find_pattern(name).topology(texts)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("pet", "pet"),
        ("2", 2),
        ('"2"', "2"),
        ("2.5", 2.5),
        ("true", True),
        ("null", "null"),
        ("[1]", "[1]"),
        ("", ""),
        ("NaN", "NaN"),
    ],
)
def test_a_header_value_has_a_type(text: str, value: object) -> None:
    assert header_value(text) == value
    assert type(header_value(text)) is type(value)


def test_a_docstring_without_indentation_gives_the_same_options() -> None:
    """As Python 3.13 keeps it."""

    def build(exchange: str, *, queues: Sequence[str]) -> Topology:
        return broadcast.fanout_broadcast(exchange, queues=queues)

    function: Any = broadcast.fanout_broadcast
    build.__doc__ = inspect.cleandoc(function.__doc__)
    assert options_of(build) == options_of(function)[:2]
    assert all(one.help for one in options_of(build))


# -- where messages go, by the model of the routing


def queues_of(topology: Topology, exchange: str, key: str = "", headers: Mapping[str, Any] | None = None) -> set[str]:
    return set(route(topology, exchange, key, headers).queues)


def test_layered_exchanges_route_by_key_then_by_headers() -> None:
    topology = find_pattern("2").sample_topology()
    assert queues_of(topology, "travel", "booking.new") == {"billing", "crm"}
    pet = {"entity.type": "pet", "change.type": "new"}
    assert queues_of(topology, "travel", "booking.pet", pet) == {"billing", "crm", "pets"}
    assert queues_of(topology, "travel", "extras.pet", pet) == {"pets"}


def test_mail_is_routed_by_its_headers() -> None:
    topology = find_pattern("3").sample_topology()
    mail = EmailMessage()
    mail["From"] = "Reports <Reports@ABC.example>"
    mail["To"] = "Safety <safety@air.example>, crew@air.example"
    mail["Subject"] = "component status"
    mail.set_content("...")
    headers = broadcast.mail_headers(mail)
    assert headers == {
        "from": "reports@abc.example",
        "subject": "component status",
        "to:safety@air.example": True,
        "to:crew@air.example": True,
        "attachments": 0,
    }
    assert queues_of(topology, "mailbox", headers=headers) == {"finance", "safety"}
    mail.replace_header("Subject", "Component status")
    mail.replace_header("To", "crew@air.example")
    mail.add_attachment(b"...", maintype="text", subtype="csv", filename="a.csv")
    headers = broadcast.mail_headers(mail)
    assert headers["attachments"] == 1
    assert queues_of(topology, "mailbox", headers=headers) == {"other-mail"}


def test_private_exchanges_filter_for_their_queue() -> None:
    topology = find_pattern("4").sample_topology()
    assert queues_of(topology, "booking.new", "mytravel.com") == {"app1", "app3"}
    assert queues_of(topology, "booking.new", "web", {"client.id": 1001}) == {"app1", "app2"}
    assert queues_of(topology, "booking.modified", "mytravel.com", {"client.id": 1001}) == {"app3"}


def test_a_hierarchy_routes_to_every_level_above() -> None:
    topology = find_pattern("8").sample_topology()
    assert queues_of(topology, "finance.fraud.alert") == {"ledger", "investigators"}
    assert queues_of(topology, "finance.invoicing.invoice-requested") == {"ledger"}
    later = topology | conventions.message_line("finance.fraud.pattern.found")
    assert queues_of(later, "finance.fraud.pattern.found") == {"ledger", "investigators"}


def test_if_else_routes_to_the_first_matching_branch() -> None:
    topology = find_pattern("11").sample_topology()
    assert queues_of(topology, "clients", "acme") == {"acme"}
    assert queues_of(topology, "clients", "initech") == {"partners"}
    assert queues_of(topology, "clients", "hooli") == {"everybody-else"}
    first_wins = alternates.if_else("x", branches={"a": ["*.de"], "b": ["#"]}, otherwise="c", type="topic")
    assert queues_of(first_wins, "x", "shop.de") == {"a"}
    assert queues_of(first_wins, "x", "shop.fr") == {"b"}


def test_not_routing_diverts_unwanted_keys() -> None:
    topology = alternates.not_routing("in", queue="q", unwanted=["spam", "ad.#"], source_type="topic")
    assert queues_of(topology, "in", "news") == {"q"}
    assert queues_of(topology, "in", "spam") == {"q.waste"}
    assert queues_of(topology, "in", "ad.shoes.red") == {"q.waste"}


def test_each_class_of_service_has_its_queue() -> None:
    topology = find_pattern("10").sample_topology()
    assert queues_of(topology, "orders", "eu.new.high") == {"orders.high"}
    assert queues_of(topology, "orders", "eu.new") == {"orders.low"}


def test_an_ephemeral_queue_delivers_after_its_delay() -> None:
    topology = delays.ephemeral_delay("one", delay="1.5s", to="orders")
    (arrival,) = travel(
        topology | primitives.central_dead_letters("d", queues=["orders"], dead_letter_queue="m"), "one"
    )
    assert (arrival.queue, arrival.at.total_seconds(), arrival.hops) == ("orders", 1.5, ("one",))


def test_only_classic_ephemeral_queues_expire() -> None:
    classic = delays.ephemeral_delay("one", delay="5s", to="q", queue_type="classic", grace="10s")
    assert classic.queues[0].arguments["x-expires"] == 15_000
    quorum = delays.ephemeral_delay("one", delay="5s", to="q")
    assert "x-expires" not in quorum.queues[0].arguments
    assert quorum.queues[0].arguments["x-dead-letter-strategy"] == "at-least-once"
    assert classic.exchanges[0].auto_delete
    assert quorum.exchanges[0].auto_delete


def test_a_private_publisher_exchange_keeps_the_routing_key() -> None:
    topology = delays.private_publisher_delay("mine", to="all", delay="5m") | service_classes.classes_of_service(
        "all", queue="q", levels=["high"]
    )
    (arrival,) = travel(topology, "mine", "new.high")
    assert (arrival.queue, arrival.routing_key, arrival.at.total_seconds()) == ("q.high", "new.high", 300)


def test_a_three_level_cascade_delays_by_five_seconds() -> None:
    topology = find_pattern("13").sample_topology()
    (arrival,) = travel(topology, "nsb.v2.delay-level-02", "1.0.1.consumer-app-1")
    assert (arrival.queue, arrival.at.total_seconds()) == ("consumer-app-1", 5)
    assert len(arrival.hops) == 2


def test_direct_replies_need_no_queue() -> None:
    assert [one.name for one in rpc.rpc("prices").queues] == ["prices"]
    instances = rpc.rpc("prices", replies="instance", instances=["a", "b"], expires="2m")
    assert [one.name for one in instances.queues] == ["prices", "prices.replies.a", "prices.replies.b"]
    assert instances.queues[1].arguments["x-expires"] == 120_000


# -- what cannot be


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: broadcast.fanout_broadcast("x", queues=[]), "no queue is given: give at least one in queues=[...]"),
        (lambda: broadcast.fanout_broadcast("x", queues="abc"), "a single text"),
        (lambda: broadcast.fanout_broadcast("x", queues=["q", "q"]), "'q' is named 2 times"),
        (lambda: broadcast.fanout_broadcast("", queues=["q"]), "default exchange"),
        (lambda: broadcast.fanout_broadcast("amq.topic", queues=["q"]), "the broker declares it as"),
        (lambda: broadcast.fanout_broadcast("x" * 300, queues=["q"]), "255"),
        (lambda: broadcast.fanout_broadcast("x", queues=["q"], queue_type="lazy"), "queue_type='lazy'"),
        (lambda: broadcast.layered_exchanges("x", layers={"x": "#"}, queues={"q": "x"}), "both the entry exchange"),
        (lambda: broadcast.layered_exchanges("x", layers={"y": "#"}, queues={"q": "z"}), "'z', which is not a layer"),
        (
            lambda: broadcast.layered_exchanges("x", layers={"y": "#"}, queues={"q": "y"}, rules={"r": {"a": 1}}),
            "'r', which is not one of the queues",
        ),
        (lambda: broadcast.layered_exchanges("x", layers={"y": "#"}, queues={"q": "y"}, entry="fanout"), "ignores"),
        (lambda: broadcast.layered_exchanges("x", layers={"y": ""}, queues={"q": "y"}, entry="headers"), "entry="),
        (lambda: broadcast.email_routing("x", rules={"q": {"x-match": "any"}}), "has no header"),
        (lambda: broadcast.email_routing("x", rules={"q": {"a": 1, "x-match": "some"}}), "x-match is 'some'"),
        (lambda: broadcast.email_routing("x", rules={"q": {"a": 1}}, others="q"), "a queue with a rule"),
        (lambda: broadcast.email_routing("x", rules={"q": {"a": 1}}, others="x"), "different properties"),
        (
            lambda: conventions.private_consumer_exchanges(messages=["m"], consumers={"q": ["n"]}),
            "'n', which is not one of the messages",
        ),
        (
            lambda: conventions.private_consumer_exchanges(
                messages=["m"], consumers={"q": ["m"]}, keys={"q": ["a"]}, rules={"q": {"a": 1}}
            ),
            "has keys and a rule",
        ),
        (
            lambda: conventions.private_consumer_exchanges(messages=["q.private"], consumers={"q": ["q.private"]}),
            "both a message exchange and the private exchange",
        ),
        (
            lambda: conventions.private_consumer_exchanges(messages=["m"], consumers={"q": ["m"]}, keys={"r": ["a"]}),
            "'r', which is not a consumer",
        ),
        (lambda: conventions.hierarchical_routing(messages=["a..b"], queues={"q": ["a"]}), "empty word"),
        (lambda: conventions.hierarchical_routing(messages=["a.b"], queues={"q": ["b"]}), "nor the first words of one"),
        (lambda: partitions.ordered_partitions("x", queue="q", partitions=0), "from 1 to 1000"),
        (
            lambda: partitions.ordered_partitions("x", queue="q", partitions=2, header="a", property="message_id"),
            "leave one out",
        ),
        (lambda: partitions.ordered_partitions("x", queue="q", partitions=2, property="type"), "property='type'"),
        (lambda: service_classes.priority_queue("q", priorities=200), "from 1 to 10"),
        (lambda: service_classes.priority_queue("q", priorities=3, queue_type="quorum"), "for classic queues"),
        (lambda: service_classes.priority_queue("q", overflow="drop-head"), "add max_length=..."),
        (lambda: service_classes.classes_of_service("x", queue="q", levels=["a", "a"]), "named 2 times"),
        (lambda: service_classes.classes_of_service("x", queue="q", levels=["#"]), "wildcards"),
        (lambda: service_classes.classes_of_service("x", queue="q", levels=["a.b"]), "one word"),
        (lambda: service_classes.classes_of_service("x", queue="q", levels=["a"], otherwise="b"), "otherwise='b'"),
        (lambda: alternates.if_else("x", branches={}, otherwise="q"), "give at least one in branches={...}"),
        (
            lambda: alternates.if_else("x", branches={"q": []}, otherwise="r"),
            "no binding key is given: give at least one in branches={...} for 'q'",
        ),
        (lambda: alternates.if_else("x", branches={"q": ["a"]}, otherwise="q"), "queue of a branch"),
        (lambda: alternates.if_else("x", branches={"q": ["a"]}, otherwise="r", type="fanout"), "type='fanout'"),
        (
            lambda: alternates.if_else("x", branches={"q": ["a", "b"], "r": ["b"]}, otherwise="s"),
            "the branch 'r' gets nothing, because 'q' before it has the key 'b'",
        ),
        (
            lambda: alternates.if_else("x", branches={"q": ["#"], "r": ["b"]}, otherwise="s", type="topic"),
            "put 'q' last",
        ),
        (lambda: alternates.not_routing("x", queue="q", unwanted=[]), "give at least one in unwanted=[...]"),
        (lambda: alternates.not_routing("x", queue="q", unwanted=["a", "#"]), "so 'q' would get nothing"),
        (lambda: alternates.not_routing("q.filter", queue="q", unwanted=["a"]), "both the exchange and"),
        (lambda: delays.delayed_retry_cascade(queues=["q"], levels=29), "give 1 to 28"),
        (
            lambda: delays.delayed_retry_cascade(queues=["q"], layout="clock", levels=3),
            "levels=... is 3, and only the layout 'nservicebus' has it",
        ),
        (lambda: delays.delayed_retry_cascade(queues=["q"], resolution="1s"), "only the layout 'clock' has it"),
        (lambda: delays.delayed_delivery_cascade(queues=["q"], resolution="7s"), "must be a multiple of a unit"),
        (lambda: delays.delayed_retry_cascade(queues=["q"], layout="sundial"), "layout='sundial'"),
        (lambda: delays.ephemeral_delay("x", delay="1s"), "give a queue with to=..., or else exchange=..."),
        (lambda: delays.ephemeral_delay("x", delay="1s", to="q", exchange="y"), "missing or ambiguous"),
        (lambda: delays.ephemeral_delay("q", delay="1s", to="q"), "both the queue that delays and"),
        (lambda: delays.ephemeral_delay("x", delay="1s", exchange="x"), "both the exchange that delays and"),
        (lambda: delays.ephemeral_delay("x", delay="0s", to="q"), "between 1 ms"),
        (lambda: delays.ephemeral_delay("x", delay="1s", to="q", grace="5s"), "for a classic queue"),
        (
            lambda: delays.ephemeral_delay("x", delay="1s", to="q", queue_type="classic", grace="0s"),
            "the grace is zero",
        ),
        (lambda: delays.delayed_message_exchange("x", bindings={"q": ["a"]}, type="x-random"), "type='x-random'"),
        (lambda: delays.private_publisher_delay("x", to="x", delay="1s"), "also the shared one"),
        (lambda: delays.private_publisher_delay("x", to="y", delay="4000d"), "between 1 ms"),
        (lambda: rpc.rpc("q", reply_queue="r"), "direct replies have no queue"),
        (lambda: rpc.rpc("q", replies="fixed", instances=["a"]), "no queues for instances"),
        (lambda: rpc.rpc("q", replies="fixed", expires="1m"), "no queue that expires"),
        (lambda: rpc.rpc("q", replies="fixed", reply_queue="q"), "also the request queue"),
        (lambda: rpc.rpc("q", replies="instance"), "no instance is given"),
        (lambda: rpc.rpc("q", replies="pigeon"), "replies='pigeon'"),
        (lambda: primitives.bounded_queue("q", dead_letter_queue="d"), "no limit is given"),
        (lambda: primitives.bounded_queue("q", dead_letter_queue="q", max_length=1), "both the queue and"),
        (lambda: primitives.central_dead_letters("x", queues=["q"], dead_letter_queue="q"), "both a queue and"),
        (lambda: primitives.waiting_queue("q", to="q"), "both the waiting queue and"),
        (lambda: primitives.catch_all("x", queues=["q"], unmatched="x"), "both the exchange and"),
    ],
)
def test_invalid_or_contradictory_arguments_are_refused(build: Callable[[], Topology], expected: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        build()
    assert expected in str(caught.value)
