"""The options of a write, on a real broker."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from anyio.from_thread import start_blocking_portal
from pyspark.errors import PySparkException

import bide
from bide.cli.app import run
from bide.local_broker import LocalBroker
from tests.broker.conftest import SMALL_CLOCK, clock_url
from tests.faults.proxy import Proxy
from tests.spark.receiving import drain, drain_all, new_queue
from tests.spark.test_sink import SMALL, writer
from tests.support import Vhost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["clock_url"]

CONFIRM = b"\x00\x3c\x00\x50"
"""Begins what the broker says of a message that it has."""

USER = "bide"
"""Of the tests' broker, which knows no other."""


@pytest.fixture
def queue(clock_url: str) -> str:
    return new_queue(clock_url)


def test_options_replace_columns(spark: SparkSession, clock_url: str, queue: str) -> None:
    """What is in those is not looked at: of a queue and an exchange both, a row would be refused."""
    frame = spark.sql(
        """
        select '1' as value, 'nowhere' as queue, 'nowhere' as exchange, 'nowhere' as routing_key, 'c' as correlation_id,
               repeat('x', 300) as type, 'another' as user_id, 300 as priority, true as persistent, 'soon' as delay,
               'text/plain' as content_type
        """
    )
    options = {"type": "Remind", "user_id": USER, "priority": 7, "persistent": "false", "delay": "100ms"}
    writer(frame, clock_url, queue=queue, **options).save()
    (message,) = drain(clock_url, queue, 1)
    assert (message.body, message.correlation_id, message.content_type) == (b"1", "c", "text/plain")
    assert (message.type, message.user_id) == ("Remind", USER)
    assert (message.priority, message.raw.values["delivery_mode"]) == (7, 1)
    assert message.due is not None
    assert message.sent_at is not None
    assert timedelta(milliseconds=99) < message.due - message.sent_at < timedelta(milliseconds=101)


def test_the_option_exchange_leaves_the_routing_key_to_its_column(
    spark: SparkSession, clock_url: str, queue: str
) -> None:
    exchange = f"{queue}-exchange"
    with bide.connect_sync(clock_url) as client:
        client.declare(
            bide.Topology(
                exchanges=[bide.Exchange(exchange, "topic")],
                queues=[bide.Queue.quorum(queue)],
                bindings=[bide.Binding(exchange, queue, "order.*")],
            )
        )
    frame = spark.sql("select '1' as value, 'nowhere' as queue, 'nowhere' as exchange, 'order.paid' as routing_key")
    writer(frame, clock_url, exchange=exchange, delay="100ms").save()
    (message,) = drain(clock_url, queue, 1)
    assert (message.exchange, message.routing_key) == (exchange, "order.paid")


def test_a_foreign_user_id_fails_only_its_own_row(spark: SparkSession, clock_url: str, queue: str) -> None:
    """The broker closes the channel without naming the message."""
    frame = spark.range(0, 10, 1, 1).selectExpr(
        "cast(id as string) as value", "concat('m-', id) as message_id", f"if(id = 4, 'another', '{USER}') as user_id"
    )
    with pytest.raises(PySparkException, match="1 of the last 10 messages were not confirmed") as caught:
        writer(frame, clock_url, queue=queue).save()
    assert "row 4, message id m-4, failed" in str(caught.value)
    assert "user_id" in str(caught.value)
    # Those that were on their way with it may be there twice.
    arrived = {one.body: one.user_id for one in drain_all(clock_url, queue, 9)}
    assert arrived == {str(number).encode(): USER for number in range(10) if number != 4}


def test_isolated_queues_have_release_queues_of_their_own(
    spark: SparkSession, broker: LocalBroker, clock_url: str, queue: str
) -> None:
    own = SMALL_CLOCK.release_queue(bide.QueueTarget(queue, isolated=True))
    name = urlsplit(clock_url).path.removeprefix("/")

    def is_there() -> bool:
        return own in {one["name"] for one in broker.management.call("GET", "queues", name)}

    frame = spark.sql("select '1' as value, '100ms' as delay")
    writer(frame, clock_url, queue=queue).save()
    assert not is_there()
    writer(frame, clock_url, queue=queue, isolated="true").save()
    assert is_there()
    assert len(drain(clock_url, queue, 2)) == 2


def test_without_declare_the_infrastructure_has_to_exist(spark: SparkSession, vhost: Vhost) -> None:
    queue = new_queue(vhost.url)
    frame = spark.sql("select '1' as value")
    delayed = writer(frame, vhost.url, queue=queue, declare="false", delay="100ms")
    with pytest.raises(
        PySparkException,
        match=r"'clock' is not complete on the virtual host.*call bide\.admin\.infrastructure\.install",
    ):
        delayed.save()
    writer(frame, vhost.url, queue=queue, declare="false").save()
    assert {one["name"] for one in vhost.broker.management.call("GET", "queues", vhost.name)} == {queue}
    small = ("--max-delay", SMALL["maxDelay"], "--resolution", SMALL["resolution"])
    assert run(["delay", "apply", "--url", vhost.url, *small]) == 0
    delayed.save()
    assert [one.due is not None for one in drain(vhost.url, queue, 2)] == [False, True]


def test_the_nservicebus_layout_reaches_exchanges_and_queues(spark: SparkSession, vhost: Vhost) -> None:
    """Delays are whole seconds there, and rounded up. By default an endpoint has an exchange of its name."""
    queues = {"conventional": new_queue(vhost.url), "direct": new_queue(vhost.url)}
    name = queues["conventional"]
    with bide.connect_sync(vhost.url) as client:
        client.declare(
            bide.Topology(
                exchanges=[bide.Exchange(name, "fanout")],
                queues=[bide.Queue.quorum(name)],
                bindings=[bide.Binding(name, name)],
            )
        )
    frame = spark.sql("select '1' as value, interval '0.2' second as delay")
    for routing, queue in queues.items():
        options = {"url": vhost.url, "layout": "nservicebus", "routing": routing, "queue": queue}
        frame.write.format("rabbitmq").mode("append").options(**options).save()
    for queue in queues.values():
        (message,) = drain(vhost.url, queue, 1)
        assert message.raw.values["headers"]["NServiceBus.Transport.RabbitMQ.DelayInSeconds"] == 1
        assert message.lateness is not None
        assert message.lateness >= timedelta(0)


def test_a_broker_that_confirms_nothing_ends_the_task_after_the_timeout(
    spark: SparkSession, clock_url: str, queue: str
) -> None:
    frame = spark.sql("select '1' as value")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(Proxy(clock_url)) as proxy:
        proxy.rewrite = lambda data: b"" if CONFIRM in data else data
        with pytest.raises(PySparkException, match=r"the broker has 1 of the messages.*: no confirm within 10 s"):
            writer(frame, proxy.url, queue=queue, timeout="10s").save()
    assert [one.body for one in drain(clock_url, queue, 1)] == [b"1"], "which it has"
