"""``NServiceBus``, compared with literal names and keys of NServiceBus.RabbitMQ."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest

from bide.delay.nservicebus import NServiceBus, format_timestamp, nservicebus_headers
from bide.delay.protocol import ExchangeTarget, QueueTarget, existing
from bide.errors import (
    InvalidDelayError,
    InvalidDueTimeError,
    InvalidInputError,
    InvalidNameError,
    UnsupportedTargetError,
)
from bide.topology import Binding, Exchange, Queue, Topology
from tests.cascade_keys import split_key

if TYPE_CHECKING:
    from bide.delay.protocol import DelayInfrastructure, Target

TTL = {
    "00": 1_000,
    "01": 2_000,
    "02": 4_000,
    "03": 8_000,
    "04": 16_000,
    "05": 32_000,
    "06": 64_000,
    "07": 128_000,
    "08": 256_000,
    "09": 512_000,
    "10": 1_024_000,
    "11": 2_048_000,
    "12": 4_096_000,
    "13": 8_192_000,
    "14": 16_384_000,
    "15": 32_768_000,
    "16": 65_536_000,
    "17": 131_072_000,
    "18": 262_144_000,
    "19": 524_288_000,
    "20": 1_048_576_000,
    "21": 2_097_152_000,
    "22": 4_194_304_000,
    "23": 8_388_608_000,
    "24": 16_777_216_000,
    "25": 33_554_432_000,
    "26": 67_108_864_000,
    "27": 134_217_728_000,
}
ZEROS = "0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0."
ONES = "1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1."
EXACT = "*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*."
DELAY_HEADER = "NServiceBus.Transport.RabbitMQ.DelayInSeconds"


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def test_it_satisfies_the_protocol() -> None:
    infrastructure: DelayInfrastructure = NServiceBus()
    assert infrastructure.name == "nservicebus"
    assert NServiceBus(version=1).name == "nservicebus-v1"
    assert infrastructure.resolution == timedelta(seconds=1)
    assert infrastructure.max_delay == timedelta(days=3106, hours=21, minutes=24, seconds=15)
    with pytest.raises(FrozenInstanceError):
        infrastructure.version = 1  # type: ignore[attr-defined]  # wrong on purpose


def test_version_2_declares_the_same_topology_as_dotnet() -> None:
    topology = NServiceBus().topology()

    assert set(topology.exchanges) == {
        Exchange("nsb.v2.delay-delivery", "topic", durable=True, auto_delete=False, internal=False, arguments={}),
        *(
            Exchange(f"nsb.v2.delay-level-{level}", "topic", durable=True, auto_delete=False, arguments={})
            for level in TTL
        ),
    }
    after = {level: f"nsb.v2.delay-level-{below}" for below, level in zip(TTL, list(TTL)[1:], strict=False)}
    after["00"] = "nsb.v2.delay-delivery"
    assert set(topology.queues) == {
        Queue(
            f"nsb.v2.delay-level-{level}",
            durable=True,
            exclusive=False,
            auto_delete=False,
            arguments={
                "x-queue-type": "quorum",
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
                "x-message-ttl": ttl,
                "x-dead-letter-exchange": after[level],
            },
        )
        for level, ttl in TTL.items()
    }
    assert len(topology.bindings) == len(set(topology.bindings)) == 56


def test_bindings_of_selected_levels_equal_those_of_dotnet() -> None:
    bindings = NServiceBus().topology().bindings
    level = "nsb.v2.delay-level-"
    for source, queue_key, exchange_key, below in (
        ("27", "1.#", "0.#", f"{level}26"),
        ("26", "*.1.#", "*.0.#", f"{level}25"),
        ("25", "*.*.1.#", "*.*.0.#", f"{level}24"),
        (
            "01",
            "*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.1.#",
            "*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.0.#",
            f"{level}00",
        ),
        (
            "00",
            "*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.1.#",
            "*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.0.#",
            "nsb.v2.delay-delivery",
        ),
    ):
        assert {one for one in bindings if one.source == level + source} == {
            Binding(level + source, level + source, queue_key, "queue"),
            Binding(level + source, below, exchange_key, "exchange"),
        }


def test_every_level_matches_its_own_word_of_the_key() -> None:
    for one in NServiceBus().topology().bindings:
        level = int(one.source[-2:])
        assert one.routing_key == "*." * (27 - level) + ("1.#" if one.destination_type == "queue" else "0.#")


def test_version_1_has_lazy_classic_queues_and_the_same_keys() -> None:
    first, second = NServiceBus(version=1).topology(), NServiceBus().topology()

    assert {one.name: dict(one.arguments) for one in first.queues} == {
        f"nsb.delay-level-{level}": {
            "x-queue-mode": "lazy",
            "x-message-ttl": ttl,
            "x-dead-letter-exchange": f"nsb.delay-level-{int(level) - 1:02}" if int(level) else "nsb.delay-delivery",
        }
        for level, ttl in TTL.items()
    }
    assert all(one.durable and not one.auto_delete and not one.exclusive for one in first.queues)
    renamed = {
        (one.source.replace("v2.", ""), one.destination.replace("v2.", ""), one.routing_key, one.destination_type)
        for one in second.bindings
    }
    assert renamed == {(one.source, one.destination, one.routing_key, one.destination_type) for one in first.bindings}
    assert {one.name for one in first.exchanges}.isdisjoint(one.name for one in second.exchanges)
    assert all(one.type == "topic" and one.durable and not one.arguments for one in first.exchanges)


@pytest.mark.parametrize(
    ("delay", "entry", "digits", "hops"),
    [
        (seconds(0), "00", ZEROS, 0),
        (timedelta(microseconds=1), "00", ZEROS[:-2] + "1.", 1),
        (seconds(1), "00", ZEROS[:-2] + "1.", 1),
        (seconds(1.000001), "01", ZEROS[:-4] + "1.0.", 1),
        (seconds(2), "01", ZEROS[:-4] + "1.0.", 1),
        (seconds(3), "01", ZEROS[:-4] + "1.1.", 2),
        (seconds(9.001), "03", ZEROS[:-8] + "1.0.1.0.", 2),
        (seconds(10), "03", "0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.1.0.1.0.", 2),
        (seconds(2**20 - 1), "19", ZEROS[:-40] + ONES[:40], 20),
        (seconds(2**20), "20", ZEROS[:-42] + "1." + ZEROS[:40], 1),
        (seconds(2**27), "27", "1." + ZEROS[:54], 1),
        (seconds(268_435_454), "27", ONES[:54] + "0.", 27),
        (seconds(268_435_455), "27", ONES, 28),
        (seconds(268_435_454.5), "27", ONES, 28),
    ],
)
@pytest.mark.parametrize(("version", "family"), [(1, "nsb"), (2, "nsb.v2")])
def test_a_route_starts_at_its_highest_level_with_digits_and_address(
    delay: timedelta, entry: str, digits: str, hops: int, version: Any, family: str
) -> None:
    route = NServiceBus(version=version).route(delay, QueueTarget("destination"))

    assert route.exchange == f"{family}.delay-level-{entry}"
    assert route.routing_key == digits + "destination"
    assert route.hops == hops
    assert delay <= route.delay < delay + seconds(1)
    assert split_key(route.routing_key) == (route.delay.total_seconds(), "destination")


def test_a_delayed_send_has_the_delay_in_whole_seconds() -> None:
    headers = NServiceBus().route(seconds(9.1), QueueTarget("billing.orders")).headers

    assert headers == {DELAY_HEADER: 10, "bide-to": "q:billing.orders"}
    assert type(headers[DELAY_HEADER]) is int, "text or a float would make .NET set the message aside"


@pytest.mark.parametrize(
    ("delay", "message"),
    [
        (seconds(268_435_456), r"3106 d 21:24:16 is longer .*\(3106 d 21:24:15\).*shorter"),
        (seconds(268_435_455.000001), r"3106 d 21:24:15.000001 is longer"),
        (seconds(-1), r"-0:00:01 is negative: give zero or more"),
        (timedelta(microseconds=-1), r"negative"),
    ],
)
def test_delays_out_of_range_are_refused(delay: timedelta, message: str) -> None:
    with pytest.raises(InvalidDelayError, match=message):
        NServiceBus().route(delay, QueueTarget("orders"))
    with pytest.raises(InvalidDelayError, match=message):
        NServiceBus().steps(delay, QueueTarget("orders"))


@pytest.mark.parametrize(
    "address",
    [
        "x",
        "1",
        "0.1",
        "a" * 199,
        "é" * 99,
        "日本.注文",
        "billing.orders",
        "a..b",
        "orders.",
        "a*b.#c",
        "with space|pipe",
    ],
)
@pytest.mark.parametrize("routing", ["conventional", "direct"])
def test_valid_addresses_fit_into_the_routing_key(address: str, routing: Any) -> None:
    infrastructure = NServiceBus(routing=routing)
    route = infrastructure.route(seconds(268_435_455), QueueTarget(address))

    assert route.routing_key == ONES + address
    assert len(route.routing_key.encode()) <= 255
    kind: Any = "queue" if routing == "direct" else "exchange"
    assert route.requires == Topology(bindings=[Binding("nsb.v2.delay-delivery", address, EXACT + address, kind)])
    assert split_key(route.routing_key)[1] == address


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", r"the queue name is empty"),
        ("a" * 200, r"takes 200 bytes, the limit is 199: use a shorter one"),
        ("é" * 100, r"takes 200 bytes, the limit is 199"),
        ("a\udcff", r"UTF-8 cannot encode"),
        ("*", r"'\*' as a word.*rename it"),
        ("#", r"'#' as a word"),
        ("billing.*", r"the queue 'billing\.\*' has '\*' as a word"),
        ("#.orders", r"'#' as a word"),
        ("a.#.b", r"'#' as a word"),
    ],
)
@pytest.mark.parametrize("routing", ["conventional", "direct"])
def test_invalid_addresses_are_refused(address: str, message: str, routing: Any) -> None:
    infrastructure = NServiceBus(routing=routing)
    with pytest.raises(InvalidNameError, match=message):
        infrastructure.route(seconds(1), QueueTarget(address))
    with pytest.raises(InvalidNameError, match=message):
        infrastructure.endpoint_topology(address)


def test_fewer_levels_leave_more_room_for_the_address() -> None:
    infrastructure = NServiceBus(levels=4)
    assert infrastructure.max_delay == seconds(15)
    route = infrastructure.route(seconds(10), QueueTarget("destination"))
    assert (route.exchange, route.routing_key) == ("nsb.v2.delay-level-03", "1.0.1.0.destination")
    assert infrastructure.route(seconds(1), QueueTarget("a" * 247)).routing_key.startswith("0.0.0.1.a")
    with pytest.raises(InvalidNameError, match="takes 248 bytes, the limit is 247"):
        infrastructure.route(seconds(1), QueueTarget("a" * 248))
    with pytest.raises(InvalidDelayError, match=r"0:00:16 is longer .*\(0:00:15\)"):
        infrastructure.route(seconds(16), QueueTarget("a"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"version": 3}, "version 3"),
        ({"routing": "topic"}, "'topic' is unknown: give 'conventional' or 'direct'"),
        ({"levels": 0}, "0 levels: give 1 to 28"),
        ({"levels": 29}, "29 levels: give 1 to 28"),
    ],
)
def test_invalid_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        NServiceBus(**arguments)


@pytest.mark.parametrize(
    ("target", "word", "onward"),
    [
        (ExchangeTarget("shop", "order.created"), "shop~order/created", ("shop", "order.created")),
        (ExchangeTarget("orders", "", type="direct"), "orders~", ("orders", "")),
        (ExchangeTarget("Shop:OrderPlaced", type="fanout"), "Shop:OrderPlaced~", ("Shop:OrderPlaced", "")),
        (QueueTarget("billing.orders", isolated=True), "~billing/orders", ("", "billing.orders")),
    ],
)
@pytest.mark.parametrize("routing", ["conventional", "direct"])
def test_exchanges_and_isolated_queues_have_a_release_queue(
    target: Target, word: str, onward: tuple[str, str], routing: Any
) -> None:
    """Under one word as the address, so that no ``#.<address>`` of .NET takes the message too."""
    route = NServiceBus(routing=routing).route(seconds(1), target)
    assert (route.routing_key, route.hops) == (f"{ZEROS[:-2]}1.~r:{word}", 2)
    (queue,) = route.requires.queues
    assert queue.name == f"bide.release.nsb.v2:{word}"
    assert (queue.arguments["x-dead-letter-exchange"], queue.arguments["x-dead-letter-routing-key"]) == onward
    assert route.requires.bindings == (Binding("nsb.v2.delay-delivery", queue.name, f"{EXACT}~r:{word}"),)
    assert route.expects == existing(target)
    assert NServiceBus().owns(queue.name)
    assert not NServiceBus(version=1).owns(queue.name)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (ExchangeTarget("", "orders"), r"default exchange: name the queue"),
        (ExchangeTarget("tasks", "", type="topic"), r"'tasks' is empty.*at least one word"),
    ],
)
def test_the_default_exchange_and_empty_topic_keys_are_refused(target: Target, message: str) -> None:
    with pytest.raises(UnsupportedTargetError, match=message):
        NServiceBus().route(seconds(1), target)


def test_an_endpoint_is_bound_to_the_delivery_exchange() -> None:
    assert NServiceBus().endpoint_topology("orders") == Topology(
        [Exchange("orders", "fanout")],
        bindings=[
            Binding("orders", "orders", "", "queue"),
            Binding("nsb.v2.delay-delivery", "orders", EXACT + "orders", "exchange"),
        ],
    )
    assert NServiceBus(version=1, routing="direct").endpoint_topology("orders") == Topology(
        bindings=[Binding("nsb.delay-delivery", "orders", EXACT + "orders", "queue")]
    )


def test_probes_are_the_delivery_exchange_and_the_outermost_levels() -> None:
    infrastructure = NServiceBus()
    probes, whole = infrastructure.probes(), infrastructure.topology()
    assert [one.name for one in probes.exchanges] == ["nsb.v2.delay-delivery"]
    assert [one.name for one in probes.queues] == ["nsb.v2.delay-level-00", "nsb.v2.delay-level-27"]
    assert set(probes.exchanges) <= set(whole.exchanges)
    assert set(probes.queues) <= set(whole.queues)


@pytest.mark.parametrize(
    ("infrastructure", "name", "label"),
    [
        (NServiceBus(), "nsb.v2.delay-level-03", "Level 03"),
        (NServiceBus(), "nsb.v2.delay-delivery", "Delivery"),
        (NServiceBus(version=1), "nsb.delay-level-27", "Level 27"),
        (NServiceBus(version=1), "nsb.v2.delay-level-03", None),
        (NServiceBus(levels=4), "nsb.v2.delay-level-04", None),
        (NServiceBus(), "orders", None),
    ],
)
def test_it_owns_and_labels_its_own_names_only(infrastructure: NServiceBus, name: str, label: str | None) -> None:
    assert infrastructure.label(name) == label
    assert infrastructure.owns(name) is (label is not None)


def test_each_version_has_its_own_guard() -> None:
    second, first = NServiceBus().guard_policy(), NServiceBus(version=1).guard_policy()
    assert (second.name, first.name) == ("bide.guard.nsb.v2", "bide.guard.nsb")
    assert second.definition == {"alternate-exchange": "bide.undeliverable.nsb.v2"}
    assert (second.apply_to, second.priority) == ("exchanges", 0)
    assert NServiceBus().guard_topology() == Topology(
        [Exchange("bide.undeliverable.nsb.v2", "fanout")],
        [Queue.quorum("bide.undeliverable.nsb.v2", {"x-overflow": "reject-publish"})],
        [Binding("bide.undeliverable.nsb.v2", "bide.undeliverable.nsb.v2")],
    )
    assert NServiceBus().owns("bide.undeliverable.nsb.v2")


def test_headers_for_a_dotnet_receiver_are_those_that_nservicebus_expects() -> None:
    now = datetime(2026, 11, 21, 2, 5, 6, 78, tzinfo=timezone(timedelta(hours=1)))
    assert nservicebus_headers("m-1", now) == {
        "NServiceBus.MessageId": "m-1",
        "NServiceBus.CorrelationId": "m-1",
        "NServiceBus.ConversationId": "m-1",
        "NServiceBus.MessageIntent": "Send",
        "NServiceBus.TimeSent": "2026-11-21 01:05:06:000078 Z",
    }
    assert nservicebus_headers(
        "m-2",
        now,
        message_types=["Shop.PlaceOrder", "Shop.ICommand"],
        content_type="application/json",
        reply_to="answers",
        correlation_id="c",
        conversation_id="d",
        originating_endpoint="python",
        deliver_at=now + seconds(10),
    ) == {
        "NServiceBus.MessageId": "m-2",
        "NServiceBus.CorrelationId": "c",
        "NServiceBus.ConversationId": "d",
        "NServiceBus.MessageIntent": "Send",
        "NServiceBus.TimeSent": "2026-11-21 01:05:06:000078 Z",
        "NServiceBus.DeliverAt": "2026-11-21 01:05:16:000078 Z",
        "NServiceBus.EnclosedMessageTypes": "Shop.PlaceOrder;Shop.ICommand",
        "NServiceBus.ContentType": "application/json",
        "NServiceBus.ReplyToAddress": "answers",
        "NServiceBus.OriginatingEndpoint": "python",
    }


def test_blank_message_ids_and_times_without_a_zone_are_refused() -> None:
    now = datetime(2026, 11, 21, tzinfo=UTC)
    for blank in ("", "  "):
        with pytest.raises(InvalidInputError, match="message id is blank"):
            nservicebus_headers(blank, now)
    with pytest.raises(InvalidDueTimeError, match="2026-11-21T00:00:00 has no time zone"):
        nservicebus_headers("m", now.replace(tzinfo=None))
    with pytest.raises(InvalidDueTimeError, match="no time zone"):
        nservicebus_headers("m", now, deliver_at=now.replace(tzinfo=None))


def test_a_timestamp_is_padded_to_microseconds() -> None:
    assert format_timestamp(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)) == "2026-01-02 03:04:05:000000 Z"


def test_time_sent_plus_the_delay_header_is_never_before_the_due_time() -> None:
    """``delays migrate`` adds the delay header to ``TimeSent``: that must never come before the due time."""
    now = datetime(2026, 11, 21, 1, 0, 0, 999_999, tzinfo=UTC)
    delay = seconds(9.25)
    header = NServiceBus().route(delay, QueueTarget("orders")).headers[DELAY_HEADER]
    sent = nservicebus_headers("m", now)["NServiceBus.TimeSent"]
    assert datetime.strptime(f"{sent}+00:00", "%Y-%m-%d %H:%M:%S:%f Z%z") + seconds(header) >= now + delay
