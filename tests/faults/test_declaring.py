"""Declarations, bindings and deletions that a busy broker refuses for a moment."""

from __future__ import annotations

import asyncio
import os
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

import bide
from bide.admin.apply import apply
from bide.admin.destroy import destroy
from bide.amqp import codec
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import (
    AccessRefusedError,
    BrokerError,
    BrokerUnreachableError,
    ClosedError,
    ConnectionLostError,
    PublishError,
)
from tests.broker.receiving import eventually, fresh, receive
from tests.faults.conftest import CLOCK
from tests.faults.proxy import Proxy
from tests.support import Vhost
from tests.timeouts import TIMEOUT

BIND_OK, UNBIND_OK = (50, 21), (50, 51)
EXCHANGE_DECLARE_OK, EXCHANGE_DELETE_OK, QUEUE_DELETE_OK = (40, 11), (40, 21), (50, 41)
LOGGER = "bide.admin.declaring"


class Blockade:
    """Makes the broker refuse a quorum queue with cluster_not_formed.

    A process with the name of the queue's Raft server is there already, so that none can be started: what is left of an
    earlier attempt does the same on a busy node.
    """

    def __init__(self, vhost: Vhost, queue: str) -> None:
        self._broker = vhost.broker
        self._name = f"'{vhost.name}_{queue}'"

    def raise_(self) -> None:
        self._broker.rabbitmqctl("eval", f"register({self._name}, spawn(fun() -> receive stop -> ok end end)).")

    def lift(self) -> None:
        self._broker.rabbitmqctl("eval", f"exit(whereis({self._name}), kill).")


@contextmanager
def blockade(vhost: Vhost, queue: str) -> Iterator[Blockade]:
    made = Blockade(vhost, queue)
    made.raise_()
    yield made


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each queue is declared."""
    counts: Counter[str] = Counter()
    declare = Channel.declare_queue

    def counted(self: Channel, queue: bide.Queue, *, passive: bool = False) -> asyncio.Future[Any]:
        counts[queue.name] += not passive
        return declare(self, queue, passive=passive)

    monkeypatch.setattr(Channel, "declare_queue", counted)
    return counts


async def refused(caplog: pytest.LogCaptureFixture, task: asyncio.Task[Any], times: int) -> None:
    """Wait until the broker has refused so often, and the task was not ended by it."""

    async def is_declared() -> bool:
        if task.done():
            await task
        return sum(one.name == LOGGER for one in caplog.records) >= times

    await eventually(is_declared)


async def test_a_refused_declaration_is_repeated_and_those_before_it_are_not(
    vhost: Vhost, declared: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"q{number}" for number in range(12)]
    async with bide.connect(vhost.url, timeout=timedelta(seconds=TIMEOUT)) as client:
        with blockade(vhost, "q8") as blocked:
            topology = bide.Topology(queues=[bide.Queue.quorum(name) for name in names])
            declaring = asyncio.create_task(client.declare(topology))
            await refused(caplog, declaring, 2)
            await asyncio.to_thread(blocked.lift)
        assert (await declaring).queues == 12
        assert all([await client.exists(name) for name in names])
    assert [declared[name] for name in names[:8]] == [1] * 8
    assert declared["q8"] >= 3
    assert "cluster_not_formed" in caplog.text


async def test_a_refusal_does_not_end_the_first_delayed_publish(vhost: Vhost, caplog: pytest.LogCaptureFixture) -> None:
    async with bide.connect(vhost.url, infrastructure=CLOCK, timeout=timedelta(seconds=TIMEOUT)) as client:
        queue = fresh("q")
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        with blockade(vhost, "bide.v1.s1") as blocked:
            publishing = asyncio.create_task(client.publish(b"x", to=queue, delay="1s"))
            await refused(caplog, publishing, 2)
            await asyncio.to_thread(blocked.lift)
        receipt = await publishing
        assert (receipt.attempts, receipt.hops) == (1, 1)
        await receive(client, queue, 1)


async def test_a_refusal_does_not_end_a_bind(vhost: Vhost, caplog: pytest.LogCaptureFixture) -> None:
    async with bide.connect(vhost.url, infrastructure=CLOCK, timeout=timedelta(seconds=TIMEOUT)) as client:
        queue = fresh("q")
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        with blockade(vhost, CLOCK.undeliverable) as blocked:
            binding = asyncio.create_task(client.bind(queue))
            await refused(caplog, binding, 1)
            await asyncio.to_thread(blocked.lift)
        await binding
        await client.publish(b"x", to=queue, delay="1s")
        (message,) = await receive(client, queue, 1)
        assert message.body == b"x"


async def test_a_refusal_does_not_end_delay_apply(vhost: Vhost) -> None:
    url = {"BIDE_URL": vhost.url}
    command = [sys.executable, "-m", "bide", "delay", "apply", "--max-delay", "20s", "--resolution", "1s"]
    with blockade(vhost, "bide.v1.s1") as blocked:
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **url}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        line = await process.stderr.readline()
        assert b"cluster_not_formed" in line
        await asyncio.to_thread(blocked.lift)
        output, complaints = await process.communicate()
    assert process.returncode == 0, complaints
    assert output.startswith(b"clock: ")


async def test_a_permanent_refusal_is_retried_only_until_the_timeout(vhost: Vhost) -> None:
    async with bide.connect(vhost.url, timeout="1s") as client:
        with blockade(vhost, "b") as blocked:
            begun = time.monotonic()
            with pytest.raises(
                ConnectionLostError,
                match=r"cluster_not_formed \(541\); it was tried \d+ times within \d+ s; declared before that: .* 1 q",
            ):
                await client.declare(bide.Topology(queues=[bide.Queue.quorum("a"), bide.Queue.quorum("b")]))
            assert time.monotonic() - begun >= 1

            async def goes_on() -> bool:
                # Over another connection, which may take longer than the time limit on a slow machine.
                try:
                    return await client.exists("a") and not await client.exists("b")
                except BrokerUnreachableError:
                    return False

            await eventually(goes_on)
            await asyncio.to_thread(blocked.lift)


class Refusal:
    """Replaces an answer of the broker by closing the connection, a limited number of times."""

    def __init__(self, method: tuple[int, int], text: str, *, times: int) -> None:
        self._marker = struct.pack(">HH", *method)
        arguments = (codec.short(541), codec.short_string(f"INTERNAL_ERROR - {text}"), b"\0\0\0\0")
        self._close = codec.frame(codec.METHOD, 0, codec.method(10, 50, *arguments))
        self.left = times

    def __call__(self, data: bytes) -> bytes:
        place = 0
        while self.left and place < len(data):
            kind, _, size = struct.unpack_from(">BHI", data, place)
            if kind == codec.METHOD and data[place + 7 : place + 11] == self._marker:
                self.left -= 1
                return data[:place] + self._close
            place += size + codec.FRAME_OVERHEAD
        return data


def without_answers(method: tuple[int, int], data: bytes) -> bytes:
    """Nothing of what comes together with an answer of this kind."""
    return b"" if struct.pack(">HH", *method) in data else data


TOPOLOGY = bide.Topology(
    [bide.Exchange("x", "fanout"), bide.Exchange("y", "fanout")],
    [bide.Queue.quorum("q")],
    [bide.Binding("x", "q"), bide.Binding("y", "q")],
)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (EXCHANGE_DECLARE_OK, "failed to declare exchange 'x' in vhost '/' because the operation timed out"),
        (BIND_OK, "Could not add binding due to timeout"),
    ],
)
async def test_a_refusal_of_an_exchange_or_a_binding_does_not_end_apply(
    proxy: Proxy, method: tuple[int, int], text: str
) -> None:
    connection = await Connection.open(BrokerUrl.parse(proxy.url))
    proxy.rewrite = refusal = Refusal(method, text, times=3)
    applied = await apply(connection, TOPOLOGY)
    assert (applied.exchanges, applied.queues, applied.bindings) == (2, 1, 2)
    assert refusal.left == 0
    assert not connection.is_open


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (QUEUE_DELETE_OK, "The operation to delete the queue from the metadata store timed out"),
        (EXCHANGE_DELETE_OK, "failed to delete exchange 'x' in vhost '/' due to a timeout"),
        (EXCHANGE_DELETE_OK, ""),
    ],
)
async def test_a_refused_deletion_does_not_end_destroy(proxy: Proxy, method: tuple[int, int], text: str) -> None:
    connection = await Connection.open(BrokerUrl.parse(proxy.url))
    await apply(connection, TOPOLOGY)
    proxy.rewrite = refusal = Refusal(method, text, times=2)
    await destroy(connection, TOPOLOGY)
    assert refusal.left == 0
    async with bide.connect(proxy.url) as client:
        assert not await client.exists("q")


async def test_connections_cut_while_declaring_do_not_end_apply(proxy: Proxy) -> None:
    connection = await Connection.open(BrokerUrl.parse(proxy.url))
    budgets = iter((1_500, 2_500))
    proxy.budget = lambda: next(budgets, None)
    proxy.cut()
    applied = await apply(connection, CLOCK.topology())
    assert applied.queues == len(CLOCK.topology().queues)
    assert proxy.cuts == 3


async def test_a_disabled_feature_flag_is_not_retried(proxy: Proxy) -> None:
    connection = await Connection.open(BrokerUrl.parse(proxy.url))
    text = "Cannot declare a queue 'q' of type 'stream' on node 'n': the corresponding feature flag is disabled"
    proxy.rewrite = refusal = Refusal(BIND_OK, text, times=2)
    # With two bindings, the answer to the second one would be a second refusal if it came in a packet of its own.
    topology = bide.Topology(TOPOLOGY.exchanges, TOPOLOGY.queues, TOPOLOGY.bindings[:1])
    with pytest.raises(BrokerError, match="feature flag is disabled"):
        await apply(connection, topology)
    assert refusal.left == 1


async def test_a_missing_permission_or_a_limit_is_not_retried(vhost: Vhost, declared: Counter[str]) -> None:
    await asyncio.to_thread(vhost.broker.rabbitmqctl, "set_vhost_limits", "-p", vhost.name, '{"max-queues": 1}')
    vhost.broker.add_user(vhost.name, "secret")
    vhost.broker.set_permissions(vhost.name, vhost.name, configure="^a")
    try:
        topology = bide.Topology(queues=[bide.Queue.quorum("a"), bide.Queue.quorum("a2")])
        connection = await Connection.open(BrokerUrl.parse(vhost.url))
        with pytest.raises(BrokerError, match="limit"):
            await apply(connection, topology)
        assert declared["a2"] == 1
        url = vhost.broker.vhost_url(vhost.name, user=vhost.name, password="secret")
        other = await Connection.open(BrokerUrl.parse(url))
        with pytest.raises(AccessRefusedError):
            await apply(other, bide.Topology(queues=[bide.Queue.quorum("b")]))
        assert declared["b"] == 1
        await connection.close()
        await other.close()
    finally:
        vhost.broker.delete_user(vhost.name)


async def test_exclusive_queues_are_not_declared_again_on_another_connection(
    vhost: Vhost, declared: Counter[str]
) -> None:
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    with blockade(vhost, "b") as blocked:
        topology = bide.Topology(queues=[bide.Queue("a", durable=False, exclusive=True), bide.Queue.quorum("b")])
        with pytest.raises(ConnectionLostError, match="cluster_not_formed"):
            await apply(connection, topology)
        await asyncio.to_thread(blocked.lift)
    assert declared == {"a": 1, "b": 1}


async def test_a_closed_connection_is_refused_for_declarations(vhost: Vhost) -> None:
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    await connection.close()
    with pytest.raises(ClosedError):
        await apply(connection, TOPOLOGY)


async def published(client: bide.Client, *, to: str) -> bool:
    """Whether a delayed message was confirmed in time, with everything that it needs declared."""
    try:
        await client.publish(b"x", to=to, delay="1s")
    except PublishError:
        return False
    return True


async def test_a_publish_that_runs_out_of_time_names_the_refusal(proxy: Proxy) -> None:
    async with bide.connect(proxy.url, infrastructure=CLOCK, timeout="3s") as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("a"), bide.Queue.quorum("b")]))
        await eventually(lambda: published(client, to="a"))
        refusal = Refusal(BIND_OK, "Could not add binding due to timeout", times=1)
        # The second answer does not come at all: the time is over while a new connection waits for it.
        proxy.rewrite = lambda data: refusal(data) if refusal.left else without_answers(BIND_OK, data)
        with pytest.raises(PublishError, match=r"was not sent within 3 s: .*Could not add binding due to timeout"):
            await client.publish(b"x", to="b", delay="1s")


async def test_a_refusal_after_the_timeout_is_still_retried(proxy: Proxy) -> None:
    connection = await Connection.open(BrokerUrl.parse(proxy.url))
    proxy.rewrite = refusal = Refusal(BIND_OK, "Could not add binding due to timeout", times=1)
    proxy.stall()
    applying = asyncio.create_task(apply(connection, TOPOLOGY, retry_for=timedelta(seconds=0.5)))
    await asyncio.sleep(1)  # longer than the time for retries
    proxy.moving.set()
    assert (await applying).bindings == 2
    assert refusal.left == 0
