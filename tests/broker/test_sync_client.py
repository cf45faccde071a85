"""The synchronous client against a broker."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

import bide
from bide.errors import BulkPublishError, InvalidInputError
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.receiving import fresh
from tests.support import Vhost
from tests.timeouts import TIMEOUT


@pytest.fixture
def client(vhost: Vhost) -> Iterator[bide.SyncClient]:
    with bide.connect_sync(vhost.url, infrastructure=SMALL_CLOCK) as client:
        yield client


@pytest.fixture
def queue(client: bide.SyncClient) -> str:
    name = fresh("q")
    client.declare(bide.Topology(queues=[bide.Queue.quorum(name)]))
    return name


def bodies(client: bide.SyncClient, queue: str, number: int) -> list[str]:
    """The bodies of all messages of a queue, acknowledged. More or fewer than this number are an error.

    A busy broker may forget the last acknowledgements of a channel that closes, and have those messages again.
    """
    found: list[str] = []
    seen: set[str | None] = set()
    with client.consume(queue, timeout=timedelta(seconds=TIMEOUT)) as messages:
        while len(found) < number:
            message = next(messages)
            found.append(message.body.decode())
            seen.add(message.message_id)
            message.ack()
    while (again := client.get(queue)) is not None:
        assert again.redelivered
        assert again.message_id in seen
        again.ack()
    return found


def test_publish_many_reads_the_input_in_the_thread_of_the_caller(client: bide.SyncClient, queue: str) -> None:
    threads = set()

    def messages() -> Iterator[bide.OutgoingMessage]:
        for number in range(2_500):
            threads.add(threading.get_ident())
            yield bide.OutgoingMessage(str(number), to=queue)

    assert client.publish_many(messages()).confirmed == 2_500
    assert threads == {threading.get_ident()}
    assert bodies(client, queue, 2_500) == [str(number) for number in range(2_500)]


def test_publish_many_reports_what_the_broker_does_not_accept(client: bide.SyncClient, queue: str) -> None:
    sent = [bide.OutgoingMessage(b"", to=queue if number % 2 else "nowhere") for number in range(4)]
    with pytest.raises(BulkPublishError, match="2 of 4 messages were not accepted") as caught:
        client.publish_many(sent)
    assert [one.position for one in caught.value.report.failures] == [0, 2]
    assert bodies(client, queue, 2) == ["", ""]


def test_publish_many_confirms_earlier_messages_when_the_input_fails(client: bide.SyncClient, queue: str) -> None:
    def messages() -> Iterator[bide.OutgoingMessage]:
        yield bide.OutgoingMessage("1", to=queue)
        raise KeyError("no such row")

    with pytest.raises(KeyError, match="no such row") as caught:
        client.publish_many(messages())
    assert caught.value.__notes__ == ["until then: 1 confirmed"]
    assert bodies(client, queue, 1) == ["1"]


def test_publish_many_refuses_an_invalid_window_at_once(client: bide.SyncClient) -> None:
    with pytest.raises(InvalidInputError, match="window"):
        client.publish_many([], window=0)


def test_the_calls_of_the_asynchronous_client_are_there(client: bide.SyncClient, vhost: Vhost, queue: str) -> None:
    assert client.exists(queue)
    assert not client.exists("nowhere")
    client.bind(queue)
    assert client.infrastructure().name == "clock"
    assert client.url.vhost == vhost.name
    before = client.now()
    assert client.publish("x", to=queue, delay="10ms").due >= before  # type: ignore[operator]  # a delay has a due time
    assert client.now() >= before
    assert bodies(client, queue, 1) == ["x"]


def test_a_received_message_is_typed_and_settled_once(client: bide.SyncClient, queue: str) -> None:
    client.publish(json={"a": 1}, to=queue, headers={"h": 1}, message_id="m")
    timeout = timedelta(seconds=TIMEOUT)
    with client.consume(queue, prefetch=1, timeout=timeout, arguments={"x-priority": 5}) as messages:
        message = next(messages)
        assert isinstance(message, bide.SyncMessage)
        assert (message.json(), message.headers, message.message_id) == ({"a": 1}, {"h": 1}, "m")
        assert repr(message).startswith("<SyncMessage 'm' 7 bytes")
        message.requeue()
        assert message.settled
        with pytest.raises(InvalidInputError, match="settled already"):
            message.ack()
        again = next(messages)
        assert again.delivery_count == 1
        again.reject()
    assert client.message_count(queue) == 0


FORK = """
import multiprocessing
import bide

def in_child():
    print(client.connected)

with bide.connect_sync() as client:
    child = multiprocessing.get_context("fork").Process(target=in_child)
    child.start()
    child.join()
    print(client.connected)
"""


def test_a_client_is_not_connected_in_a_forked_process(vhost: Vhost) -> None:
    command = [sys.executable, "-c", FORK]
    environment = {**os.environ, "BIDE_URL": vhost.url}
    output = subprocess.run(
        command, check=True, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT
    ).stdout
    assert output.split() == ["False", "True"]


LOOPS = """
import asyncio
import bide

async def connected():
    client = await bide.connect()
    print(client.connected)
    return client

client = asyncio.run(connected())
print(client.connected)
"""


def test_an_asynchronous_client_is_not_connected_when_its_event_loop_is_closed(vhost: Vhost) -> None:
    command = [sys.executable, "-c", LOOPS]
    environment = {**os.environ, "BIDE_URL": vhost.url}
    output = subprocess.run(
        command, check=True, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT
    ).stdout
    assert output.split() == ["True", "False"]
