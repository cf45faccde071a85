"""Lost connections during a publish: repeated or reported, without silent loss."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from datetime import timedelta
from typing import Any, Literal

import pytest

import bide
from bide.admin.destroy import destroy
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.amqp.writer import WRITE_BUFFER
from bide.errors import (
    BrokerUnreachableError,
    BulkInDoubtError,
    ClosedError,
    ConnectionLostError,
    ProtocolError,
    PublishError,
    PublishInDoubtError,
    TargetNotFoundError,
    UnsupportedBrokerError,
)
from tests.broker.receiving import connection_of, eventually, fresh, ready_at, receive, state_of, until_ready
from tests.faults.conftest import CLOCK, declared, too_old
from tests.faults.proxy import PUBLISH, QUEUE_BIND, QUEUE_DECLARE, Proxy, without_confirms
from tests.support import Vhost
from tests.timeouts import MAX_LATENESS, TIMEOUT


@pytest.mark.parametrize("delay", [None, "1s"])
@pytest.mark.parametrize("where", ["before", "inside"])
async def test_an_interrupted_message_is_sent_again(
    vhost: Vhost, proxy: Proxy, where: Literal["before", "inside"], delay: str | None
) -> None:
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK) as client:
        proxy.on_method[PUBLISH] = where
        receipt = await client.publish(b"once", to=queue, delay=delay)
        assert receipt.attempts == 2
        assert proxy.cuts == 1
        (message,) = await receive(client, queue, 1)
    assert message.message_id == receipt.message_id
    if delay is not None:
        assert message.due is not None
        assert receipt.due is not None
        assert timedelta(0) <= message.due - receipt.due < timedelta(milliseconds=1)
    await until_ready(vhost.url, queue, 0)


async def test_a_message_with_a_lost_confirm_is_sent_again(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK) as client:
        proxy.on_method[PUBLISH] = "deaf"
        publishing = asyncio.create_task(client.publish(b"twice", to=queue, message_id="same"))
        await until_ready(vhost.url, queue, 1)
        assert not publishing.done()
        proxy.cut()
        receipt = await publishing
        assert (receipt.message_id, receipt.attempts) == ("same", 2)
        messages = await receive(client, queue, 2)
    assert [(one.message_id, one.body) for one in messages] == [("same", b"twice")] * 2


async def test_with_on_lost_raise_a_lost_confirm_is_reported(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK, on_lost="raise") as client:
        proxy.on_method[PUBLISH] = "deaf"
        publishing = asyncio.create_task(client.publish(b"doubtful", to=queue, message_id="doubtful"))
        await until_ready(vhost.url, queue, 1)
        proxy.cut()
        with pytest.raises(PublishInDoubtError, match=r"'doubtful'.*was lost.*send it again with the same") as caught:
            await publishing
        assert caught.value.message_id == "doubtful"
        assert isinstance(caught.value.__cause__, ConnectionLostError)
        # What was not sent is not in doubt: it waits for the connection, and the client goes on.
        proxy.cut()
        assert (await client.publish(b"", to=queue)).attempts == 1
    await until_ready(vhost.url, queue, 2)


@pytest.mark.parametrize("then", ["closed", "too old"])
async def test_a_sent_message_is_in_doubt_when_waiting_for_the_broker_ends(
    vhost: Vhost, proxy: Proxy, then: Literal["closed", "too old"]
) -> None:
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK) as client:
        proxy.on_method[PUBLISH] = "deaf"
        publishing = asyncio.create_task(client.publish(b"", to=queue, message_id="doubtful"))
        await until_ready(vhost.url, queue, 1)
        accepted = proxy.accepted
        if then == "closed":
            proxy.refusing = True
        else:
            # One of several hosts, say.
            proxy.rewrite = too_old(vhost)
        proxy.cut()

        async def trying() -> bool:
            return proxy.accepted > accepted

        await eventually(trying)
        if then == "closed":
            await client.close()
        with pytest.raises(PublishInDoubtError, match="'doubtful': it was sent, and not confirmed, and") as caught:
            await publishing
        assert isinstance(caught.value.__cause__, ClosedError if then == "closed" else UnsupportedBrokerError)
        proxy.rewrite = bytes


async def test_messages_to_an_exchange_being_deleted_are_in_doubt(vhost: Vhost, proxy: Proxy) -> None:
    """The broker names the exchange, not the message for which it closes the channel."""
    queue, exchange = fresh("q"), fresh("x")
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    async with bide.connect(proxy.url, infrastructure=CLOCK) as client:
        topology = bide.Topology(
            [bide.Exchange(exchange, "fanout")], [bide.Queue.quorum(queue)], [bide.Binding(exchange, queue)]
        )
        await client.declare(topology)
        await client.publish(b"", exchange=exchange)
        proxy.rewrite = without_confirms
        taken = [asyncio.create_task(client.publish(b"", exchange=exchange)) for _ in range(50)]
        await until_ready(vhost.url, queue, 51)
        async with await connection.channel() as channel:
            await channel.delete_exchange(exchange)
        more = [asyncio.create_task(client.publish(b"", exchange=exchange)) for _ in range(50)]
        results = await asyncio.gather(*taken, *more, return_exceptions=True)
        assert {type(one) for one in results} == {PublishInDoubtError}
        assert {type(one.__cause__) for one in results if isinstance(one, BaseException)} == {TargetNotFoundError}
        proxy.rewrite = bytes
        # Alone, it is certain which one the broker meant.
        await client.declare(topology)
        await client.publish(b"", exchange=exchange)
        async with await connection.channel() as channel:
            await channel.delete_exchange(exchange)
        with pytest.raises(TargetNotFoundError):
            await client.publish(b"", exchange=exchange)
    await connection.close()


async def test_a_deleted_infrastructure_is_declared_again(vhost: Vhost) -> None:
    queue = fresh("q")
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    async with bide.connect(vhost.url, infrastructure=CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        await client.publish(b"", to=queue, delay="1s")
        await receive(client, queue, 1)
        for number in (1, 100):
            await destroy(connection, CLOCK.topology())
            receipts = await asyncio.gather(*(client.publish(b"", to=queue, delay="1s") for _ in range(number)))
            # One attempt is enough if the client has just looked for the infrastructure by itself, as every 30 s.
            assert {one.attempts for one in receipts} <= {1, 2}
            received = await receive(client, queue, number)
            assert {one.message_id for one in received} == {one.message_id for one in receipts}
    await connection.close()


async def test_a_returned_message_with_a_lost_confirm_is_unroutable(vhost: Vhost, proxy: Proxy) -> None:
    async with bide.connect(proxy.url, infrastructure=CLOCK, on_lost="raise") as client:
        # The return comes before the confirm. On this way they come apart.
        proxy.rewrite = without_confirms
        publishing = asyncio.create_task(client.publish(b"", to="nowhere", message_id="back"))

        async def returned() -> bool:
            channel = await (await state_of(client)).channel()
            return any(one.returned for one in channel.confirms.waiting)

        await eventually(returned)
        proxy.cut()
        with pytest.raises(bide.errors.UnroutableError, match="back"):
            await publishing


@pytest.mark.parametrize("method", [QUEUE_DECLARE, QUEUE_BIND, PUBLISH])
@pytest.mark.parametrize("where", ["before", "inside", "deaf"])
async def test_cuts_while_declaring_the_infrastructure_are_retried(
    vhost: Vhost, proxy: Proxy, method: tuple[int, int], where: Literal["before", "inside", "deaf"]
) -> None:
    queue = fresh("q")
    async with bide.connect(vhost.url, infrastructure=CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
    async with bide.connect(proxy.url, infrastructure=CLOCK) as client:
        proxy.on_method[method] = where
        publishing = asyncio.create_task(client.publish(b"late", to=queue, delay="1s"))

        async def seen() -> bool:
            return method not in proxy.on_method

        await eventually(seen)
        if where == "deaf":
            proxy.cut()
        receipt = await publishing
        # Below 4.0 another connection checks the broker first; both may have been there to be cut.
        assert proxy.cuts in ((1, 2) if where == "deaf" else (1,))
        (message,) = await receive(client, queue, 1)
    assert message.message_id == receipt.message_id
    assert message.lateness is not None
    assert message.lateness >= timedelta(0)


async def test_an_incomplete_infrastructure_is_completed(vhost: Vhost, proxy: Proxy) -> None:
    """Wherever the applying of one client ends, the next one does not take half an infrastructure for a whole one."""
    chance = random.Random(3)
    queue = await declared(vhost.url)
    before = proxy.sent
    await _apply(proxy.url, _prefixed(0), queue)
    needed = proxy.sent - before
    incomplete = 0
    for number in range(1, 9):
        clock = _prefixed(number)
        # Below 4.0 another connection checks the broker first, which takes less than a third of the bytes.
        proxy.budget = lambda: chance.randint(needed // 3, needed * 2 // 3)
        already = proxy.cuts
        async with bide.connect(proxy.url, infrastructure=clock) as client:
            publishing = asyncio.create_task(client.publish(b"", to=queue, delay="20s"))

            async def cut(already: int = already) -> bool:
                # The next connection may have been cut, too, before this check.
                return proxy.cuts > already

            await eventually(cut, step=0.005)
            publishing.cancel()
            await asyncio.wait({publishing})
        incomplete += bool(_missing(vhost, clock))
        await _apply(vhost.url, clock, queue)
        assert _missing(vhost, clock) == set()
    assert incomplete > 0


def _prefixed(number: int) -> bide.Clock:
    return bide.Clock(prefix=f"p{number}", max_delay=CLOCK.max_delay, resolution=CLOCK.resolution)


async def _apply(url: str, clock: bide.Clock, queue: str) -> None:
    async with bide.connect(url, infrastructure=clock) as client:
        await client.publish(b"", to=queue, delay="20s")


def _missing(vhost: Vhost, clock: bide.Clock) -> set[tuple[str, str, str]]:
    found = {
        (one["source"], one["destination"], one["routing_key"])
        for one in vhost.broker.management.call("GET", "bindings", vhost.name)
    }
    needed = clock.core_topology() | clock.digit_topology(clock.route(clock.max_delay, bide.QueueTarget("q")).digits)
    return {(one.source, one.destination, one.routing_key) for one in needed.bindings} - found


@pytest.mark.parametrize("seed", range(3))
async def test_cuts_during_handshakes_are_retried(vhost: Vhost, proxy: Proxy, seed: int) -> None:
    """The client that was connected gets in again, whichever bytes of the handshakes the connections end at."""
    chance = random.Random(seed)
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK) as client:
        budgets = iter([chance.randint(1, 450) for _ in range(4)])
        proxy.budget = lambda: next(budgets, None)
        proxy.cut()
        await client.publish(b"", to=queue)
    assert proxy.cuts == 5
    assert proxy.accepted == 6


@pytest.mark.parametrize(("on_lost", "cuts"), [pytest.param("repeat", 40, marks=pytest.mark.long), ("raise", 20)])
async def test_cuts_at_random_bytes_lose_nothing(
    vhost: Vhost, proxy: Proxy, on_lost: Literal["repeat", "raise"], cuts: int
) -> None:
    """Nothing is lost. Duplicates have equal ids, and were sent but not confirmed at a cut."""
    total, budget = 2_000, random.Random(7)
    queue = await declared(vhost.url)
    proxy.budget = lambda: budget.randint(1, 20_000) if proxy.cuts < cuts else None
    sent, doubts = Counter[str](), list[tuple[str, str | None]]()

    async def send(client: bide.Client, name: str) -> None:
        while True:
            try:
                receipt = await client.publish(b"x" * 100, to=queue, delay="1s", message_id=name)
            except PublishInDoubtError as error:
                doubts.append((name, error.message_id))
                sent[name] += 1
            else:
                sent[name] += receipt.attempts
                return

    # On a slow machine, 40 connections take longer than the usual time limit.
    async with bide.connect(
        proxy.url, infrastructure=CLOCK, on_lost=on_lost, max_in_flight=200, timeout=timedelta(seconds=TIMEOUT)
    ) as client:
        await asyncio.gather(*(send(client, f"m{number}") for number in range(total)))
    assert proxy.cuts == cuts
    assert bool(doubts) == (on_lost == "raise")
    assert all(name == reported for name, reported in doubts)
    found = Counter[str]()
    async with bide.connect(vhost.url, infrastructure=CLOCK) as client:
        # Behind all others in the same delay queue, so that what comes before it is all there is.
        await client.publish(b"", to=queue, delay="1s", message_id="last")
        async with asyncio.timeout(TIMEOUT), client.consume(queue, prefetch=1000) as messages:
            async for message in messages:
                await message.ack()
                found[str(message.message_id)] += 1
                if message.message_id == "last":
                    break
        assert await ready_at(vhost.url, CLOCK.undeliverable) == 0
    assert found.keys() == sent.keys() | {"last"}
    assert all(found[name] <= attempts for name, attempts in sent.items())
    assert any(attempts > 1 for attempts in sent.values())


async def test_an_absent_broker_fails_the_publish_in_time(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK, timeout="3s") as client:
        lost = (await connection_of(client)).lost
        proxy.refusing = True
        proxy.cut()
        await lost
        with pytest.raises(PublishError, match="'second' was not sent within 3 s: ") as caught:
            await client.publish(b"second", to=queue, message_id="second")
        assert caught.value.message_id == "second"
        assert not isinstance(caught.value, PublishInDoubtError)
        proxy.refusing = False

        async def works() -> bool:
            # On a slow machine a connection may take longer than the time limit.
            try:
                return (await client.publish(b"third", to=queue)).attempts > 0
            except PublishError:
                return False

        await eventually(works)
    async with bide.connect(vhost.url) as client:
        # On a slow machine, an attempt whose confirm came too late is here as well.
        await client.publish(b"last", to=queue)
        async with asyncio.timeout(TIMEOUT), client.consume(queue) as messages:
            bodies = [(await anext(messages)).body]
            while bodies[-1] != b"last":
                bodies.append((await anext(messages)).body)
    assert set(bodies) == {b"third", b"last"}


async def test_an_infrastructure_that_is_not_declared_in_time_fails_the_publish(vhost: Vhost, proxy: Proxy) -> None:
    queue = fresh("q")
    async with bide.connect(proxy.url, infrastructure=CLOCK, timeout="3s") as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        proxy.on_method[QUEUE_BIND] = "deaf"
        with pytest.raises(
            PublishError, match=r"not sent within 3 s: the queues and bindings that it needs were not declared yet"
        ) as caught:
            await client.publish(b"", to=queue, delay="1s")
        assert not isinstance(caught.value, PublishInDoubtError)


async def test_repeated_cuts_while_declaring_end_with_the_timeout(vhost: Vhost, proxy: Proxy) -> None:
    """It is retried until the timeout."""
    queue = fresh("q")
    async with bide.connect(proxy.url, infrastructure=CLOCK, timeout="5s") as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        stop = asyncio.Event()

        async def cut() -> None:
            while not stop.is_set():
                proxy.on_method[QUEUE_BIND] = "before"
                await asyncio.sleep(0.001)  # so that each binding is cut

        cutting = asyncio.create_task(cut())
        accepted, started = proxy.accepted, asyncio.get_running_loop().time()
        with pytest.raises(PublishError, match="message 'm' was not sent within "):
            await client.publish(b"", to=queue, delay="1s", message_id="m")
        assert asyncio.get_running_loop().time() - started < MAX_LATENESS.total_seconds()
        assert proxy.accepted > accepted + 1
        accepted, started = proxy.accepted, asyncio.get_running_loop().time()
        with pytest.raises(BulkInDoubtError, match="nothing was sent within ") as caught:
            await client.publish_many([bide.OutgoingMessage(b"", to=queue, delay="1s")])
        assert (caught.value.in_doubt, len(caught.value.unsent)) == ((), 1)
        assert asyncio.get_running_loop().time() - started < MAX_LATENESS.total_seconds()
        assert proxy.accepted > accepted + 1
        stop.set()
        await cutting
        proxy.on_method.clear()

        async def works() -> bool:
            # On a slow machine the infrastructure takes longer than the time limit, and is gone on with.
            try:
                return (await client.publish(b"", to=queue, delay="1s")).attempts == 1
            except PublishError:
                return False

        await eventually(works)


async def test_an_unanswered_check_ends_with_the_timeout(vhost: Vhost, proxy: Proxy) -> None:
    """While it is asked what it has: the infrastructure is there, or the target is an exchange of others."""
    queue = await declared(vhost.url)
    for target in (bide.OutgoingMessage(b"", to=queue, delay="1s"), bide.OutgoingMessage(b"", exchange="amq.topic")):
        async with bide.connect(proxy.url, infrastructure=CLOCK, timeout="500ms") as client:
            proxy.deaf = True
            with pytest.raises(PublishError, match=r"within 0\.5 s: the queues and bindings that it needs"):
                await client.publish(b"", to=target.to, exchange=target.exchange, delay=target.delay)
            with pytest.raises(PublishError, match=r"within 0\.5 s"):
                await client.publish_many([target])
            with pytest.raises(BrokerUnreachableError, match="did not bind"):
                await client.bind(queue)
            proxy.deaf = False
            proxy.cut()


async def test_closing_the_client_ends_waiting_publishes(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK, timeout="1h") as client:
        await client.publish(b"", to=queue)
        proxy.rewrite = without_confirms
        unconfirmed = asyncio.create_task(client.publish(b"", to=queue, message_id="unconfirmed"))
        await until_ready(vhost.url, queue, 2)
        await client.close()
        with pytest.raises(PublishInDoubtError, match=r"unconfirmed.*closed"):
            await unconfirmed
    proxy.rewrite = bytes
    async with bide.connect(proxy.url, infrastructure=CLOCK, timeout="1h") as client:
        lost = (await connection_of(client)).lost
        proxy.refusing = True
        proxy.cut()
        await lost
        waiting = [asyncio.create_task(client.publish(b"", to=queue)) for _ in range(3)]
        accepted = proxy.accepted

        async def trying() -> bool:
            return proxy.accepted > accepted + 3

        await eventually(trying)
        async with asyncio.timeout(TIMEOUT):
            await client.close()
            results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(one) for one in results] == [ClosedError] * 3


async def test_a_protocol_violation_closes_the_connection(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK, on_lost="raise") as client:
        await client.publish(b"", to=queue)
        proxy.rewrite = lambda data: data[:-1] + b"\x00"
        with pytest.raises(PublishInDoubtError) as caught:
            await client.publish(b"", to=queue)
        assert isinstance(caught.value.__cause__, ProtocolError)
        proxy.rewrite = bytes
        await client.publish(b"", to=queue)


async def test_a_slow_connection_limits_the_write_buffer(vhost: Vhost, proxy: Proxy) -> None:
    """What waits for the socket stays near the limit of the write buffer, however much is published at once."""
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK) as client:
        await client.publish(b"", to=queue)
        transport: Any = (await connection_of(client))._transport
        proxy.rate = 20_000_000
        waiting = []

        async def watch() -> None:
            while True:
                waiting.append(transport.get_write_buffer_size())
                await asyncio.sleep(0.005)  # a sample, again and again

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(client.publish(b"x" * 100_000, to=queue) for _ in range(200)))
        watching.cancel()
    assert max(waiting) > 100_000
    # Our buffer and the transport's, and the message that filled each.
    assert max(waiting) < 2 * (WRITE_BUFFER + 110_000)
