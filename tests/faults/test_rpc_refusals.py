"""Refused RPC requests, and the calls whose replies are lost with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import bide
from bide.errors import AccessRefusedError, BrokerError, MessageTooLargeError, ReplyLostError
from bide.messages.prepared import PreparedMessage
from bide.messaging.rpc import Caller, Replies
from bide.messaging.rpc_server import serve
from bide.patterns.rpc import rpc
from tests.broker.receiving import fresh
from tests.faults.conftest import BODY_LIMIT, DedicatedBroker
from tests.support import Vhost
from tests.timeouts import TIMEOUT


class Server:
    """Answers at once, but for requests that say ``wait``: these it keeps until it ends."""

    def __init__(self) -> None:
        self.has_one = asyncio.Event()

    async def __call__(self, request: bide.Message) -> bytes:
        if request.body == b"wait":
            self.has_one.set()
            await asyncio.Event().wait()
        return request.body

    @asynccontextmanager
    async def serving(self, client: bide.Client) -> AsyncIterator[str]:
        queue = fresh("requests")
        await client.declare(rpc(queue))
        task = asyncio.create_task(serve(client, queue, self))
        try:
            yield queue
        finally:
            task.cancel()
            await asyncio.wait({task})


@pytest.mark.parametrize("replies", ["direct", "instance", "ephemeral"])
async def test_a_request_over_the_limit_of_the_broker_fails(dedicated: DedicatedBroker, replies: Replies) -> None:
    server = Server()
    async with (
        bide.connect(dedicated.url()) as client,
        server.serving(client) as queue,
        Caller(client, replies=replies, timeout="60s") as caller,
    ):
        waiting = asyncio.create_task(caller.call("wait", to=queue))
        await asyncio.wait_for(server.has_one.wait(), TIMEOUT)
        with pytest.raises(MessageTooLargeError, match=f"has {BODY_LIMIT + 1} bytes, the broker's limit is"):
            await caller.call(b"x" * (BODY_LIMIT + 1), to=queue)
        if replies == "ephemeral":
            assert not waiting.done()
            waiting.cancel()
        else:
            with pytest.raises(ReplyLostError, match=r"reply cannot arrive any more .*larger than"):
                await waiting
        await asyncio.wait({waiting})
        # Now that the limit is known, another does no harm any more.
        again = asyncio.create_task(caller.call("wait", to=queue))
        with pytest.raises(MessageTooLargeError, match="the broker's limit is"):
            await caller.call(b"x" * (BODY_LIMIT + 1), to=queue)
        assert (await caller.call(b"x" * BODY_LIMIT, to=queue)).body == b"x" * BODY_LIMIT
        assert not again.done()
        again.cancel()
        await asyncio.wait({again})


async def test_a_refusal_without_a_name_belongs_to_the_only_request(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what a caller can give, the broker has nothing to refuse so: the user's name is put there by hand."""
    values_of = PreparedMessage.wire_values

    def of_another(self: PreparedMessage, *given: Any) -> dict[str, Any]:
        others = {"user_id": "another"} if self.body == b"x" else {}
        return {**values_of(self, *given), **others}

    monkeypatch.setattr(PreparedMessage, "wire_values", of_another)
    async with (
        bide.connect(vhost.url) as client,
        Server().serving(client) as queue,
        Caller(client, timeout="60s") as caller,
    ):
        with pytest.raises(BrokerError, match="user_id") as refused:
            await caller.call("x", to=queue)
        assert not isinstance(refused.value, ReplyLostError)
        assert (await caller.call("after", to=queue)).body == b"after"


async def test_one_refused_request_of_many_gets_its_own_error(vhost: Vhost) -> None:
    vhost.broker.add_user("caller", "secret")
    vhost.broker.set_permissions(vhost.name, "caller", configure="^$", write=r"^amq\.default$", read=".*")
    url = vhost.broker.vhost_url(vhost.name, user="caller", password="secret")
    try:
        async with (
            bide.connect(vhost.url) as client,
            Server().serving(client) as queue,
            bide.connect(url) as limited,
            Caller(limited, timeout="60s") as caller,
        ):
            await client.declare(bide.Topology([bide.Exchange("closed", "fanout")]))
            calls = [
                caller.call(str(number), exchange="closed") if number == 10 else caller.call(str(number), to=queue)
                for number in range(20)
            ]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(refused := outcomes.pop(10), AccessRefusedError)
            assert "'closed' in vhost" in str(refused)
            assert {type(one) for one in outcomes} <= {bide.Message, ReplyLostError}
            assert (await caller.call("after", to=queue)).body == b"after"
    finally:
        vhost.broker.delete_user("caller")
