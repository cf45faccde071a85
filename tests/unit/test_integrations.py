"""Delayed publishes for other clients, and the messages of Celery, without a broker."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import amqp
import pytest

import bide
from bide.errors import InvalidDelayError, InvalidInputError, ReservedHeaderError, UnsupportedBrokerError
from bide.integrations import Delays
from bide.integrations.celery import CeleryApp, DelayingAMQP, _Requirements

SERVER = {"product": "RabbitMQ", "version": "4.3.6"}
MAIL = bide.QueueTarget("mail", isolated=True)


class Connection:
    """A connection of another library, as a key."""


def methods(delays: Delays, connection: Connection, delay: str = "1s") -> Counter[str]:
    """The declarations for one message, which are then remembered."""
    publish = delays.route(MAIL, delay=delay, server_properties=SERVER)
    counted = Counter(one.method for one in delays.declarations(publish, connection=connection))
    delays.declared(publish, connection=connection)
    return counted


class TestDelays:
    def test_what_is_declared_is_remembered_per_connection(self) -> None:
        delays, first, second = Delays(), Connection(), Connection()
        # The undeliverable queue, the queue of the digit, the release queue, and the one that is deleted at once.
        assert methods(delays, first)["queue_declare"] == 4
        assert not methods(delays, first)
        assert methods(delays, first, "2s") == {"queue_declare": 2, "queue_delete": 1, "queue_bind": 1}
        assert methods(delays, second)["queue_declare"] == 3, "all queues, of which none is new"
        delays.forget(first)
        assert methods(delays, first)["queue_delete"] == 1

    def test_what_a_lost_connection_declared_is_forgotten(self) -> None:
        delays = Delays()
        methods(delays, Connection())
        assert methods(delays, Connection())["exchange_declare"] > 10

    def test_the_header_of_the_digits_depends_on_the_brokers_release(self) -> None:
        for release, carrier in (("3.10.8", "CC"), ("4.0.5", "BCC"), ("not a release", "CC")):
            publish = Delays().route(MAIL, delay="1s", server_properties={"version": release})
            assert publish.properties["headers"][carrier][-1] == "~r:mail"

    @pytest.mark.parametrize(
        ("release", "kept"), [("3.10.8", True), ("4.0.5", False), ("4.2.9", False), ("4.3.0", True)]
    )
    def test_a_priority_is_kept_where_it_holds_back_no_other_message(self, release: str, kept: bool) -> None:
        properties = {"priority": 7, "expiration": "5000"}
        publish = Delays().route(MAIL, delay="1s", server_properties={"version": release}, properties=properties)
        assert ("priority" in publish.properties) is kept
        assert publish.properties["headers"]["bide-priority"] == 7
        assert "expiration" not in publish.properties
        assert publish.properties["headers"]["bide-expiration"] == "5000"

    def test_a_due_message_keeps_its_properties(self) -> None:
        due = datetime.now(UTC) - timedelta(seconds=1)
        properties = {"priority": 7, "expiration": "5000"}
        publish = Delays().route(MAIL, due=due, server_properties=SERVER, properties=properties)
        assert (publish.exchange, publish.routing_key, publish.hops) == ("", "mail", 0)
        assert publish.properties.items() >= properties.items()

    def test_a_broker_without_safe_dead_lettering_is_refused(self) -> None:
        with pytest.raises(UnsupportedBrokerError, match=r"3\.9\.29"):
            Delays().route(MAIL, delay="1s", server_properties={"version": "3.9.29"})

    def test_a_senders_own_cc_is_refused(self) -> None:
        with pytest.raises(ReservedHeaderError, match="CC"):
            Delays().route(MAIL, delay="1s", server_properties=SERVER, properties={"headers": {"CC": ["copy"]}})

    def test_too_long_a_delay_is_refused(self) -> None:
        with pytest.raises(InvalidDelayError, match="longer than"):
            Delays().route(MAIL, delay=timedelta(days=4000), server_properties=SERVER)

    @pytest.mark.parametrize("infrastructure", [bide.NServiceBus(), bide.Celery(), "clock"])
    def test_another_infrastructure_than_clock_is_refused(self, infrastructure: Any) -> None:
        with pytest.raises(InvalidInputError, match=r"bide\.Clock"):
            Delays(infrastructure)

    def test_owned_names_and_restored_messages(self) -> None:
        delays = Delays(bide.Clock(prefix="shop"))
        assert delays.owns("shop.v1.released")
        assert not delays.owns("bide.v1.released")
        restored = delays.restore("shop.v1.released", "mail", {"headers": {"bide-to": "q:mail", "task": "send"}})
        assert (restored.exchange, restored.routing_key, restored.values["headers"]) == ("", "mail", {"task": "send"})


class Sent(Exception):  # noqa: N818 (it is not an error)
    """A task was published, with these options."""


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An application whose tasks are not sent, but raised as :class:`Sent`."""
    base = DelayingAMQP.__mro__[1]

    def create(amqp: Any) -> Any:
        def send(producer: Any, name: str, message: Any, **options: Any) -> None:
            raise Sent(producer, message, options)

        return send

    monkeypatch.setattr(base, "_create_task_sender", create)
    return CeleryApp("tests", broker="memory://", set_as_current=False)


def sent(app: Any, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    with pytest.raises(Sent) as caught:
        app.send_task("run", **options)
    producer, message, found = caught.value.args
    return producer, message, found


class TestCeleryMessages:
    @pytest.mark.parametrize("protocol", [1, 2])
    @pytest.mark.parametrize("positional", [False, True])
    def test_a_countdown_becomes_the_eta_of_the_message(self, app: Any, protocol: int, positional: bool) -> None:
        app.conf.task_protocol = protocol
        before = datetime.now(UTC)
        if positional:
            with pytest.raises(Sent) as caught:
                app.send_task("run", (), {}, 5, None, "the-id")
            _, message, options = caught.value.args
        else:
            _, message, options = sent(app, countdown=5, task_id="the-id")
        fields = message.headers if protocol == 2 else message.body
        assert fields["id"] == "the-id"
        eta = datetime.fromisoformat(fields["eta"])
        assert before <= eta - timedelta(seconds=5) <= datetime.now(UTC)
        assert "bide_when" not in options

    @pytest.mark.parametrize("eta", [datetime(2030, 1, 1, 12), "2030-01-01T12:00:00"])  # noqa: DTZ001 (on purpose)
    def test_an_eta_without_time_zone_is_in_utc_as_in_a_worker(self, app: Any, eta: Any) -> None:
        app.conf.timezone = "America/New_York"
        assert app.amqp._due(eta) == datetime(2030, 1, 1, 12, tzinfo=UTC)
        _, message, _ = sent(app, eta=eta)
        assert message.headers["eta"] == "2030-01-01T12:00:00"

    def test_too_long_a_countdown_is_refused_with_its_value(self, app: Any) -> None:
        with pytest.raises(InvalidDelayError, match="1000000000000000"):
            app.send_task("run", countdown=1e15)

    def test_a_keyed_task_without_a_delay_is_refused(self, app: Any) -> None:
        with pytest.raises(InvalidInputError, match="countdown="):
            app.send_task("run", keyed=True)
        for delay in ({"countdown": 0}, {"eta": datetime.now(UTC)}):
            sent(app, keyed=True, **delay)

    def test_other_transports_get_tasks_as_without_the_adapter(self, app: Any) -> None:
        producer, _, _ = sent(app, countdown=5)
        assert type(producer).__module__.startswith("kombu")

    def test_a_retry_does_not_copy_headers_of_its_delay(self, app: Any) -> None:
        headers = {"mine": 1, "bide-to": "q:work", "bide-due": 5, "CC": ["~s1", "~r:work"], "bide-priority": 9}
        _, _, options = sent(app, headers=headers, priority=0)
        assert options["headers"] == {"mine": 1}
        assert options["priority"] == 9

    def test_a_retry_leaves_the_exchanges_of_the_infrastructure(self, app: Any) -> None:
        headers = {"bide-to": "q:work"}
        _, _, options = sent(app, headers=headers, exchange="bide.v1.released", routing_key="work")
        assert (options["exchange"], options["routing_key"], options["queue"].name) == (None, None, "work")
        headers = {"bide-to": "x:shop"}
        _, _, options = sent(app, headers=headers, exchange="bide.v1.released", routing_key="order.created")
        assert (options["exchange"], options["routing_key"]) == ("shop", "order.created")

    def test_the_infrastructure_is_a_setting(self, app: Any) -> None:
        assert app.amqp.delays.infrastructure == bide.Clock()
        app = CeleryApp("tests", broker="memory://", set_as_current=False)
        app.conf.bide_infrastructure = bide.Clock(prefix="shop")
        assert app.amqp.delays.owns("shop.v1.released")

    def test_a_workers_consumer_of_the_users_own_is_kept(self) -> None:
        app = CeleryApp("tests", broker="memory://", set_as_current=False)
        assert app.conf.worker_consumer == "bide.integrations.celery_worker:ConsumerWithoutNativeDelay"
        app.conf.worker_consumer = "mine:Consumer"
        assert app.conf.worker_consumer == "mine:Consumer"


class BusyChannel:
    """A channel of py-amqp whose broker ends the connection when it declares a queue."""

    connection: Any = amqp.Connection()

    def __init__(self, code: int) -> None:
        self._code = code

    def exchange_declare(self, **_: Any) -> None: ...

    def queue_declare(self, **_: Any) -> None:
        raise amqp.exceptions.error_for_code(self._code, "closed", (0, 0), amqp.ConnectionError)


@pytest.mark.parametrize(
    ("code", "raised"), [(541, amqp.RecoverableConnectionError), (530, amqp.exceptions.NotAllowed)]
)
def test_kombu_can_repeat_declarations_that_a_busy_broker_aborts(code: int, raised: type[Exception]) -> None:
    delays = Delays()
    publish = delays.route(MAIL, delay="1s", server_properties=SERVER)
    channel = BusyChannel(code)
    with pytest.raises(raised, match="closed"):
        _Requirements(delays, publish).declare(channel=channel)
    assert list(delays.declarations(publish, connection=channel.connection)), "nothing is remembered"
