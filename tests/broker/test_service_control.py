"""Endpoints of bide beside ServiceControl, which pika plays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

import bide
from tests.broker.dotnet import Routing, ServiceControl, Transport
from tests.broker.endpoints import Recorder, running

if TYPE_CHECKING:
    from tests.support import Vhost


@pytest.fixture(params=["conventional", "direct"])
async def transport(vhost: Vhost, request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    """The .NET side, in both routing topologies, with the queues of ServiceControl."""
    transport = await asyncio.to_thread(Transport, vhost.url, request.param)
    await asyncio.to_thread(transport.create_queue, "error")
    yield transport
    await asyncio.to_thread(transport.close)


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
        assert recorder.kinds() == ["retried", "retried", "parked"]
        await asyncio.to_thread(service_control.retry, failed, "u1")
        failed = await asyncio.to_thread(service_control.ingest)
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
