"""Sharing a broker with NServiceBus.

There is no .NET here: its side is played by literal names, arguments, keys and headers, as NServiceBus.RabbitMQ 11.2
declares and sends them, over bare AMQP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import bide
from bide.admin.live_topology import read_topology
from bide.admin.locate import management_api
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.amqp.url import BrokerUrl
from bide.errors import InvalidNameError, TargetNotFoundError
from bide.recoverability.history import nservicebus_time
from tests.broker.receiving import connected, eventually, receive

if TYPE_CHECKING:
    from tests.support import Vhost

LEVELS = 28
THOUSAND_SECONDS = "0." * 18 + "1.1.1.1.1.0.1.0.0.0."


@pytest.fixture
async def dotnet(vhost: Vhost) -> AsyncIterator[Channel]:
    """The channel of the .NET side."""
    async with connected(vhost.url) as connection:
        yield await connection.channel(confirms=True)


def stem_of(version: int) -> str:
    """What the names of the infrastructure begin with."""
    return "nsb.v2" if version == 2 else "nsb"


async def build(channel: Channel, version: int) -> None:
    """What an endpoint of NServiceBus declares when it starts."""
    stem = stem_of(version)
    kind: dict[str, str | int] = (
        {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
        if version == 2
        else {"x-queue-mode": "lazy"}
    )
    below = f"{stem}.delay-delivery"
    await channel.declare_exchange(bide.Exchange(below, "topic"))
    for level in range(LEVELS):
        name = f"{stem}.delay-level-{level:02}"
        stars = "*." * (27 - level)
        await channel.declare_exchange(bide.Exchange(name, "topic"))
        await channel.declare_queue(
            bide.Queue(name, arguments={**kind, "x-message-ttl": 2**level * 1000, "x-dead-letter-exchange": below})
        )
        await channel.bind(bide.Binding(name, name, f"{stars}1.#"))
        await channel.bind(bide.Binding(name, below, f"{stars}0.#", "exchange"))
        below = name


async def endpoint(channel: Channel, name: str, routing: str, version: int = 2) -> None:
    """What an endpoint of NServiceBus declares for its own queue."""
    delivery = f"{stem_of(version)}.delay-delivery"
    await channel.declare_queue(bide.Queue.quorum(name))
    if routing == "conventional":
        await channel.declare_exchange(bide.Exchange(name, "fanout"))
        await channel.bind(bide.Binding(name, name))
        await channel.bind(bide.Binding(delivery, name, f"#.{name}", "exchange"))
    else:
        await channel.bind(bide.Binding(delivery, name, f"#.{name}"))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("first", ["bide", "dotnet"])
async def test_bide_and_dotnet_declare_the_same_topology(
    vhost: Vhost, dotnet: Channel, version: Any, first: str
) -> None:
    async with bide.connect(vhost.url) as client:
        topology = bide.NServiceBus(version=version).topology()
        if first == "bide":
            await client.declare(topology)
            await build(dotnet, version)
        else:
            await build(dotnet, version)
            await client.declare(topology)
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
        found = await read_topology(api, vhost.name)
    assert set(found.queues) == set(topology.queues)
    assert {one for one in found.exchanges if not one.name.startswith("amq.")} == set(topology.exchanges)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("routing", ["conventional", "direct"])
async def test_a_dotnet_endpoint_receives_messages_delayed_by_bide(
    vhost: Vhost, dotnet: Channel, routing: Any, version: Any
) -> None:
    await build(dotnet, version)
    await endpoint(dotnet, "Sales", routing, version)
    await endpoint(dotnet, "Billing.Sales", routing, version)
    infrastructure = bide.NServiceBus(version=version, routing=routing)
    async with bide.connect(vhost.url, infrastructure=infrastructure) as client:
        receipt = await client.publish(json={"order": 1}, to="Sales", delay="2.2s", correlation_id="c")
        assert receipt.hops == 2
        deliveries: list[Delivery] = []

        async def is_delivered() -> bool:
            deliveries.extend(filter(None, [await dotnet.get("Sales")]))
            return bool(deliveries)

        await eventually(is_delivered)
        assert await dotnet.get("Billing.Sales") is None
    (delivery,) = deliveries
    headers = delivery.values["headers"]
    assert delivery.routing_key == "0." * 26 + "1.1.Sales"
    assert headers["NServiceBus.Transport.RabbitMQ.DelayInSeconds"] == 3
    assert headers["NServiceBus.MessageId"] == delivery.values["message_id"] == receipt.message_id
    assert headers["NServiceBus.CorrelationId"] == "c"
    assert headers["NServiceBus.TimeSent"].endswith(" Z")
    assert delivery.values["content_type"] == headers["NServiceBus.ContentType"] == "application/json"
    assert delivery.body == b'{"order":1}'


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("routing", ["conventional", "direct"])
async def test_bide_receives_messages_delayed_by_a_dotnet_endpoint(
    vhost: Vhost, dotnet: Channel, routing: Any, version: Any
) -> None:
    infrastructure = bide.NServiceBus(version=version, routing=routing)
    await build(dotnet, version)
    async with bide.connect(vhost.url, infrastructure=infrastructure) as client:
        topology = bide.Topology(queues=[bide.Queue.quorum("ours")])
        channel = await (await Connection.open(BrokerUrl.parse(vhost.url))).channel()
        await channel.declare_queue(topology.queues[0])
        for exchange in infrastructure.endpoint_topology("ours").exchanges:
            await channel.declare_exchange(exchange)
        for binding in infrastructure.endpoint_topology("ours").bindings:
            await channel.bind(binding)
        # A .NET sender binds the destination, as it does before every delayed send.
        kind: Any = "exchange" if routing == "conventional" else "queue"
        await dotnet.bind(bide.Binding(f"{stem_of(version)}.delay-delivery", "ours", "#.ours", kind))
        due = datetime.now(UTC) + timedelta(seconds=2)
        await dotnet.publish(
            exchange=f"{stem_of(version)}.delay-level-01",
            routing_key="0." * 26 + "1.0.ours",
            values={
                "message_id": "m1",
                "delivery_mode": 2,
                "headers": {
                    "NServiceBus.MessageId": "m1",
                    "NServiceBus.EnclosedMessageTypes": "Sales.PlaceOrder",
                    "NServiceBus.DeliverAt": nservicebus_time(due),
                    "NServiceBus.Transport.RabbitMQ.DelayInSeconds": 2,
                },
            },
            body=b"<order/>",
        )
        (message,) = await receive(client, "ours", 1)
        assert (message.message_id, message.body) == ("m1", b"<order/>")
        assert (message.exchange, message.routing_key, message.due) == ("", "ours", due)
        assert message.lateness is not None
        assert message.headers == {
            "NServiceBus.MessageId": "m1",
            "NServiceBus.EnclosedMessageTypes": "Sales.PlaceOrder",
            "NServiceBus.DeliverAt": nservicebus_time(due),
        }
        assert isinstance(channel.connection, Connection)
        await channel.connection.close()


async def test_a_receiver_without_delayed_delivery_is_bound_by_the_sender(vhost: Vhost, dotnet: Channel) -> None:
    await dotnet.declare_queue(bide.Queue.quorum("Unaware"))
    await dotnet.declare_exchange(bide.Exchange("Unaware", "fanout"))
    await dotnet.bind(bide.Binding("Unaware", "Unaware"))
    async with bide.connect(vhost.url, infrastructure=bide.NServiceBus()) as client:
        await client.publish(b"x", to="Unaware", delay="1s")
        (message,) = await receive(client, "Unaware", 1)
        assert message.lateness is not None
        assert message.lateness >= timedelta(0)
        with pytest.raises(TargetNotFoundError, match="Missing"):
            await client.publish(b"x", to="Missing", delay="1s")


async def test_an_endpoint_whose_name_is_a_suffix_of_another_gets_only_its_own_messages(
    vhost: Vhost, dotnet: Channel
) -> None:
    async with bide.connect(vhost.url, infrastructure=bide.NServiceBus(routing="direct")) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders"), bide.Queue.quorum("billing.orders")]))
        await client.publish(b"short", to="orders", delay="1s")
        await client.publish(b"long", to="billing.orders", delay="1s")
        (short,) = await receive(client, "orders", 1)
        (long,) = await receive(client, "billing.orders", 1)
        assert (short.body, long.body) == (b"short", b"long")
        assert await dotnet.get("orders") is None
        assert await dotnet.get("billing.orders") is None


async def test_an_address_that_does_not_fit_is_refused_before_anything_is_sent(vhost: Vhost) -> None:
    async with bide.connect(vhost.url, infrastructure=bide.NServiceBus(routing="direct")) as client:
        name = "n" * 200
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(name), bide.Queue.quorum(name[:199])]))
        with pytest.raises(InvalidNameError, match="200 bytes, the limit is 199"):
            await client.publish(b"x", to=name, delay="1s")
        await client.publish(b"x", to=name[:199], delay="1s")
        (message,) = await receive(client, name[:199], 1)
        assert message.routing_key == name[:199]


@pytest.mark.usefixtures("stock_dead_lettering")
@pytest.mark.parametrize("routing", ["conventional", "direct"])
async def test_messages_for_other_exchanges_do_not_stop_those_delayed_by_dotnet(
    vhost: Vhost, dotnet: Channel, routing: Any
) -> None:
    """Forty that no queue takes are more than the stock dead-letter prefetch."""
    await build(dotnet, 2)
    await endpoint(dotnet, "Sales", routing)
    await endpoint(dotnet, "created", routing)
    async with bide.connect(vhost.url, infrastructure=bide.NServiceBus(routing=routing)) as client:
        binding = bide.Binding("plain", "orders", "order.created")
        await client.declare(
            bide.Topology([bide.Exchange("plain", "direct")], [bide.Queue.quorum("orders")], [binding])
        )
        for key in ("order.created", "order.deleted"):
            target: dict[str, Any] = {"exchange": "plain", "routing_key": key}
            await asyncio.gather(*(client.publish(key, **target, delay="1s") for _ in range(40)))
        assert {one.routing_key for one in await receive(client, "orders", 40)} == {"order.created"}
        await dotnet.publish(
            exchange="nsb.v2.delay-level-00",
            routing_key="0." * 27 + "1.Sales",
            values={"message_id": "m1", "delivery_mode": 2, "headers": {"NServiceBus.MessageId": "m1"}},
            body=b"",
        )
        (message,) = await receive(client, "Sales", 1)
        assert message.message_id == "m1"
    # What is for the key "order.created" is not for the endpoint of that name's last word.
    assert await dotnet.get("created") is None


async def test_the_first_applicable_level_is_entered(vhost: Vhost, dotnet: Channel) -> None:
    async with bide.connect(vhost.url, infrastructure=bide.NServiceBus(routing="direct")) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        await client.publish(b"x", to="q", delay="1000s")
        delivery = await dotnet.get("nsb.v2.delay-level-09")
        assert delivery is not None
        assert (delivery.exchange, delivery.routing_key) == ("nsb.v2.delay-level-09", THOUSAND_SECONDS + "q")
        dotnet.nack(delivery.delivery_tag)
