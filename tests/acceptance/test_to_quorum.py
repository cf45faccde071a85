"""``bide queue to-quorum`` under load, killed at every stage."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from datetime import timedelta
from typing import Any

import pika
import pytest

import bide
from bide.admin.exclusive_access import without_other_connections
from bide.admin.locate import management_api
from bide.admin.to_quorum import convert, plan_conversion
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.bulk.sync import BulkPublisher
from bide.errors import BideError, InvalidInputError
from tests.broker.dotnet import Transport
from tests.polling import wait_until
from tests.support import Vhost
from tests.timeouts import TIMEOUT

BEFORE = 4000
STAGES = {
    "holding queue declared": "declared the holding queue",
    "bindings moved": "moved 2 bindings from orders to",
    "moving out": "moving the messages of orders\n",
    "moved out": "messages of orders\n",
    "publishers paused": "refuses new connections",
    "quorum queue declared": "declared the quorum queue",
    "bindings back": "bindings from orders.to-quorum",
    "moving back": "moving the messages of orders.to-quorum",
    "holding queue deleted": "deleted the holding queue",
}


class Publishers(threading.Thread):
    """Publish numbered messages through the default exchange and an exchange until stopped.

    A message is sent again until it is confirmed.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._connected, self._stopping = threading.Event(), threading.Event()
        self.sent: list[str] = []

    def start(self) -> None:
        """Start, and wait for the connection: while the publishers are paused, none could be opened."""
        super().start()
        assert self._connected.wait(TIMEOUT)

    def run(self) -> None:
        with bide.connect_sync(self._url) as client:
            self._connected.set()
            for number in itertools.count():
                if self._stopping.is_set():
                    break
                self._publish(client, f"default-{number}", to="orders")
                self._publish(client, f"shop-{number}", exchange="shop", routing_key="order.created")

    def _publish(self, client: Any, name: str, **target: str) -> None:
        begun = time.monotonic()
        # At the end too: what was not confirmed may be in the queue all the same.
        while not self._stopping.is_set() or time.monotonic() < begun + TIMEOUT:
            try:
                client.publish(name, **target)
            except BideError:
                time.sleep(0.01)  # before the next attempt
            else:
                self.sent.append(name)
                return

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def declare(vhost: Vhost) -> None:
    with bide.connect_sync(vhost.url) as client:
        client.declare(
            bide.Topology(
                [bide.Exchange("shop", "topic"), bide.Exchange("match", "headers")],
                [bide.Queue("orders", arguments={"x-queue-mode": "lazy", "x-max-length": 1_000_000})],
                [
                    bide.Binding("shop", "orders", "order.*"),
                    bide.Binding("match", "orders", "", arguments={"x-match": "all", "size": 5}),
                ],
            )
        )
    with BulkPublisher(vhost.url) as publisher:
        publisher.publish_many(
            bide.OutgoingMessage(f"old-{number}", to="orders", headers={"n": number}) for number in range(BEFORE)
        )


def bodies(vhost: Vhost, wanted: set[str]) -> Counter[str]:
    """The messages of the queue, and how often each is there: all that are wanted, and what comes soon after."""

    async def read() -> Counter[str]:
        found: Counter[str] = Counter()
        async with bide.connect(vhost.url) as client, client.consume("orders", prefetch=1000) as messages:
            while True:
                try:
                    async with asyncio.timeout(2 if found.keys() >= wanted else TIMEOUT):
                        message = await anext(messages)
                except TimeoutError:
                    return found
                found[message.body.decode()] += 1
                await message.ack()

    return asyncio.run(read())


def command(vhost: Vhost, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bide", "queue", "to-quorum", "orders", "--yes", "--json", "-v", *arguments],
        env={**os.environ, "BIDE_URL": vhost.url, "BIDE_MANAGEMENT_URL": vhost.broker.management_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(vhost: Vhost, *arguments: str) -> dict[str, Any]:
    out, stderr = command(vhost, *arguments).communicate(timeout=TIMEOUT)
    assert out, stderr
    found: dict[str, Any] = json.loads(out)
    return found


async def state(vhost: Vhost) -> tuple[str, bool, set[tuple[str, str, str]]]:
    """The type of the queue, whether the holding queue exists, and the queue's bindings."""
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
        found = await api.queue(vhost.name, "orders")
        held = await api.queue(vhost.name, "orders.to-quorum")
        bindings = await api.bindings(vhost.name, to_queue="orders")
    assert found is not None
    return (
        found.type,
        held is not None,
        {(one.source, one.routing_key, json.dumps(dict(one.arguments), sort_keys=True)) for one in bindings},
    )


def read_until(process: subprocess.Popen[str], text: str) -> None:
    """Read the log of a command until a line with this text."""
    assert process.stderr is not None
    log: list[str] = []
    for line in process.stderr:
        log.append(line)
        if text in line:
            return
    raise AssertionError(f"the log lacks {text!r}: {log}")


def kill_at(process: subprocess.Popen[str], text: str) -> None:
    """Kill a command at a line of its log."""
    with process:
        read_until(process, text)
        process.kill()


CONVERTED = ("quorum", False, {("shop", "order.*", "{}"), ("match", "", '{"size": 5, "x-match": "all"}')})


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_any_stage_and_run_again_no_message_is_lost(vhost: Vhost, stage: str) -> None:
    declare(vhost)
    publishers = Publishers(vhost.url)
    publishers.start()
    try:
        kill_at(command(vhost, "--pause-publishers"), STAGES[stage])
        done = finish(vhost, "--pause-publishers")
    finally:
        publishers.stop()
    assert asyncio.run(state(vhost)) == CONVERTED
    if stage == "holding queue deleted":
        assert (done["found"], done["holding"]) == ("quorum", "")
    wanted = {f"old-{number}" for number in range(BEFORE)} | set(publishers.sent)
    found = bodies(vhost, wanted)
    assert found.keys() == wanted
    # Twice only what was in flight, or published while a binding moved.
    assert found.total() - len(found) <= 2 * 2000 + 100


class NetSenders(threading.Thread):
    """.NET endpoints that send to an endpoint's exchange, publish an event, and delay a message, until stopped."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._transport = Transport(url)
        self._stopping = threading.Event()
        self.sent: list[str] = []
        self.error: BaseException | None = None
        channel = self._transport.channel
        self._transport.build_delays()
        channel.queue_declare("orders", durable=True)
        channel.exchange_declare("orders", "fanout", durable=True)
        channel.queue_bind("orders", "orders", "")
        channel.exchange_declare("Shop:OrderPlaced", "fanout", durable=True)
        channel.exchange_bind("orders", "Shop:OrderPlaced", "")

    def run(self) -> None:
        try:
            for number in itertools.count():
                if self._stopping.is_set():
                    break
                self._transport.dispatch("orders", {}, f"sent-{number}".encode(), f"sent-{number}")
                self.sent.append(f"sent-{number}")
                name = f"event-{number}"
                self._transport.publish("Shop:OrderPlaced", "", {}, name.encode(), name)
                self.sent.append(name)
                if number % 50 == 0:
                    name, delay = f"delayed-{number}", timedelta(seconds=1)
                    self._transport.dispatch("orders", {}, name.encode(), name, delay=delay)
                    self.sent.append(name)
            self._transport.close()
        except BaseException as error:
            self.error = error
            raise

    def more(self, number: int) -> None:
        """Wait until more messages are confirmed."""
        wanted = len(self.sent) + number

        def are_confirmed() -> bool:
            assert self.error is None, self.error
            return len(self.sent) >= wanted

        wait_until(are_confirmed, f"{number} more messages are confirmed")

    def stop(self) -> None:
        self._stopping.set()
        self.join()


@pytest.mark.slow
def test_net_endpoints_lose_nothing_that_they_send_by_exchange(vhost: Vhost) -> None:
    """The first run is killed; publishers are not paused."""
    senders = NetSenders(vhost.url)
    with BulkPublisher(vhost.url) as publisher:
        publisher.publish_many(bide.OutgoingMessage(f"old-{number}", to="orders") for number in range(500))
    senders.start()
    try:
        senders.more(100)
        with command(vhost) as process:
            assert process.stderr is not None
            log = list(itertools.takewhile(lambda line: "moved 1 bindings from orders to" not in line, process.stderr))
            process.kill()
        assert log
        senders.more(100)
        done = finish(vhost)
        assert done["holding"] == "orders.to-quorum"
        senders.more(100)
    finally:
        senders.stop()
    assert senders.error is None
    assert asyncio.run(state(vhost)) == ("quorum", False, {("orders", "", "{}")})
    wanted = {f"old-{number}" for number in range(500)} | set(senders.sent)
    found = bodies(vhost, wanted)
    assert found.keys() == wanted
    assert found.total() - len(found) <= 2 * 2000 + 100


@pytest.mark.slow
def test_messages_stay_as_they_were(vhost: Vhost) -> None:
    declare(vhost)
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue("other")]))
    done = finish(vhost)
    assert (done["found"], done["dropped"], done["moved"]) == ("classic", ["x-queue-mode"], BEFORE)
    assert done["arguments"] == {"x-max-length": 1_000_000}
    assert asyncio.run(state(vhost)) == CONVERTED

    async def check() -> None:
        async with bide.connect(vhost.url) as client, client.consume("orders") as messages:
            for number in range(BEFORE):
                message = await anext(messages)
                assert (message.body, message.headers["n"]) == (f"old-{number}".encode(), number)
                assert message.routing_key == "orders"
                await message.ack()

    asyncio.run(check())
    assert finish(vhost)["holding"] == ""


def test_messages_with_odd_properties_are_moved(vhost: Vhost) -> None:
    vhost.broker.add_user("publisher", "secret")
    try:
        vhost.broker.set_permissions(vhost.name, "publisher", configure="", write=".*", read="")
        declare(vhost)
        odd = (
            pika.BasicProperties(timestamp=(1 << 63) - 1),
            pika.BasicProperties(user_id="publisher", headers={"CC": ["orders"], "x-death": 5}),
        )
        url = vhost.broker.vhost_url(vhost.name, user="publisher", password="secret")
        with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for properties in odd:
                channel.basic_publish("", "orders", b"odd", properties, mandatory=True)
        assert finish(vhost)["moved"] == BEFORE + len(odd)
        found = bodies(vhost, {"odd", *(f"old-{number}" for number in range(BEFORE))})
        assert found["odd"] == len(odd)
    finally:
        vhost.broker.delete_user("publisher")


async def test_a_queue_that_cannot_be_converted_is_refused_unchanged(vhost: Vhost) -> None:
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    async with bide.connect(vhost.url) as client:
        queues = [bide.Queue("ranked", arguments={"x-max-priority": 5}), bide.Queue("busy")]
        await client.declare(bide.Topology(queues=queues))
        async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
            with pytest.raises(
                InvalidInputError, match=r"'ranked' cannot become a quorum queue: it has x-max-priority"
            ):
                await plan_conversion(connection, api, "ranked")
            with pytest.raises(InvalidInputError, match="the limit is 245"):
                await plan_conversion(connection, api, "q" * 250)
            with pytest.raises(InvalidInputError, match="is empty"):
                await plan_conversion(connection, api, "")
            async with client.consume("busy") as _:
                with pytest.raises(InvalidInputError, match="'busy' has 1 consumer,"):
                    await convert(connection, api, "busy")
            assert (await plan_conversion(connection, api, "busy")).found == "classic"
    await connection.close()


async def test_a_dry_run_does_not_let_paused_publishers_go_on(vhost: Vhost) -> None:
    held = bide.Topology(queues=[bide.Queue("orders"), bide.Queue.quorum("orders.to-quorum")])
    async with bide.connect(vhost.url) as client:
        await client.declare(held)
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
        await api.call("PUT", "vhost-limits", vhost.name, "max-connections", body={"value": 0})
        with command(vhost, "--dry-run") as process:
            _, stderr = await asyncio.to_thread(process.communicate, timeout=TIMEOUT)
        (limits,) = await api.call("GET", "vhost-limits", vhost.name)
        assert (process.returncode, limits["value"]) == (1, {"max-connections": 0}), stderr
        assert "Traceback" not in stderr
        assert "limit" in stderr
        await api.call("DELETE", "vhost-limits", vhost.name, "max-connections")


async def test_a_second_run_does_not_let_publishers_go_on_that_another_conversion_paused(vhost: Vhost) -> None:
    """The second run has a holding queue of its own, of a conversion that was killed."""
    await asyncio.to_thread(declare, vhost)
    await asyncio.to_thread(kill_at, command(vhost), "declared the holding queue")
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
        async with without_other_connections(connection, api):
            second = command(vhost)
            try:
                await asyncio.to_thread(read_until, second, "waiting for the end of the pause")
                (limits,) = await api.call("GET", "vhost-limits", vhost.name)
            except BaseException:
                second.kill()
                raise
            assert limits["value"] == {"max-connections": 0}
        out, stderr = await asyncio.to_thread(second.communicate, timeout=TIMEOUT)
    await connection.close()
    assert json.loads(out)["moved"] == BEFORE, stderr
    assert await state(vhost) == CONVERTED
