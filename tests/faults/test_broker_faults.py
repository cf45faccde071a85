"""Faults and refusals of the broker, and their error messages."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import trustme

import bide
from bide.admin.apply import check_release
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import (
    AccessRefusedError,
    AuthenticationError,
    BrokerUnreachableError,
    MessageTooLargeError,
    PublishError,
    TlsError,
    UnsupportedBrokerError,
    VirtualHostError,
)
from tests.broker.receiving import eventually, fresh
from tests.faults.conftest import BODY_LIMIT, CLOCK, DedicatedBroker
from tests.support import flush_declarations
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from bide.local_broker import LocalBroker


@pytest.fixture
def own_broker(dedicated: DedicatedBroker) -> LocalBroker:
    return dedicated.broker


async def prepared(client: bide.Client) -> str:
    queue = fresh("q")
    await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
    return queue


async def test_a_killed_broker_delivers_waiting_messages_after_its_restart(own_broker: LocalBroker) -> None:
    # Half of them fall due while it is down: what a delay queue then sends too early is tried again after 20 s.
    async with bide.connect(own_broker.url, infrastructure=CLOCK, timeout=timedelta(seconds=TIMEOUT)) as client:
        queue = await prepared(client)
        receipts = await asyncio.gather(
            *(client.publish(str(number), to=queue, delay=timedelta(seconds=5 + number % 11)) for number in range(220))
        )
        await asyncio.to_thread(flush_declarations, own_broker)
        await asyncio.to_thread(own_broker.kill)
        due = sorted(receipt.due for receipt in receipts if receipt.due is not None)
        await asyncio.sleep((due[len(due) // 2] - datetime.now(UTC)).total_seconds())  # until half are due
        await asyncio.to_thread(own_broker.restart)
        # The client notices, connects again, and what is published now arrives as well.
        await client.publish(b"after", to=queue, delay="1s")
        bodies = set()
        async with asyncio.timeout(TIMEOUT), client.consume(queue) as messages:
            async for message in messages:
                assert message.lateness is not None
                assert message.lateness >= timedelta(0)
                await message.ack()
                bodies.add(message.body)
                if len(bodies) == len(receipts) + 1:
                    break
    assert bodies == {b"after", *(str(number).encode() for number in range(220))}


async def test_only_a_body_over_the_limit_of_the_broker_fails(own_broker: LocalBroker) -> None:
    async with bide.connect(own_broker.url, infrastructure=CLOCK) as client:
        queue = await prepared(client)
        await client.publish(b"", to=queue, delay="1s")
        results = await asyncio.gather(
            *(client.publish(b"small", to=queue, delay="1s", message_id=f"s{number}") for number in range(50)),
            client.publish(b"x" * (BODY_LIMIT + 1), to=queue, delay="1s", message_id="large"),
            *(client.publish(b"small", to=queue, delay="1s", message_id=f"t{number}") for number in range(50)),
            return_exceptions=True,
        )
        failed = [one for one in results if isinstance(one, BaseException)]
        assert [type(one) for one in failed] == [MessageTooLargeError]
        assert f"{BODY_LIMIT + 1} bytes" in str(failed[0])
        assert f"limit is {BODY_LIMIT}" in str(failed[0])
        await client.publish(b"x" * BODY_LIMIT, to=queue)


async def test_an_alarm_makes_publishers_wait(own_broker: LocalBroker) -> None:
    async with (
        bide.connect(own_broker.url, infrastructure=CLOCK, timeout=timedelta(seconds=TIMEOUT)) as patient,
        bide.connect(own_broker.url, infrastructure=CLOCK, timeout="4s") as hasty,
    ):
        queue = await prepared(patient)
        await asyncio.to_thread(own_broker.rabbitmqctl, "set_vm_memory_high_watermark", "0.000001")
        try:

            async def blocked() -> bool:
                # The broker looks at its memory now and then, and blocks a connection when that publishes next.
                try:
                    await hasty.publish(b"", to=queue)
                except PublishError as error:
                    return "blocks publishing" in str(error)
                return False

            await eventually(blocked)
            with pytest.raises(PublishError, match="blocks publishing at the moment"):
                await hasty.publish(b"", to=queue)
            waiting = asyncio.create_task(patient.publish(b"patient", to=queue))
            done, _ = await asyncio.wait({waiting}, timeout=1)
            assert not done
        finally:
            await asyncio.to_thread(own_broker.rabbitmqctl, "set_vm_memory_high_watermark", "0.6")
        receipt = await waiting
        assert receipt.message_id


async def test_refused_logins_and_virtual_hosts_are_errors_without_the_password(own_broker: LocalBroker) -> None:
    url = BrokerUrl.parse(own_broker.url)
    (host, port) = url.hosts[0]
    address = f"{host}:{port}"
    with pytest.raises(AuthenticationError, match="'bide' with this password"):
        await Connection.open(BrokerUrl.parse(f"amqp://bide:wrong-secret@{address}/"))
    with pytest.raises(VirtualHostError, match="no virtual host 'nowhere'"):
        await Connection.open(BrokerUrl.parse(f"{own_broker.url.rstrip('/')}/nowhere"))
    own_broker.add_user("stranger", "stranger-secret")
    with pytest.raises(VirtualHostError, match="'stranger' may not enter") as caught:
        await Connection.open(BrokerUrl.parse(f"amqp://stranger:stranger-secret@{address}/"))
    assert "secret" not in str(caught.value)


async def test_missing_permissions_are_named(own_broker: LocalBroker) -> None:
    url = BrokerUrl.parse(own_broker.url)
    (host, port) = url.hosts[0]
    async with bide.connect(own_broker.url, infrastructure=CLOCK) as client:
        queue = await prepared(client)
    own_broker.add_vhost("empty")
    own_broker.add_user("limited", "limited-secret")
    own_broker.set_permissions("empty", "limited", configure="^$", write=".*", read=".*")
    own_broker.set_permissions("/", "limited", configure="^$", write="^$", read="^$")
    limited = f"amqp://limited:limited-secret@{host}:{port}"
    async with bide.connect(f"{limited}/empty", infrastructure=CLOCK) as client:
        with pytest.raises(AccessRefusedError, match=r"permission|access"):
            await client.declare(bide.Topology(queues=[bide.Queue.quorum("new")]))
    async with bide.connect(f"{limited}/", infrastructure=CLOCK) as client:
        with pytest.raises(AccessRefusedError, match="give this user the permission"):
            await client.publish(b"", to=queue)
        with pytest.raises(AccessRefusedError, match=queue):
            await anext(client.consume(queue))


async def test_certificates_are_verified_and_plain_and_tls_ports_are_told_apart(
    dedicated: DedicatedBroker, tmp_path: Path
) -> None:
    url = BrokerUrl.parse(dedicated.broker.url)
    plain_port = url.hosts[0][1]
    right, wrong = tmp_path / "right.pem", tmp_path / "wrong.pem"
    dedicated.authority.cert_pem.write_to_path(str(right))
    trustme.CA().cert_pem.write_to_path(str(wrong))
    login = f"bide:{url.password}@127.0.0.1"
    connection = await Connection.open(BrokerUrl.parse(f"amqps://{login}:{dedicated.tls_port}/?cafile={right}"))
    assert connection.is_open
    await connection.close()
    with pytest.raises(TlsError, match=r"not trusted .*cafile"):
        await Connection.open(BrokerUrl.parse(f"amqps://{login}:{dedicated.tls_port}/?cafile={wrong}"))
    with pytest.raises(BrokerUnreachableError) as caught:
        await Connection.open(BrokerUrl.parse(f"amqps://{login}:{plain_port}/?cafile={right}"))
    assert str(url.password) not in str(caught.value)
    with pytest.raises(BrokerUnreachableError, match="amqps://"):
        await Connection.open(BrokerUrl.parse(f"amqp://{login}:{dedicated.tls_port}/?timeout={TIMEOUT:.0f}"))


async def test_a_broker_below_3_10_is_refused(own_broker: LocalBroker) -> None:
    connection = await Connection.open(BrokerUrl.parse(own_broker.url))
    check_release(connection)
    # No release so old is to be had any more: the number alone is made up.
    connection.release = (3, 9, 29)
    with pytest.raises(UnsupportedBrokerError, match=r"RabbitMQ 3\.9\.29, older than 3\.10: upgrade"):
        check_release(connection)
    await connection.close()


async def test_nothing_is_left_running_after_close(own_broker: LocalBroker) -> None:
    before = asyncio.all_tasks()
    async with bide.connect(own_broker.url, infrastructure=CLOCK) as client:
        queue = await prepared(client)
        consumer = client.consume(queue)
        reading = asyncio.create_task(anext(consumer, None))

        async def subscribed() -> bool:
            return consumer.subscribed

        await eventually(subscribed)
    assert await reading is None
    assert asyncio.all_tasks() == before
