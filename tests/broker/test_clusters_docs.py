"""Messages leave a delay queue without a TTL with the program of docs/clusters.md."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import bide
from bide.admin.infrastructure import install
from bide.admin.protection import protect
from bide.amqp.connection import Connection
from bide.local_broker import LocalBroker
from bide.management.api import ManagementApi
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.receiving import eventually, ready, receive
from tests.readme import blocks

if TYPE_CHECKING:
    from tests.support import Vhost

DELAY_QUEUE = "bide.v1.s1"

FORGET_TTL = """
    {ok, Queue} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"VHOST">>, queue, <<"QUEUE">>)),
    {ok, ok, _} = ra:process_command(amqqueue:get_pid(Queue), rabbit_fifo:make_update_config(#{
        name => element(1, amqqueue:get_pid(Queue)),
        queue_resource => amqqueue:get_name(Queue),
        dead_letter_handler => at_least_once,
        become_leader_handler => {rabbit_quorum_queue, become_leader, [amqqueue:get_name(Queue)]}
    })).
"""
"""The state of a quorum queue of RabbitMQ before 4.1 between the two steps of its declaration."""


async def test_messages_leave_a_delay_queue_without_a_ttl(
    vhost: Vhost, vhost_connection: Connection, api: ManagementApi, broker: LocalBroker, release: tuple[int, ...]
) -> None:
    program: dict[str, Any] = {}
    [source] = [text for _, text in blocks("docs/clusters.md") if "async def send_on" in text]
    exec(source.partition("asyncio.run(")[0], program)
    send_on: Callable[[bide.Client, str], Awaitable[None]] = program["send_on"]
    await install(vhost_connection, SMALL_CLOCK)
    forget = FORGET_TTL.replace("VHOST", vhost.name).replace("QUEUE", DELAY_QUEUE)
    await asyncio.to_thread(broker.rabbitmqctl, "eval", forget)
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
        sent = [await client.publish(f"{number}", to="orders", delay="1s") for number in range(3)]
        assert sent[-1].due is not None
        last_due = sent[-1].due

        async def are_due() -> bool:
            return client.now() > last_due + timedelta(seconds=0.5)

        await eventually(are_due)
        assert await ready(vhost_connection, DELAY_QUEUE) == 3
        await protect(api, vhost.name, SMALL_CLOCK, release)
        new = await client.publish("new", to="orders", delay="1s")
        await send_on(client, DELAY_QUEUE)
        received = await receive(client, "orders", 4)
    assert {one.message_id for one in received} == {one.message_id for one in (*sent, new)}
    assert all(one.lateness is not None and one.lateness >= timedelta(0) for one in received)
