"""Fixtures: a virtual host with a small ``Clock``, shared by the tests of a module."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import timedelta

import pika
import pytest

import bide
from bide.admin.infrastructure import install
from bide.admin.locate import management_api
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.local_broker import LocalBroker
from bide.management.api import ManagementApi
from tests.broker.receiving import connected
from tests.support import Vhost
from tests.timeouts import TIMEOUT

# By default, pika gives up opening a connection after 15 s.
pika.connection.Parameters.DEFAULT_STACK_TIMEOUT = TIMEOUT

SMALL_CLOCK = bide.Clock(max_delay=timedelta(seconds=20), resolution=timedelta(milliseconds=50))
"""39 digit queues instead of 370: it is applied in a moment, and differs from the full one in nothing else."""

LONG_CLOCK = bide.Clock(max_delay=timedelta(minutes=5), resolution=timedelta(seconds=1))
"""64 digit queues, for messages that have to wait still when the machine has been held up for minutes."""

_TIMEOUT = "dead_letter_worker_publisher_confirm_timeout"
STOCK = {"dead_letter_worker_consumer_prefetch": 32, _TIMEOUT: 180_000}
"""What RabbitMQ does where nothing is configured: 32 messages that nothing takes stop a queue, for three minutes."""

_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def patient_with_the_management_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """Error queues and endpoints wait for the answer of a busy API, and do not assume a delivery limit."""
    monkeypatch.setattr("bide.error_queues.delivery_count._MANAGEMENT_TIMEOUT", TIMEOUT)
    monkeypatch.setattr("bide.endpoint.startup._MANAGEMENT_TIMEOUT", TIMEOUT)


@pytest.fixture(scope="module")
def stock_dead_lettering(broker: LocalBroker) -> Iterator[None]:
    """Dead-letter workers that start while a module runs have RabbitMQ's defaults, and not those of private brokers."""
    usual = _configure(broker, STOCK)
    yield
    _configure(broker, usual)


@pytest.fixture(scope="module")
def clock_url(broker: LocalBroker) -> Iterator[str]:
    """The URL of a virtual host, one per module, that has :data:`SMALL_CLOCK`."""
    name = f"clock-{next(_numbers)}"
    url = broker.add_vhost(name)

    async def put() -> None:
        connection = await Connection.open(BrokerUrl.parse(url))
        await install(connection, SMALL_CLOCK)
        await connection.close()

    asyncio.run(put())
    yield url
    broker.delete_vhost(name)


@pytest.fixture
async def client(clock_url: str) -> AsyncIterator[bide.Client]:
    """A client with :data:`SMALL_CLOCK`."""
    async with bide.connect(clock_url, infrastructure=SMALL_CLOCK) as client:
        yield client


@pytest.fixture
async def connection(clock_url: str) -> AsyncIterator[Connection]:
    """A bare connection to the same virtual host, for what the client does not do."""
    async with connected(clock_url) as connection:
        yield connection


@pytest.fixture
async def api(vhost: Vhost) -> AsyncIterator[ManagementApi]:
    """The management API of a virtual host of its own."""
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
        yield api


@pytest.fixture
async def vhost_connection(vhost: Vhost) -> AsyncIterator[Connection]:
    """A bare connection to a virtual host of its own."""
    async with connected(vhost.idle_url) as connection:
        yield connection


@pytest.fixture
def quick_redelivery(broker: LocalBroker) -> Iterator[None]:
    """Dead-letter workers that start now try again after one second rather than three minutes."""
    usual = _configure(broker, {_TIMEOUT: 1000})
    yield
    _configure(broker, usual)


def limit_messages(broker: LocalBroker, size: int) -> int:
    """Change the largest size of a message on a running broker, and return what it was."""
    setting = "max_message_size"
    return _configure(broker, {setting: size}, also=f"persistent_term:put({setting}, {size})")[setting]


def _configure(broker: LocalBroker, settings: Mapping[str, int], *, also: str = "ok") -> dict[str, int]:
    """Change settings of a running broker, and return what they were; a call takes a second of processor time."""
    before = ", ".join(f"element(2, application:get_env(rabbit, {name}))" for name in settings)
    changes = ", ".join(f"application:set_env(rabbit, {name}, {value})" for name, value in settings.items())
    printed = broker.rabbitmqctl("eval", f"Before = {{{before}}}, {changes}, {also}, Before.")
    return {name: int(value) for name, value in zip(settings, re.findall(r"\d+", printed), strict=True)}
