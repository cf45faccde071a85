"""Positions and ranges of real streams."""

from __future__ import annotations

import gzip
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import pika
import pytest

from bide.errors import (
    AuthenticationError,
    BrokerUnreachableError,
    OffsetsLostError,
    TargetNotFoundError,
    VirtualHostError,
)
from bide.local_broker import LocalBroker
from bide.streams import frames, log
from bide.streams.amqp10 import sections
from bide.streams.chunk import Undecodable
from bide.streams.connection import StreamConnection
from bide.streams.frames import Fields
from bide.streams.log import Address, StreamLogs
from bide.streams.range_reader import OffsetRange, read_range
from tests import stream_publisher
from tests.broker.receiving import fresh
from tests.polling import wait_until
from tests.support import Rabbitmq, Vhost, apply_retention, flush_declarations, stream_port


@pytest.fixture
def channel(vhost: Vhost) -> Iterator[pika.adapters.blocking_connection.BlockingChannel]:
    """A channel of pika, since the messages must not come from bide."""
    with closing(pika.BlockingConnection(pika.URLParameters(vhost.idle_url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


@pytest.fixture
def address(vhost: Vhost) -> Address:
    return Address.of(vhost.url, stream_port(vhost.broker))


def declare(channel: pika.adapters.blocking_connection.BlockingChannel, stream: str, **arguments: object) -> None:
    channel.queue_declare(stream, durable=True, arguments={"x-queue-type": "stream", **arguments})


def fill(channel: pika.adapters.blocking_connection.BlockingChannel, stream: str, bodies: list[bytes]) -> None:
    for body in bodies:
        channel.basic_publish("", stream, body)


def bodies(address: Address, stream: str, start: int, end: int, *, fail: bool = True) -> list[bytes]:
    found: list[bytes] = []
    for chunk, first, last in read_range(
        address, OffsetRange(stream=stream, start=start, end=end), fail_on_data_loss=fail
    ):
        found += [sections(one).body or b"" for one in list(chunk.messages())[first:last] if isinstance(one, bytes)]
    return found


@contextmanager
def silent_once(at: int) -> Iterator[None]:
    """The chunk that has this offset, or one after it, does not come in time; over the next connection it does."""
    original = StreamConnection.next_chunk
    missed = 0

    def waiting(self: StreamConnection, subscription: int, seconds: float) -> object:
        nonlocal missed
        chunk = original(self, subscription, seconds)
        if chunk is not None and chunk.end > at and not missed:
            missed += 1
            return None
        return chunk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamConnection, "next_chunk", waiting)
        yield
    assert missed == 1


def test_an_empty_stream_begins_and_ends_at_zero(
    channel: pika.adapters.blocking_connection.BlockingChannel, address: Address
) -> None:
    declare(channel, "s")
    with StreamLogs(address) as logs:
        assert (logs.first("s"), logs.end("s"), logs.since("s", 0)) == (0, 0, 0)
    assert bodies(address, "s", 0, 0) == []


def test_every_range_is_read_exactly(
    channel: pika.adapters.blocking_connection.BlockingChannel, address: Address
) -> None:
    declare(channel, "s")
    wanted = [b"%d" % number for number in range(20)]
    fill(channel, "s", wanted)
    with StreamLogs(address) as logs:
        assert (logs.first("s"), logs.end("s")) == (0, 20)
    for start, end in [(0, 20), (0, 1), (19, 20), (7, 13), (5, 5)]:
        assert bodies(address, "s", start, end) == wanted[start:end]


def test_the_end_follows_the_last_confirmed_message(
    channel: pika.adapters.blocking_connection.BlockingChannel, address: Address
) -> None:
    declare(channel, "s")
    with StreamLogs(address) as logs:
        for number in range(50):
            fill(channel, "s", [b"x"])
            assert logs.end("s") == number + 1


def test_a_time_is_resolved_to_an_offset(
    channel: pika.adapters.blocking_connection.BlockingChannel, address: Address
) -> None:
    declare(channel, "s")
    fill(channel, "s", [b"early"] * 3)
    time.sleep(0.05)  # the broker's clock has milliseconds
    between = time.time_ns() // 1_000_000
    time.sleep(0.05)  # as above
    fill(channel, "s", [b"late"] * 3)
    with StreamLogs(address) as logs:
        assert logs.since("s", between) == 3
        assert logs.since("s", 0) == 0
        assert logs.since("s", between + 3_600_000) == 6


def test_missing_streams_are_errors_that_name_them(
    channel: pika.adapters.blocking_connection.BlockingChannel, vhost: Vhost, address: Address
) -> None:
    channel.queue_declare("classic", durable=True)
    channel.exchange_declare("unbound", durable=True)
    with StreamLogs(address) as logs:
        with pytest.raises(TargetNotFoundError, match="no stream 'missing' on the virtual host"):
            logs.end("missing")
        with pytest.raises(TargetNotFoundError, match="no stream 'classic'"):
            logs.end("classic")
        with pytest.raises(TargetNotFoundError, match="no super stream 'missing'"):
            logs.partitions("missing")
        with pytest.raises(TargetNotFoundError, match="'unbound' is not a super stream"):
            logs.partitions("unbound")


def test_partitions_of_a_super_stream_are_in_order(
    channel: pika.adapters.blocking_connection.BlockingChannel, address: Address
) -> None:
    channel.exchange_declare("super", "direct", durable=True, arguments={"x-super-stream": True})
    for number in range(3):
        declare(channel, f"super-{number}")
        channel.queue_bind(f"super-{number}", "super", str(number), {"x-stream-partition-order": number})
    with StreamLogs(address) as logs:
        assert logs.partitions("super") == ["super-0", "super-1", "super-2"]


def test_a_recreated_stream_has_lost_its_offsets(
    channel: pika.adapters.blocking_connection.BlockingChannel, vhost: Vhost, address: Address
) -> None:
    declare(channel, "s")
    fill(channel, "s", [b"x"] * 5)
    channel.queue_delete("s")
    with pytest.raises(TargetNotFoundError):
        bodies(address, "s", 0, 5)
    assert bodies(address, "s", 0, 5, fail=False) == []
    declare(channel, "s")
    fill(channel, "s", [b"y"] * 2)
    # The broker sends nothing for offsets that do not exist yet, so each of these reads takes the timeout.
    address = Address.of(f"{vhost.url}?timeout=2", stream_port(vhost.broker))
    with pytest.raises(OffsetsLostError, match="offsets 3 to 4 any more; it ends before them") as caught:
        bodies(address, "s", 3, 5)
    assert (caught.value.stream, caught.value.offset, caught.value.found) == ("s", 3, None)
    assert bodies(address, "s", 3, 5, fail=False) == []


def test_offsets_dropped_by_retention_are_lost(
    channel: pika.adapters.blocking_connection.BlockingChannel, vhost: Vhost, address: Address
) -> None:
    declare(channel, "s", **{"x-max-length-bytes": 50_000, "x-stream-max-segment-size-bytes": 20_000})
    # Several segments are closed, and the stream may be cut several times after the last confirm.
    fill(channel, "s", [bytes(5_000)] * 30)
    apply_retention(vhost.broker)
    with StreamLogs(address) as logs:
        first, end = logs.first("s"), logs.end("s")
    assert first > 0, "retention never came"
    with pytest.raises(OffsetsLostError, match="retention removed them") as caught:
        bodies(address, "s", 0, end)
    assert caught.value.offset == 0
    assert caught.value.found is not None
    assert 0 < caught.value.found <= end
    assert first <= caught.value.found
    # Each segment has one offset for an entry of the broker's own.
    left = bodies(address, "s", 0, end, fail=False)
    assert 0 < len(left) < end - caught.value.found
    assert left == bodies(address, "s", caught.value.found, end)
    # The same where the broker is silent as it happens.
    with silent_once(0), pytest.raises(OffsetsLostError, match="retention removed them"):
        bodies(address, "s", 0, end)
    with silent_once(0):
        assert bodies(address, "s", 0, end, fail=False) == left


def body(text: bytes) -> bytes:
    """A message of AMQP 1.0."""
    return b"\0Su\xa0" + bytes([len(text)]) + text


def test_malformed_batches_do_not_hide_later_messages(
    channel: pika.adapters.blocking_connection.BlockingChannel, address: Address
) -> None:
    """The broker believes what a publisher says of its batches, and gives them as many offsets."""
    declare(channel, "s")
    one, two, three = body(b"one"), body(b"two"), body(b"three")
    bomb = gzip.compress(bytes(1_000_000))
    entries = [
        stream_publisher.message(one),
        stream_publisher.batch([two, three], compression=1),
        stream_publisher.batch([two, three], records=5),
        stream_publisher.batch([two, three], records=1),
        stream_publisher.any_batch(bomb, compression=1, records=2, unpacked=100),
        stream_publisher.batch([two], compression=2),
        stream_publisher.message(b"\0" * 3_000),
        stream_publisher.message(three),
    ]
    assert stream_publisher.publish(address, "s", entries) == entries
    with StreamLogs(address) as logs:
        assert (logs.first("s"), logs.end("s")) == (0, 14)
    found: list[bytes | Undecodable | None] = []
    for start, end in ((0, 4), (4, 14)):
        for chunk, first, last in read_range(
            address, OffsetRange(stream="s", start=start, end=end), fail_on_data_loss=True
        ):
            found += list(chunk.messages())[first:last]
    assert [one.data if isinstance(one, Undecodable) else one for one in found] == [
        *(one, two, three),
        *(entries[2], None, None, None, None),
        entries[3],
        *(entries[4], None),
        entries[5],
        *(b"\0" * 3_000, three),
    ]
    # RabbitMQ 4.3 refuses this one.
    bomb = stream_publisher.any_batch(bomb, compression=1, records=1, unpacked=0)
    taken = stream_publisher.publish(address, "s", [bomb, stream_publisher.message(one)])
    end = 14 + len(taken)
    assert bodies(address, "s", 13, end) == [b"three", b"one"]


def test_a_failed_login_is_an_error_without_the_password(vhost: Vhost) -> None:
    port = stream_port(vhost.broker)
    with pytest.raises(AuthenticationError, match="does not accept user 'someone' with this password") as caught:
        Address.of("amqp://someone:secret@127.0.0.1", port).connect()
    assert "secret" not in str(caught.value)
    host = vhost.url.rpartition("/")[0]
    with pytest.raises(VirtualHostError, match="virtual host 'no such'"):
        Address.of(f"{host}/{quote('no such')}", port).connect()


def test_a_password_is_not_sent_to_a_stream_port_where_plain_is_not_offered(
    vhost: Vhost, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    ask = StreamConnection._ask

    def noted(self: StreamConnection, key: int, *parts: bytes, stream: str = "") -> Fields:
        sent.append(key)
        return ask(self, key, *parts, stream=stream)

    monkeypatch.setattr(StreamConnection, "_ask", noted)
    mechanisms = vhost.broker.rabbitmqctl("eval", "element(2, application:get_env(rabbit, auth_mechanisms)).").strip()
    assert "'PLAIN'" in mechanisms
    vhost.broker.rabbitmqctl("eval", "application:set_env(rabbit, auth_mechanisms, ['AMQPLAIN']).")
    try:
        with pytest.raises(AuthenticationError, match="offers AMQPLAIN to log in, not PLAIN"):
            address.connect()
    finally:
        vhost.broker.rabbitmqctl("eval", f"application:set_env(rabbit, auth_mechanisms, {mechanisms}).")
    assert frames.SASL_HANDSHAKE in sent
    assert frames.SASL_AUTHENTICATE not in sent


def test_a_port_of_another_protocol_is_an_error(vhost: Vhost) -> None:
    amqp_port = Address.of(vhost.url).url.hosts[0][1]
    with pytest.raises(BrokerUnreachableError, match="rabbitmq_stream"):
        Address.of(f"{vhost.url}?timeout=2", amqp_port).connect()


def test_hosts_are_tried_in_order(vhost: Vhost) -> None:
    several = vhost.url.replace("@127.0.0.1", "@127.0.0.2:1,127.0.0.1")
    with Address.of(several, stream_port(vhost.broker)).connect() as connection:
        assert connection.address[0] == "127.0.0.1"


def test_a_broken_connection_is_reopened(
    channel: pika.adapters.blocking_connection.BlockingChannel, address: Address
) -> None:
    declare(channel, "s")
    fill(channel, "s", [b"%d" % number for number in range(40)])
    with StreamLogs(address) as logs:
        assert logs.end("s") == 40
        logs.leader("s").close()
        assert logs.end("s") == 40
    # In the middle of a range; each message is in a chunk of its own.
    found: list[bytes] = []
    broken = 0
    original = StreamConnection.next_chunk

    def breaking(self: StreamConnection, subscription: int, seconds: float) -> object:
        nonlocal broken
        chunk = original(self, subscription, seconds)
        if chunk is not None and chunk.first == 25 and not broken:
            broken += 1
            self.close()
        return chunk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamConnection, "next_chunk", breaking)
        for chunk, first, last in read_range(address, OffsetRange(stream="s", start=0, end=40), fail_on_data_loss=True):
            found += [sections(one).body or b"" for one in list(chunk.messages())[first:last] if isinstance(one, bytes)]
    assert broken == 1
    assert found == [b"%d" % number for number in range(40)]


@pytest.mark.parametrize("fail", [True, False])
def test_messages_after_a_timeout_are_read_again(
    channel: pika.adapters.blocking_connection.BlockingChannel, address: Address, fail: bool
) -> None:
    declare(channel, "s")
    wanted = [b"%d" % number for number in range(10)]
    fill(channel, "s", wanted)
    with silent_once(5):
        assert bodies(address, "s", 0, 10, fail=fail) == wanted


@pytest.fixture(scope="module")
def _another(rabbitmq: Rabbitmq) -> Iterator[LocalBroker]:
    with rabbitmq.start(ephemeral=True) as broker:
        yield broker


@pytest.fixture
def another(_another: LocalBroker) -> LocalBroker:
    """A broker that tests may stop, restart and kill."""
    if not _another.running:
        _another.restart()
    return _another


def fill_first(broker: LocalBroker, bodies: list[bytes]) -> str:
    """Fill the stream ``s`` of a new virtual host, and return the URL."""
    url = broker.add_vhost(fresh("streams"))
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        declare(channel, "s")
        fill(channel, "s", bodies)
    return url


def is_stopped(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


def test_a_read_survives_a_broker_that_pauses(another: LocalBroker) -> None:
    """Stopped in the middle of a range, until the reader has noticed."""
    wanted = [b"%d" % number for number in range(40)]
    url = fill_first(another, wanted)
    address = Address.of(f"{url}?timeout=1", stream_port(another))
    pid = another.pid
    assert pid is not None
    noticed: list[log.RetryTimer] = []

    def wake(timer: log.RetryTimer) -> None:
        noticed.append(timer)
        os.kill(pid, signal.SIGCONT)

    found: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log.RetryTimer, "pause", wake)
        try:
            for chunk, first, last in read_range(
                address, OffsetRange(stream="s", start=0, end=40), fail_on_data_loss=False
            ):
                if not found:
                    os.kill(pid, signal.SIGSTOP)
                    # On a busy machine the other threads go on until the process has taken the signal.
                    wait_until(lambda: is_stopped(pid), "the broker stands still")
                found += [
                    sections(one).body or b"" for one in list(chunk.messages())[first:last] if isinstance(one, bytes)
                ]
        finally:
            os.kill(pid, signal.SIGCONT)
    assert found == wanted
    assert noticed


def test_an_unavailable_stream_is_retried(
    channel: pika.adapters.blocking_connection.BlockingChannel, address: Address
) -> None:
    """The refusal of a leader that is just being elected: no test can be there in that moment."""
    declare(channel, "s")
    fill(channel, "s", [b"a", b"b"])
    original = StreamConnection._receive_response
    refusals: list[int] = []

    def refusing(self: StreamConnection, key: int, number: int) -> Fields:
        answer = original(self, key, number)
        if key in refusals or key not in (frames.SUBSCRIBE, frames.STREAM_STATS):
            return answer
        refusals.append(key)
        return Fields(struct.pack(">H", frames.STREAM_NOT_AVAILABLE))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamConnection, "_receive_response", refusing)
        with StreamLogs(address) as logs:
            assert (logs.first("s"), logs.end("s")) == (0, 2)
        assert frames.SUBSCRIBE in refusals
        refusals.clear()
        assert bodies(address, "s", 0, 2) == [b"a", b"b"]
        assert frames.SUBSCRIBE in refusals


def test_a_read_survives_a_restart_of_the_broker(another: LocalBroker) -> None:
    url = fill_first(another, [b"a", b"b"])
    flush_declarations(another)
    address = Address.of(url, stream_port(another))
    with StreamLogs(address) as logs:
        assert logs.end("s") == 2
        another.restart()
        assert logs.end("s") == 2
    assert bodies(address, "s", 0, 2) == [b"a", b"b"]


def test_a_broker_that_does_not_come_back_is_an_error(another: LocalBroker) -> None:
    url = fill_first(another, [b"a", b"b"])
    address = Address.of(url, stream_port(another))
    with pytest.MonkeyPatch.context() as patch, StreamLogs(address) as logs:
        assert logs.end("s") == 2
        another.kill()
        patch.setattr(log, "_RETRY_TIMEOUT", 1.0)
        start = time.monotonic()
        with pytest.raises(BrokerUnreachableError, match="no broker answers the stream protocol"):
            logs.end("s")
        with pytest.raises(BrokerUnreachableError, match="no broker answers the stream protocol"):
            bodies(address, "s", 0, 2)
        assert time.monotonic() - start >= 2.0


def test_a_subscription_delivers_existing_messages_before_later_answers(
    channel: pika.adapters.blocking_connection.BlockingChannel, address: Address
) -> None:
    """What asking for positions relies on: the barrier comes after the chunk."""
    declare(channel, "s")
    fill(channel, "s", [b"x"])
    with address.connect() as connection:
        for _ in range(300):
            subscription = connection.subscribe("s", frames.LAST, credit=1)
            connection.barrier()
            assert connection.take_received(subscription) is not None
            connection.unsubscribe(subscription)
