"""Lost connections and blocked brokers during a bulk publish.

``BIDE_SOAK=1`` cuts 200 connections rather than a few.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from typing import Any

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.amqp.writer import WRITE_BUFFER
from bide.client.broker_state import BrokerState, Preparation
from bide.client.bulk.publish import BulkPublish
from bide.client.bulk.sync import BulkPublisher
from bide.client.publish_result import PublishResult, PublishSummary
from bide.errors import (
    AccessRefusedError,
    BulkInDoubtError,
    ClosedError,
    ConnectionLostError,
    MessageTooLargeError,
    PublishError,
    PublishInDoubtError,
    PublishRefusedError,
    TargetNotFoundError,
    UnsupportedBrokerError,
)
from bide.messages.outgoing import OutgoingMessage
from bide.messages.prepared import PreparedMessage
from tests.broker.receiving import connection_of, eventually, fresh, until_ready
from tests.faults.conftest import BODY_LIMIT, CLOCK, DedicatedBroker, too_old
from tests.faults.proxy import PUBLISH, QUEUE_DECLARE, Proxy, without_confirms
from tests.polling import wait_until
from tests.support import SOAK, Vhost
from tests.timeouts import MAX_LATENESS, TIMEOUT

CUTS = 200 if SOAK else 6
MESSAGES = 5_000
LAST = "last"


async def declared(url: str) -> str:
    """A new queue."""
    queue = fresh("q")
    async with bide.connect(url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
    return queue


async def found(url: str, queue: str) -> Counter[str]:
    """How often each message is in a queue, the last one included.

    Read a queue once: of thousands of acknowledgements at once, the broker forgets some when the channel closes.
    """
    ids = Counter[str]()
    async with (
        bide.connect(url) as client,
        asyncio.timeout(TIMEOUT),
        client.consume(queue, prefetch=2_000) as messages,
    ):
        async for message in messages:
            await message.ack()
            ids[str(message.message_id)] += 1
            if message.message_id == LAST:
                return ids
    raise AssertionError("the consumer ended")


async def publish_last(url: str, queue: str, *, delay: str | None = None) -> None:
    """Publish the last message, over a connection that nothing breaks.

    With the delay of the others, it is behind them in the same delay queue; by a longer one, it could pass those whose
    release takes a busy broker seconds.
    """
    async with bide.connect(url, infrastructure=CLOCK) as client:
        await client.publish(b"", to=queue, delay=delay, message_id=LAST)


def generated(queue: str, number: int = MESSAGES, **options: Any) -> Iterator[OutgoingMessage]:
    for place in range(number):
        yield OutgoingMessage(b"x" * 200, to=queue, message_id=f"m{place}", **options)


async def collect_results(publishing: BulkPublish) -> tuple[dict[str, PublishResult], BulkInDoubtError | None]:
    """The outcomes by message id, and what was raised in the end."""
    known: dict[str, PublishResult] = {}
    try:
        async for one in publishing:
            assert one.message_id is not None
            assert one.message_id not in known
            known[one.message_id] = one
    except BulkInDoubtError as error:
        return known, error
    return known, None


@pytest.mark.timeout(900 + 20 * CUTS)
async def test_cuts_at_random_bytes_lose_nothing(vhost: Vhost, proxy: Proxy) -> None:
    """Nothing is lost. Duplicates were sent but not confirmed when the connection broke."""
    chance = random.Random(11)
    repeated = 0
    for number in range(CUTS):
        queue = await declared(vhost.url)
        # From the first bytes of the handshake to the last message, and the connections after the first as well.
        budgets = iter([chance.randint(1, MESSAGES * 300), chance.randint(1, 20_000), chance.randint(1, 500_000)])
        delay = "1s" if number % 3 == 0 else None
        async with bide.connect(proxy.url, infrastructure=CLOCK, max_in_flight=1_000) as client:
            proxy.budget = partial(next, budgets, None)
            proxy.cut()
            known, error = await collect_results(client.publish_many(generated(queue, delay=delay)))
        await publish_last(vhost.url, queue, delay=delay)
        proxy.budget = lambda: None
        assert error is None
        assert len(known) == MESSAGES
        assert {one.status for one in known.values()} == {"confirmed"}
        there = await found(vhost.url, queue)
        assert there.keys() == known.keys() | {LAST}
        assert all(there[name] <= one.attempts for name, one in known.items())
        repeated += sum(one.attempts > 1 for one in known.values())
    assert proxy.cuts >= 3 * CUTS
    assert repeated > 0


@pytest.mark.timeout(900 + 20 * CUTS)
async def test_cuts_at_random_bytes_report_exactly_the_messages_in_doubt(vhost: Vhost, proxy: Proxy) -> None:
    """What the error names, and nothing else, is in doubt; what was not sent is not there."""
    chance = random.Random(13)
    doubts = 0
    for _ in range(max(3, CUTS // 4)):
        queue = await declared(vhost.url)
        source = generated(queue)
        confirmed, doubtful, unsent, rounds = set[str](), set[str](), set[str](), 0
        async with bide.connect(proxy.url, infrastructure=CLOCK, on_lost="raise", max_in_flight=500) as client:
            proxy.budget = lambda: chance.randint(20_000, 600_000)
            proxy.cut()
            while True:
                known, error = await collect_results(client.publish_many(source))
                confirmed |= known.keys()
                assert {one.status for one in known.values()} <= {"confirmed"}
                if error is None:
                    break
                rounds += 1
                assert isinstance(error.__cause__, ConnectionLostError)
                assert all(one.attempts == 1 for one in error.in_doubt)
                assert all(one.attempts == 0 for one in error.unsent)
                assert {one.status for one in error.in_doubt} <= {"in doubt"}
                assert {one.status for one in error.unsent} <= {"unsent"}
                assert len(error.in_doubt) + len(error.unsent) <= 500
                doubtful |= {str(one.message_id) for one in error.in_doubt}
                unsent |= {str(one.message_id) for one in error.unsent}
        proxy.budget = lambda: None
        await publish_last(vhost.url, queue)
        # Every message has one fate.
        assert len(confirmed) + len(doubtful) + len(unsent) == MESSAGES
        there = await found(vhost.url, queue)
        assert confirmed | {LAST} <= there.keys() <= confirmed | doubtful | {LAST}
        assert there.total() == len(there)
        assert rounds > 0
        doubts += len(doubtful)
    assert doubts > 0


@pytest.mark.timeout(900 + 20 * CUTS)
async def test_cuts_at_random_bytes_of_the_synchronous_publisher_lose_nothing(vhost: Vhost, proxy: Proxy) -> None:
    """Nothing is lost, and what is there more than once had its place in the window as the connection broke."""
    chance = random.Random(17)
    window, repeated = 700, 0
    for _ in range(max(3, CUTS // 4)):
        queue = await declared(vhost.url)
        budgets = iter([chance.randint(1, MESSAGES * 300), chance.randint(1, 20_000), chance.randint(1, 500_000)])

        def publish(queue: str = queue) -> PublishSummary:
            with BulkPublisher(proxy.url, window=window) as publisher:
                return publisher.publish_many(generated(queue))

        proxy.budget = partial(next, budgets, None)
        report = await asyncio.to_thread(publish)
        proxy.budget = lambda: None
        assert (report.total, report.confirmed, report.failures) == (MESSAGES, MESSAGES, ())
        await publish_last(vhost.url, queue)
        there = await found(vhost.url, queue)
        assert there.keys() == {f"m{number}" for number in range(MESSAGES)} | {LAST}
        again = [name for name, times in there.items() if times > 1]
        assert len(again) <= 3 * window
        assert max(there.values()) <= 4
        repeated += len(again)
    assert repeated > 0


async def test_messages_in_doubt_can_be_sent_again(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)
    source = generated(queue, 1_000, delay="1s")
    async with bide.connect(proxy.url, infrastructure=CLOCK, on_lost="raise", max_in_flight=100) as client:
        proxy.on_method[PUBLISH] = "deaf"
        publishing = asyncio.create_task(collect_results(client.publish_many(source)))

        async def sent() -> bool:
            return proxy.methods[PUBLISH] == 100

        await eventually(sent)
        proxy.cut()
        known, error = await publishing
        assert known == {}
        assert error is not None
        assert error.unsent == ()
        assert [one.position for one in error.in_doubt] == list(range(100))
        assert {one.status for one in error.in_doubt} == {"in doubt"}
        again = [one.again() for one in error.in_doubt]
        assert [one.deliver_at for one in again] == [one.due for one in error.in_doubt]
        assert (await client.publish_many(again)).confirmed == 100
        assert (await client.publish_many(source)).confirmed == 900
    await publish_last(vhost.url, queue, delay="1s")
    there = await found(vhost.url, queue)
    assert there.keys() == {LAST, *(f"m{number}" for number in range(1_000))}


async def test_messages_with_lost_confirms_are_sent_again(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK) as client:
        proxy.on_method[PUBLISH] = "deaf"
        publishing = asyncio.create_task(collect_results(client.publish_many(generated(queue, 300))))
        await until_ready(vhost.url, queue, 300)
        assert not publishing.done()
        proxy.cut()
        known, error = await publishing
        assert error is None
        assert {one.attempts for one in known.values()} == {2}
        await client.publish(b"", to=queue, message_id=LAST)
    there = await found(vhost.url, queue)
    assert there == {LAST: 1, **{f"m{number}": 2 for number in range(300)}}


@pytest.mark.parametrize("many", [True, False])
async def test_a_message_refused_on_repeat_is_in_doubt(vhost: Vhost, proxy: Proxy, many: bool) -> None:
    queue = fresh("full")
    arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-max-length": 1, "x-overflow": "reject-publish"}
    async with bide.connect(proxy.url, infrastructure=CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue(queue, arguments=arguments)]))
        # A quorum queue takes one more than its limit before it refuses.
        await client.publish(b"", to=queue)
        await until_ready(vhost.url, queue, 1)
        proxy.on_method[PUBLISH] = "deaf"
        if many:
            publishing = asyncio.ensure_future(
                collect_results(client.publish_many([OutgoingMessage(b"", to=queue, message_id="one")]))
            )
            await until_ready(vhost.url, queue, 2)
            proxy.cut()
            known, error = await publishing
            assert error is None
            assert (known["one"].status, known["one"].attempts) == ("in doubt", 2)
            cause = known["one"].error
        else:
            sending = asyncio.ensure_future(client.publish(b"", to=queue, message_id="one"))
            await until_ready(vhost.url, queue, 2)
            proxy.cut()
            with pytest.raises(PublishInDoubtError) as caught:
                await sending
            cause = caught.value
        assert cause is not None
        assert "it was sent, and not confirmed, and then: " in str(cause)
        assert isinstance(cause.__cause__, PublishRefusedError)
        # Sent once, and refused, it is not there.
        with pytest.raises(PublishRefusedError):
            await client.publish(b"", to=queue)


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("change", ["deleted", "forbidden"])
async def test_a_message_that_cannot_be_repeated_is_in_doubt(
    vhost: Vhost, proxy: Proxy, change: str, many: bool
) -> None:
    queue, exchange = fresh("q"), fresh("x")
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    vhost.broker.add_user("limited", "secret")
    vhost.broker.set_permissions(vhost.name, "limited")

    try:
        url = proxy.url.replace(f"bide:{vhost.broker.password}", "limited:secret")
        async with bide.connect(url, infrastructure=CLOCK) as client:
            topology = bide.Topology(
                [bide.Exchange(exchange, "fanout")], [bide.Queue.quorum(queue)], [bide.Binding(exchange, queue)]
            )
            await client.declare(topology)
            proxy.on_method[PUBLISH] = "deaf"
            message = OutgoingMessage(b"", exchange=exchange, message_id="one")

            async def fate() -> BaseException | None:
                if many:
                    known, error = await collect_results(client.publish_many([message]))
                    assert error is None
                    assert (known["one"].status, known["one"].attempts) == ("in doubt", 1 + (change == "forbidden"))
                    return known["one"].error
                with pytest.raises(PublishInDoubtError) as caught:
                    await client.publish(b"", exchange=exchange, message_id="one")
                return caught.value

            sending = asyncio.create_task(fate())
            await until_ready(vhost.url, queue, 1)
            if change == "deleted":
                async with await connection.channel() as channel:
                    await channel.delete_exchange(exchange)
            else:
                vhost.broker.set_permissions(vhost.name, "limited", write="^$")
            proxy.cut()
            cause = await sending
            assert cause is not None
            assert "it was sent, and not confirmed, and then: " in str(cause)
            refusal = TargetNotFoundError if change == "deleted" else AccessRefusedError
            assert isinstance(cause.__cause__, refusal)
            # Sent once, or not at all, it is not there.
            with pytest.raises(refusal):
                await client.publish(b"", exchange=exchange)
    finally:
        vhost.broker.delete_user("limited")
    await connection.close()


@pytest.mark.parametrize("name", ["x", "x" * 230], ids=["named", "cut-off"])
@pytest.mark.parametrize("count", [1, 2])
async def test_a_single_message_to_a_deleted_exchange_is_not_in_doubt(vhost: Vhost, count: int, name: str) -> None:
    """Of several the exchange may have taken some before it was deleted. The broker cuts a long name off."""
    queue, exchange = fresh("q"), fresh(name)
    async with bide.connect(vhost.url, infrastructure=CLOCK) as client:
        await client.declare(
            bide.Topology(
                [bide.Exchange(exchange, "fanout")], [bide.Queue.quorum(queue)], [bide.Binding(exchange, queue)]
            )
        )
        await client.publish(b"", exchange=exchange)
        connection = await Connection.open(BrokerUrl.parse(vhost.url))
        async with await connection.channel() as channel:
            await channel.delete_exchange(exchange)
        await connection.close()
        several = [OutgoingMessage(b"", exchange=exchange, message_id=f"m{number}") for number in range(count)]
        known, error = await collect_results(client.publish_many(several))
        assert error is None
        assert len(known) == count
        for one in known.values():
            if count == 1:
                assert one.status == "failed"
                assert isinstance(one.error, TargetNotFoundError)
            else:
                assert one.status == "in doubt"
                assert one.error is not None
                assert isinstance(one.error.__cause__, TargetNotFoundError)
        # The others fare as before.
        await client.publish(b"", to=queue)


async def test_an_unexpected_error_accounts_for_every_message(vhost: Vhost) -> None:
    """An error in bide: of those that are known, none is left."""
    queue = await declared(vhost.url)
    async with bide.connect(vhost.url, infrastructure=CLOCK) as client:
        await client.publish(b"", to=queue)

        all_taken = asyncio.Event()

        async def broken(self: BrokerState, message: PreparedMessage, previous: Preparation | None = None) -> None:
            await asyncio.wait_for(all_taken.wait(), TIMEOUT)
            raise ZeroDivisionError("odd")

        def taken(messages: Iterable[OutgoingMessage]) -> Iterator[OutgoingMessage]:
            yield from messages
            all_taken.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BrokerState, "prepare", broken)
            plain = list(generated(queue, 305))
            two = taken([*plain[:300], OutgoingMessage(b"", to=queue, delay="1s"), *plain[300:]])
            known, error = await collect_results(client.publish_many(two))
        assert error is not None
        assert "ZeroDivisionError: odd" in str(error)
        assert isinstance(error.__cause__, ZeroDivisionError)
        named = [one.position for one in (*known.values(), *error.in_doubt, *error.unsent)]
        assert sorted(named) == list(range(306))


async def test_a_broker_that_stops_answering_ends_the_bulk_publish_in_time(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)

    def source() -> Iterator[OutgoingMessage]:
        for number, message in enumerate(generated(queue, 1_000)):
            if number == 150:
                proxy.stall()
            yield message

    async with bide.connect(proxy.url, infrastructure=CLOCK, timeout="3s") as client:
        async with asyncio.timeout(MAX_LATENESS.total_seconds()):
            while True:
                known, error = await collect_results(client.publish_many(source(), window=100))
                # On a busy machine, a confirm may take 3 s even before the stall: begin again.
                if not proxy.moving.is_set():
                    break
        assert len(known) >= 50
        assert error is not None
        assert "no confirm within 3 s" in str(error)
        assert isinstance(error, PublishInDoubtError)
        assert 0 < len(error.in_doubt) + len(error.unsent) <= 100
        # Nothing was sent that is not reported.
        with pytest.raises(PublishError, match="not reached within 3 s"):
            await client.publish_many(generated(queue, 10))
        proxy.moving.set()


async def test_a_broker_that_falls_silent_is_noticed_by_its_missing_heartbeats(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)
    stalled = asyncio.Event()

    def source() -> Iterator[OutgoingMessage]:
        for number, message in enumerate(generated(queue, 1_000)):
            if number == 500:
                proxy.stall()
                stalled.set()
            yield message

    async with bide.connect(f"{proxy.url}?heartbeat=1", infrastructure=CLOCK, timeout="60s") as client:
        publishing = asyncio.create_task(collect_results(client.publish_many(source(), window=100)))
        async with asyncio.timeout(TIMEOUT):
            await stalled.wait()
            # On a slow machine it is not the first one: a broker gives up a silent client, too.
            lost = await (await connection_of(client)).lost
        assert "silent for" in str(lost)
        assert not publishing.done()
        proxy.moving.set()
        known, error = await publishing
        await client.publish(b"", to=queue, message_id=LAST)
    assert error is None
    assert len(known) == 1_000
    assert Counter((one.status, one.attempts) for one in known.values()).keys() == {("confirmed", 1), ("confirmed", 2)}
    there = await found(vhost.url, queue)
    assert there.keys() == known.keys() | {LAST}
    assert all(there[name] <= one.attempts for name, one in known.items())


async def test_a_timeout_names_what_was_not_done_in_time(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK, timeout="1s") as client:
        proxy.on_method[QUEUE_DECLARE] = "deaf"
        known, error = await collect_results(client.publish_many(generated(queue, 3, delay="1s")))
        assert known == {}
        assert error is not None
        reason = "the queues and bindings that they need were not declared yet"
        assert f"nothing was sent within 1 s: {reason}" in str(error)
        assert (error.in_doubt, [one.position for one in error.unsent]) == ((), [0, 1, 2])
        proxy.cut()

        async def works() -> bool:
            # To connect again may take longer than the timeout.
            _, error = await collect_results(client.publish_many(generated(queue, 1)))
            return error is None

        await eventually(works)
        proxy.refusing = True
        proxy.on_method[PUBLISH] = "before"
        known, error = await collect_results(client.publish_many(generated(queue, 3)))
        assert known == {}
        assert error is not None
        assert "no confirm within 1 s: the broker was not reached" in str(error)
        assert [one.position for one in error.in_doubt] == [0, 1, 2]


async def test_closing_the_client_leaves_unconfirmed_messages_in_doubt(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK) as client:
        proxy.rewrite = without_confirms
        publishing = asyncio.create_task(collect_results(client.publish_many(generated(queue, 300))))
        await until_ready(vhost.url, queue, 300)
        await client.close()
        known, error = await publishing
    assert known == {}
    assert error is not None
    assert len(error.in_doubt) == 300
    assert isinstance(error.__cause__, ClosedError)


async def test_every_message_of_the_synchronous_publisher_is_confirmed_in_doubt_or_unsent(
    vhost: Vhost, proxy: Proxy
) -> None:
    """All that was put has one fate: confirmed in an earlier flush, in doubt, or unsent."""
    queue = await declared(vhost.url)
    proxy.budget = lambda: 100_000

    def publish() -> BulkInDoubtError:
        with BulkPublisher(proxy.url, on_lost="raise", window=300) as publisher:
            with pytest.raises(BulkInDoubtError) as caught:
                publisher.publish_many(generated(queue, 12_000))
            return caught.value

    error = await asyncio.to_thread(publish)
    proxy.budget = lambda: None
    assert isinstance(error.__cause__, ConnectionLostError)
    positions = [one.position for one in (*error.in_doubt, *error.unsent)]
    assert sorted(positions) == list(range(positions[0], positions[0] + len(positions)))
    assert 0 < len(error.in_doubt) <= 300
    assert len(error.unsent) >= 1_000
    async with bide.connect(vhost.url) as client:
        await client.publish(b"", to=queue, message_id=LAST)
    there = await found(vhost.url, queue)
    assert not there.keys() & {one.message_id for one in error.unsent}
    assert {f"m{number}" for number in range(positions[0])} <= there.keys()


async def test_the_synchronous_publisher_reports_a_batch_that_cannot_start(vhost: Vhost, proxy: Proxy) -> None:
    """The broker is away when it is its turn."""
    queue = await declared(vhost.url)

    loop = asyncio.get_running_loop()

    def publish() -> tuple[BulkInDoubtError, PublishSummary]:
        with BulkPublisher(proxy.url, timeout="3s") as publisher:
            publisher.publish_many(generated(queue, 10))
            proxy.refusing, before = True, proxy.accepted
            loop.call_soon_threadsafe(proxy.cut)
            wait_until(lambda: proxy.accepted > before, "it has noticed and tries to connect again")
            with pytest.raises(BulkInDoubtError, match="not reached within 3 s") as caught:
                publisher.publish_many(generated(queue, 7_000))
            proxy.refusing = False
            give_up = time.monotonic() + TIMEOUT
            while True:
                # On a slow machine a connection may take longer than the time limit.
                try:
                    return caught.value, publisher.publish_many(generated(queue, 5))
                except BulkInDoubtError:
                    if time.monotonic() > give_up:
                        raise

    error, after = await asyncio.to_thread(publish)
    assert isinstance(error.__cause__, PublishError)
    assert error.in_doubt == ()
    # What it had taken of the messages.
    assert 1_000 <= len(error.unsent) <= 7_000
    assert [one.position for one in error.unsent] == list(range(10, 10 + len(error.unsent)))
    assert {one.status for one in error.unsent} == {"unsent"}
    assert error.report.total == 0
    assert after.confirmed == 5


async def test_results_known_before_the_failure_are_in_the_error(vhost: Vhost, proxy: Proxy) -> None:
    """A failed await returns no results, so the error contains those that are known."""
    queue = await declared(vhost.url)
    more = asyncio.Event()

    async def source() -> AsyncIterator[OutgoingMessage]:
        yield OutgoingMessage(b"", to="nowhere")
        for message in generated(queue, 9):
            yield message
        await more.wait()
        proxy.on_method[PUBLISH] = "deaf"
        for message in generated(queue, 10):
            yield message

    async with bide.connect(proxy.url, infrastructure=CLOCK, on_lost="raise") as client:
        publishing = asyncio.ensure_future(client.publish_many(source()))
        await until_ready(vhost.url, queue, 9)
        publisher = await connection_of(client)

        async def confirmed() -> bool:
            # The message is in the queue before its confirm is here.
            return not publisher.is_waiting

        await eventually(confirmed)
        more.set()
        await until_ready(vhost.url, queue, 19)
        proxy.cut()
        with pytest.raises(BulkInDoubtError) as caught:
            await publishing
    error = caught.value
    assert len(error.in_doubt) == 10
    assert (error.report.returned, error.report.confirmed, error.report.total) == (1, 9, 10)


async def test_an_unsupported_broker_after_the_cut_ends_the_bulk_publish(vhost: Vhost, proxy: Proxy) -> None:
    """One of several hosts, say, that is too old: it ends, and says so, rather than to try for ever."""
    queue = await declared(vhost.url)
    rewrite = too_old(vhost)

    def source() -> Iterator[OutgoingMessage]:
        for number, message in enumerate(generated(queue, 1_000)):
            if number == 500:
                proxy.rewrite = rewrite
                proxy.cut()
            yield message

    async with bide.connect(proxy.url, infrastructure=CLOCK, timeout="120s") as client:
        async with asyncio.timeout(TIMEOUT):
            known, error = await collect_results(client.publish_many(source(), window=100))
        proxy.rewrite = bytes
    assert error is not None
    assert isinstance(error.__cause__, UnsupportedBrokerError)
    assert len(known) + len(error.in_doubt) + len(error.unsent) >= 500


async def test_another_host_takes_over(vhost: Vhost, proxy: Proxy) -> None:
    """A URL of several hosts: where the first refuses, the second goes on."""
    queue = await declared(vhost.url)
    hosts = ",".join(f"{host}:{port}" for url in (proxy.url, vhost.url) for host, port in BrokerUrl.parse(url).hosts)
    credentials, _, rest = vhost.url.rpartition("@")
    url = f"{credentials}@{hosts}/{rest.partition('/')[2]}?order=given"
    async with bide.connect(url, infrastructure=CLOCK) as client:
        proxy.budget = lambda: None
        source = generated(queue)
        known = {}
        async for one in client.publish_many(source, window=500):
            known[one.message_id] = one
            if len(known) == 1_000:
                proxy.refusing = True
                proxy.cut()
        await client.publish(b"", to=queue, message_id=LAST)
    assert len(known) == MESSAGES
    assert {one.status for one in known.values()} == {"confirmed"}
    assert (await found(vhost.url, queue)).keys() == known.keys() | {LAST}


async def test_a_slow_connection_limits_the_write_buffer(vhost: Vhost, proxy: Proxy) -> None:
    queue = await declared(vhost.url)
    async with bide.connect(proxy.url, infrastructure=CLOCK) as client:
        transport: Any = (await connection_of(client))._transport
        proxy.rate = 20_000_000
        most = 0
        async for _ in client.publish_many(OutgoingMessage(b"x" * 50_000, to=queue) for _ in range(300)):
            most = max(most, transport.get_write_buffer_size())
    assert 50_000 < most < 2 * WRITE_BUFFER


async def test_bulk_publishing_works_over_tls(dedicated: DedicatedBroker) -> None:
    queue = await declared(dedicated.url())
    async with bide.connect(dedicated.url(tls=f"cafile={dedicated.folder}/ca.pem"), infrastructure=CLOCK) as client:
        assert (await client.publish_many(generated(queue))).confirmed == MESSAGES
        await client.publish(b"", to=queue, message_id=LAST)
    assert (await found(dedicated.url(), queue)).total() == MESSAGES + 1


async def test_only_bodies_over_the_limit_of_the_broker_fail(dedicated: DedicatedBroker) -> None:
    """The broker closes the channel for each of them; all others arrive."""
    queue = await declared(dedicated.url())
    async with bide.connect(dedicated.url(), infrastructure=CLOCK) as client:
        sizes = [BODY_LIMIT + 1 if number in (3, 700, 701) else 100 for number in range(1_000)]
        source = (OutgoingMessage(b"x" * size, to=queue, message_id=f"m{number}") for number, size in enumerate(sizes))
        known, error = await collect_results(client.publish_many(source))
        await client.publish(b"", to=queue, message_id=LAST)
    assert error is None
    failed = {(one.position, one.status) for one in known.values() if one.error is not None}
    assert failed == {(3, "failed"), (700, "failed"), (701, "failed")}
    assert all(isinstance(known[f"m{number}"].error, MessageTooLargeError) for number in (3, 700, 701))
    assert len(await found(dedicated.url(), queue)) == 998


async def test_a_broker_alarm_does_not_count_against_the_timeout(dedicated: DedicatedBroker) -> None:
    """However long it takes: the client's timeout is for brokers that say nothing."""
    queue = await declared(dedicated.url())
    names: list[str] = []
    seen = asyncio.Event()

    def source() -> Iterator[OutgoingMessage]:
        # The broker checks its memory periodically, and blocks a connection at its next publish.
        more = 1_000
        while more:
            more -= seen.is_set()
            names.append(f"m{len(names)}")
            yield OutgoingMessage(b"", to=queue, message_id=names[-1])

    async with bide.connect(f"{dedicated.url()}?heartbeat=3", infrastructure=CLOCK, timeout="7s") as client:
        connection = await connection_of(client)
        await asyncio.to_thread(dedicated.broker.rabbitmqctl, "set_vm_memory_high_watermark", "0.000001")
        try:
            publishing = asyncio.create_task(collect_results(client.publish_many(source(), window=50)))

            async def blocked() -> bool:
                return connection.blocked_by is not None

            await eventually(blocked)
            seen.set()
            # Longer than the time limit, and than both sides wait for a sign of life.
            done, _ = await asyncio.wait({publishing}, timeout=8)
            assert not done
            assert connection.blocked_by is not None
        finally:
            await asyncio.to_thread(dedicated.broker.rabbitmqctl, "set_vm_memory_high_watermark", "0.6")
        known, error = await publishing
        await client.publish(b"", to=queue, message_id=LAST)
    assert error is None
    assert list(known) == names
    assert {(one.status, one.attempts) for one in known.values()} == {("confirmed", 1)}
    assert await found(dedicated.url(), queue) == Counter([*names, LAST])
