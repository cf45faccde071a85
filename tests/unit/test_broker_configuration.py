"""The configuration of a private broker."""

from __future__ import annotations

import socket
from dataclasses import asdict, replace
from pathlib import Path

from bide.local_broker.configuration import (
    PLUGINS,
    BrokerNode,
    Ports,
    advanced_config,
    enabled_plugins,
    environment,
    inetrc,
    is_free,
    rabbitmq_conf,
)

PORTS = Ports(amqp=20_001, management=20_002, stream=20_003, distribution=20_004, epmd=20_005)


def test_every_listener_is_on_loopback() -> None:
    lines = rabbitmq_conf(ports=PORTS, address="127.0.0.1", password="secret", plugins=PLUGINS, extra="").splitlines()
    assert "listeners.tcp.local = 127.0.0.1:20001" in lines
    assert {"management.tcp.ip = 127.0.0.1", "management.tcp.port = 20002"} <= set(lines)
    assert "stream.listeners.tcp.local = 127.0.0.1:20003" in lines
    assert "default_pass = secret" in lines


def test_disabled_plugins_are_not_configured() -> None:
    """RabbitMQ refuses keys of plugins that are not enabled."""
    text = rabbitmq_conf(ports=PORTS, address="127.0.0.1", password="secret", plugins=["rabbitmq_management"], extra="")
    assert "stream" not in text
    assert "management.tcp.port = 20002" in text


def test_configuration_of_the_caller_comes_last() -> None:
    """Of a key that is there twice, RabbitMQ takes the last."""
    text = rabbitmq_conf(
        ports=PORTS, address="127.0.0.1", password="secret", plugins=PLUGINS, extra="\nmax_message_size = 1000\n\n"
    )
    assert text.endswith("\nmax_message_size = 1000\n")


def test_erlang_files_hold_valid_terms() -> None:
    assert advanced_config(dead_letter_prefetch=7) == (
        "[{rabbit, [{dead_letter_worker_consumer_prefetch, 7}, "
        "{dead_letter_worker_publisher_confirm_timeout, 20000}]}].\n"
    )
    assert enabled_plugins(["rabbitmq_management", "rabbitmq_stream"]) == "[rabbitmq_management,rabbitmq_stream].\n"


def test_the_environment_keeps_the_broker_in_its_folder() -> None:
    values = environment(
        folder=Path("/b"), ports=PORTS, node=BrokerNode(), path="/usr/bin", more={"RABBITMQ_LOG": "debug"}
    )
    assert values["BIDE_BROKER_FOLDER"] == "/b"
    assert values["HOME"] == "/b/home"
    assert values["PATH"] == "/usr/bin"
    assert values["RABBITMQ_LOG"] == "debug"
    assert (values["ERL_EPMD_ADDRESS"], values["ERL_EPMD_PORT"]) == ("127.0.0.1", "20005")
    assert "inet_dist_use_interface {127,0,0,1}" in values["ERL_AFLAGS"]
    assert not any(value.startswith("/etc") for value in values.values())


def test_ports_are_free_distinct_and_below_the_ephemeral_range() -> None:
    chosen = list(asdict(Ports.choose()).values())
    assert len(set(chosen)) == len(chosen) == 5
    assert all(20_000 <= port <= 32_767 and is_free(port) for port in chosen)


def test_ports_are_reused_while_they_are_free() -> None:
    before = Ports.choose()
    assert Ports.choose(before=before) == before
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", before.stream))
        listener.listen()
        assert before.taken() == [before.stream]
        after = Ports.choose(before=before)
    assert after.stream != before.stream
    assert not set(asdict(Ports.choose(before=before, exclude=asdict(before).values())).values()) & set(
        asdict(before).values()
    )
    assert replace(after, stream=before.stream) == before


def test_each_host_of_a_cluster_has_one_address() -> None:
    """Of two lines for the same address, Erlang takes the last only."""
    assert inetrc([BrokerNode("a@localhost"), BrokerNode("b@localhost")]) == (
        '{host, {127,0,0,1}, ["localhost"]}.\n{lookup, [file, native]}.\n'
    )
    assert inetrc([BrokerNode("a@n1", "10.1.2.1", "x1"), BrokerNode("b@n2", "10.1.2.2", "x2")]) == (
        '{host, {10,1,2,1}, ["n1"]}.\n{host, {10,1,2,2}, ["n2"]}.\n{lookup, [file, native]}.\n'
    )


def test_programs_of_a_node_run_in_its_network_namespace() -> None:
    assert BrokerNode().inside("rabbitmqctl") == ["rabbitmqctl"]
    assert BrokerNode("a@n1", "10.1.2.1", "x1").inside("rabbitmqctl") == [
        "nsenter",
        "--net=/run/netns/x1",
        "rabbitmqctl",
    ]
