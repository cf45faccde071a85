"""Delays and retries of dramatiq actors, with dramatiq's own broker and with the adapter."""

from __future__ import annotations

import queue
import ssl
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import dramatiq
import pika
import pytest
from dramatiq.brokers import rabbitmq
from dramatiq.middleware import CurrentMessage
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend
from dramatiq_abort import Abortable, abort

import bide
from bide.amqp.url import BrokerUrl
from bide.errors import InvalidDelayError, InvalidInputError
from bide.integrations import Delays, delays
from bide.integrations.dramatiq import RabbitmqBroker, broker_url
from tests.polling import wait_until
from tests.relay_process import gate
from tests.support import Vhost
from tests.timeouts import TIMEOUT

with warnings.catch_warnings():
    # That there is no redis, which no test uses.
    warnings.simplefilter("ignore", ImportWarning)
    from dramatiq_abort.backends import StubBackend as AbortBackend

MAX_LATENESS = 30.0
"""Seconds. A message on a wrong route waits for minutes, or never arrives."""

UNACKNOWLEDGED = "messages_unacknowledged"

Kind = Literal["stock", "adapted"]


@dataclass
class Runs:
    """What actors did, and when: seconds since the start of the test."""

    began: float = field(default_factory=time.time)
    _runs: queue.Queue[tuple[Any, float]] = field(default_factory=queue.Queue)

    def add(self, label: Any) -> None:
        self._runs.put((label, time.time() - self.began))

    def next(self) -> tuple[Any, float]:
        return self._runs.get(timeout=TIMEOUT)

    def many(self, count: int) -> list[tuple[Any, float]]:
        return [self.next() for _ in range(count)]

    @property
    def is_empty(self) -> bool:
        return self._runs.empty()


class Application:
    """A dramatiq broker and its actors, and a worker that the test starts."""

    def __init__(self, kind: Kind, url: str, name: str, **options: Any) -> None:
        self.runs = Runs()
        self.aborts = AbortBackend()
        self.results = StubBackend()
        self.queue = name
        make: Any = RabbitmqBroker if kind == "adapted" else rabbitmq.RabbitmqBroker
        self.broker: RabbitmqBroker = make(url=url, confirm_delivery=True, **options)
        self.abortable = Abortable(backend=self.aborts)
        results = Results(backend=self.results)  # type: ignore[no-untyped-call]  # dramatiq has no types here
        for middleware in (CurrentMessage(), results, self.abortable):
            self.broker.add_middleware(middleware)

    def actor(self, function: Callable[..., Any], **options: Any) -> Any:
        decorator = dramatiq.actor(broker=self.broker, queue_name=self.queue, actor_name=function.__name__, **options)
        return decorator(function)

    @contextmanager
    def worker(self, threads: int = 2) -> Iterator[dramatiq.Worker]:
        worker = dramatiq.Worker(self.broker, worker_timeout=100, worker_threads=threads)
        worker.start()
        try:
            yield worker
        finally:
            worker.stop()

    def counts(self) -> tuple[int, int, int]:
        """Ready messages in the queue, its delay queue, and its dead-letter queue."""
        counts: tuple[int, int, int] = self.broker.get_queue_message_counts(self.queue)
        return counts


@pytest.fixture(params=["stock", "adapted"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """dramatiq's own broker, and the adapter."""
    kind: Kind = request.param
    return kind


@pytest.fixture
def application(kind: Kind, vhost: Vhost) -> Iterator[Application]:
    application = Application(kind, vhost.idle_url, "work")
    yield application
    application.broker.close()


@pytest.fixture
def adapted(vhost: Vhost) -> Iterator[Application]:
    """An application with the adapter."""
    application = Application("adapted", vhost.idle_url, "work")
    yield application
    application.broker.close()


# --- with and without the adapter


def test_delayed_messages_run_when_they_are_due(application: Application) -> None:
    """Once each, with arguments as they were, and not behind one that waits for longer."""
    actor = application.actor(application.runs.add)
    delays: list[int | timedelta] = [3_600_000, 610, 0, -5, timedelta(milliseconds=300), 10]
    for number, delay in enumerate(delays):
        actor.send_with_options(args=([number, "\N{SNOWMAN}"],), delay=delay)
    with application.worker():
        runs = application.runs.many(5)
        actor.send("last")
        last, _ = application.runs.next()
    assert last == "last", "one came twice"
    began = {number: at for (number, text), at in runs if text == "\N{SNOWMAN}"}
    assert sorted(began) == [1, 2, 3, 4, 5]
    for number, least in ((1, 0.61), (4, 0.3), (5, 0.01)):
        assert least <= began[number] < least + MAX_LATENESS


def test_a_failed_actor_is_retried_after_its_backoff(application: Application) -> None:
    """The backoff is random, between the least and twice as much; the message counts its retries."""

    def fail_twice() -> str:
        message = CurrentMessage.get_current_message()
        assert message is not None
        retries = message.options.get("retries", 0)
        application.runs.add(retries)
        if retries < 2:
            raise RuntimeError(f"failure {retries}")
        return "done"

    actor = application.actor(fail_twice, min_backoff=200, max_backoff=400, store_results=True)
    with application.worker():
        message = actor.send()
        runs = application.runs.many(3)
        assert message.get_result(backend=application.results, block=True, timeout=int(TIMEOUT * 1000)) == "done"
    assert [retries for retries, _ in runs] == [0, 1, 2]
    for (_, before), (_, after) in pairwise(runs):
        assert 0.2 <= after - before < 0.4 + MAX_LATENESS


def test_an_actor_chooses_the_delay_of_its_retry(application: Application) -> None:
    def ask_for_a_retry() -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        application.runs.add(message.options.get("retries", 0))
        if not message.options.get("retries"):
            raise dramatiq.errors.Retry("again", delay=300)

    actor = application.actor(ask_for_a_retry)
    with application.worker():
        actor.send_with_options(delay=100)
        (first, began), (second, again) = application.runs.many(2)
    assert (first, second) == (0, 1)
    assert 0.3 <= again - began < 0.3 + MAX_LATENESS


def test_a_message_out_of_retries_is_dead_lettered(application: Application) -> None:
    """And its last actor is called."""

    def always_fail() -> None:
        application.runs.add("tried")
        raise RuntimeError("failed")

    def give_up(message: dict[str, Any], retries: dict[str, int]) -> None:
        application.runs.add([message["args"], retries])

    application.actor(give_up)
    actor = application.actor(always_fail, max_retries=1, min_backoff=10, max_backoff=20, on_retry_exhausted="give_up")
    with application.worker():
        actor.send_with_options(delay=50)
        labels = [label for label, _ in application.runs.many(3)]
        wait_until(lambda: application.counts() == (0, 0, 1))
    assert labels == ["tried", "tried", [[], {"retries": 1, "max_retries": 1}]]


def test_the_result_of_a_delayed_message_can_be_awaited(application: Application) -> None:
    """By the message that the sender got, and through a pipeline that is delayed as a whole."""

    def double(number: int) -> int:
        return 2 * number

    actor = application.actor(double, store_results=True)
    timeout = int(TIMEOUT * 1000)
    message = actor.send_with_options(args=(21,), delay=200)
    with pytest.raises(dramatiq.results.ResultMissing):
        message.get_result(backend=application.results)
    pipeline: Any = dramatiq.pipeline([actor.message(1), actor.message()], broker=application.broker)
    pipeline.run(delay=200)
    with application.worker():
        assert message.get_result(backend=application.results, block=True, timeout=timeout) == 42
        assert pipeline.get_result(block=True, timeout=timeout) == 4


def test_a_message_aborted_while_it_waits_does_not_run(application: Application) -> None:
    actor = application.actor(application.runs.add)
    aborted = actor.send_with_options(args=("aborted",), delay=100)
    actor.send_with_options(args=("other",), delay=300)
    abort(aborted.message_id, middleware=application.abortable, abort_ttl=int(TIMEOUT * 1000))
    with application.worker():
        assert application.runs.next()[0] == "other"
        # The aborted message was skipped, and not dead-lettered.
        actor.send("last")
        assert application.runs.next()[0] == "last"
        assert application.counts() == (0, 0, 0)


def test_an_old_message_is_skipped_when_it_is_due(application: Application) -> None:
    actor = application.actor(application.runs.add, max_age=200)
    with application.worker():
        actor.send_with_options(args=("too old",), delay=300)
        wait_until(lambda: application.counts()[2] == 1)
    assert application.runs.is_empty


def test_a_message_of_an_unknown_actor_is_dead_lettered_when_it_is_due(application: Application) -> None:
    application.actor(application.runs.add)
    message: dramatiq.Message[None] = dramatiq.Message(
        queue_name=application.queue, actor_name="unknown", args=(), kwargs={}, options={}
    )
    with application.worker():
        application.broker.enqueue(message, delay=100)
        wait_until(lambda: application.counts() == (0, 0, 1))


def test_a_delayed_message_is_sent_over_a_new_connection(application: Application) -> None:
    actor = application.actor(application.runs.add)
    actor.send_with_options(args=("first",), delay=10)
    application.broker.connection.close()
    actor.send_with_options(args=("second",), delay=10)
    with application.worker():
        assert sorted(label for label, _ in application.runs.many(2)) == ["first", "second"]


WAITING = 50


def test_no_worker_holds_messages_that_wait(application: Application, kind: Kind, vhost: Vhost) -> None:
    """dramatiq's own worker has them all in its memory, unacknowledged."""
    actor = application.actor(application.runs.add)
    for _ in range(WAITING):
        actor.send_with_options(args=("waits",), delay=3_600_000)
    with application.worker() as worker:
        held = WAITING if kind == "stock" else 0
        wait_until(lambda: worker.consumers[f"{application.queue}.DQ"].delay_queue.qsize() == held)
        wait_until(lambda: unacknowledged(vhost) == held)
        actor.send("runs")
        assert application.runs.next()[0] == "runs"
        # A worker acknowledges a moment after the run.
        wait_until(lambda: unacknowledged(vhost) == held)
    # And the broker requeues a moment after the worker has ended.
    wait_until(lambda: application.counts() == (0, WAITING - (0 if kind == "stock" else WAITING), 0))


def unacknowledged(vhost: Vhost) -> int:
    """Unacknowledged messages of all queues."""
    listed = vhost.broker.rabbitmqctl("list_queues", "-p", vhost.name, "--silent", "--no-table-headers", UNACKNOWLEDGED)
    return sum(int(line) for line in listed.split())


# --- one side with the adapter


@pytest.mark.parametrize(("sender", "receiver"), [("stock", "adapted"), ("adapted", "stock")])
def test_workers_run_what_the_other_broker_delayed(sender: Kind, receiver: Kind, vhost: Vhost) -> None:
    """So workers can be moved one by one, and back, with messages waiting."""
    sending, receiving = (Application(kind, vhost.idle_url, "work") for kind in (sender, receiver))
    sending.actor(sending.runs.add).send_with_options(args=("delayed",), delay=300)
    sending.broker.close()
    receiving.actor(receiving.runs.add)
    with receiving.worker():
        label, at = receiving.runs.next()
    receiving.broker.close()
    assert label == "delayed"
    assert at >= 0.3 - (receiving.runs.began - sending.runs.began)


# --- the adapter alone


@pytest.fixture
def modest_url(vhost: Vhost) -> Iterator[str]:
    """The URL of a user who may not declare the delay infrastructure."""
    name = f"modest-{vhost.name}"
    vhost.broker.add_user(name, "secret")
    vhost.broker.set_permissions(vhost.name, name, configure=r"^(?!bide\.)")
    yield f"{vhost.broker.vhost_url(vhost.name, user=name, password='secret')}?heartbeat=0"
    vhost.broker.delete_user(name)


@pytest.mark.parametrize("error", [ValueError("failed"), dramatiq.errors.Retry(delay=10**12)], ids=["refused", "long"])
def test_a_message_whose_retry_cannot_be_sent_is_dead_lettered(modest_url: str, error: Exception) -> None:
    """The broker refuses to declare the queues of its delay, or the delay is too long."""
    adapted = Application("adapted", modest_url, "work")

    def fail(label: str) -> None:
        adapted.runs.add(label)
        raise error

    actor = adapted.actor(fail, min_backoff=1000)
    with adapted.worker():
        actor.send("body")
        assert adapted.runs.next()[0] == "body"
        wait_until(lambda: adapted.counts()[2] == 1)
    adapted.broker.close()


def test_a_delayed_message_arrives_as_it_was_sent(vhost: Vhost, release: tuple[int, ...]) -> None:
    adapted = Application("adapted", vhost.idle_url, "work", max_priority=5)
    actor = adapted.actor(adapted.runs.add)
    sent = actor.send_with_options(args=("label",), delay=15, broker_priority=3)
    wait_until(lambda: adapted.counts()[0] == 1)
    method, properties, body = adapted.broker.channel.basic_get(adapted.queue)
    adapted.broker.close()

    assert dramatiq.Message.decode(body) == sent
    assert (sent.queue_name, sent.options) == ("work", {"broker_priority": 3})
    assert method.routing_key == "work"
    headers = Delays().restore(method.exchange, method.routing_key, {"headers": properties.headers}).values["headers"]
    assert headers == {}
    # Below 4.3 and from 4.0 on, a priority would hold back other messages that wait.
    assert properties.priority == (None if (4, 0) <= release < (4, 3) else 3)
    assert (properties.delivery_mode, properties.message_id) == (2, sent.message_id)


def test_threads_share_the_broker(adapted: Application) -> None:
    """Each with a connection of its own; what one has declared the others need not declare."""
    actor = adapted.actor(adapted.runs.add)
    numbers = range(60)
    with ThreadPoolExecutor(6) as threads:
        sent = [threads.submit(actor.send_with_options, args=(number,), delay=10 * (number % 20)) for number in numbers]
        assert all(one.result() for one in sent)
    with adapted.worker():
        assert sorted(label for label, _ in adapted.runs.many(len(numbers))) == list(numbers)
        actor.send("last")
        assert adapted.runs.next()[0] == "last", "one came twice"


def test_what_was_deleted_is_declared_again(adapted: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue at the next check, and the delay infrastructure at once."""
    actor = adapted.actor(adapted.runs.add)
    actor.send_with_options(args=("lost with its queue",), delay=0)
    monkeypatch.setattr(delays, "REBIND_AFTER", 0.0)
    actor.send_with_options(args=("lost, too",), delay=60_000)
    adapted.broker.channel.queue_delete(adapted.queue)
    actor.send_with_options(args=("queue",), delay=10)
    monkeypatch.undo()
    for exchange in ("bide.v1.in.c", "bide.v1.c"):
        adapted.broker.channel.exchange_delete(exchange)
    actor.send_with_options(args=("exchange",), delay=10)
    with adapted.worker():
        assert sorted(label for label, _ in adapted.runs.many(2)) == ["exchange", "queue"]


def test_too_long_a_delay_is_refused(adapted: Application) -> None:
    actor = adapted.actor(adapted.runs.add)
    for delay in (1e12, 1e30):
        with pytest.raises(InvalidDelayError, match="give a shorter delay"):
            actor.send_with_options(delay=delay)


# --- keys


def test_a_message_with_a_key_can_be_cancelled_while_it_waits(
    adapted: Application, vhost: Vhost, tmp_path: Path
) -> None:
    actor = adapted.actor(adapted.runs.add)

    def remind(number: int, delay: int) -> None:
        actor.send_with_options(args=(number,), delay=delay, schedule_key=f"invoice:{number}")

    remind(1, 3_600_000)
    remind(2, 3_600_000)
    remind(2, 300)  # instead of the message before
    remind(3, 100)
    with gate(vhost, tmp_path), adapted.worker():
        assert adapted.broker.cancel("invoice:1").outcome is bide.ScheduleOutcome.CANCELLED
        assert sorted(label for label, _ in adapted.runs.many(2)) == [2, 3]
        assert adapted.broker.cancel("invoice:3").outcome is bide.ScheduleOutcome.TOO_LATE
        assert adapted.broker.cancel("invoice:4").outcome is bide.ScheduleOutcome.NOT_FOUND


def test_retries_have_no_key(adapted: Application, vhost: Vhost, tmp_path: Path) -> None:
    """So that the retry of an old message does not replace a new one."""

    def fail_once() -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        adapted.runs.add(sorted(message.options))
        if "retries" not in message.options:
            actor.send_with_options(delay=3_600_000, schedule_key="key")
            raise RuntimeError("failed")

    actor = adapted.actor(fail_once, min_backoff=10, max_backoff=20)
    actor.send_with_options(delay=10, schedule_key="key")
    with gate(vhost, tmp_path), adapted.worker():
        (first, _), (second, _) = adapted.runs.many(2)
        assert first == []
        assert "retries" in second
        assert adapted.broker.cancel("key").outcome is bide.ScheduleOutcome.CANCELLED


def test_a_key_needs_a_delay(adapted: Application) -> None:
    with pytest.raises(InvalidInputError, match="schedule_key='k' for a message without a delay"):
        adapted.actor(adapted.runs.add).send_with_options(schedule_key="k")


def test_keys_use_the_address_of_the_broker() -> None:
    """Hosts, login and TLS, from each way to give them."""
    password = "p/w"
    context = ssl.create_default_context()
    credentials = pika.PlainCredentials("u", password)
    several = [{"host": host, "virtual_host": "v", "credentials": credentials} for host in ("a", "b")]
    options = pika.SSLOptions(context)
    for given, expected in (
        ({"url": "amqp://u:p%2Fw@a:1/v"}, {"hosts": (("a", 1),)}),
        ({"parameters": several}, {"hosts": (("a", 5672), ("b", 5672))}),
        ({**several[0], "port": 2, "ssl_options": options}, {"hosts": (("a", 2),), "tls": True, "context": context}),
    ):
        url = broker_url(RabbitmqBroker(**given).parameters)
        assert url == BrokerUrl(**expected, user="u", password=password, vhost="v")
        assert url.context is expected.get("context")
