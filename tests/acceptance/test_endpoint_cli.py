"""``bide endpoint`` on a real broker."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import bide
from tests.acceptance.test_cli import Program
from tests.broker.dotnet import Endpoint, Routing, Transport
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from tests.support import Vhost


@pytest.mark.parametrize("routing", ["conventional", "direct"])
def test_both_sides_can_use_a_created_endpoint_without_declaring(
    vhost: Vhost, program: Program, routing: Routing
) -> None:
    layout = ("--layout", "nservicebus", "--routing", routing)
    subscribe = ("--subscribe", "Shop.OrderBilled")
    create = ("endpoint", "create", "Sales", "--error-queue", "error", "--instance", "a", *subscribe, *layout)
    assert "run 'bide delay apply --layout nservicebus'" in program.fails(1, *create)
    program.ok("delay", "apply", *layout)
    printed = program.ok(*create)
    assert printed.splitlines()[1:] == ["  Sales", "  Sales-a", "  error"]
    # A second time nothing changes.
    found = json.loads(program.ok(*create, "--audit-queue", "audit", "--json"))
    assert found["queues"] == ["Sales", "Sales-a", "error", "audit"]
    events = ["Shop:OrderBilled", "System:Object"]
    assert sorted(found["exchanges"]) == (sorted([*found["queues"], *events]) if routing == "conventional" else [])
    transport = Transport(vhost.url, routing)
    with bide.connect_sync(vhost.url, infrastructure=bide.NServiceBus(routing=routing), declare=False) as client:
        for queue in ("Sales", "Sales-a"):
            client.publish(b'"delayed"', to=queue, delay="1s")
            Endpoint(transport, "Billing").send(queue, "Shop.PlaceOrder", "at once")
            received = {transport.receive(queue).json(), transport.receive(queue).json()}
            assert received == {"delayed", "at once"}
        Endpoint(transport, "Billing").send("Sales", "Shop.PlaceOrder", 1, delay=timedelta(seconds=1))
        assert transport.receive("Sales").json() == 1
    exchange, key = ("Shop:OrderBilled", "") if routing == "conventional" else ("amq.topic", "Shop-OrderBilled")
    transport.publish(exchange, key, {"NServiceBus.EnclosedMessageTypes": "Shop.OrderBilled, Shop"}, b"billed", "m1")
    assert asyncio.run(handled_without_declaring(vhost, routing)) == [b"billed"]
    transport.close()


async def handled_without_declaring(vhost: Vhost, routing: Routing) -> list[bytes]:
    """The event that an endpoint of bide handles, for a user without the permission to declare."""
    seen: list[bytes] = []
    app = bide.Endpoint("Sales", subscribe=["Shop.OrderBilled"], audit_queue="audit", declare=False)

    @app.handler(type="Shop.OrderBilled")
    async def handle(message: bide.Message) -> None:
        seen.append(message.body)
        app.stop()

    vhost.broker.add_user("Sales", "secret")
    vhost.broker.set_permissions(vhost.name, "Sales", configure="^$")
    try:
        url = vhost.broker.vhost_url(vhost.name, user="Sales", password="secret")
        async with bide.connect(url, infrastructure=bide.NServiceBus(routing=routing), declare=False) as client:
            await asyncio.wait_for(app.run(client), TIMEOUT)
    finally:
        vhost.broker.delete_user("Sales")
    return seen


EVENTS = """
import bide

ORDER_EVENT = bide.MessageType("Shop.IOrderEvent", is_interface=True)
BASE = bide.MessageType("Shop.OrderChanged")
ORDER_BILLED = bide.MessageType("Shop.OrderBilled", base=BASE, interfaces=[ORDER_EVENT])
number = 5
"""


@pytest.mark.parametrize("routing", ["conventional", "direct"])
def test_an_endpoint_publishes_described_types_without_declaring(
    vhost: Vhost, program: Program, routing: Routing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And others get the events as their base class and interface."""
    (tmp_path / "events.py").write_text(EVENTS)
    monkeypatch.chdir(tmp_path)
    layout = ("--layout", "nservicebus", "--routing", routing)
    program.ok("delay", "apply", *layout)
    program.ok("endpoint", "create", "Sales", "--error-queue", "error", "--publish", "events:ORDER_BILLED", *layout)
    # The key of direct routing starts with the base class, so its subscribers have to describe it as well.
    program.ok("endpoint", "create", "Archive", "--subscribe", "events:ORDER_BILLED", *layout)
    transport = Transport(vhost.url, routing)
    Endpoint(transport, "Web").send("Sales", "Shop.BillOrder", 1)
    asyncio.run(published_without_declaring(vhost, routing))
    assert transport.receive("Archive").json() == 1
    transport.close()


async def published_without_declaring(vhost: Vhost, routing: Routing) -> None:
    """An endpoint that publishes an event, for a user without the permission to declare."""
    event = bide.MessageType("Shop.IOrderEvent", is_interface=True)
    billed = bide.MessageType("Shop.OrderBilled", base=bide.MessageType("Shop.OrderChanged"), interfaces=[event])
    app = bide.Endpoint("Sales", declare=False)

    @app.handler(type="Shop.BillOrder")
    async def handle(message: bide.Message) -> None:
        await message.publish(billed, json=message.json())
        app.stop()

    vhost.broker.add_user("publisher", "secret")
    vhost.broker.set_permissions(vhost.name, "publisher", configure="^$")
    try:
        url = vhost.broker.vhost_url(vhost.name, user="publisher", password="secret")
        async with bide.connect(url, infrastructure=bide.NServiceBus(routing=routing), declare=False) as client:
            await asyncio.wait_for(app.run(client), TIMEOUT)
    finally:
        vhost.broker.delete_user("publisher")


@pytest.mark.parametrize(
    ("described", "error"),
    [
        ("events:MISSING", "'events:MISSING' cannot be imported: AttributeError"),
        ("nothing_here:A", "'nothing_here:A' cannot be imported: ModuleNotFoundError"),
        ("events:number", "'events:number' is of type int: name a bide.MessageType"),
        ("a,b", "is not the full name of a type"),
    ],
)
def test_types_that_cannot_be_read_are_refused(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: str, error: str
) -> None:
    (tmp_path / "events.py").write_text(EVENTS)
    monkeypatch.chdir(tmp_path)
    for option in ("--subscribe", "--publish"):
        assert error in program.fails(2, "endpoint", "create", "Sales", option, described, "--layout", "nservicebus")


def test_an_endpoint_of_clock_is_created_too(vhost: Vhost, program: Program) -> None:
    program.ok("delay", "apply", "--max-delay", "20s", "--resolution", "1s")
    program.ok("endpoint", "create", "orders", "--type", "classic")

    async def delivered() -> bytes:
        async with bide.connect(vhost.url, declare=False) as client:
            await client.publish(b"x", to="orders", delay="1s")
            async with client.consume("orders") as messages:
                message = await anext(messages)
                await message.ack()
                return message.body

    assert asyncio.run(delivered()) == b"x"


def test_invalid_names_and_other_types_are_refused(vhost: Vhost, program: Program) -> None:
    layout = ("--layout", "nservicebus")
    for option in ("--subscribe", "--publish"):
        assert "nservicebus" in program.fails(2, "endpoint", "create", "Sales", option, "Shop.OrderBilled")
    assert "given twice" in program.fails(2, "endpoint", "create", "q", "--error-queue", "q", *layout)
    assert "*" in program.fails(2, "endpoint", "create", "Sales.*", *layout)
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology([bide.Exchange("nsb.v2.delay-delivery", "topic")], [bide.Queue("Sales")]))
    assert "x-queue-type" in program.fails(1, "endpoint", "create", "Sales", *layout)
