"""Invalid arguments, refused by errors of bide."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import bide
from bide.admin.locate import stream_port
from bide.amqp.handshake import release_of
from bide.amqp.url import BrokerUrl
from bide.client.message import Message
from bide.durations import parse_delay
from bide.errors import (
    InvalidDelayError,
    InvalidDueTimeError,
    InvalidInputError,
    InvalidNameError,
    InvalidTopologyError,
    InvalidUrlError,
    UndecodableMessageError,
)
from bide.management.endpoint import parse_management_url
from bide.patterns.building import milliseconds
from bide.recoverability.decision import Park, RetryLater
from bide.recoverability.failure import Failure
from bide.testing import MemoryBroker
from bide.topology.rendering import from_definitions


@pytest.mark.parametrize("url", ["amqp://[::1", "http://[", "http://h:²", "http://h:99999", "", "\ud800"])
def test_a_management_url_that_cannot_be_read_is_refused(url: str) -> None:
    with pytest.raises(InvalidUrlError):
        parse_management_url(url, BrokerUrl.parse("amqp://localhost"))


@pytest.mark.parametrize("url", [5, b"amqp://localhost", ["amqp://localhost"], 0.5])
def test_a_broker_url_that_is_not_text_is_refused(url: Any) -> None:
    with pytest.raises(InvalidUrlError, match="not text"):
        bide.connect(url)


@pytest.mark.parametrize("resolution", [timedelta.max, timedelta(days=9_999_999), timedelta.min])
def test_a_resolution_near_the_longest_timedelta_does_not_overflow(resolution: timedelta) -> None:
    with pytest.raises(InvalidDelayError):
        bide.WaitingHall(resolution=resolution)
    with pytest.raises(InvalidDelayError):
        bide.Clock(resolution=resolution)


@pytest.mark.parametrize("delay", [timedelta.max, timedelta.min, timedelta(days=999_999_999), timedelta(days=999_999)])
@pytest.mark.parametrize("infrastructure", [bide.Clock(), bide.WaitingHall(), bide.NServiceBus(), bide.Celery()])
async def test_delays_near_the_longest_timedelta_do_not_overflow(
    delay: timedelta, infrastructure: bide.DelayInfrastructure
) -> None:
    async with MemoryBroker() as broker, broker.connect(infrastructure=infrastructure) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        with pytest.raises((InvalidDelayError, InvalidDueTimeError)):
            await client.publish(b"", to="q", delay=delay)
        with pytest.raises(InvalidDelayError):
            await client.publish(b"", to="q", expiration=delay)


LONG = (timedelta.max, timedelta(days=999_999_999, microseconds=1), "999999999d1s")
"""Longer than the longest delay: their negatives, by which they are rounded up, are no timedelta."""


@pytest.mark.parametrize("delay", LONG, ids=str)
def test_a_delay_that_cannot_be_rounded_up_is_refused_when_parsed(delay: timedelta | str) -> None:
    for use in (
        parse_delay,
        lambda value: milliseconds("wait", value),
        lambda value: bide.Retry(delays=[value]),
        lambda value: bide.Retry(give_up_after=value),
        lambda value: bide.BrokerRetry(first="1s", longest=value, times=1),
        lambda value: bide.linear(value, times=1),
        lambda value: bide.exponential("1s", times=1, longest=value),
    ):
        with pytest.raises(InvalidDelayError, match="longer than 999999999 d"):
            use(delay)


def test_the_longest_delay_does_not_overflow() -> None:
    longest = timedelta(days=999_999_999)
    assert parse_delay(longest) == parse_delay("999999999d") == longest
    assert bide.exponential("1s", times=9, factor=1000, longest=longest)[-1] == longest
    jittered = bide.Retry(immediate=0, delays=[longest] * 20, jitter=1, give_up_after=longest)
    assert jittered.longest_delay == longest
    for year in (1, 9999):
        for number in range(20):
            failure = Failure(
                endpoint="e",
                queue="q",
                error=ValueError(),
                attempt=1,
                delayed_retries=number,
                first_failed_at=datetime(year, 6, 1, tzinfo=UTC),
                failed_at=datetime(2026, 6, 1, tzinfo=UTC),
            )
            decision = jittered(failure)
            assert isinstance(decision, RetryLater | Park)
            assert not isinstance(decision, RetryLater) or decision.delay <= longest
    arguments = bide.BrokerRetry(first=longest, longest=longest, times=1).queue_arguments
    assert arguments["x-delayed-retry-max"] == 999_999_999 * 86_400_000


@pytest.mark.parametrize("name", [[], None, 5, b"q", "", "\ud800", "q" * 256])
async def test_an_invalid_queue_name_is_refused(name: Any) -> None:
    async with MemoryBroker() as broker, broker.connect() as client:
        with pytest.raises(InvalidNameError):
            await client.exists(name)


@pytest.mark.parametrize("value", [None, 5, [], {"queues": []}, bide.Queue("q")])
async def test_a_value_that_is_not_a_topology_is_refused(value: Any) -> None:
    async with MemoryBroker() as broker, broker.connect() as client:
        with pytest.raises(InvalidTopologyError, match="give a Topology"):
            await client.declare(value)
        with pytest.raises(InvalidTopologyError, match="give a Topology"):
            await client.destroy(value)


@pytest.mark.parametrize("body", [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000])
async def test_a_body_of_deep_json_does_not_exhaust_the_stack(body: bytes) -> None:
    async with MemoryBroker() as broker, broker.connect() as client:
        await client.declare(bide.Topology(queues=[bide.Queue("q")]))
        await client.publish(body, to="q")
        async with client.consume("q") as messages:
            message: Message = await anext(messages)
        with pytest.raises(UndecodableMessageError, match="is not JSON"):
            message.json()


@pytest.mark.parametrize("document", [{"queues": 5}, {"exchanges": None}, {"bindings": "x"}, {"queues": {"name": "q"}}])
def test_definitions_whose_parts_are_not_lists_are_refused(document: Any) -> None:
    with pytest.raises(InvalidInputError, match="not a list"):
        from_definitions(document)


def test_a_digit_that_is_not_ascii_is_not_parsed_as_a_number() -> None:
    assert release_of({"version": "4.²"}) == (4,)
    assert release_of({"version": "٣.1"}) == ()
    with pytest.raises(InvalidUrlError, match="give a port"):
        stream_port("amqp://localhost", {"BIDE_STREAM_PORT": "²"})
    for text in ("²s", "1²s", "P²D"):
        with pytest.raises(InvalidDelayError):
            bide.Clock(max_delay=parse_delay(text))


def test_a_client_is_refused_in_a_second_event_loop() -> None:
    with MemoryBroker() as broker:

        async def opened() -> bide.Client:
            client: bide.Client = await broker.connect()
            return client

        async def used(client: bide.Client) -> None:
            for work in (client.publish(b"", to="q"), client.exists("q"), client.release()):
                with pytest.raises(InvalidInputError, match="another event loop"):
                    await work
            with pytest.raises(InvalidInputError, match="another event loop"):
                async with client.consume("q") as messages:
                    await anext(messages)
            with pytest.raises(InvalidInputError, match="another event loop"):
                await client.close()

        first = asyncio.new_event_loop()
        try:
            client = first.run_until_complete(opened())
            asyncio.run(used(client))
            first.run_until_complete(client.close())
        finally:
            first.close()


def test_a_sync_client_refuses_calls_that_would_block_its_own_thread() -> None:
    with MemoryBroker() as broker, broker.connect_sync() as client:

        async def used() -> None:
            # It blocks this loop, as any blocking call does, and works.
            assert client.release()
            with pytest.raises(InvalidInputError, match="another event loop"):
                await client.client.exists("q")

        asyncio.run(used())

        async def own_thread() -> None:
            with pytest.raises(InvalidInputError, match="in its own thread"):
                client.release()

        client.wait_for(own_thread(), timeout="60s")
