"""Bulk publishing: each message arrives or is reported, exactly once."""

from __future__ import annotations

import asyncio
import math
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import bide
from bide.admin.destroy import destroy
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.bulk.input import open_input
from bide.client.bulk.publish import BulkPublish
from bide.client.publish_result import PublishResult, PublishSummary
from bide.delay.protocol import DelayInfrastructure
from bide.errors import (
    BulkPublishError,
    ClosedError,
    InvalidDelayError,
    InvalidInputError,
    NotAppliedError,
    PublishRefusedError,
    TargetNotFoundError,
    UnroutableError,
)
from bide.messages.outgoing import OutgoingMessage
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.receiving import connection_of, eventually, fresh, receive
from tests.leaks import no_leaks
from tests.support import Vhost
from tests.timeouts import MAX_LATENESS, TIMEOUT


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    """Nothing is left behind, however a publishing ends."""
    async with no_leaks():
        yield


@pytest.fixture
async def queue(client: bide.Client) -> str:
    name = fresh("q")
    await client.declare(bide.Topology(queues=[bide.Queue.quorum(name)]))
    return name


class _UnencodableText(str):
    """A text whose encoding fails with an unexpected error."""

    __slots__ = ()

    def encode(self, *_: Any, **__: Any) -> bytes:
        raise RuntimeError("not now")


def _deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


async def outcomes(publishing: BulkPublish) -> list[PublishResult]:
    """All of them, in the order of the input."""
    return sorted([one async for one in publishing], key=lambda one: one.position)


async def drained(publishing: BulkPublish) -> tuple[list[PublishResult], Exception | None]:
    """The outcomes in the order in which they came, and what was raised in the end."""
    seen = []
    try:
        async for one in publishing:
            seen.append(one)  # noqa: PERF401 (those before an error count)
    except (bide.BideError, OSError, RuntimeError) as error:
        return seen, error
    return seen, None


async def test_a_delay_counts_from_the_current_millisecond_rounded_down(client: bide.Client, queue: str) -> None:
    # As the broker counts it: of a due time that is exact to the microsecond, the message would come too early.
    began = datetime.now(UTC) - timedelta(milliseconds=1)
    receipts = [await client.publish("x", to=queue, delay="1s") for _ in range(20)]
    found = await outcomes(client.publish_many(OutgoingMessage("x", to=queue, delay="1s") for _ in range(20)))
    received = await receive(client, queue, 40)
    for due in (*(one.due for one in receipts), *(one.due for one in found), *(one.due for one in received)):
        assert due is not None
        assert not due.microsecond % 1_000
        assert began < due - timedelta(seconds=1) <= datetime.now(UTC)
    assert all(one.lateness is not None and one.lateness >= timedelta(0) for one in received)


async def test_messages_arrive_in_order(client: bide.Client, queue: str) -> None:
    report = await client.publish_many(OutgoingMessage(str(number), to=queue) for number in range(3_000))
    assert (report.confirmed, report.total, report.failures) == (3_000, 3_000, ())
    assert [int(one.body) for one in await receive(client, queue, 3_000)] == list(range(3_000))


async def test_results_and_batches_agree(client: bide.Client, queue: str) -> None:
    def messages() -> Iterator[OutgoingMessage]:
        for number in range(700):
            yield OutgoingMessage(b"", to=queue if number % 7 else "nowhere", message_id=f"m{number}")

    each = await outcomes(client.publish_many(messages()))
    assert [one.message_id for one in each] == [f"m{number}" for number in range(700)]
    assert [one.position for one in each] == list(range(700))
    assert [one.position for one in each if one.status == "returned"] == list(range(0, 700, 7))
    assert {one.attempts for one in each} == {1}
    reports = [one async for one in client.publish_many(messages()).batches()]
    assert sum(one.confirmed for one in reports) == 600
    assert sum(one.returned for one in reports) == 100
    assert sorted(one.position for report in reports for one in report.failures) == list(range(0, 700, 7))
    with pytest.raises(
        BulkPublishError, match=r"100 of 700 messages were not accepted \(600 confirmed, 100 ret"
    ) as caught:
        await client.publish_many(messages())
    assert caught.value.report.returned == 100


async def test_every_result_belongs_to_its_message(client: bide.Client, queue: str) -> None:
    full, missing = fresh("full"), fresh("missing")
    arguments: dict[str, Any] = {"x-queue-type": "classic", "x-max-length": 1, "x-overflow": "reject-publish"}
    await client.declare(bide.Topology(queues=[bide.Queue(full, arguments=arguments)]))
    await client.publish(b"fills it", to=full)
    kinds: list[tuple[Any, str, type[Exception] | None]] = [
        (OutgoingMessage(b"", to=queue), "confirmed", None),
        (OutgoingMessage(b"", to=full), "refused", PublishRefusedError),
        (OutgoingMessage(b"", to=missing), "returned", UnroutableError),
        (OutgoingMessage(b"", to=missing, mandatory=False), "confirmed", None),
        (OutgoingMessage(b"", to=queue, delay="-1s"), "invalid", InvalidInputError),
        (OutgoingMessage(b"", to=queue, delay="1d"), "invalid", InvalidDelayError),
        (OutgoingMessage(b"", to=missing, delay="20s"), "failed", TargetNotFoundError),
        (OutgoingMessage(b"", exchange=missing, routing_key="k"), "failed", TargetNotFoundError),
        ({"to": queue}, "invalid", InvalidInputError),
        (None, "invalid", InvalidInputError),
        (OutgoingMessage(b"", to=queue, delay="20s"), "confirmed", None),
        (OutgoingMessage(b"", to=queue, headers={"x": object()}), "invalid", InvalidInputError),
        (OutgoingMessage(b"", to=queue, headers={"x": math.nan}), "invalid", InvalidInputError),
        (OutgoingMessage(b"", to=queue, headers={"x": "y" * 200_000}), "invalid", InvalidInputError),
        (OutgoingMessage(b"", to=queue, headers={"x": [memoryview(b"x")]}), "invalid", InvalidInputError),
        (OutgoingMessage(b"", to=queue, delay=["1s"]), "invalid", InvalidInputError),  # type: ignore[arg-type]  # wrong on purpose
        (OutgoingMessage(b"", to=queue, mandatory=None), "invalid", InvalidInputError),  # type: ignore[arg-type]  # wrong on purpose
        (OutgoingMessage(json=_deep(), to=queue), "invalid", InvalidInputError),
        (OutgoingMessage(_UnencodableText(), to=queue), "invalid", InvalidInputError),
        (OutgoingMessage(b"", to=queue, delay="1s", isolated=[]), "invalid", InvalidInputError),  # type: ignore[arg-type]  # wrong on purpose
    ]
    each = await outcomes(client.publish_many(kinds[number % len(kinds)][0] for number in range(40 * len(kinds))))
    assert len(each) == 40 * len(kinds)
    for one in each:
        outgoing_message, status, error = kinds[one.position % len(kinds)]
        assert one.message is outgoing_message
        assert one.status == status, one.error
        assert isinstance(one.error, error or type(None))
        assert (one.due is not None) == (status == "confirmed" and outgoing_message.delay is not None)
    assert len(await receive(client, queue, 40)) == 40
    # The client goes on as if nothing had been.
    await client.publish(b"", to=queue)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_a_full_queue_refuses_exactly_the_messages_that_it_does_not_hold(
    client: bide.Client, queue: str, kind: str
) -> None:
    full = fresh("full")
    arguments: dict[str, Any] = {"x-queue-type": kind, "x-max-length": 100, "x-overflow": "reject-publish"}
    await client.declare(bide.Topology(queues=[bide.Queue(full, arguments=arguments)]))
    each = await outcomes(
        client.publish_many(
            OutgoingMessage(b"", to=(queue, full)[number % 2], message_id=f"{number}") for number in range(2_000)
        )
    )
    statuses = Counter((one.message.to, one.status) for one in each)
    confirmed = statuses[full, "confirmed"]
    assert statuses == {
        (queue, "confirmed"): 1_000,
        (full, "confirmed"): confirmed,
        (full, "refused"): 1000 - confirmed,
    }
    assert 100 <= confirmed < 1_000
    found = {one.message_id for one in await receive(client, full, confirmed)}
    assert found == {one.message_id for one in each if one.message.to == full and one.error is None}


async def test_delayed_messages_are_on_time(client: bide.Client, queue: str) -> None:
    delays = [timedelta(milliseconds=10 * number) for number in range(150)]
    now = datetime.now(UTC)
    # A delay counts from the millisecond, rounded down.
    started = now.replace(microsecond=now.microsecond // 1_000 * 1_000)
    messages = [OutgoingMessage(f"{number}", to=queue, delay=delay) for number, delay in enumerate(delays)]
    messages += [
        OutgoingMessage(f"{150 + number}", to=queue, deliver_at=started + delay) for number, delay in enumerate(delays)
    ]
    each = await outcomes(client.publish_many(messages))
    received = {int(one.body): one for one in await receive(client, queue, 300)}
    for one in each:
        message = received[one.position]
        assert message.message_id == one.message_id
        assert one.due is not None
        assert message.due is not None
        assert timedelta(0) <= message.due - one.due < timedelta(milliseconds=1)
        assert message.lateness is not None
        assert timedelta(0) <= message.lateness < MAX_LATENESS
        if one.position < 150:
            assert one.due - started >= delays[one.position]
        else:
            assert one.due == one.message.deliver_at


@pytest.mark.parametrize(
    "infrastructure", [bide.NServiceBus(routing="direct"), bide.Celery()], ids=lambda one: one.name
)
async def test_other_infrastructures_deliver_bulk_messages(vhost: Vhost, infrastructure: DelayInfrastructure) -> None:
    async with bide.connect(vhost.url, infrastructure=infrastructure) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        messages = [OutgoingMessage(str(number), to="q", delay=("1s", None)[number % 2]) for number in range(200)]
        assert (await client.publish_many(messages)).confirmed == 200
        received = await receive(client, "q", 200)
        assert sorted(int(one.body) for one in received) == list(range(200))
        assert all(one.lateness is None or one.lateness >= timedelta(0) for one in received)


async def test_bodies_larger_than_a_frame_arrive_whole(client: bide.Client, queue: str) -> None:
    bodies = [bytes([number]) * size for number, size in enumerate((0, 131_063, 131_064, 131_065, 400_000, 3_000_000))]
    await client.publish_many(OutgoingMessage(body, to=queue) for body in bodies * 3)
    assert [one.body for one in await receive(client, queue, 18)] == bodies * 3


async def test_only_the_message_that_closes_the_channel_fails(client: bide.Client, queue: str) -> None:
    """The broker does not name the message. All others arrive."""

    def outgoing() -> Iterator[OutgoingMessage]:
        for number in range(3_000):
            yield OutgoingMessage(
                b"", to=queue, message_id=f"{number}", user_id="stranger" if number in (700, 2_900) else None
            )
        yield OutgoingMessage(b"", to=queue, message_id="last")

    each = await outcomes(client.publish_many(outgoing()))
    failed = [one for one in each if one.error is not None]
    assert [(one.position, one.status) for one in failed] == [(700, "failed"), (2_900, "failed")]
    assert all("user_id" in str(one.error) for one in failed)
    repeated = sum(one.attempts - 1 for one in each if one.error is None)
    assert repeated > 0
    found = set[str | None]()
    async with client.consume(queue, prefetch=2_000) as messages:
        # Every other was sent, and confirmed, before the last one was sent for the last time.
        async for message in messages:
            await message.ack()
            found.add(message.message_id)
            if len(found) == 2_999:
                break
    assert found == {"last", *(f"{number}" for number in range(3_000))} - {"700", "2900"}


async def test_a_blocking_input_blocks_neither_its_messages_nor_the_event_loop(client: bide.Client, queue: str) -> None:
    first, given, ticks = 0, 0, 0
    deadline = time.monotonic() + TIMEOUT

    def messages() -> Iterator[OutgoingMessage]:
        nonlocal given
        while (not first or ticks < 10) and time.monotonic() < deadline:
            given += 1
            yield OutgoingMessage(b"", to=queue)
            time.sleep(0.1)  # an input that is slower than the broker

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)  # one turn of the loop
            ticks += 1

    await client.publish(b"", to=queue)
    ticking = asyncio.create_task(tick())
    async for _ in client.publish_many(messages()):
        first = first or given
    ticking.cancel()
    # The input ends when the first result is known, and not because the time is over.
    assert 0 < first <= given
    assert ticks >= 10
    assert time.monotonic() < deadline


async def test_messages_taken_before_an_exchange_is_deleted_are_not_failures(
    client: bide.Client, queue: str, clock_url: str
) -> None:
    """What it took before is not called failed, whether the confirm came or not; what never left is."""
    exchange, deleted = fresh("x"), False
    bindings = [bide.Binding(exchange, queue)]
    await client.declare(bide.Topology([bide.Exchange(exchange, "fanout")], [bide.Queue.quorum(queue)], bindings))
    connection = await Connection.open(BrokerUrl.parse(clock_url))

    async def outgoing() -> AsyncIterator[OutgoingMessage]:
        nonlocal deleted
        for number in range(20_000):
            if number == 10_000:
                async with await connection.channel() as channel:
                    await channel.delete_exchange(exchange)
                deleted = True
            yield OutgoingMessage(b"", exchange=exchange, message_id=f"{number}")

    each = await outcomes(client.publish_many(outgoing()))
    await connection.close()
    statuses = Counter(one.status for one in each)
    assert deleted
    assert statuses.total() == 20_000
    # Its bindings go a moment before it: what the broker gets to in between is returned.
    assert statuses.keys() <= {"confirmed", "in doubt", "returned", "failed"}
    assert statuses["confirmed"] > 0
    assert statuses["failed"] > 0
    assert all((one.attempts > 0) == (one.status != "failed") for one in each)
    await client.publish(b"", to=queue, message_id="last")
    found = set()
    async with client.consume(queue, prefetch=2_000) as messages:
        async for message in messages:
            await message.ack()
            if message.message_id == "last":
                break
            found.add(message.message_id)
    confirmed, doubtful = ({one.message_id for one in each if one.status == name} for name in ("confirmed", "in doubt"))
    assert confirmed <= found <= confirmed | doubtful


async def test_a_deleted_infrastructure_is_declared_again(vhost: Vhost) -> None:
    """It is put there again, and everything arrives."""
    queue = fresh("q")
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        await client.publish(b"", to=queue, delay="100ms")
        assert len(await receive(client, queue, 1)) == 1
        connection = await Connection.open(BrokerUrl.parse(vhost.url))
        await destroy(connection, SMALL_CLOCK.topology())
        await connection.close()
        report = await client.publish_many(OutgoingMessage(b"", to=queue, delay="100ms") for _ in range(2_000))
        assert report.confirmed == 2_000
        assert len(await receive(client, queue, 2_000)) == 2_000


async def test_messages_are_confirmed_while_an_asynchronous_input_waits(client: bide.Client, queue: str) -> None:
    more = asyncio.Event()

    async def messages() -> AsyncIterator[OutgoingMessage]:
        for number in range(5_000):
            if number == 3:
                await more.wait()
            yield OutgoingMessage(b"", to=queue, message_id=f"{number}")

    seen = 0
    async for one in client.publish_many(messages(), window=500):
        assert one.status == "confirmed"
        seen += 1
        if seen == 3:
            # The three are confirmed although the fourth is not there yet.
            assert not more.is_set()
            more.set()
    assert seen == 5_000


async def test_slow_inputs_and_callers_do_not_count_against_the_timeout(
    clock_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit counts the broker's silence alone. The clock of the event loop leaps, instead of a sleep."""
    loop, leaps, known = asyncio.get_running_loop(), 0, asyncio.Event()
    time_of_loop = loop.time

    def leap() -> None:
        nonlocal leaps
        leaps += 1

    async def leap_while_waiting() -> None:
        leap()
        for _ in range(10):  # turns of the loop in which a timeout would end
            await asyncio.sleep(0)

    async def slow() -> AsyncIterator[OutgoingMessage]:
        yield OutgoingMessage(b"", to=queue)
        await known.wait()
        await leap_while_waiting()
        yield OutgoingMessage(b"", to=queue)

    def blocking() -> Iterator[OutgoingMessage]:
        for _ in range(2):
            yield OutgoingMessage(b"", to=queue)
            leap()

    async with bide.connect(f"{clock_url}?heartbeat=0", timeout="1h") as client:
        with monkeypatch.context() as patch:
            patch.setattr(loop, "time", lambda: time_of_loop() + leaps * 3700)
            async for one in client.publish_many(slow()):
                assert one.status == "confirmed"
                known.set()
            assert (await client.publish_many(blocking())).confirmed == 2
            seen = 0
            async for one in client.publish_many(OutgoingMessage(b"", to=queue) for _ in range(600)):
                assert one.status == "confirmed"
                if seen % 300 == 0:
                    await leap_while_waiting()
                seen += 1
    assert (seen, leaps) == (600, 5)


async def test_at_most_a_window_of_messages_is_taken(client: bide.Client, queue: str) -> None:
    """However long the input is, a message is taken only when an earlier one is confirmed."""
    taken = known = most = 0
    connection = await connection_of(client)

    def messages() -> Iterator[OutgoingMessage]:
        nonlocal taken, most
        for _ in range(20_000):
            taken += 1
            most = max(most, taken - known)
            if taken == 1_000:
                # However fast the broker is, nothing is confirmed until the window is full.
                connection.pause_reading()
            yield OutgoingMessage(b"x" * 200, to=queue)

    async def is_full() -> bool:
        return taken >= 1_000 and taken - known >= 500

    async def resume_when_full() -> None:
        await eventually(is_full, step=0.01)
        connection.resume_reading()

    resuming = asyncio.create_task(resume_when_full())
    async for _ in client.publish_many(messages(), window=500):
        known += 1
    await resuming
    assert taken == known == 20_000
    assert 500 <= most <= 500 + 1


async def test_memory_does_not_grow_with_the_input(client: bide.Client, queue: str) -> None:
    """60 MB go through, and a few at a time are held."""
    known = before = 0
    tracemalloc.start()
    try:
        async for _ in client.publish_many(
            (OutgoingMessage(bytes(2_000), to=queue) for _ in range(30_000)), window=500
        ):
            known += 1
            if known == 3_000:
                before, _ = tracemalloc.get_traced_memory()
                tracemalloc.reset_peak()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert known == 30_000
    assert peak - before < 6_000_000
    assert after - before < 1_000_000


async def test_bytes_in_flight_are_limited(client: bide.Client, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bide.client.bulk.sender.MAX_BYTES", 100_000)
    taken = known = most = 0

    def messages() -> Iterator[OutgoingMessage]:
        nonlocal taken, most
        for _ in range(300):
            taken += 1
            most = max(most, taken - known)
            yield OutgoingMessage(b"x" * 30_000, to=queue)

    async for _ in client.publish_many(messages()):
        known += 1
    assert taken == known == 300
    assert most == 4


async def test_an_error_of_the_input_is_raised_after_the_confirms(client: bide.Client, queue: str) -> None:
    def messages() -> Iterator[OutgoingMessage]:
        for _ in range(300):
            yield OutgoingMessage(b"", to=queue)
        raise OSError("the file is gone")

    async def later() -> AsyncIterator[OutgoingMessage]:
        for message in [OutgoingMessage(b"", to=queue)] * 300:
            yield message
        raise OSError("the file is gone")

    for source in (messages(), later()):
        seen, error = await drained(client.publish_many(source))
        assert [one.status for one in seen] == ["confirmed"] * 300
        assert isinstance(error, OSError)


async def test_an_input_cancelled_from_within_is_an_error(client: bide.Client, queue: str) -> None:
    async def messages() -> AsyncIterator[OutgoingMessage]:
        for message in [OutgoingMessage(b"", to=queue)] * 300:
            yield message
        other = asyncio.create_task(asyncio.sleep(60))  # cancelled below
        other.cancel()
        await other

    seen, error = await drained(client.publish_many(messages()))
    assert [one.status for one in seen] == ["confirmed"] * 300
    assert str(error) == "the input was cancelled from within"
    with pytest.raises(RuntimeError, match="from within"):
        await client.publish_many(messages())


@pytest.mark.parametrize("how", ["time limit", "time limit that is its end", "task group", "itself"])
async def test_an_input_that_cancels_its_reader_is_an_error(client: bide.Client, queue: str, how: str) -> None:
    """The input is stopped while it waits for room, so that a cancellation reaches it where it yields a message."""
    given, stop = 0, asyncio.Event()

    def more() -> Iterator[OutgoingMessage]:
        nonlocal given
        while True:
            given += 1
            yield OutgoingMessage(b"", to=queue)

    async def limited(expected: type[Exception] = ZeroDivisionError) -> AsyncIterator[OutgoingMessage]:
        with suppress(expected):
            async with asyncio.timeout(None) as limit:
                waiting = asyncio.create_task(stop.wait())
                waiting.add_done_callback(lambda _: limit.reschedule(0))
                for message in more():
                    yield message

    async def grouped() -> AsyncIterator[OutgoingMessage]:
        async def fail() -> None:
            await stop.wait()
            raise OSError("the file is gone")

        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            for message in more():
                yield message

    async def alone() -> AsyncIterator[OutgoingMessage]:
        reader = asyncio.current_task()
        assert reader is not None
        waiting = asyncio.create_task(stop.wait())
        waiting.add_done_callback(lambda _: reader.cancel())
        for message in more():
            yield message

    source, expected = {
        "time limit": (limited(), "TimeoutError()"),
        "time limit that is its end": (limited(TimeoutError), "None"),
        "task group": (grouped(), "ExceptionGroup('unhandled errors in a TaskGroup', [OSError('the file is gone')])"),
        "itself": (alone(), "RuntimeError('the input was cancelled from within')"),
    }[how]
    seen, error = 0, None
    try:
        async for one in client.publish_many(source, window=100):
            assert one.status == "confirmed"
            seen += 1
            stop.set()
    except Exception as caught:  # noqa: BLE001 (looked at below)
        error = caught
    assert repr(error) == expected
    assert seen == given == 1_000


async def test_closing_the_iteration_closes_the_input(client: bide.Client, queue: str) -> None:
    """Also where it was not asked for more at that moment."""
    has_ended = False

    async def messages() -> AsyncIterator[OutgoingMessage]:
        nonlocal has_ended
        try:
            while True:
                yield OutgoingMessage(b"", to=queue)
        finally:
            await asyncio.sleep(0)  # an await while it is closed
            has_ended = True

    publishing = aiter(client.publish_many(messages(), window=100))
    assert (await anext(publishing)).status == "confirmed"
    await publishing.aclose()
    assert has_ended


async def test_leaving_the_iteration_early_keeps_the_client_usable(client: bide.Client, queue: str) -> None:
    publishing = aiter(client.publish_many(OutgoingMessage(b"", to=queue) for _ in range(100_000)))
    assert (await anext(publishing)).status == "confirmed"
    await publishing.aclose()
    await client.publish(b"", to=queue)


async def test_a_bulk_publish_is_used_once(client: bide.Client, queue: str) -> None:
    publishing = client.publish_many([OutgoingMessage(b"", to=queue)])
    assert (await publishing).confirmed == 1
    with pytest.raises(ClosedError, match="published already"):
        await publishing
    with pytest.raises(ClosedError):
        publishing.batches()
    assert (await client.publish_many([])).total == 0


async def test_invalid_arguments_are_refused(client: bide.Client) -> None:
    with pytest.raises(InvalidInputError, match="window"):
        client.publish_many([], window=0)
    with pytest.raises(InvalidInputError, match="on_lost"):
        client.publish_many([], on_lost="never")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidInputError, match="iterable"):
        await client.publish_many(3)  # type: ignore[arg-type]  # wrong on purpose


async def test_a_missing_infrastructure_ends_the_bulk_publish(vhost: Vhost) -> None:
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK, declare=False) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        messages = (OutgoingMessage(b"", to="q", delay=(None, "1s")[number // 5]) for number in range(10))
        seen, error = await drained(client.publish_many(messages))
        assert isinstance(error, NotAppliedError)
        assert Counter(one.status for one in seen) == {"confirmed": 5, "failed": 5}


async def test_several_bulk_publishes_can_run_at_once(client: bide.Client, queue: str) -> None:
    reports = await asyncio.gather(
        *(client.publish_many(OutgoingMessage(b"", to=queue, delay="100ms") for _ in range(500)) for _ in range(4)),
        *(client.publish(b"", to=queue) for _ in range(500)),
    )
    assert [one.confirmed for one in reports[:4] if isinstance(one, PublishSummary)] == [500] * 4
    assert len(await receive(client, queue, 2_500)) == 2_500


async def test_an_asynchronous_input_is_read_ahead_up_to_a_limit() -> None:
    given = 0

    async def messages(size: int) -> AsyncIterator[OutgoingMessage]:
        nonlocal given
        given = 0
        while True:
            given += 1
            yield OutgoingMessage(bytes(size), to="q")

    for size, most in ((10, 1_000), (1 << 20, 8)):
        source = open_input(messages(size), lambda: None)
        wanted = most

        async def reached() -> bool:
            return given >= wanted  # noqa: B023 (asked in this round alone)

        await eventually(reached)
        for _ in range(100):  # turns of the loop in which more could be asked for
            await asyncio.sleep(0)
        assert given == most
        for _ in range(most):
            source.take()
        wanted = 2 * most
        await eventually(reached)
        await source.close()
