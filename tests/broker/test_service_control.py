"""Endpoints of bide beside ServiceControl, which pika plays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

import bide
from bide.endpoint import service_control as service_control_messages
from bide.errors import DeclarationMismatchError, InvalidInputError
from bide.runtime.host import HOST, host_id
from tests.broker.dotnet import Endpoint, Incoming, Routing, ServiceControl, Transport
from tests.broker.endpoints import Recorder, running
from tests.polling import wait_until

if TYPE_CHECKING:
    from tests.support import Vhost

NEVER = bide.Retry(immediate=0, delays=())


@pytest.fixture(params=["conventional", "direct"])
async def transport(vhost: Vhost, request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    """The .NET side, in both routing topologies, with the queues of ServiceControl."""
    transport = await asyncio.to_thread(Transport, vhost.url, request.param)
    await asyncio.to_thread(transport.create_queue, "error")
    yield transport
    await asyncio.to_thread(transport.close)


def failures(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The log levels of heartbeats that could not be sent."""
    return [record.levelno for record in caplog.records if "cannot send a heartbeat" in record.getMessage()]


def layout(routing: Routing) -> bide.NServiceBus:
    return bide.NServiceBus(routing=routing, levels=3)


async def test_a_retry_by_servicecontrol_starts_afresh_and_is_confirmed(vhost: Vhost, transport: Transport) -> None:
    recorder, service_control = Recorder(), ServiceControl(transport)
    works = False
    app = bide.Endpoint("orders", retry=bide.Retry(immediate=0, delays=["1s", "1s"]), observers=[recorder])

    @app.handler
    async def handle(_: bide.Message) -> None:
        if not works:
            raise ValueError("the shop is closed")

    async with (
        bide.connect(vhost.url, infrastructure=layout(transport.routing)) as client,
        running(app, client, recorder),
    ):
        await client.publish(b"x", to="orders", message_id="m1", headers={"list": ["a", 1], "table": {"b": 2}})
        failed = await asyncio.to_thread(service_control.ingest)
        await recorder.until("parked")
        assert recorder.kinds() == ["retried", "retried", "parked"]
        await asyncio.to_thread(service_control.retry, failed, "u1")
        failed = await asyncio.to_thread(service_control.ingest)
        await recorder.until("parked", count=2)
        assert recorder.kinds() == ["retried", "retried", "parked"] * 2
        assert failed.headers["ServiceControl.Retry.UniqueMessageId"] == "u1"
        works = True
        await asyncio.to_thread(service_control.retry, failed, "u1")
        assert await asyncio.to_thread(service_control.confirmed) == "u1"
        await recorder.until("processed")


async def test_a_missing_confirmation_queue_does_not_hold_the_message(
    vhost: Vhost, transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, queues = Recorder(), ("gone", "nsb.v2.delay-level-00", "x" * 300)
    app = bide.Endpoint("orders", observers=[recorder], retry=bide.Retry(delays=()))
    app.handler(lambda _: None)
    async with bide.connect(vhost.url, infrastructure=layout(transport.routing)) as client:
        async with running(app, client, recorder):
            for queue in queues:
                headers: dict[str, Any] = {"ServiceControl.Retry.UniqueMessageId": "u"}
                headers["ServiceControl.Retry.AcknowledgementQueue"] = queue
                await client.publish(b"x", to="orders", headers=headers)
            await recorder.until("processed", count=len(queues))
        assert await client.message_count("orders") == 0
    logged = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert len([one for one in logged if "cannot confirm the retry" in one.message]) == len(queues)


async def test_without_the_layout_of_nservicebus_nothing_is_confirmed(vhost: Vhost) -> None:
    recorder = Recorder()
    app = bide.Endpoint("orders", observers=[recorder], retry=bide.Retry(delays=()))
    app.handler(lambda _: None)
    async with bide.connect(vhost.url) as client:
        async with running(app, client, recorder):
            headers = {
                "ServiceControl.Retry.UniqueMessageId": "u",
                "ServiceControl.Retry.AcknowledgementQueue": "error",
            }
            await client.publish(b"x", to="orders", headers=headers)
            await recorder.until("processed")
        assert await client.message_count("error") == 0


async def test_handled_messages_are_copied_to_the_audit_queue(vhost: Vhost, transport: Transport) -> None:
    recorder, sales = Recorder(), Endpoint(transport, "Sales")
    app = bide.Endpoint("orders", name="Orders", audit_queue="audit", observers=[recorder], retry=NEVER)

    @app.handler
    async def handle(message: bide.Message) -> None:
        if message.body == b'"fails"':
            raise ValueError("no")

    async with (
        bide.connect(vhost.url, infrastructure=layout(transport.routing)) as client,
        running(app, client, recorder),
    ):
        sent = await asyncio.to_thread(sales.send, "orders", "Shop.PlaceOrder, Shop", "fails")
        failed = await asyncio.to_thread(transport.receive, "error")
        sent = await asyncio.to_thread(sales.send, "orders", "Shop.PlaceOrder, Shop", {"order": 1})
        audited = await asyncio.to_thread(transport.receive, "audit")
        await client.publish(b"native", to="orders", message_id="m1", headers={"NServiceBus.Retries": "2"})
        native = await asyncio.to_thread(transport.receive, "audit")
    headers = audited.headers
    assert (audited.json(), audited.message_id) == ({"order": 1}, sent["NServiceBus.MessageId"])
    assert headers == sent | {name: one for name, one in headers.items() if name not in sent}
    assert (headers["NServiceBus.ProcessingEndpoint"], headers["NServiceBus.ProcessingMachine"]) == ("Orders", HOST)
    assert headers["NServiceBus.TimeSent"] <= headers["NServiceBus.ProcessingStarted"]
    assert headers["NServiceBus.ProcessingStarted"] <= headers["NServiceBus.ProcessingEnded"]
    # ServiceControl knows an instance of an endpoint by these two, in audits, failures and heartbeats.
    for name, value in (("$.diagnostics.hostid", host_id("Orders")), ("$.diagnostics.hostdisplayname", HOST)):
        assert headers[name] == failed.headers[name] == value
    assert "ServiceControl.Retry.AcknowledgementSent" not in headers
    assert native.headers["NServiceBus.MessageId"] == "m1"
    assert native.headers["NServiceBus.Retries"] == "2"


async def test_the_audit_copy_of_a_confirmed_retry_says_so(vhost: Vhost, transport: Transport) -> None:
    recorder, service_control = Recorder(), ServiceControl(transport)
    app = bide.Endpoint("orders", audit_queue="audit", observers=[recorder], retry=NEVER)
    app.handler(lambda _: None)
    async with (
        bide.connect(vhost.url, infrastructure=layout(transport.routing)) as client,
        running(app, client, recorder),
    ):
        failed = Incoming("m1", {"NServiceBus.FailedQ": "orders", "NServiceBus.MessageId": "m1"}, b"x", "")
        await asyncio.to_thread(service_control.retry, failed, "u1")
        audited = await asyncio.to_thread(transport.receive, "audit")
        # Otherwise the audit instance of ServiceControl would confirm the retry.
        assert audited.headers["ServiceControl.Retry.AcknowledgementSent"] == "true"
        assert await asyncio.to_thread(service_control.confirmed) == "u1"


async def test_heartbeats_register_an_endpoint_and_keep_it_alive(
    vhost: Vhost, transport: Transport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "bide.endpoint.service_control")
    monkeypatch.setattr(service_control_messages, "HEARTBEAT", timedelta(milliseconds=200))
    # None expires before it is received.
    monkeypatch.setattr(service_control_messages, "_LIFETIME", 1500)
    recorder = Recorder()
    queue = "Particular.ServiceControl"
    app = bide.Endpoint("orders", name="Orders", heartbeat_queue=queue, observers=[recorder], retry=NEVER)
    app.handler(lambda _: None)
    async with (
        bide.connect(vhost.url, infrastructure=layout(transport.routing)) as client,
        running(app, client, recorder),
    ):
        # The endpoint works without ServiceControl, and registers when it comes.
        await client.publish(b"x", to="orders")
        await recorder.until("processed")
        await asyncio.to_thread(wait_until, lambda: len(failures(caplog)) >= 3, "three heartbeats have failed")
        assert [level for level in failures(caplog) if level == logging.WARNING] == [logging.WARNING]
        await asyncio.to_thread(transport.create_queue, queue)
        registered, *beats = [await asyncio.to_thread(transport.receive, queue) for _ in range(3)]
    kind = "ServiceControl.Plugin.Heartbeat.Messages"
    assert registered.headers["NServiceBus.EnclosedMessageTypes"] == f"{kind}.RegisterEndpointStartup"
    own = {"HostId": str(UUID(host_id("Orders"))), "Host": HOST}
    values = registered.json()
    assert own | {"Endpoint": "Orders", "HostDisplayName": HOST} == {
        name: values[name] for name in (*own, "Endpoint", "HostDisplayName")
    }
    assert datetime.fromisoformat(values["StartedAt"]).utcoffset() == timedelta(0)
    assert values["HostProperties"]["Machine"] == HOST
    for beat in beats:
        assert beat.headers["NServiceBus.EnclosedMessageTypes"] == f"{kind}.EndpointHeartbeat"
        assert beat.headers["NServiceBus.ContentType"] == "application/json"
        executed = beat.json().pop("ExecutedAt")
        assert beat.json() == own | {"EndpointName": "Orders", "ExecutedAt": executed}
    assert datetime.fromisoformat(beats[0].json()["ExecutedAt"]) < datetime.fromisoformat(beats[1].json()["ExecutedAt"])


async def test_other_layouts_refuse_audits_and_heartbeats(client: bide.Client) -> None:
    for options in ({"audit_queue": "audit"}, {"heartbeat_queue": "Particular.ServiceControl"}):
        app = bide.Endpoint("orders", retry=NEVER, **options)  # type: ignore[arg-type]  # options by name
        app.handler(lambda _: None)
        with pytest.raises(InvalidInputError, match=r"bide\.NServiceBus"):
            await app.run(client)
        with pytest.raises(InvalidInputError, match="own"):
            bide.Endpoint("orders", **dict.fromkeys(options, "orders"))  # type: ignore[arg-type]  # options by name


@pytest.mark.parametrize("is_installed", [True, False])
async def test_an_endpoint_may_be_refused_the_exchange_of_its_error_queue(vhost: Vhost, *, is_installed: bool) -> None:
    broker, recorder = vhost.broker, Recorder()
    broker.add_user("orders", "secret")
    configure, read = r"^(orders|nsb\.v2\..*)$", r"^(orders|nsb\.v2\..*)$"
    broker.set_permissions(
        vhost.name, "orders", configure=configure, write=r"^(orders|error|nsb\.v2\..*|amq\.default)$", read=read
    )
    error = bide.Topology(queues=[bide.Queue.quorum("error")])
    if is_installed:
        error |= bide.Topology([bide.Exchange("error", "fanout")], bindings=[bide.Binding("error", "error")])
    app = bide.Endpoint("orders", observers=[recorder], retry=NEVER)

    @app.handler
    async def fail(_: bide.Message) -> None:
        raise ValueError("no")

    url = broker.vhost_url(vhost.name, user="orders", password="secret")
    try:
        async with bide.connect(vhost.url, infrastructure=layout("conventional")) as client:
            await client.declare(error)
            async with (
                bide.connect(url, infrastructure=layout("conventional")) as limited,
                running(app, limited, recorder),
            ):
                await client.publish(b"x", to="orders")
                await recorder.until("parked")
            assert await client.message_count("error") == 1
    finally:
        broker.delete_user("orders")


async def test_an_exchange_of_another_type_with_the_name_of_the_error_queue_is_reported(vhost: Vhost) -> None:
    app = bide.Endpoint("orders", retry=NEVER)
    app.handler(lambda _: None)
    async with bide.connect(vhost.url, infrastructure=layout("conventional")) as client:
        await client.declare(bide.Topology([bide.Exchange("error", "topic")]))
        with pytest.raises(DeclarationMismatchError, match="error"):
            await app.run(client)
