"""A whole conversation between endpoints of bide, NServiceBus and ServiceControl.

There is no .NET here: pika plays it after its source (:mod:`tests.broker.dotnet`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import bide
from tests.broker.dotnet import Endpoint, ServiceControl, Transport
from tests.broker.endpoints import Recorder, running

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support import Vhost

SAGA = ("11111111-2222-3333-4444-555555555555", "Sales.OrderPolicy, Sales")
PLACE_ORDER = "Shop.PlaceOrder, Shop, Version=1.0.0.0;Shop.IOrderCommand, Shop, Version=1.0.0.0"
PLACED = bide.MessageType("Shop.OrderPlaced", interfaces=[bide.MessageType("Shop.IOrderEvent", is_interface=True)])


async def do(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Let the .NET side do something."""
    return await asyncio.to_thread(function, *arguments, **options)


@pytest.fixture(params=["conventional", "direct"])
async def transport(vhost: Vhost, request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    """The .NET side, which starts first and declares what it needs."""
    transport = await do(Transport, vhost.url, request.param)
    await do(transport.build_delays)
    await do(transport.create_endpoint, "Sales")
    yield transport
    await do(transport.close)


async def test_a_conversation_from_the_command_to_the_audit(vhost: Vhost, transport: Transport) -> None:
    """A delayed command fails, is retried with a delay, is parked, and succeeds when ServiceControl retries it. Its
    reply finds the saga, which retries it with a delay and audits it."""
    sales, service_control, recorder = Endpoint(transport, "Sales"), ServiceControl(transport), Recorder()
    works, seen = False, list[bide.Message]()
    app = bide.Endpoint(
        "Billing",
        retry=bide.Retry(immediate=0, delays=["1s"]),
        audit_queue="audit",
        subscribe=[PLACED],
        observers=[recorder],
    )

    @app.handler(type="Shop.IOrderCommand")
    async def bill(message: bide.Message) -> None:
        seen.append(message)
        if not works:
            raise ConnectionError("the bank is closed (until 9)")
        await message.reply(json={"billed": message.json()["order"]}, type="Shop.OrderBilled")
        await message.publish(PLACED, json={"order": message.json()["order"]})

    @app.handler(type="Shop.IOrderEvent")
    async def note(message: bide.Message) -> None:
        seen.append(message)

    layout = bide.NServiceBus(routing=transport.routing)
    async with bide.connect(vhost.url, infrastructure=layout) as client, running(app, client, recorder):
        # The command, delayed by .NET.
        before = datetime.now(UTC)
        sent = await do(sales.send, "Billing", PLACE_ORDER, {"order": 1}, saga=SAGA, delay=timedelta(seconds=1))
        failed = await do(service_control.ingest)
        await recorder.until("parked")
        assert recorder.kinds() == ["retried", "parked"]
        first, retried = seen
        assert (first.exchange, first.routing_key) == ("", "Billing")
        assert first.due is not None
        assert before < first.due <= first.received_at
        assert retried.history.retries == 1
        assert retried.history.first_due is not None
        assert abs(retried.history.first_due - first.due) <= timedelta(milliseconds=1)
        # The failure, as ServicePulse groups and shows it.
        place = f"{__name__}.{test_a_conversation_from_the_command_to_the_audit.__name__}.<locals>.bill"
        assert failed.headers["NServiceBus.ExceptionInfo.StackTrace"].startswith(f"   at {place}() in {__file__}:line ")
        assert failed.headers["NServiceBus.ProcessingEndpoint"] == failed.headers["NServiceBus.FailedQ"] == "Billing"
        assert failed.headers["NServiceBus.EnclosedMessageTypes"] == PLACE_ORDER
        assert {name: failed.headers[name] for name in sent} == sent
        # The operator retries twice: first too early.
        await do(service_control.retry, failed, "u1")
        failed = await do(service_control.ingest)
        await recorder.until("parked", count=2)
        assert recorder.kinds() == ["retried", "parked"] * 2
        works = True
        await do(service_control.retry, failed, "u1")
        assert await do(service_control.confirmed) == "u1"
        # The reply to the saga.
        reply = await do(transport.receive, "Sales")
        assert (reply.headers["NServiceBus.SagaId"], reply.headers["NServiceBus.SagaType"]) == SAGA
        assert reply.headers["NServiceBus.ConversationId"] == sent["NServiceBus.ConversationId"]
        assert reply.headers["NServiceBus.CorrelationId"] == sent["NServiceBus.CorrelationId"]
        assert reply.headers["NServiceBus.RelatedTo"] == sent["NServiceBus.MessageId"]
        assert reply.headers["NServiceBus.MessageIntent"] == "Reply"
        # .NET copies all headers of bide's messages, also into its delayed retry and its audit.
        await do(sales.retry_later, reply, timedelta(seconds=1), retries=1)
        again = await do(transport.receive, "Sales")
        assert again.json() == reply.json() == {"billed": 1}
        await do(sales.audit, again)
        audits = {one.json().get("order"): one for one in [await do(transport.receive, "audit") for _ in range(3)]}
        await recorder.until("processed", count=2)
    audited = audits[1]
    assert audited.headers["NServiceBus.ConversationId"] == sent["NServiceBus.ConversationId"]
    assert audits[None].headers["NServiceBus.ProcessingEndpoint"] == "Sales"
    event = seen[-1]
    assert event.headers["NServiceBus.MessageIntent"] == "Publish"
    assert event.headers["NServiceBus.ConversationId"] == sent["NServiceBus.ConversationId"]


async def test_a_message_that_bide_delayed_survives_the_copies_of_dotnet(vhost: Vhost, transport: Transport) -> None:
    """bide delays a command to .NET, which retries it with a delay, parks it, and gets it back from ServiceControl."""
    sales, service_control = Endpoint(transport, "Sales"), ServiceControl(transport)
    async with bide.connect(vhost.url, infrastructure=bide.NServiceBus(routing=transport.routing)) as client:
        headers = {"list": ["a", 1], "NServiceBus.EnclosedMessageTypes": "Shop.PlaceOrder"}
        sent = await client.publish(json={"order": 1}, to="Sales", delay="1s", headers=headers)
        command = await do(transport.receive, "Sales")
        await do(sales.retry_later, command, timedelta(seconds=1), retries=1)
        again = await do(transport.receive, "Sales")
        parked = again.headers | {"NServiceBus.FailedQ": "Sales", "NServiceBus.TimeOfFailure": "now"}
        await do(transport.dispatch, "error", parked, again.body, again.message_id)
        await do(service_control.retry, await do(service_control.ingest), "u2")
        final = await do(transport.receive, "Sales")
    assert final.json() == {"order": 1}
    assert final.headers["NServiceBus.MessageId"] == sent.message_id
    assert final.headers["list"] == "a;1"
    assert "NServiceBus.Retries" not in final.headers
