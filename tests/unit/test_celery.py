"""``Celery``, compared with what kombu declares, binds and publishes, without a broker."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from kombu import entity
from kombu.transport import native_delayed_delivery, pyamqp

from bide.delay.cascade_keys import original_key
from bide.delay.celery import Celery
from bide.delay.cross_delivery import foreign_suffix_bindings
from bide.delay.protocol import ExchangeTarget, QueueTarget
from bide.errors import InvalidDelayError, InvalidInputError, InvalidNameError, UnsupportedTargetError
from bide.topology import Binding, Exchange, Queue, Topology
from bide.topology.routing import Model
from tests.cascade_keys import split_key

if TYPE_CHECKING:
    from bide.delay.protocol import DelayInfrastructure, Target
    from bide.delay.routes import DelayRoute

# Only part of kombu has type annotations.
KombuExchange: Any = entity.Exchange
KombuQueue: Any = entity.Queue
KombuChannel: Any = pyamqp.Channel
kombu_delay: Any = native_delayed_delivery

ZEROS = "0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0."
EXACT = "*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*."


class Recorder:
    """A kombu connection, and its channel, that notes what kombu declares."""

    is_open = True

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.queues: list[Queue] = []
        self.bindings: list[Binding] = []

    @property
    def topology(self) -> Topology:
        return Topology(self.exchanges, self.queues, self.bindings)

    def channel(self) -> Recorder:
        return self

    def prepare_queue_arguments(self, arguments: dict[str, Any], **limits: Any) -> Any:
        return KombuChannel.prepare_queue_arguments(self, arguments, **limits)

    def exchange_declare(self, *, exchange: str, durable: bool, auto_delete: bool, arguments: Any, **more: Any) -> None:
        self.exchanges.append(
            Exchange(exchange, more["type"], durable=durable, auto_delete=auto_delete, arguments=arguments or {})
        )

    def queue_declare(
        self, *, queue: str, durable: bool, exclusive: bool, auto_delete: bool, arguments: Any, **_: Any
    ) -> tuple[str, int, int]:
        self.queues.append(
            Queue(queue, durable=durable, exclusive=exclusive, auto_delete=auto_delete, arguments=arguments)
        )
        return queue, 0, 0

    def queue_bind(self, *, queue: str, exchange: str, routing_key: str, arguments: Any, **_: Any) -> None:
        self.bindings.append(Binding(exchange, queue, routing_key, "queue", arguments or {}))

    def exchange_bind(self, *, destination: str, source: str, routing_key: str, arguments: Any, **_: Any) -> None:
        self.bindings.append(Binding(source, destination, routing_key, "exchange", arguments or {}))


def declared_by_kombu(queue_type: str, prefix: str | None = None) -> Topology:
    recorder = Recorder()
    kombu_delay.declare_native_delayed_delivery_exchanges_and_queues(recorder, queue_type, prefix)
    return recorder.topology


def worker(name: str, exchange: str, routing_key: str, *, exchange_type: str = "topic") -> Topology:
    """What a Celery worker makes for one queue of its own, on its way to consuming from it."""
    recorder = Recorder()
    queue = KombuQueue(
        name, KombuExchange(exchange, exchange_type), routing_key, queue_arguments={"x-queue-type": "quorum"}
    )
    queue.bind(recorder).declare()
    kombu_delay.bind_queue_to_native_delayed_delivery_exchange(recorder, queue)
    return recorder.topology


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def test_it_satisfies_the_protocol() -> None:
    infrastructure: DelayInfrastructure = Celery()
    assert infrastructure.name == "celery"
    assert infrastructure.resolution == seconds(1)
    assert infrastructure.max_delay == seconds(268_435_455)


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize("prefix", [None, "", "shop", "a.b"])
def test_it_declares_the_same_topology_as_kombu(prefix: str | None, queue_type: Any) -> None:
    ours, theirs = Celery(prefix=prefix, queue_type=queue_type).topology(), declared_by_kombu(queue_type, prefix)
    assert set(ours.exchanges) == set(theirs.exchanges)
    assert set(ours.queues) == set(theirs.queues)
    assert set(ours.bindings) == set(theirs.bindings)
    assert (len(ours.exchanges), len(ours.queues), len(ours.bindings)) == (29, 28, 56)


def test_declarations_have_the_names_and_arguments_of_celery() -> None:
    topology = Celery().topology()
    assert topology.queue("celery_delayed_27") == Queue(
        "celery_delayed_27",
        arguments={
            "x-queue-type": "quorum",
            "x-overflow": "reject-publish",
            "x-message-ttl": 134_217_728_000,
            "x-dead-letter-exchange": "celery_delayed_26",
            "x-dead-letter-strategy": "at-least-once",
        },
    )
    assert Celery(prefix="shop", queue_type="classic").topology().queue("shop_celery_delayed_0") == Queue(
        "shop_celery_delayed_0",
        arguments={
            "x-queue-type": "classic",
            "x-overflow": "reject-publish",
            "x-message-ttl": 1_000,
            "x-dead-letter-exchange": "shop_celery_delayed_delivery",
        },
    )
    assert topology.exchange("celery_delayed_delivery") == Exchange("celery_delayed_delivery", "topic")
    assert {one for one in topology.bindings if one.source == "celery_delayed_0"} == {
        Binding("celery_delayed_0", "celery_delayed_0", EXACT[:-2] + "1.#", "queue"),
        Binding("celery_delayed_0", "celery_delayed_delivery", EXACT[:-2] + "0.#", "exchange"),
    }


@pytest.mark.parametrize("delay", [1, 2, 3, 10, 2**20 - 1, 2**20, 2**27, 2**28 - 1])
def test_routing_keys_have_the_digits_of_kombu(delay: int) -> None:
    route = Celery().route(seconds(delay), ExchangeTarget("tasks", "order.created"))
    theirs = kombu_delay.calculate_routing_key(delay, "order.created")
    assert route.routing_key.replace("~r:tasks~order/created", "order.created") == theirs
    assert split_key(kombu_delay.calculate_routing_key(delay, "order.created")) == (delay, "order.created")


@pytest.mark.parametrize(
    ("delay", "entry", "digits", "hops"),
    [
        (timedelta(microseconds=1), "celery_delayed_0", ZEROS[:-2] + "1.", 1),
        (seconds(1), "celery_delayed_0", ZEROS[:-2] + "1.", 1),
        (seconds(1.5), "celery_delayed_1", ZEROS[:-4] + "1.0.", 1),
        (seconds(10), "celery_delayed_3", ZEROS[:-8] + "1.0.1.0.", 2),
        (seconds(2**27), "celery_delayed_27", "1." + ZEROS[2:], 1),
        (seconds(2**28 - 1), "celery_delayed_27", ZEROS.replace("0", "1"), 28),
    ],
)
def test_a_route_starts_at_its_highest_level_with_digits_and_target(
    delay: timedelta, entry: str, digits: str, hops: int
) -> None:
    route = Celery().route(delay, QueueTarget("orders"))
    assert route.exchange == entry
    assert route.routing_key == digits + "~q:orders"
    assert route.hops == hops
    assert route.headers == {"bide-to": "q:orders"}
    assert delay <= route.delay < delay + seconds(1)
    assert Celery(prefix="shop").route(delay, QueueTarget("orders")).exchange == f"shop_{entry}"


def test_a_delay_of_zero_is_published_to_the_target() -> None:
    route = Celery().route(seconds(0), QueueTarget("orders"))
    assert (route.exchange, route.routing_key, route.hops, route.requires) == ("", "orders", 0, Topology())
    assert dict(route.headers) == {}
    route = Celery().route(seconds(0), ExchangeTarget("shop", "order.created"))
    assert (route.exchange, route.routing_key, route.hops, route.requires) == ("shop", "order.created", 0, Topology())


def test_targets_are_bound_at_exact_width_and_exchanges_have_a_release_queue_for_each_key() -> None:
    queue = Celery().route(seconds(1), QueueTarget("billing.orders"))
    assert queue.requires == Topology(
        bindings=[Binding("celery_delayed_delivery", "billing.orders", EXACT + "~q:billing%2Eorders", "queue")]
    )
    one = Celery().route(seconds(1), ExchangeTarget("shop.eu", "order.created"))
    other = Celery().route(seconds(9), ExchangeTarget("shop.eu", "#.order"))
    name = "bide.release.celery:shop/eu~order/created"
    arguments: dict[str, Any] = {
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-queue-leader-locator": "balanced",
        "x-message-ttl": 0,
        "x-dead-letter-exchange": "shop.eu",
        "x-dead-letter-routing-key": "order.created",
    }
    assert one.requires == Topology(
        queues=[Queue.quorum(name, arguments)],
        bindings=[Binding("celery_delayed_delivery", name, EXACT + "~r:shop/eu~order/created", "queue")],
    )
    assert (one.expects, one.hops) == (Topology([Exchange("shop.eu")]), 2)
    assert [queue.name for queue in other.requires.queues] == ["bide.release.celery:shop/eu~#/order"]


def test_a_release_queue_has_a_name_that_fits_whatever_the_prefix() -> None:
    ours = Celery(prefix="p" * 200)
    (queue,) = ours.route(seconds(1), ExchangeTarget("tasks", "k" * 180)).requires.queues
    assert len(queue.name) <= 255
    assert queue.arguments["x-dead-letter-routing-key"] == "k" * 180
    assert ours.owns(queue.name)
    assert not Celery().owns(queue.name)


@pytest.mark.parametrize(
    ("target", "key"),
    [
        (QueueTarget("orders"), "orders"),
        (QueueTarget("billing.orders"), "billing.orders"),
        (QueueTarget("100%.%2E.#"), "100%.%2E.#"),
        (QueueTarget("*"), "*"),
        (QueueTarget("注文.é"), "注文.é"),
        (QueueTarget("q" * 196), "q" * 196),
        (ExchangeTarget("tasks", "order.created"), "order.created"),
        (ExchangeTarget("tasks", "*.#"), "*.#"),
        (ExchangeTarget("a.b", "c..d."), "c..d."),
        (ExchangeTarget("news", "", type="fanout"), ""),
        (ExchangeTarget("a/b~c%d", "a/b~c%d.e"), "a/b~c%d.e"),
        (ExchangeTarget("tasks", "k" * 190), "k" * 190),
        (QueueTarget("billing.orders", isolated=True), "billing.orders"),
    ],
)
def test_original_key_restores_the_routing_key(target: Target, key: str) -> None:
    route = Celery().route(seconds(12345), target)
    assert len(route.routing_key.encode()) <= 255
    assert original_key(route.routing_key) == key


@pytest.mark.parametrize(
    ("key", "original"),
    [
        (ZEROS + "celery", "celery"),
        (ZEROS + "order.created", "order.created"),
        (ZEROS + "0.1", "0.1"),
        (ZEROS, ""),
        ("order.created", "order.created"),
        ("", ""),
        ("1.0.1.0.destination", "1.0.1.0.destination"),
        ("2." + ZEROS[2:] + "celery", "2." + ZEROS[2:] + "celery"),
    ],
)
def test_original_key_restores_keys_of_celery_itself(key: str, original: str) -> None:
    assert original_key(key) == original


@pytest.mark.parametrize(
    ("delay", "message"),
    [(seconds(268_435_456), "is longer"), (seconds(268_435_455.5), "is longer"), (seconds(-0.5), "is negative")],
)
def test_delays_out_of_range_are_refused(delay: timedelta, message: str) -> None:
    with pytest.raises(InvalidDelayError, match=message):
        Celery().route(delay, QueueTarget("orders"))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (QueueTarget(""), "the queue name is empty"),
        (QueueTarget("q" * 197), "takes 197 bytes, the limit is 196"),
        (QueueTarget("é" * 99), "takes 198 bytes, the limit is 196"),
        (QueueTarget("." * 66), "takes 198 bytes, the limit is 196"),
        (ExchangeTarget("tasks", "k" * 191), "'tasks' and the routing key 'k+' take 200 bytes .*, the limit is 199"),
        (ExchangeTarget("x" * 196, ""), "the exchange 'x+' .* take 200 bytes .*, the limit is 199"),
        (QueueTarget("q" * 196, isolated=True), "the routing key 'q+' take 200 bytes .*, the limit is 199"),
        (ExchangeTarget("tasks", "\udcff"), "UTF-8 cannot encode"),
    ],
)
@pytest.mark.parametrize("delay", [0, 1])
def test_names_that_are_empty_or_too_long_are_refused(target: Target, message: str, delay: int) -> None:
    with pytest.raises(InvalidNameError, match=message):
        Celery().route(seconds(delay), target)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (ExchangeTarget("", "orders"), r"default exchange: name the queue"),
        (ExchangeTarget("tasks", "", type="topic"), r"'tasks' is empty.*at least one word"),
    ],
)
def test_the_default_exchange_and_empty_topic_keys_are_refused(target: Target, message: str) -> None:
    with pytest.raises(UnsupportedTargetError, match=message):
        Celery().route(seconds(1), target)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"queue_type": "stream"}, InvalidInputError, "'stream' is unknown: give 'quorum' or 'classic'"),
        ({"prefix": "p" * 201}, InvalidNameError, "takes 201 bytes, the limit is 200"),
        ({"prefix": "amq.shop"}, InvalidNameError, "starts with 'amq.'"),
    ],
)
def test_invalid_settings_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Celery(**arguments)


def test_the_longest_prefix_keeps_every_name_within_the_limit() -> None:
    infrastructure = Celery(prefix="p" * 200)
    topology = infrastructure.topology() | infrastructure.guard_topology()
    names = [*(one.name for one in topology.exchanges), *(one.name for one in topology.queues)]
    assert max(map(len, names)) <= 255


def test_it_owns_and_labels_its_own_names_only() -> None:
    infrastructure = Celery(prefix="shop")
    assert infrastructure.label("shop_celery_delayed_3") == "Level 03"
    assert infrastructure.label("shop_celery_delayed_delivery") == "Delivery"
    assert infrastructure.label("celery_delayed_3") is None
    assert infrastructure.owns("shop_celery_delayed_0")
    assert infrastructure.owns("bide.undeliverable.shop_celery")
    assert not infrastructure.owns("celery_delayed_0")
    assert not infrastructure.owns("bide.undeliverable.celery")
    assert [one.name for one in infrastructure.probes().queues] == ["shop_celery_delayed_0", "shop_celery_delayed_27"]
    assert [one.name for one in infrastructure.probes().exchanges] == ["shop_celery_delayed_delivery"]


def sent(model: Model, route: DelayRoute) -> list[tuple[str, float]]:
    arrivals = model.travel(route.exchange, route.routing_key, route.headers)
    assert all(one.fate == "arrived" for one in arrivals)
    return [(one.queue, one.at.total_seconds()) for one in arrivals]


@pytest.mark.parametrize("delay", [0, 1, 10, 4095])
def test_a_worker_receives_messages_delayed_by_bide(delay: int) -> None:
    route = Celery().route(seconds(delay), ExchangeTarget("tasks", "order.created"))
    workers = (
        worker("orders", "tasks", "order.created")
        | worker("other", "tasks", "order.deleted")
        | worker("letters", "post", "letter")
    )
    assert sent(Model(Celery().topology() | workers | route.requires), route) == [("orders", delay)]


def test_a_worker_on_a_fanout_exchange_receives_any_key() -> None:
    route = Celery().route(seconds(5), ExchangeTarget("news", "", type="fanout"))
    workers = worker("a", "news", "a", exchange_type="fanout") | worker("b", "tasks", "b")
    assert sent(Model(Celery().topology() | workers | route.requires), route) == [("a", 5)]


def test_a_queue_of_a_worker_can_be_a_target_itself() -> None:
    """Even when another worker's routing key is the name of that queue."""
    route = Celery().route(seconds(5), QueueTarget("orders"))
    workers = worker("orders", "tasks", "order.created") | worker("archive", "tasks", "orders")
    assert sent(Model(Celery().topology() | workers | route.requires), route) == [("orders", 5)]


def test_bindings_of_bide_do_not_divert_messages_delayed_by_celery() -> None:
    ours = Celery()
    requires = ours.route(seconds(1), ExchangeTarget("post", "order.created")).requires
    requires |= ours.route(seconds(1), QueueTarget("created")).requires
    workers = worker("orders", "tasks", "order.created") | worker("letters", "post", "letter")
    model = Model(ours.topology() | workers | requires)
    arrivals = model.travel("celery_delayed_27", kombu_delay.calculate_routing_key(300, "order.created"))
    assert [(one.queue, one.at, original_key(one.routing_key)) for one in arrivals] == [
        ("orders", seconds(300), "order.created")
    ]


def test_two_exchanges_with_one_routing_key_are_two_targets() -> None:
    ours = Celery()
    queues = Topology(
        [Exchange("shop", "topic"), Exchange("audit", "topic")],
        bindings=[Binding("shop", "a", "#.order"), Binding("audit", "b", "#.order")],
    )
    one, other = (ours.route(seconds(1), ExchangeTarget(name, "order")) for name in ("shop", "audit"))
    model = Model(ours.topology() | queues | one.requires | other.requires)
    assert sent(model, one) == [("a", 1)]
    assert sent(model, other) == [("b", 1)]


def test_bindings_of_workers_that_cross_deliver_are_found() -> None:
    workers = worker("orders", "tasks", "created") | worker("archive", "audit", "order.created")
    bindings = [one for one in workers.bindings if one.source == "celery_delayed_delivery"]
    (found,) = foreign_suffix_bindings(bindings)
    assert (found.binding.destination, found.addresses) == ("tasks", ("order.created",))


def test_a_task_retried_by_celery_reaches_its_queue_again() -> None:
    """Celery's retry puts digits before the key that the message came with."""
    route = Celery().route(seconds(5), ExchangeTarget("tasks", "order.created"))
    model = Model(Celery().topology() | worker("orders", "tasks", "order.created") | route.requires)
    (arrival,) = model.travel(route.exchange, route.routing_key, route.headers)
    assert arrival.routing_key == "order.created"
    again = kombu_delay.calculate_routing_key(60, arrival.routing_key)
    assert [(one.queue, one.at) for one in model.travel("celery_delayed_27", again)] == [("orders", seconds(60))]
