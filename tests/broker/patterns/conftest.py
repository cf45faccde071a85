"""Fixtures: a client and a bare connection, on a virtual host per test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import bide
from bide.amqp.connection import Connection
from tests.broker.conftest import SMALL_CLOCK


@pytest.fixture
async def client(vhost_url: str) -> AsyncIterator[bide.Client]:
    """A client with a small ``Clock``, which nothing has put on the broker yet."""
    async with bide.connect(vhost_url, infrastructure=SMALL_CLOCK) as client:
        yield client


@pytest.fixture
def connection(vhost_connection: Connection) -> Connection:
    """A bare connection to the same virtual host, for what the client does not do."""
    return vhost_connection
