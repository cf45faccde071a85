"""Messages delivered by bide that a .NET endpoint copies and publishes again.

There is no .NET here: pika plays an endpoint that audits. It copies all headers, lists as text, as
NServiceBus.RabbitMQ does, and takes off only what NServiceBus.RabbitMQ takes off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pika
import pika.exceptions
import pytest

import bide
from bide.admin.locate import management_api
from bide.admin.verify import verify
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.error_queues import ErrorQueue, Selection
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.receiving import receive, state_of
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from tests.support import Vhost

AUDIT = "audit"
REMOVED = {"NServiceBus.Transport.RabbitMQ.DelayInSeconds", "x-death", "x-delivery-count"} | {
    f"x-first-death-{what}" for what in ("exchange", "queue", "reason")
}
"""Headers that NServiceBus.RabbitMQ takes off a message that it receives."""

TARGETS: dict[str, dict[str, Any]] = {
    "queue": {"to": "Sales"},
    "isolated queue": {"to": "Sales", "isolated": True},
    "endpoint's exchange": {"exchange": "Sales"},
    "event exchange": {"exchange": "Shop:OrderPlaced"},
    "topic exchange": {"exchange": "amq.topic", "routing_key": "Shop.OrderPlaced"},
}


def as_text(value: Any) -> Any:
    """A header as .NET has it: lists and tables become text."""
    return "~".join(map(str, value)) if isinstance(value, list | dict) else value


class DotnetEndpoint:
    """The endpoint ``Sales``, which puts a copy of every message into the audit queue."""

    def __init__(self, url: str) -> None:
        self._connection = pika.BlockingConnection(pika.URLParameters(url))
        channel = self._channel = self._connection.channel()
        channel.confirm_delivery()
        quorum = {"x-queue-type": "quorum"}
        channel.queue_declare(AUDIT, durable=True, arguments=quorum)
        channel.queue_declare("Sales", durable=True, arguments=quorum)
        for exchange in ("Sales", "Shop:OrderPlaced"):
            channel.exchange_declare(exchange, "fanout", durable=True)
        channel.queue_bind("Sales", "Sales", "")
        channel.exchange_bind("Sales", "Shop:OrderPlaced", "")
        channel.exchange_bind("Sales", "amq.topic", "Shop.*")

    def switch_delayed_delivery_on(self, family: str = "nsb.v2") -> None:
        """Declare the part of the delay infrastructure that shows that it is in use."""
        self._channel.exchange_declare(f"{family}.delay-delivery", "topic", durable=True)
        self._channel.exchange_bind("Sales", f"{family}.delay-delivery", "#.Sales")

    def audit_one(self) -> dict[str, Any]:
        """Receive one message, copy it, and acknowledge it once the copy is confirmed; return the copied headers."""
        messages = self._channel.consume("Sales", inactivity_timeout=TIMEOUT)
        method, properties, body = next(messages)
        assert method is not None, "no message came"
        assert properties is not None
        headers = {name: as_text(value) for name, value in (properties.headers or {}).items() if name not in REMOVED}
        # A broker below 4.0 closes the channel on a CC header that is text.
        copy = pika.BasicProperties(headers=headers, message_id=properties.message_id, delivery_mode=2)
        self._channel.basic_publish("", AUDIT, body or b"", copy, mandatory=True)
        self._channel.basic_ack(method.delivery_tag)
        self._channel.cancel()
        return headers

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
async def dotnet(vhost: Vhost) -> AsyncIterator[DotnetEndpoint]:
    """The endpoint, with delayed delivery off."""
    endpoint = await asyncio.to_thread(DotnetEndpoint, vhost.idle_url)
    yield endpoint
    await asyncio.to_thread(endpoint.close)


@pytest.mark.parametrize("carrier", [None, "CC"])
@pytest.mark.parametrize("family", ["nsb.v2", "nsb"])
async def test_a_delayed_message_does_not_poison_a_dotnet_endpoint(
    vhost: Vhost, dotnet: DotnetEndpoint, family: str, carrier: Any
) -> None:
    """By its queue, or by an exchange: from the first message on, without any setting."""
    await asyncio.to_thread(dotnet.switch_delayed_delivery_on, family)
    async with bide.connect(vhost.url, infrastructure=replace(SMALL_CLOCK, carrier=carrier)) as client:
        for name, target in TARGETS.items():
            await client.publish(name, **target, delay="100ms", headers={"mine": 1}, message_id=name)
            headers = await asyncio.to_thread(dotnet.audit_one)
            assert not {"CC", "BCC"} & headers.keys()
            (copy,) = await receive(client, AUDIT, 1)
            assert (copy.body, copy.message_id, copy.headers["mine"]) == (name.encode(), name, 1)


async def test_bulk_messages_do_not_poison_a_dotnet_endpoint(vhost: Vhost, dotnet: DotnetEndpoint) -> None:
    """Bulk publishing encodes what they share once."""
    await asyncio.to_thread(dotnet.switch_delayed_delivery_on)
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        messages = [bide.OutgoingMessage(f"{number}", to="Sales", delay="100ms") for number in range(3)]
        async for _ in client.publish_many(messages):
            pass
        for _ in messages:
            assert not {"CC", "BCC"} & (await asyncio.to_thread(dotnet.audit_one)).keys()


async def test_an_endpoint_started_later_is_not_poisoned(vhost: Vhost, dotnet: DotnetEndpoint) -> None:
    """The client looks again as often as it binds its targets: when it connects, and every 30 s of use."""
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.publish(b"before", to="Sales", delay="10ms")
        (first,) = await receive(client, "Sales", 1)
        assert first.body == b"before"
        await asyncio.to_thread(dotnet.switch_delayed_delivery_on)
        await forget_what_is_known(client)
        await client.publish(b"after", to="Sales", delay="100ms")
        assert not {"CC", "BCC"} & (await asyncio.to_thread(dotnet.audit_one)).keys()


async def test_an_endpoint_started_during_publishing_is_not_poisoned(vhost: Vhost, dotnet: DotnetEndpoint) -> None:
    """Each message is bound and encoded alike, in bulk and side by side, so none ends in the undeliverable queue."""
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("other")]))

        async def messages() -> AsyncIterator[bide.OutgoingMessage]:
            for number in range(100):
                if number == 50:
                    await asyncio.to_thread(dotnet.switch_delayed_delivery_on)
                    await forget_what_is_known(client)
                yield bide.OutgoingMessage(b"", to=("Sales", "other")[number % 2], delay="100ms")

        assert [outcome.error async for outcome in client.publish_many(messages())] == [None] * 100
        await forget_what_is_known(client)
        await asyncio.gather(*(client.publish(b"", to=("Sales", "other")[n % 2], delay="100ms") for n in range(100)))
        carried = [message.raw.values["headers"] for message in await receive(client, "other", 100)]
        assert not [headers for headers in carried[50:] if {"CC", "BCC"} & headers.keys()]
        assert len(await receive(client, "Sales", 100)) == 100


async def forget_what_is_known(client: bide.Client) -> None:
    """What a client remembers of the broker for 30 s."""
    state = await state_of(client)
    state._nservicebus_checked_until = 0.0
    state._targets.clear()
    state._templates.clear()


async def test_an_undelayed_publisher_does_not_look_for_nservicebus(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what delays messages does, when it sends the first."""
    asked: list[str] = []
    declare = Channel.declare_exchange

    def noted(self: Channel, exchange: bide.Exchange, *, passive: bool = False) -> asyncio.Future[None]:
        asked.append(exchange.name)
        return declare(self, exchange, passive=passive)

    monkeypatch.setattr(Channel, "declare_exchange", noted)
    async with bide.connect(vhost.url, infrastructure=bide.Clock(carrier="CC")) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        for _ in range(2):
            await client.publish(b"", to="q")
        async with client.consume("q") as messages:
            await (await anext(messages)).ack()
        assert asked == []
        await client.publish(b"", to="q", delay="10ms")
        assert [name for name in asked if name.startswith("nsb")] == ["nsb.v2.delay-delivery", "nsb.delay-delivery"]


async def test_without_nservicebus_messages_take_no_extra_hop(vhost: Vhost) -> None:
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
        assert (await client.publish(b"", to="orders", delay="1s")).hops == 1


async def test_a_retry_spread_over_time_does_not_poison_a_dotnet_endpoint(vhost: Vhost, dotnet: DotnetEndpoint) -> None:
    """Messages wait in the error queue, and go back without a delay: even where delayed delivery is off."""
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("error")]))
        headers = {"NServiceBus.FailedQ": "Sales", "NServiceBus.EnclosedMessageTypes": "Shop.PlaceOrder"}
        for number in range(3):
            await client.publish(f"{number}", to="error", message_id=f"m{number}", headers=headers)
        moved = await ErrorQueue(client, "error").retry(Selection(), over="2s")
        assert moved.done == 3
        for _ in range(3):
            assert not {"CC", "BCC"} & (await asyncio.to_thread(dotnet.audit_one)).keys()


async def test_verify_reports_dotnet_targets_without_hidden_keys(
    vhost: Vhost, dotnet: DotnetEndpoint, release: tuple[int, ...]
) -> None:
    """What was bound before NServiceBus came: messages that wait for it still carry the keys."""
    clock = replace(SMALL_CLOCK, carrier="CC")
    async with bide.connect(vhost.url, infrastructure=clock) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("ours")]))
        await client.publish(b"", to="ours", delay="10ms")
        await client.publish(b"", to="Sales", delay="10ms")
        await client.publish(b"", exchange="Shop:OrderPlaced", delay="10ms")
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
        report = await verify(connection, SMALL_CLOCK, api)
        assert not [one for one in report.findings if one.check == "NServiceBus targets"]
        await asyncio.to_thread(dotnet.switch_delayed_delivery_on)
        report = await verify(connection, SMALL_CLOCK, api)
    await connection.close()
    found = [one.text for one in report.findings if one.check == "NServiceBus targets" and one.status == "problem"]
    if release >= (4, 0):
        assert not found
    else:
        assert len(found) == 2
        assert any("the queue 'Sales'" in text for text in found)
        assert any("the exchange 'Shop:OrderPlaced'" in text for text in found)
        assert not any("'ours'" in text for text in found)


async def test_a_dotnet_target_with_hidden_keys_passes_verify(vhost: Vhost, dotnet: DotnetEndpoint) -> None:
    await asyncio.to_thread(dotnet.switch_delayed_delivery_on)
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.publish(b"", to="Sales", delay="10ms")
        await client.publish(b"", exchange="Shop:OrderPlaced", delay="10ms")
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
        report = await verify(connection, SMALL_CLOCK, api)
    await connection.close()
    assert not [one for one in report.findings if one.check == "NServiceBus targets" and one.status == "problem"]
