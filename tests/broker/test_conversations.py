"""Replies, commands and events from handlers to NServiceBus endpoints, played by pika."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import bide
from bide.errors import InvalidInputError, TargetNotFoundError, UnsupportedTargetError
from bide.runtime.host import HOST
from tests.broker.dotnet import QUORUM, Endpoint, Incoming, Transport
from tests.broker.endpoints import Recorder, running
from tests.broker.receiving import receive, state_of

if TYPE_CHECKING:
    from tests.support import Vhost

SAGA = ("11111111-2222-3333-4444-555555555555", "Shop.OrderPolicy, Shop")
PLACE = "Shop.PlaceOrder, Shop.Messages, Version=1.0.0.0, Culture=neutral, PublicKeyToken=null"
NEVER = bide.Retry(immediate=0, delays=())


@dataclass
class Side:
    """Both sides: pika plays the endpoint ``Sales``, and a client with the layout of NServiceBus is open."""

    transport: Transport
    sales: Endpoint
    client: bide.Client

    async def receive(self, queue: str = "Sales") -> Incoming:
        return await asyncio.to_thread(self.transport.receive, queue)

    async def send(self, address: str, **options: Any) -> dict[str, str]:
        return await asyncio.to_thread(self.sales.send, address, PLACE, {"order": 1}, **options)


@pytest.fixture(params=["conventional", "direct"])
async def side(vhost: Vhost, request: pytest.FixtureRequest) -> AsyncIterator[Side]:
    """Both sides in both routing topologies."""
    transport = await asyncio.to_thread(Transport, vhost.url, request.param)
    for queue in ("Sales", "error"):
        await asyncio.to_thread(transport.create_queue, queue)
    layout = bide.NServiceBus(routing=request.param, levels=3)
    async with bide.connect(vhost.url, infrastructure=layout) as client:
        yield Side(transport, Endpoint(transport, "Sales"), client)
    await asyncio.to_thread(transport.close)


async def test_a_reply_finds_the_saga_that_asked(side: Side) -> None:
    recorder = Recorder()
    app = bide.Endpoint("billing-queue", name="Billing", observers=[recorder], retry=NEVER)

    @app.handler(type="Shop.PlaceOrder")
    async def bill(message: bide.Message) -> None:
        await message.reply(json={"paid": True}, type="Shop.OrderBilled", headers={"mine": "1"})

    async with running(app, side.client, recorder):
        sent = await side.send("billing-queue", saga=SAGA)
        answer = await side.receive()
    headers = answer.headers
    assert answer.json() == {"paid": True}
    assert headers["NServiceBus.MessageIntent"] == "Reply"
    assert (headers["NServiceBus.SagaId"], headers["NServiceBus.SagaType"]) == SAGA
    assert headers["NServiceBus.ConversationId"] == sent["NServiceBus.ConversationId"]
    assert headers["NServiceBus.RelatedTo"] == sent["NServiceBus.MessageId"]
    assert headers["NServiceBus.CorrelationId"] == sent["NServiceBus.CorrelationId"]
    assert headers["NServiceBus.ReplyToAddress"] == "billing-queue"
    assert (headers["NServiceBus.OriginatingEndpoint"], headers["NServiceBus.OriginatingMachine"]) == ("Billing", HOST)
    assert len(headers["$.diagnostics.originating.hostid"]) == 32
    assert headers["NServiceBus.EnclosedMessageTypes"] == "Shop.OrderBilled"
    assert headers["NServiceBus.ContentType"] == "application/json"
    assert headers["NServiceBus.TimeSent"].endswith(" Z")
    assert headers["mine"] == "1"
    assert answer.message_id == headers["NServiceBus.MessageId"] != sent["NServiceBus.MessageId"]
    assert not {name for name in headers if "OriginatingSaga" in name}


async def test_a_command_continues_the_conversation(side: Side) -> None:
    recorder = Recorder()
    app = bide.Endpoint("billing", observers=[recorder], retry=NEVER)

    @app.handler
    async def bill(message: bide.Message) -> None:
        await message.send(json={}, to="Sales", type="Shop.ShipOrder", delay="1s")

    async with running(app, side.client, recorder):
        sent = await side.send("billing", saga=SAGA)
        command = await side.receive()
    headers = command.headers
    assert headers["NServiceBus.MessageIntent"] == "Send"
    assert headers["NServiceBus.ConversationId"] == sent["NServiceBus.ConversationId"]
    assert headers["NServiceBus.RelatedTo"] == sent["NServiceBus.MessageId"]
    assert headers["NServiceBus.DeliverAt"] > headers["NServiceBus.TimeSent"]
    assert headers["NServiceBus.ReplyToAddress"] == "billing"
    assert not {name for name in headers if "Saga" in name}
    assert command.exchange.startswith("nsb.v2.delay-")


async def test_a_message_from_elsewhere_starts_a_conversation(side: Side) -> None:
    """A native message has no headers of NServiceBus."""
    await side.client.declare(bide.Topology(queues=[bide.Queue.quorum("native")]))
    channel = side.transport.channel
    await asyncio.to_thread(channel.basic_publish, "", "native", b"{}")
    async with side.client.consume("native") as messages:
        message = await anext(messages)
        with pytest.raises(InvalidInputError, match="no address for replies"):
            await message.reply(json={})
        await message.reply(json={}, to="Sales", message_id="m1")
        await message.ack()
    headers = (await side.receive()).headers
    assert headers["NServiceBus.ConversationId"] == headers["NServiceBus.CorrelationId"] == "m1"
    assert "NServiceBus.RelatedTo" not in headers
    assert headers["NServiceBus.OriginatingEndpoint"] == headers["NServiceBus.ReplyToAddress"] == "native"


async def test_a_reply_goes_to_queues_only(side: Side) -> None:
    await side.client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
    await side.client.publish(b"", to="q", reply_to="nsb.v2.delay-level-00")
    async with side.client.consume("q") as messages:
        message = await anext(messages)
        with pytest.raises(InvalidInputError, match="exchange"):
            await message.reply(b"", exchange="amq.topic")
        with pytest.raises(InvalidInputError, match="delay-level-00"):
            await message.reply(b"")
        await message.ack()


def test_the_synchronous_twin_replies_and_publishes(vhost: Vhost) -> None:
    transport = Transport(vhost.url)
    transport.create_queue("Sales")
    transport.create_queue("billing")
    sent = Endpoint(transport, "Sales").send("billing", PLACE, {"order": 1}, saga=SAGA)
    with bide.connect_sync(vhost.url, infrastructure=bide.NServiceBus(levels=3)) as client:
        subscription = client.infrastructure().event_routing()
        assert subscription is not None
        client.declare(subscription.subscription(bide.MessageType("Shop.Billed"), "Sales"), external={"Sales"})
        with client.consume("billing") as messages:
            message = next(messages)
            message.reply(json=1, type="Shop.OrderBilled")
            message.send(json=2, to="Sales", type="Shop.ShipOrder")
            message.publish("Shop.Billed", json=3)
            message.ack()
    received = [transport.receive("Sales") for _ in range(3)]
    transport.close()
    assert [one.json() for one in received] == [1, 2, 3]
    assert [one.headers["NServiceBus.MessageIntent"] for one in received] == ["Reply", "Send", "Publish"]
    assert {one.headers["NServiceBus.ConversationId"] for one in received} == {sent["NServiceBus.ConversationId"]}


async def test_with_other_layouts_a_reply_has_the_correlation_id_only(client: bide.Client, vhost: Vhost) -> None:
    queues = [bide.Queue.quorum("requests"), bide.Queue.quorum("answers")]
    await client.declare(bide.Topology(queues=queues))
    await client.publish(b"", to="requests", message_id="m1", reply_to="answers")
    async with client.consume("requests") as messages:
        message = await anext(messages)
        await message.reply(b"yes")
        await message.send(b"go", to="answers")
        with pytest.raises(UnsupportedTargetError, match=r"bide\.NServiceBus"):
            await message.publish("Shop.OrderPlaced", b"")
        await message.ack()
    reply, command = await receive(client, "answers", 2)
    assert (reply.body, reply.correlation_id, dict(reply.headers)) == (b"yes", "m1", {})
    assert (command.body, command.correlation_id, dict(command.headers)) == (b"go", None, {})


async def test_undelayed_messages_follow_the_bindings_of_the_endpoint(vhost: Vhost) -> None:
    """As during ``queue migrate-to-quorum``, which binds another queue to the exchange of the endpoint."""
    transport = await asyncio.to_thread(Transport, vhost.url)
    await asyncio.to_thread(transport.create_queue, "Sales")
    channel = transport.channel
    layout = bide.NServiceBus(levels=3)
    async with bide.connect(vhost.url, infrastructure=layout) as client:
        await client.publish(b"1", to="Sales")
        async for _ in client.publish_many([bide.OutgoingMessage(b"2", to="Sales")]):
            pass
        channel.queue_declare("Sales-migration-temp", durable=True, arguments=QUORUM)
        channel.queue_bind("Sales-migration-temp", "Sales", "")
        channel.queue_unbind("Sales", "Sales", "")
        await client.publish(b"3", to="Sales")
        async for _ in client.publish_many([bide.OutgoingMessage(b"4", to="Sales")]):
            pass
        received = [one.body for one in await receive(client, "Sales", 2)]
        moved = [one.body for one in await receive(client, "Sales-migration-temp", 2)]
    await asyncio.to_thread(transport.close)
    assert (received, moved) == ([b"1", b"2"], [b"3", b"4"])


async def test_queues_without_an_exchange_are_reached_directly(vhost: Vhost) -> None:
    """Queues that are not those of an endpoint: for replies, or declared by other programs."""
    async with bide.connect(vhost.url, infrastructure=bide.NServiceBus(levels=3)) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("plain")]))
        private = await client.private_queue()
        for queue in ("plain", private):
            await client.publish(b"1", to=queue)
            await client.publish(b"2", to=queue)
            assert [one.body for one in await receive(client, queue, 2)] == [b"1", b"2"]


async def test_an_exchange_that_is_deleted_or_comes_later_is_noticed(vhost: Vhost) -> None:
    transport = await asyncio.to_thread(Transport, vhost.url)
    async with bide.connect(vhost.url, infrastructure=bide.NServiceBus(levels=3)) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("Sales")]))
        await client.publish(b"directly", to="Sales")
        await asyncio.to_thread(transport.create_queue, "Sales")
        # What a client knows is 30 s old at most.
        (await state_of(client))._addresses.forget()
        (await state_of(client)).forget_targets()
        await client.publish(b"by the exchange", to="Sales")
        transport.channel.exchange_delete("Sales")
        for _ in range(2):
            try:
                await client.publish(b"after", to="Sales")
                break
            except TargetNotFoundError:
                continue
        found = await receive(client, "Sales", 3)
    await asyncio.to_thread(transport.close)
    assert [(one.body, one.exchange) for one in found] == [
        (b"directly", ""),
        (b"by the exchange", "Sales"),
        (b"after", ""),
    ]


async def test_an_endpoint_declares_the_exchange_of_the_error_queue(side: Side) -> None:
    recorder = Recorder()
    app = bide.Endpoint("orders", error_queue="faults", observers=[recorder], retry=NEVER)

    @app.handler
    async def fail(_: bide.Message) -> None:
        raise ValueError("no")

    async with running(app, side.client, recorder):
        # As ServiceControl addresses the queue, for example to import failed messages again.
        await asyncio.to_thread(side.transport.dispatch, "faults", {}, b"by its address", "m1")
        assert (await side.receive("faults")).body == b"by its address"
        await side.client.publish(b"x", to="orders")
        assert (await side.receive("faults")).headers["NServiceBus.FailedQ"] == "orders"
