"""Pattern 18: RPC."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

import bide
from bide.amqp.connection import Connection
from bide.errors import (
    ClosedError,
    ConsumerCancelledError,
    InvalidInputError,
    RemoteError,
    ReplyLostError,
    ReplyTimeoutError,
    TargetNotFoundError,
    UnroutableError,
)
from bide.messaging.rpc import Caller, Replies
from bide.messaging.rpc_server import serve
from bide.messaging.rpc_sync import SyncCaller
from bide.patterns.rpc import rpc
from bide.topology import Binding, Exchange, Topology
from tests.broker.receiving import eventually, has_consumer, ready, receive, stack_of
from tests.faults.cutting import Proxy
from tests.support import Vhost
from tests.timeouts import MAX_LATENESS, TIMEOUT
from tests.unit.test_endpoint_failures import UnprintableError

WAYS: tuple[Replies, ...] = ("direct", "instance", "ephemeral")
every_way = pytest.mark.parametrize("replies", WAYS)


@pytest.fixture(autouse=True)
async def prices(client: bide.Client) -> None:
    await client.declare(rpc("prices"))


@asynccontextmanager
async def serving(
    client: bide.Client, handler: Callable[[bide.Message], Awaitable[Any]], *, at_once: int = 10
) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(serve(client, "prices", handler, at_once=at_once))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def all_settled(requests: list[bide.Message]) -> None:
    """Wait until the server has settled the requests: the last reply comes before its request is acknowledged."""

    async def settled() -> bool:
        return all(one.settled for one in requests)

    await eventually(settled)


async def shout(request: bide.Message) -> str:
    return request.body.decode().upper()


@every_way
async def test_each_call_gets_its_own_reply(client: bide.Client, replies: Replies) -> None:
    async def slow_first(request: bide.Message) -> bytes:
        await asyncio.sleep(0.2 if request.body == b"0" else 0)  # so that the first call is answered last
        return request.body * 2

    async with serving(client, slow_first), Caller(client, replies=replies) as caller:
        answers = await asyncio.gather(*(caller.call(str(number), to="prices") for number in range(20)))
    assert [one.body.decode() for one in answers] == [str(number) * 2 for number in range(20)]
    assert caller.late == 0


async def test_replies_in_a_fixed_queue_have_their_correlation_ids(client: bide.Client) -> None:
    await client.declare(rpc("prices", replies="fixed", reply_queue="answers"))
    async with serving(client, shout):
        await client.publish("a", to="prices", reply_to="answers", correlation_id="first")
        await client.publish("b", to="prices", reply_to="answers", correlation_id="second")
        # Any instance of the caller may take a reply, and knows by its id what it is about.
        found = {one.correlation_id: one.body for one in await receive(client, "answers", 2)}
    assert found == {"first": b"A", "second": b"B"}


@every_way
async def test_results_and_exceptions_of_the_handler_reach_the_caller(client: bide.Client, replies: Replies) -> None:
    async def handler(request: bide.Message) -> Any:
        match request.body:
            case b"json":
                return {"price": 7, "for": request.headers["item"]}
            case b"nothing":
                return None
            case b"no json":
                return object()
            case _:
                raise LookupError("no such\nitem")

    async with serving(client, handler), Caller(client, replies=replies) as caller:
        assert (await caller.call("json", to="prices", headers={"item": "tea"})).json() == {"price": 7, "for": "tea"}
        assert (await caller.call("nothing", to="prices")).body == b""
        with pytest.raises(RemoteError, match="LookupError: no such item"):
            await caller.call("unknown", to="prices")
        with pytest.raises(RemoteError, match="json=object cannot be serialised"):
            await caller.call("no json", to="prices")
        assert (await caller.call("nothing", to="prices")).body == b""


async def test_any_exception_of_a_handler_is_replied_and_frees_its_slot(
    client: bide.Client, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    requests: list[bide.Message] = []

    async def handler(request: bide.Message) -> bytes:
        requests.append(request)
        if request.body == b"unprintable":
            raise UnprintableError
        if request.body == b"cancelled":
            other = asyncio.create_task(asyncio.sleep(3600))  # never ends
            other.cancel()
            await other
        if request.body == b"by itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(3600)  # raises CancelledError
        return request.body

    async with serving(client, handler, at_once=1), Caller(client, timeout="1m") as caller:
        with pytest.raises(RemoteError, match=r"UnprintableError: \(an exception that cannot be printed"):
            await caller.call("unprintable", to="prices")
        with pytest.raises(RemoteError, match="RuntimeError: the handler was cancelled from within"):
            await caller.call("cancelled", to="prices")
        with pytest.raises(RemoteError, match="RuntimeError: the handler was cancelled from within"):
            await caller.call("by itself", to="prices")
        assert (await caller.call("tea", to="prices")).body == b"tea"
        await all_settled(requests)
    assert await ready(connection, "prices") == 0
    # Whose server it is wants to know where that was.
    unprintable, cancelled, by_itself = [stack for one in caplog.records if (stack := stack_of(one))]
    assert "raise UnprintableError" in unprintable
    assert "await other" in cancelled
    assert "in handler" in by_itself


@every_way
async def test_a_reply_after_the_timeout_is_dropped(
    client: bide.Client, connection: Connection, replies: Replies, vhost: Vhost
) -> None:
    go_on = asyncio.Event()

    async def slow(request: bide.Message) -> bytes:
        if request.body == b"slow":
            await go_on.wait()
        return request.body

    async def consumed() -> bool:
        return await has_consumer(connection, "prices")

    async with serving(client, slow), Caller(client, replies=replies) as caller:
        await eventually(consumed)  # the request expires with the timeout
        started = time.monotonic()
        with pytest.raises(ReplyTimeoutError, match=r"no reply from q:prices within 0:00:00\.3"):
            await caller.call("slow", to="prices", timeout="300ms")
        assert 0.3 <= time.monotonic() - started < MAX_LATENESS.total_seconds()
        go_on.set()
        # The late reply may come first, and is not mistaken for this one. The server outlives its callers.
        assert (await caller.call("quick", to="prices")).body == b"quick"
        if replies == "ephemeral":

            async def gone() -> bool:
                found = vhost.broker.management.call("GET", "queues", vhost.name)
                return {one["name"] for one in found} == {"prices"}

            await eventually(gone)
        else:

            async def counted() -> bool:
                return caller.late == 1

            await eventually(counted)


async def test_a_request_expires_with_the_timeout_of_its_caller(client: bide.Client, connection: Connection) -> None:
    async with Caller(client, timeout="200ms") as caller:
        with pytest.raises(ReplyTimeoutError):
            await caller.call("too late", to="prices")

    async def expired() -> bool:
        return await ready(connection, "prices") == 0

    # It was sent a moment after its caller began to wait.
    await eventually(expired)


@every_way
async def test_a_request_without_a_queue_is_unroutable(client: bide.Client, replies: Replies) -> None:
    async with Caller(client, replies=replies, timeout="20s") as caller:
        with pytest.raises(UnroutableError, match="no queue is bound for the request to q:nowhere"):
            await caller.call("x", to="nowhere")


@every_way
async def test_a_missing_exchange_does_not_fail_other_calls(client: bide.Client, replies: Replies) -> None:
    release = asyncio.Event()

    async def wait(request: bide.Message) -> bytes:
        await release.wait()
        return request.body

    async with serving(client, wait), Caller(client, replies=replies) as caller:
        waiting = asyncio.create_task(caller.call("mine", to="prices"))
        with pytest.raises(TargetNotFoundError, match="'nowhere' does not exist"):
            await caller.call("x", exchange="nowhere")
        release.set()
        assert (await waiting).body == b"mine"


async def test_a_request_can_go_to_an_exchange(client: bide.Client) -> None:
    await client.declare(
        rpc("prices") | Topology([Exchange("ask", "topic")], [], [Binding("ask", "prices", "price.*")])
    )
    async with serving(client, shout), Caller(client) as caller:
        assert (await caller.call("tea", exchange="ask", routing_key="price.tea")).body == b"TEA"


KILLED = """
import asyncio, os, bide

async def main():
    async with bide.connect() as client, client.consume("prices") as requests:
        await anext(requests)
        print("taken", flush=True)
        await asyncio.sleep(60)  # until it is killed

asyncio.run(main())
"""


@every_way
async def test_another_server_replies_after_the_first_is_killed(
    client: bide.Client, vhost: Vhost, replies: Replies
) -> None:
    async with Caller(client, replies=replies) as caller:
        call = asyncio.create_task(caller.call("tea", to="prices", timeout="60s"))
        victim = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", KILLED), env={**os.environ, "BIDE_URL": vhost.url}, stdout=asyncio.subprocess.PIPE
        )
        assert victim.stdout is not None
        assert await asyncio.wait_for(victim.stdout.readline(), TIMEOUT) == b"taken\n"
        victim.kill()
        await victim.wait()
        async with serving(client, shout):
            assert (await call).body == b"TEA"


@every_way
async def test_a_broken_connection_fails_the_call_and_the_next_succeeds(vhost: Vhost, replies: Replies) -> None:
    taken, cut = asyncio.Event(), asyncio.Event()

    async def take(request: bide.Message) -> bytes:
        taken.set()
        await cut.wait()
        return request.body

    async with (
        bide.connect(vhost.url) as client,
        serving(client, take),
        Proxy(vhost.url) as proxy,
        bide.connect(proxy.url) as through,
        Caller(through, replies=replies) as caller,
    ):
        call = asyncio.create_task(caller.call("tea", to="prices"))
        await asyncio.wait_for(taken.wait(), TIMEOUT)
        proxy.cut()
        cut.set()
        with pytest.raises(ReplyLostError, match=r"may have done the work|may do the work"):
            await call
        assert (await caller.call("tea", to="prices")).body == b"tea"


async def test_a_deleted_reply_queue_fails_the_call(client: bide.Client, vhost: Vhost) -> None:
    taken, go_on = asyncio.Event(), asyncio.Event()

    async def take(request: bide.Message) -> bytes:
        taken.set()
        await go_on.wait()
        return request.body

    async with serving(client, take), Caller(client, replies="instance") as caller:
        call = asyncio.create_task(caller.call("tea", to="prices"))
        await asyncio.wait_for(taken.wait(), TIMEOUT)
        found = {one["name"] for one in vhost.broker.management.call("GET", "queues", vhost.name)}
        (reply_queue,) = found - {"prices"}
        expression = (
            f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"{vhost.name}">>, queue, <<"{reply_queue}">>)), '
            'rabbit_amqqueue:delete(Q, false, false, <<"test">>).'
        )
        await asyncio.to_thread(vhost.broker.rabbitmqctl, "eval", expression)
        with pytest.raises(ReplyLostError):
            await call
        go_on.set()
        assert (await caller.call("tea", to="prices")).body == b"tea"


async def test_a_request_without_reply_to_is_handled(client: bide.Client) -> None:
    handled: list[bytes] = []

    async def handler(request: bide.Message) -> None:
        handled.append(request.body)
        if request.body == b"fails":
            raise ValueError("refused")

    async with serving(client, handler):
        await client.publish("fails", to="prices")
        await client.publish("works", to="prices")

        async def both() -> bool:
            return len(handled) >= 2

        await eventually(both)
    assert handled == [b"fails", b"works"]


@every_way
async def test_a_caller_that_has_gone_does_not_stop_the_server(
    client: bide.Client, connection: Connection, replies: Replies
) -> None:
    taken, go_on = asyncio.Event(), asyncio.Event()
    requests: list[bide.Message] = []

    async def handler(request: bide.Message) -> bytes:
        requests.append(request)
        if request.body == b"leaves":
            taken.set()
            await go_on.wait()
        return request.body

    async with serving(client, handler, at_once=1):
        async with Caller(client, replies=replies) as leaving:
            call = asyncio.create_task(leaving.call("leaves", to="prices"))
            await asyncio.wait_for(taken.wait(), TIMEOUT)
        with pytest.raises(ReplyLostError):
            await call
        go_on.set()
        async with Caller(client, replies=replies) as staying:
            assert (await staying.call("stays", to="prices")).body == b"stays"
        # The request of the closed caller is settled, although its reply was lost. RabbitMQ 4.3 may refuse a reply to a
        # queue that it is just deleting: then the request goes back, and is answered when it comes again, as the next.
        await all_settled(requests)
    assert await ready(connection, "prices") == 0


async def test_the_synchronous_caller_works_from_several_threads(client: bide.Client, vhost_url: str) -> None:
    def ask() -> list[bytes]:
        with (
            bide.connect_sync(vhost_url) as blocking,
            SyncCaller(blocking) as caller,
            ThreadPoolExecutor(4) as threads,
        ):
            answers = list(threads.map(lambda text: caller.call(text, to="prices").body, ("a", "b", "c", "d")))
            with pytest.raises(ReplyTimeoutError):
                caller.call("slow", to="prices", timeout="100ms")
            return answers

    async def handler(request: bide.Message) -> str:
        if request.body == b"slow":
            await asyncio.sleep(3600)  # never answers in time
        return await shout(request)

    async with serving(client, handler):
        assert await asyncio.to_thread(ask) == [b"A", b"B", b"C", b"D"]


async def test_a_missing_or_deleted_request_queue_ends_the_server(client: bide.Client, connection: Connection) -> None:
    with pytest.raises(TargetNotFoundError):
        await serve(client, "nowhere", shout)
    async with serving(client, shout) as server, Caller(client) as caller:
        assert (await caller.call("a", to="prices")).body == b"A"
        async with await connection.channel() as channel:
            await channel.delete_queue("prices")
        with pytest.raises(ConsumerCancelledError):
            await asyncio.wait_for(asyncio.shield(server), TIMEOUT)


async def test_invalid_arguments_and_closed_callers_are_refused(client: bide.Client) -> None:
    with pytest.raises(InvalidInputError, match="replies='fixed' is not a kind of reply queue"):
        Caller(client, replies="fixed")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidInputError, match="timeout is zero"):
        Caller(client, timeout="0s")
    caller = Caller(client)
    await caller.close()
    with pytest.raises(ClosedError):
        await caller.call("x", to="prices")
