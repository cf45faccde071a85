"""Bulk publishing without an event loop."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta

import pytest

import bide
from bide.client.bulk.sync import BulkPublisher
from bide.client.message_sync import SyncMessage
from bide.errors import BulkInDoubtError, BulkPublishError, ClosedError, InvalidInputError, NotAppliedError
from bide.messages.outgoing import OutgoingMessage
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.receiving import fresh
from tests.support import Vhost
from tests.timeouts import TIMEOUT


@pytest.fixture
def queue(clock_url: str) -> str:
    name = fresh("q")
    with bide.connect_sync(clock_url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum(name)]))
    return name


def received(url: str, queue: str, number: int) -> list[SyncMessage]:
    """Receive exactly ``number`` messages."""
    found: list[SyncMessage] = []
    with (
        bide.connect_sync(url) as client,
        client.consume(queue, timeout=timedelta(seconds=TIMEOUT), prefetch=2_000) as messages,
    ):
        for message in messages:
            found.append(message)
            message.ack()
            if len(found) == number:
                break
    assert len(found) == number
    return found


def test_messages_of_several_batches_arrive_in_order(
    clock_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several batches, and the end of the block sends the rest."""
    monkeypatch.setattr("bide.client.bulk.batches._BATCH", 300)
    with BulkPublisher(clock_url) as publisher:
        for number in range(1_000):
            publisher.put(OutgoingMessage(str(number), to=queue))
    assert [int(one.body) for one in received(clock_url, queue, 1_000)] == list(range(1_000))


def test_a_flush_reports_every_message_since_the_last_flush(clock_url: str, queue: str) -> None:
    with BulkPublisher(clock_url, infrastructure=SMALL_CLOCK) as publisher:
        assert publisher.flush().total == 0
        publisher.put(OutgoingMessage(b"", to=queue, delay="100ms"))
        assert publisher.flush().confirmed == 1
        assert publisher.publish_many(OutgoingMessage(b"", to=queue) for _ in range(6_000)).confirmed == 6_000
        for number in range(5_500):
            publisher.put(OutgoingMessage(b"", to="nowhere" if number in (2, 5_400) else queue))
        with pytest.raises(BulkPublishError, match="2 of 5500 messages were not accepted") as caught:
            publisher.flush()
        # Positions count from the first message of the publisher.
        assert [one.position for one in caught.value.report.failures] == [6_003, 11_401]
        assert publisher.flush().total == 0


def test_an_interrupted_flush_does_not_block_later_messages(clock_url: str, queue: str) -> None:
    """For example by Ctrl-C, whose moment a test cannot control."""
    with BulkPublisher(clock_url) as publisher:
        for number in range(1_500):
            publisher.put(OutgoingMessage(str(number), to=queue))
        with pytest.MonkeyPatch.context() as patch:

            def interrupted(self: Future[None], timeout: float | None = None) -> None:
                raise KeyboardInterrupt

            patch.setattr(Future, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                publisher.flush()
        for number in range(1_500, 3_000):
            publisher.put(OutgoingMessage(str(number), to=queue))
        assert publisher.flush().confirmed == 3_000
    assert [int(one.body) for one in received(clock_url, queue, 3_000)] == list(range(3_000))


def test_an_early_end_reports_each_message_in_one_place(vhost: Vhost) -> None:
    """Only the last message cannot be sent: all others are settled, and the next flush starts from zero."""
    queue = fresh("q")
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
    with BulkPublisher(vhost.url, declare=False, infrastructure=SMALL_CLOCK) as publisher:
        for _ in range(10):
            publisher.put(OutgoingMessage(b"", to=queue))
        assert publisher.flush().confirmed == 10
        publisher.put(OutgoingMessage(b"", to=queue, delay="100ms"))
        with pytest.raises(
            BulkInDoubtError, match=r"the publishing ended early: .*call bide\.admin\.infrastructure\.install"
        ) as caught:
            publisher.flush()
        error = caught.value
        assert isinstance(error.__cause__, NotAppliedError)
        assert (error.in_doubt, error.unsent, error.report.total) == ((), (), 1)
        publisher.put(OutgoingMessage(b"", to=queue))
        assert publisher.flush().total == 1


def test_an_early_end_is_raised_in_any_order_of_threads(vhost: Vhost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sends ends while the other one waits for room, or just before, or just after."""
    monkeypatch.setattr("bide.client.bulk.batches._BATCH", 1)
    queue = fresh("q")
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
    with BulkPublisher(vhost.url, declare=False, infrastructure=SMALL_CLOCK) as publisher:
        for _ in range(100):
            with pytest.raises(BulkInDoubtError, match=r"call bide\.admin\.infrastructure\.install"):
                publisher.publish_many(OutgoingMessage(b"", to=queue, delay="100ms") for _ in range(12))


def test_failures_are_raised_at_the_end_of_the_block(clock_url: str, queue: str) -> None:
    def block() -> None:
        with BulkPublisher(clock_url) as publisher:
            publisher.put(OutgoingMessage(b"", to="nowhere"))

    with pytest.raises(BulkPublishError, match="1 returned"):
        block()


def test_an_exception_in_the_block_abandons_the_rest(clock_url: str, queue: str) -> None:
    def rows() -> Iterator[OutgoingMessage]:
        yield OutgoingMessage(b"", to=queue)
        raise OSError("the file is gone")

    publisher = BulkPublisher(clock_url)
    with pytest.raises(OSError, match="file is gone"), publisher:
        publisher.publish_many(rows())
    publisher.put(OutgoingMessage(b"", to=queue))
    with pytest.raises(ClosedError):
        publisher.flush()


FORK = """
import os, signal, sys
import bide
publisher = bide.BulkPublisher(sys.argv[1])
messages = [bide.OutgoingMessage(b"", to=sys.argv[2])] * 6_000
for message in messages[:1_500]:
    publisher.put(message)
child = os.fork()
if child:
    os.waitpid(child, 0)
    print(publisher.flush())
    publisher.close()
else:
    signal.alarm(int(sys.argv[3]))
    for work in (lambda: publisher.publish_many(messages), publisher.flush):
        try:
            work()
        except bide.errors.ClosedError as error:
            print(error, flush=True)
    publisher.close()
"""


def test_a_forked_process_is_refused_the_publisher_of_its_parent(clock_url: str, queue: str) -> None:
    command = [sys.executable, "-c", FORK, clock_url, queue, f"{TIMEOUT:.0f}"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout
    refusal = "this publisher belongs to the parent process: create another one after the fork"
    assert output.splitlines() == [refusal, refusal, "1500 confirmed"]
    assert len(received(clock_url, queue, 1_500)) == 1_500


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="window"):
        BulkPublisher("amqp://localhost", window=0)
