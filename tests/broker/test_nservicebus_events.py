"""Events between endpoints of bide and NServiceBus, along a hierarchy of types."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

import bide
from bide.errors import UnsupportedTargetError
from tests.broker.dotnet import Transport
from tests.broker.endpoints import Recorder, running

if TYPE_CHECKING:
    from tests.support import Vhost

IORDER = bide.MessageType("Shop.IOrder", is_interface=True)
ORDER = bide.MessageType("Shop.Order", interfaces=[IORDER])
RUSH = bide.MessageType("Shop.RushOrder", base=ORDER)
NEVER = bide.Retry(immediate=0, delays=())

ENCLOSED = "Shop.RushOrder, Shop;Shop.Order, Shop;Shop.IOrder, Shop"
RUSH_KEY = "Shop-IOrder.Shop-Order.Shop-IOrder.Shop-RushOrder"
"""What NServiceBus makes of these types, in its words."""


def declare_types(transport: Transport) -> None:
    """What a .NET publisher of ``Shop.RushOrder`` declares before it publishes."""
    if transport.routing == "direct":
        return
    for name in ("Shop:RushOrder", "Shop:Order", "System:Object", "Shop:IOrder"):
        transport.channel.exchange_declare(name, "fanout", durable=True)
    for lower, higher in (
        ("Shop:RushOrder", "Shop:Order"),
        ("Shop:Order", "System:Object"),
        ("Shop:RushOrder", "Shop:IOrder"),
    ):
        transport.channel.exchange_bind(higher, lower, "")


def subscribe(transport: Transport, queue: str, name: str, key: str) -> None:
    """Subscribe a .NET endpoint to a type."""
    transport.create_queue(queue)
    if transport.routing == "conventional":
        transport.channel.exchange_declare(name, "fanout", durable=True)
        transport.channel.exchange_bind(queue, name, "")
    else:
        transport.channel.queue_bind(queue, "amq.topic", key)


@pytest.fixture(params=["conventional", "direct"])
async def transport(vhost: Vhost, request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    """The .NET side in both routing topologies."""
    transport = await asyncio.to_thread(Transport, vhost.url, request.param)
    yield transport
    await asyncio.to_thread(transport.close)


def layout(transport: Transport) -> bide.NServiceBus:
    return bide.NServiceBus(routing=transport.routing, levels=3)


@pytest.mark.parametrize("kind", [RUSH, ORDER, IORDER, bide.MessageType("NServiceBus.IEvent", is_interface=True)])
@pytest.mark.parametrize("first", ["bide", "dotnet"])
async def test_a_subscriber_of_any_type_above_receives_a_dotnet_event_once(
    vhost: Vhost, transport: Transport, kind: bide.MessageType, first: str
) -> None:
    recorder, seen = Recorder(), list[str]()
    app = bide.Endpoint("Shipping", subscribe=[kind, IORDER], observers=[recorder], retry=NEVER)

    @app.handler(type="Shop.IOrder")
    async def ship(message: bide.Message) -> None:
        seen.append(message.body.decode())

    if first == "dotnet":
        await asyncio.to_thread(declare_types, transport)
    async with bide.connect(vhost.url, infrastructure=layout(transport)) as client:
        async with running(app, client, recorder):
            await asyncio.to_thread(declare_types, transport)
            headers = {"NServiceBus.EnclosedMessageTypes": ENCLOSED, "NServiceBus.MessageIntent": "Publish"}
            exchange, key = ("Shop:RushOrder", "") if transport.routing == "conventional" else ("amq.topic", RUSH_KEY)
            await asyncio.to_thread(transport.publish, exchange, key, headers, b"rush", "m1")
            await recorder.until("processed")
        assert await client.message_count("Shipping") == 0
    assert seen == ["rush"]


async def test_dotnet_subscribers_of_the_types_above_receive_an_event(vhost: Vhost, transport: Transport) -> None:
    types = {"rush": ("Shop:RushOrder", f"{RUSH_KEY}.#"), "order": ("Shop:Order", "Shop-IOrder.Shop-Order.#")}
    types |= {"iorder": ("Shop:IOrder", "Shop-IOrder.#"), "all": ("System:Object", "#")}
    types |= {"other": ("Shop:Paid", "Shop-Paid.#")}
    for queue, (name, key) in types.items():
        await asyncio.to_thread(subscribe, transport, queue, name, key)
    recorder = Recorder()
    app = bide.Endpoint("Sales", observers=[recorder], retry=NEVER)

    @app.handler
    async def accept(message: bide.Message) -> None:
        await message.publish(RUSH, json={"rush": True})
        await message.publish("Shop.WithoutSubscribers", json={})

    async with (
        bide.connect(vhost.url, infrastructure=layout(transport)) as client,
        running(app, client, recorder),
    ):
        await client.publish(b"x", to="Sales")
        await recorder.until("processed")
    for queue in ("rush", "order", "iorder", "all"):
        event = await asyncio.to_thread(transport.receive, queue)
        assert event.json() == {"rush": True}
        assert event.headers["NServiceBus.EnclosedMessageTypes"] == "Shop.RushOrder;Shop.Order;Shop.IOrder"
        assert event.headers["NServiceBus.MessageIntent"] == "Publish"
    assert transport.channel.queue_declare("other", passive=True).method.message_count == 0


async def test_an_event_is_published_again_after_its_exchange_was_deleted(vhost: Vhost) -> None:
    transport = await asyncio.to_thread(Transport, vhost.url)
    await asyncio.to_thread(transport.create_queue, "in")
    recorder = Recorder()
    app = bide.Endpoint("Sales", observers=[recorder], subscribe="Shop.Paid", retry=bide.Retry(delays=()))
    app.handler(type="Shop.Paid")(lambda _: None)

    @app.handler
    async def accept(message: bide.Message) -> None:
        await message.publish("Shop.Paid", json={})

    async with (
        bide.connect(vhost.url, infrastructure=bide.NServiceBus(levels=3)) as client,
        running(app, client, recorder),
    ):
        await client.publish(b"x", to="Sales")
        await recorder.until("processed", count=2)
        await asyncio.to_thread(transport.channel.exchange_delete, "Shop:Paid")
        await client.publish(b"x", to="Sales")
        await recorder.until("processed", count=3)
    assert transport.channel.exchange_declare("Shop:Paid", passive=True)
    await asyncio.to_thread(transport.close)


async def test_other_layouts_refuse_subscriptions(client: bide.Client) -> None:
    app = bide.Endpoint("shipping", subscribe=[ORDER], retry=NEVER)
    app.handler(lambda _: None)
    with pytest.raises(UnsupportedTargetError, match="nservicebus"):
        await app.run(client)
