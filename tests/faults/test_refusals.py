"""Missing brokers, refused logins and refused operations, and their error messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta

import pytest

import bide
from bide.admin.infrastructure import install
from bide.admin.taps import turn_on
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import (
    AccessRefusedError,
    ConnectionLostError,
    InvalidInputError,
    ProtocolError,
    UnsupportedBrokerError,
)
from bide.local_broker.installation import numbers
from tests.broker.receiving import connected, fresh, receive, state_of
from tests.faults.conftest import BODY_LIMIT, CLOCK, DedicatedBroker, too_old
from tests.faults.proxy import Proxy
from tests.ports import held_port
from tests.support import Rabbitmq, Vhost
from tests.timeouts import TIMEOUT


def address(vhost: Vhost) -> str:
    (host, port) = BrokerUrl.parse(vhost.url).hosts[0]
    return f"{host}:{port}"


async def opening(url: str) -> str:
    """Open this URL, and return its error as text, which must not contain the password."""
    with pytest.raises(bide.BideError) as caught:
        async with bide.connect(url):
            pass
    assert "secret" not in repr(caught.value)
    kinds = " ".join(one.__name__ for one in type(caught.value).__mro__)
    return f"{kinds}: {caught.value}"


async def test_a_closed_port_is_an_error_that_names_it() -> None:
    with held_port() as port:
        error = await opening(f"amqp://guest:secret@127.0.0.1:{port}/")
    assert error.startswith("BrokerUnreachableError ")
    assert f"127.0.0.1:{port}" in error
    assert "BIDE_URL" in error


async def test_an_unknown_host_is_an_error_that_names_it() -> None:
    error = await opening("amqp://guest:secret@no-such-host.invalid/?timeout=5")
    assert error.startswith("BrokerUnreachableError ")
    assert "no-such-host.invalid:5672" in error


async def test_a_silent_server_is_an_error_after_the_timeout() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        error = await opening(f"amqp://guest:secret@127.0.0.1:{port}/?timeout=1")
    assert error.startswith("BrokerUnreachableError ")
    assert "did not answer within 1 s" in error


async def test_a_server_of_another_protocol_is_an_error() -> None:
    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(8)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(web, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        error = await opening(f"amqp://guest:secret@127.0.0.1:{port}/")
    assert error.startswith("ProtocolError ")
    assert "HTTP" in error
    assert "not AMQP 0-9-1" in error


async def test_the_second_host_is_tried_when_the_first_is_down(vhost: Vhost) -> None:
    alive = address(vhost)
    with held_port() as port:
        async with bide.connect(vhost.url.replace(alive, f"127.0.0.1:{port},{alive}")) as client:
            assert await client.release() >= (3, 10)


async def test_the_next_host_is_tried_when_one_refuses(vhost: Vhost, dedicated: DedicatedBroker, proxy: Proxy) -> None:
    """One that does not know us, and one that speaks something else; the first time, and when the connection broke."""

    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(8)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    (stranger, port), *_ = BrokerUrl.parse(dedicated.url()).hosts
    async with await asyncio.start_server(web, "127.0.0.1", 0) as server:
        refusing = f"{stranger}:{port},127.0.0.1:{server.sockets[0].getsockname()[1]}"
        (host, port) = BrokerUrl.parse(proxy.url).hosts[0]
        url = f"{proxy.url.replace(f'{host}:{port}', f'{refusing},{host}:{port}')}?order=given"
        async with bide.connect(url) as client:
            await client.declare(bide.Topology(queues=[bide.Queue("q")]))
            proxy.cut()
            await client.publish(b"", to="q")
        error = await opening(f"amqp://bide:secret@{refusing}/{vhost.name}")
    assert error.startswith("AuthenticationError ")
    assert f"{stranger}:" in error
    assert "; the connection to 127.0.0.1:" in error


async def test_a_connection_limit_is_an_error_with_the_way_out(vhost: Vhost) -> None:
    vhost.broker.management.call("PUT", "vhost-limits", vhost.name, "max-connections", body={"value": 0})
    error = await opening(vhost.url)
    assert error.startswith("BrokerError ")
    assert "accepts no more connections" in error
    assert "raise the limit" in error


async def test_a_wrong_password_and_an_unknown_user_are_errors(vhost: Vhost) -> None:
    for user in ("bide", "unknown"):
        error = await opening(f"amqp://{user}:secret@{address(vhost)}/{vhost.name}")
        assert error.startswith("AuthenticationError ")
        assert f"'{user}'" in error
        assert "check both" in error


async def test_unknown_and_forbidden_virtual_hosts_are_errors(vhost: Vhost) -> None:
    error = await opening(vhost.url.replace(f"/{vhost.name}", "/nowhere"))
    assert error.startswith("VirtualHostError ")
    assert "no virtual host 'nowhere'" in error
    vhost.broker.add_user("stranger", "secret")
    try:
        error = await opening(f"amqp://stranger:secret@{address(vhost)}/{vhost.name}")
        assert error.startswith("VirtualHostError ")
        assert f"'stranger' may not enter the virtual host {vhost.name!r}" in error
        assert "grant the permission" in error
    finally:
        vhost.broker.delete_user("stranger")
    with pytest.raises(InvalidInputError, match=r"300 bytes.* 255"):
        await Connection.open(BrokerUrl(hosts=(("127.0.0.1", 1),), vhost="v" * 300))


async def test_a_revoked_login_is_retried(vhost: Vhost, proxy: Proxy) -> None:
    """A restarting broker may refuse a valid login for a moment."""
    vhost.broker.add_user("late", "secret")
    vhost.broker.set_permissions(vhost.name, "late")
    try:
        url = proxy.url.replace(f"bide:{vhost.broker.password}", "late:secret")
        async with bide.connect(url, infrastructure=CLOCK) as client:
            await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
            vhost.broker.add_user("late", "another")
            proxy.cut()
            publishing = asyncio.create_task(client.publish(b"", to="q"))
            await asyncio.wait({publishing}, timeout=0.3)
            assert not publishing.done()
            vhost.broker.add_user("late", "secret")
            await publishing
    finally:
        vhost.broker.delete_user("late")


@pytest.fixture
def limited(vhost: Vhost) -> Iterator[str]:
    """The URL for a user without permissions but to enter."""
    vhost.broker.add_user("limited", "secret")
    vhost.broker.set_permissions(vhost.name, "limited", configure="^$", write="^$", read="^$")
    yield vhost.broker.vhost_url(vhost.name, user="limited", password="secret")
    vhost.broker.delete_user("limited")


async def test_without_configure_permission_only_undelayed_messages_are_sent(vhost: Vhost, limited: str) -> None:
    vhost.broker.set_permissions(vhost.name, "limited", configure="^(?!bide)", write=".*", read=".*")
    async with bide.connect(limited, infrastructure=CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("mine")]))
        with pytest.raises(
            bide.errors.NotAppliedError,
            match=r"'bide.*' in vhost.* give this user the permission.*infrastructure\.install",
        ):
            await client.publish(b"", to="mine", delay="1s")
        # What needs no declaring goes on.
        await client.publish(b"", to="mine")
    async with bide.connect(vhost.url, infrastructure=CLOCK) as administrator:
        await administrator.publish(b"", to="mine", delay="1s")
        async with connected(vhost.url) as connection:
            await install(connection, CLOCK)
    async with bide.connect(limited, infrastructure=CLOCK) as client:
        # Where all of the infrastructure is there already, the right to bind a target is enough.
        receipt = await client.publish(b"", to="mine", delay="1s")
        assert receipt.message_id in {one.message_id for one in await receive(client, "mine", 3)}


async def test_without_write_permission_the_error_names_the_exchange(vhost: Vhost, limited: str) -> None:
    async with bide.connect(vhost.url, infrastructure=CLOCK) as administrator:
        queue, exchange = fresh("q"), fresh("x")
        await administrator.declare(
            bide.Topology(
                [bide.Exchange(exchange, "topic")],
                [bide.Queue.quorum(queue)],
                [bide.Binding(exchange, queue, "#")],
            )
        )
        async with connected(vhost.url) as connection:
            await install(connection, CLOCK)
    vhost.broker.set_permissions(vhost.name, "limited", configure=".*", write=f"^{queue}$", read=".*")
    async with bide.connect(limited, infrastructure=CLOCK) as client:
        with pytest.raises(AccessRefusedError, match=r"'amq\.default' in vhost.*give this user the permission"):
            await client.publish(b"", to=queue)
        with pytest.raises(AccessRefusedError, match=f"'{exchange}' in vhost"):
            await client.publish(b"", exchange=exchange, routing_key="a.b")
        with pytest.raises(AccessRefusedError, match=r"'bide\.v1\.in\.s' in vhost"):
            await client.publish(b"", to=queue, delay="1s")


async def test_a_forbidden_exchange_fails_only_its_own_messages(vhost: Vhost, limited: str) -> None:
    queue = fresh("q")
    async with bide.connect(vhost.url) as administrator:
        await administrator.declare(bide.Topology([bide.Exchange("closed", "fanout")], [bide.Queue.quorum(queue)]))
    vhost.broker.set_permissions(vhost.name, "limited", configure="^$", write=r"^amq\.default$", read="^$")
    async with bide.connect(limited) as client:
        results = await asyncio.gather(
            *(
                client.publish(b"", exchange="closed") if number % 50 == 25 else client.publish(b"", to=queue)
                for number in range(200)
            ),
            return_exceptions=True,
        )
    assert [number for number, one in enumerate(results) if isinstance(one, AccessRefusedError)] == [25, 75, 125, 175]
    assert sum(isinstance(one, bide.Receipt) for one in results) == 196


async def test_a_forbidden_routing_key_fails_only_its_own_messages(vhost: Vhost, limited: str) -> None:
    """Topic permissions: the broker names the exchange, but only some of the messages to it are to blame."""
    queue = fresh("q")
    async with bide.connect(vhost.url) as administrator:
        await administrator.declare(
            bide.Topology(
                [bide.Exchange("shop", "topic")], [bide.Queue.quorum(queue)], [bide.Binding("shop", queue, "#")]
            )
        )
    vhost.broker.set_permissions(vhost.name, "limited", configure="^$", write=".*", read="^$")
    vhost.broker.management.call(
        "PUT", "topic-permissions", vhost.name, "limited",
        body={"exchange": "shop", "write": "^order\\.", "read": ".*"},
    )  # fmt: skip
    async with bide.connect(limited) as client:
        results = await asyncio.gather(
            *(
                client.publish(b"", exchange="shop", routing_key="invoice.a" if number in (7, 70) else "order.a")
                for number in range(100)
            ),
            return_exceptions=True,
        )
    assert [number for number, one in enumerate(results) if isinstance(one, AccessRefusedError)] == [7, 70]
    assert sum(isinstance(one, bide.Receipt) for one in results) == 98


async def test_without_read_permission_the_error_names_the_queue(vhost: Vhost, limited: str) -> None:
    queue = fresh("q")
    async with bide.connect(vhost.url) as administrator:
        await administrator.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
    vhost.broker.set_permissions(vhost.name, "limited", configure=".*", write=".*", read="^$")
    async with bide.connect(limited) as client:
        with pytest.raises(AccessRefusedError, match=f"'{queue}' in vhost.*give this user the permission"):
            await anext(client.consume(queue))


async def test_an_old_release_is_refused(vhost: Vhost, proxy: Proxy, release: tuple[int, ...]) -> None:
    proxy.rewrite = too_old(vhost)
    with pytest.raises(UnsupportedBrokerError, match=r"RabbitMQ 3\.9\.[0-9]+, older than 3\.10: upgrade it"):
        await bide.connect(proxy.url)
    assert release >= (3, 10)


async def test_a_broker_other_than_rabbitmq_is_refused(vhost: Vhost, proxy: Proxy) -> None:
    proxy.rewrite = lambda data: data.replace(b"RabbitMQ", b"LavinMQ!", 1)
    with pytest.raises(UnsupportedBrokerError, match="is LavinMQ!, not RabbitMQ"):
        await bide.connect(proxy.url)


async def test_disabled_streams_fail_only_delayed_messages_and_taps(
    rabbitmq: Rabbitmq, broker: bide.local_broker.LocalBroker
) -> None:
    if numbers(broker.release) >= (4, 0):
        # There they cannot be switched off any more: the first delayed publish asks for nothing.
        async with bide.connect(broker.add_vhost("streams"), infrastructure=CLOCK) as client:
            await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
            await client.publish(b"", to="q", delay="1s")
        broker.delete_vhost("streams")
        return
    flags = "quorum_queue,implicit_default_bindings,virtual_host_metadata,maintenance_mode_status,user_limits"
    with rabbitmq.start(
        ephemeral=True, plugins=("rabbitmq_management",), environment={"RABBITMQ_FEATURE_FLAGS": flags}
    ) as old:
        async with bide.connect(old.url, infrastructure=CLOCK) as client:
            await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
            with pytest.raises(UnsupportedBrokerError, match="enable_feature_flag stream_queue"):
                await client.publish(b"", to="q", delay="1s")
            await client.publish(b"", to="q")
            connection = await Connection.open(BrokerUrl.parse(old.url))
            with pytest.raises(UnsupportedBrokerError, match=r"taps are streams, .* enable_feature_flag stream_queue"):
                await turn_on(connection, CLOCK)
            await connection.close()
            assert {one["name"] for one in old.management.call("GET", "queues", "/")} == {"q"}
            await asyncio.to_thread(old.rabbitmqctl, "enable_feature_flag", "stream_queue")
            await client.publish(b"", to="q", delay="1s")
            await receive(client, "q", 2)


@pytest.mark.parametrize("mandatory", [True, False])
async def test_only_bodies_over_the_limit_of_the_broker_fail(dedicated: DedicatedBroker, mandatory: bool) -> None:
    """The broker answers one with the closing of the channel; the others on it go through."""
    queue = fresh("q")
    async with bide.connect(dedicated.url(), infrastructure=CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        await client.publish(b"", to=queue, delay="1s")
        bodies = [b"x" * (BODY_LIMIT + number) if number in (30, 60) else b"small" for number in range(100)]
        results = await asyncio.gather(
            *(
                client.publish(body, to=queue, delay="1s", message_id=str(number), mandatory=mandatory)
                for number, body in enumerate(bodies)
            ),
            return_exceptions=True,
        )
        failed = {number: one for number, one in enumerate(results) if isinstance(one, BaseException)}
        assert {number: type(one) for number, one in failed.items()} == {
            30: bide.errors.MessageTooLargeError,
            60: bide.errors.MessageTooLargeError,
        }
        limit = f"'30' has {BODY_LIMIT + 30} bytes, the broker's limit is {BODY_LIMIT}"
        assert f"{limit}: send a smaller body" in str(failed[30])
        # Now that the limit is known, nothing is sent that is over it.
        channel = await (await state_of(client)).channel()
        with pytest.raises(bide.errors.MessageTooLargeError, match=str(BODY_LIMIT)):
            await client.publish(b"x" * (BODY_LIMIT + 1), to=queue, delay="1s")
        assert channel.is_open
        await client.publish(b"x" * BODY_LIMIT, to=queue)
        # Those that were on their way with one that is too large may be there twice.
        expected = {str(number) for number in range(100) if number not in failed}
        arrived = set[str]()
        async with asyncio.timeout(TIMEOUT), client.consume(queue) as messages:
            while not expected <= arrived:
                message = await anext(messages)
                await message.ack()
                arrived.add(str(message.message_id))
    assert arrived.isdisjoint({"30", "60"})


async def test_a_foreign_user_id_fails_only_its_own_messages(vhost: Vhost) -> None:
    """The broker does not name the message that it refuses."""
    queue = fresh("q")
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        results = await asyncio.gather(
            *(
                client.publish(b"", to=queue, user_id="another" if number in (10, 11) else "bide")
                for number in range(200)
            ),
            return_exceptions=True,
        )
        failed = {number: one for number, one in enumerate(results) if isinstance(one, BaseException)}
        assert failed.keys() == {10, 11}
        assert all("user_id" in str(one) and "'another'" in str(one) for one in failed.values())
        # A single one needs no second try.
        with pytest.raises(bide.errors.BrokerError, match="user_id"):
            await client.publish(b"", to=queue, user_id="another")
    assert not any(isinstance(one, ConnectionLostError | ProtocolError) for one in failed.values())


async def test_a_missing_infrastructure_without_declare_is_an_error(vhost: Vhost) -> None:
    async with bide.connect(vhost.url, infrastructure=CLOCK, declare=False) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        with pytest.raises(
            bide.errors.NotAppliedError, match=rf"'clock'.*{vhost.name}.*infrastructure\.install.*declare=True"
        ):
            await client.publish(b"", to="q", delay=timedelta(seconds=1))
        await client.publish(b"", to="q")
    assert {one["name"] for one in vhost.broker.management.call("GET", "queues", vhost.name)} == {"q"}
