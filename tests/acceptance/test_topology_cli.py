"""``bide topology`` as a subprocess, on a real broker."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import bide
from bide.patterns.catalogue import PATTERNS, find_pattern
from bide.topology.rendering import from_definitions, graphviz, mermaid
from tests.acceptance.test_cli import Program

if TYPE_CHECKING:
    from tests.support import Vhost


def test_list_prints_one_json_array(program: Program) -> None:
    listed: list[dict[str, Any]] = json.loads(program.ok("topology", "list", "--json"))
    assert [one["name"] for one in listed] == [one.name for one in PATTERNS]
    assert all(one["caveat"] and one["example"] for one in listed[:18])
    options = {one["name"]: one for one in listed[0]["options"]}
    assert options["--queue"]["repeatable"]
    assert options["--exchange"]["required"]
    plain = program.ok("topology", "list").splitlines()
    assert plain[17].split()[:2] == ["18", "rpc"]
    assert len(plain) == len(PATTERNS)


def test_show_prints_mermaid_dot_and_definitions(program: Program) -> None:
    sample = find_pattern("11").sample_topology()
    show = ("topology", "show", "if-else", "--sample")
    assert program.ok(*show, "--mermaid") == mermaid(sample)
    assert program.ok(*show, "--dot") == graphviz(sample)
    assert from_definitions(json.loads(program.ok(*show, "--definitions"))) == sample
    assert "exchange  clients (direct) alternate-exchange='clients.else1'" in program.ok(*show)


def test_a_pattern_is_applied_compared_and_destroyed(program: Program, vhost: Vhost) -> None:
    options = ("--exchange", "news", "--queue", "a", "--queue", "b")
    missing = program.run("topology", "diff", "1", *options)
    assert missing.returncode == 1
    assert missing.stdout.decode().splitlines()[0] == "- missing exchange  news (fanout)"
    assert "1 exchange, 2 queues, 2 bindings" in program.ok("topology", "apply", "1", *options)
    assert program.ok("topology", "diff", "1", *options) == "fanout-broadcast is on the broker as it should be\n"
    # Existing objects with other properties are reported and left unchanged.
    other = ("--exchange", "news", "--queue", "a", "--queue-type", "classic")
    compared = program.run("topology", "diff", "1", *other, "--json")
    assert compared.returncode == 1
    found = json.loads(compared.stdout)
    assert found["different"] == [
        {"kind": "queue", "name": "a", "differences": {"x-queue-type": {"found": "quorum", "wanted": None}}}
    ]
    assert found["of_others"] == ["news -> queue b"]
    assert "exists with" in program.fails(1, "topology", "apply", "1", *other)
    # Nothing goes that holds messages.
    program.ok("send", "hello", "--exchange", "news")
    assert "2 messages wait in" in program.fails(1, "topology", "destroy", "1", *options, "--yes")
    removed = json.loads(program.ok("topology", "destroy", "1", *options, "--yes", "--force", "--json"))
    assert removed == {"exchanges": 1, "queues": 2, "messages": 2}
    gone = json.loads(program.ok("topology", "destroy", "1", *options, "--yes", "--json"))
    assert gone == {"exchanges": 0, "queues": 0, "messages": 0}
    assert vhost.broker.management.call("GET", "queues", vhost.name) == []


@pytest.mark.parametrize("kind", ["policy", "operator policy"])
def test_a_policy_on_the_queues_of_an_event_bus_does_not_pass_diff(program: Program, vhost: Vhost, kind: str) -> None:
    """With a TTL on the retry queue the broker would bring messages back without end."""
    options = ("event-bus", "--exchange", "events", "--queue", "orders", "--delay", "30s")
    program.ok("topology", "apply", *options)
    put = (kind.replace("policy", "policies").replace(" ", "-"), vhost.name, "housekeeping")
    body = {"pattern": "^orders", "apply-to": "queues", "definition": {"message-ttl": 1000}}
    assert program.ok("topology", "diff", *options) == "event-bus is on the broker as it should be\n"
    vhost.broker.management.call("PUT", *put, body=body)
    compared = program.run("topology", "diff", *options)
    assert compared.returncode == 1
    (line,) = compared.stdout.decode().splitlines()
    assert line.startswith(f"~ the {kind} 'housekeeping' sets message-ttl to 1000 on 4 of 4 queues ('orders', ")
    (text,) = json.loads(program.run("topology", "diff", *options, "--json").stdout)["policies"]
    assert line == f"~ {text}"
    vhost.broker.management.call("DELETE", *put)


def test_destroy_asks_for_confirmation(program: Program) -> None:
    done = program.run("topology", "destroy", "5", "--queue", "q", stdin=b"n\n")
    assert done.returncode == 1
    assert b"Delete 0 exchanges and 1 queue on" in done.stderr
    assert b"guest:" not in done.stderr


def test_explain_follows_a_message_through_a_pattern(program: Program) -> None:
    ask = ("topology", "explain", "--exchange", "travel", "--pattern", "layered-exchanges --sample")
    text = program.ok(*ask, "--key", "extras.pet", "--header", "entity.type=pet", "--header", "change.type=new")
    assert text.splitlines() == [
        "exchange travel (topic)",
        "  ✗ exchange bookings: its pattern 'booking.#' does not match: 'extras.pet' lacks the word 'booking'",
        "  ✓ exchange changes: its pattern '#' matches the key 'extras.pet'",
        "exchange changes (headers)",
        "  ✓ queue pets: it requires all of change.type='new', entity.type='pet'",
        "queues: pets",
    ]
    unmatched = program.run(*ask, "--key", "extras.pet", "--json")
    assert unmatched.returncode == 1
    assert json.loads(unmatched.stdout)["queues"] == []


def test_explain_follows_a_message_through_definitions(program: Program) -> None:
    definitions = program.ok("topology", "show", "carbon-copies", "--sample", "--definitions")
    ask = ("topology", "explain", "--exchange", "desk", "--definitions", "-", "--key", "front", "--json")
    assert json.loads(program.ok(*ask, "--cc", "back", stdin=definitions.encode()))["queues"] == ["back", "front"]
    assert json.loads(program.ok(*ask, "--bcc", "back", stdin=definitions.encode()))["queues"] == ["back", "front"]
    assert "is not JSON" in program.run(*ask, stdin=b"{").stderr.decode()


def test_several_virtual_hosts_in_definitions_require_vhost(program: Program) -> None:
    queues = [{"name": name, "vhost": vhost} for name, vhost in (("q", "one"), ("q", "two"), ("r", "two"))]
    definitions = json.dumps({"queues": queues}).encode()
    ask = ("topology", "explain", "--exchange", "", "--key", "r", "--definitions", "-")
    several = program.run(*ask, stdin=definitions)
    assert several.returncode == 2
    assert "holds the virtual hosts 'one', 'two': choose one with --vhost" in several.stderr.decode()
    assert program.run(*ask, "--vhost", "one", stdin=definitions).returncode == 1
    assert program.ok(*ask, "--vhost", "two", stdin=definitions).splitlines()[-1] == "queues: r"
    missing = program.run(*ask, "--vhost", "three", stdin=definitions)
    assert missing.returncode == 2
    assert "has no virtual host 'three': choose one of 'one', 'two'" in missing.stderr.decode()


async def test_explain_reads_the_broker_and_its_policies(program: Program, vhost: Vhost) -> None:
    topology = bide.Topology(
        [bide.Exchange("in", "topic"), bide.Exchange("rest", "fanout")],
        [bide.Queue("a"), bide.Queue("b")],
        [bide.Binding("in", "a", "a.#"), bide.Binding("rest", "b")],
    )
    async with bide.connect(vhost.url) as client:
        await client.declare(topology)
        ask = ("topology", "explain", "--from-broker", "--exchange", "in", "--key", "x")
        assert program.run(*ask).returncode == 1
        vhost.broker.management.call(
            "PUT",
            *("policies", vhost.name, "catch"),
            body={"pattern": "^in$", "apply-to": "exchanges", "definition": {"alternate-exchange": "rest"}},
        )
        way = json.loads(program.ok(*ask, "--json"))
        assert way["queues"] == ["b"]
        # As the broker itself does.
        await client.publish("x", exchange="in", routing_key="x")
        async with client.consume("b") as messages:
            await (await anext(messages)).ack()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("show", "1"), "needs --exchange TEXT, --queue NAME"),
        (("show", "fanout"), "there is no pattern 'fanout'"),
        (("show", "1", "--sample", "--queue", "a"), "--sample sets all options"),
        (("show", "6", "--exchange", "x", "--queue", "q", "--partitions", "two"), "not a whole number"),
        (("show", "18", "--queue", "q", "--replies", "direct", "--reply-queue", "r"), "direct replies have no queue"),
        (("show", "1", "--exchange", "x", "--queue", "q", "--queue", "q"), "named 2 times"),
        (("show", "exclusive-queue", "--sample", "--definitions"), "is exclusive"),
        (("apply", "exclusive-queue", "--sample"), "exclusive to this command's connection"),
        (("show", "1", "--sample", "--mermaid", "--dot"), "--mermaid and --dot are two output formats"),
        (("explain", "--exchange", "x"), "explain needs one topology"),
        (("explain", "--exchange", "x", "--pattern", " "), "--pattern is empty"),
        (("explain", "--exchange", "x", "--pattern", "5 --sample", "--key", "k" * 256), "the limit is 255"),
        (("explain", "--exchange", "x", "--pattern", "5 --sample", "--vhost", "v"), "--vhost needs --definitions"),
        (("explain", "--exchange", "x", "--pattern", "'"), "cannot be read"),
        (("explain", "--exchange", "x", "--pattern", "5 --colour red"), "No such option"),
        (("explain", "--exchange", "x", "--header", "a", "--pattern", "5 --sample"), "NAME=VALUE"),
    ],
)
def test_invalid_topology_commands_are_refused(program: Program, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in program.fails(2, "topology", *arguments)


def test_missing_exchanges_and_exchange_types_are_errors(program: Program) -> None:
    assert "'x' is not in the topology" in program.fails(
        1, "topology", "explain", "--exchange", "x", "--pattern", "5 --sample"
    )
    assert "no exchange type 'x-delayed-message'" in program.fails(1, "topology", "apply", "15", "--sample")
