"""Control characters in names of queues and exchanges, escaped in the output of commands."""

from __future__ import annotations

import pytest

import bide
from bide.topology import Binding, Exchange, Queue, Topology
from tests.generated_input import run_in_process
from tests.support import Vhost

EVIL = "\x1b[31mred\x9b\u202e\x07"


@pytest.fixture
def url(vhost: Vhost) -> str:
    """The URL of a virtual host where queues, exchanges, keys and policies have such names."""
    limits: dict[str, str | int] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    topology = Topology(
        [Exchange(f"x{EVIL}", "topic"), Exchange("shop", "topic")],
        [Queue.quorum(f"q{EVIL}", limits), Queue.quorum("work")],
        [Binding("shop", f"q{EVIL}", f"key.{EVIL}"), Binding("shop", "work", "other")],
    )
    with bide.connect_sync(vhost.url) as client:
        client.declare(topology)
        client.publish(b"", to=f"q{EVIL}", delay="1h")
        client.publish(b"", exchange=f"x{EVIL}", routing_key=EVIL, delay="1h")
    policy = {"pattern": ".*", "definition": {"expires": 86_400_000}, "apply-to": "queues"}
    vhost.broker.management.call("PUT", "policies", vhost.name, f"p{EVIL}", body=policy)
    return vhost.url


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("delay", "verify"), 1),
        (("errors", "stats", "--queue", f"missing{EVIL}"), 1),
        (("topology", "explain", "--from-broker", "--exchange", "shop", "--key", f"key.{EVIL}"), 0),
        (("topology", "explain", "--from-broker", "--exchange", "shop", "--key", "other", "--all"), 0),
        (("topology", "diff", "point-to-point", "--queue", f"q{EVIL}"), 1),
    ],
    ids=lambda one: " ".join(one[:2]) if isinstance(one, tuple) else str(one),
)
def test_control_characters_of_names_on_the_broker_are_escaped(
    vhost: Vhost, url: str, command: tuple[str, ...], code: int, options: tuple[str, ...]
) -> None:
    where = ("--url", url, "--management-url", vhost.broker.management_url)
    outcome = run_in_process([*command, *where, *options])
    assert outcome.code == code, outcome
    shown = outcome.out + outcome.err
    assert all(one.isprintable() or one == "\n" for one in shown), outcome
    assert "[31mred" in shown, outcome
