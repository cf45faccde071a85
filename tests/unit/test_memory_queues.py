"""The rules of queues in memory, which tests/broker compares with RabbitMQ."""

from __future__ import annotations

from typing import Any

import pytest

from bide.errors import BrokerError
from bide.testing.rules.channel import BrokerChannel, BrokerDelivery
from bide.testing.rules.clock import VirtualClock
from bide.testing.rules.dead_letter_worker import RETRY_INTERVAL
from bide.testing.rules.virtual_host import REPLY_TO, VirtualHost
from bide.topology import Binding, Exchange, Queue

V3, V40, V43 = (3, 10, 8), (4, 0, 5), (4, 3, 6)


class Lab:
    """A virtual host, and one channel of one connection."""

    def __init__(self, release: tuple[int, ...] = V43, **options: Any) -> None:
        self.clock = VirtualClock()
        self.host = VirtualHost("/", self.clock, release=release, **options)
        self.connection = object()
        self.received: list[BrokerDelivery] = []
        self.ended: list[str] = []
        self.channel = self.open()

    def open(self) -> BrokerChannel:
        return BrokerChannel(self.host, self.connection, self)

    def delivered(self, delivery: BrokerDelivery) -> None:
        self.received.append(delivery)

    def cancelled(self, tag: str) -> None:
        self.ended.append(tag)

    def queue(self, name: str, **arguments: Any) -> None:
        named = {key.replace("_", "-"): value for key, value in arguments.items()}
        self.host.declare_queue(
            Queue(name, arguments={f"x-{key}": one for key, one in named.items()}), owner=self.connection
        )

    def send(
        self, *bodies: str, to: str = "q", exchange: str = "", key: str | None = None, **properties: Any
    ) -> list[bool]:
        stored = []
        for body in bodies:
            with self.host.turn():
                sent = self.host.publish(
                    exchange, to if key is None else key, properties, body.encode(), publisher=self.channel
                )
            stored.append(sent.stored)
        return stored

    def get(self, queue: str = "q") -> BrokerDelivery | None:
        return self.channel.get(queue, no_ack=True)

    def bodies(self, queue: str = "q") -> str:
        found = ""
        while (delivery := self.get(queue)) is not None:
            found += delivery.body.decode()
        return found

    def take(self, queue: str = "q") -> int:
        delivery = self.channel.get(queue, no_ack=False)
        assert delivery is not None
        return delivery.delivery_tag

    def listen(self, queue: str = "q", tag: str = "c", prefetch: int = 0) -> BrokerChannel:
        channel = self.open()
        channel.qos(prefetch)
        channel.consume(queue, tag, no_ack=False, exclusive=False, arguments={})()
        return channel


def headers(delivery: BrokerDelivery | None) -> dict[str, Any]:
    assert delivery is not None
    return dict(delivery.properties.get("headers") or {})


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_only_the_head_expires(kind: str) -> None:
    lab = Lab()
    lab.queue("q", queue_type=kind)
    lab.send("a")
    lab.send("b", expiration="1000")
    lab.clock.advance("2s")
    assert lab.host.queue("q").message_count == 2
    assert lab.bodies() == "a"


def test_quorum_queues_still_count_an_expired_message_behind_another() -> None:
    for kind, left in (("classic", 0), ("quorum", 1)):
        lab = Lab()
        lab.queue("q", queue_type=kind)
        lab.send("a")
        lab.send("b", expiration="1000")
        lab.clock.advance("2s")
        delivery = lab.get()
        assert delivery is not None
        assert delivery.left == left
        assert lab.get() is None


def test_a_classic_priority_queue_does_not_expire_a_message_behind_another_priority() -> None:
    lab = Lab()
    lab.queue("q", max_priority=5)
    lab.send("a")
    lab.send("b", priority=5, expiration="1000")
    lab.clock.advance("2s")
    assert lab.bodies() == "ba"


def test_from_4_3_on_each_priority_of_a_quorum_queue_expires_its_own_head() -> None:
    for release, left in ((V43, "a"), (V40, "ab")):
        lab = Lab(release)
        lab.queue("q", queue_type="quorum")
        lab.send("a", priority=9)
        lab.send("b", priority=1, expiration="1000")
        lab.clock.advance("2s")
        assert lab.host.queue("q").message_count == len(left)


def test_quorum_queues_order_messages_by_priority_from_4_0_on() -> None:
    for release, order in ((V3, "abcdef"), (V40, "bdafce"), (V43, "fdbcea")):
        lab = Lab(release)
        lab.queue("q", queue_type="quorum")
        for body, priority in zip("abcdef", (1, 6, None, 7, 3, 8), strict=True):
            lab.send(body, priority=priority)
        assert lab.bodies() == order


def test_from_4_0_to_4_2_a_purge_begins_the_turns_of_two_priorities_anew() -> None:
    lab = Lab(V40)
    lab.queue("q", queue_type="quorum")
    lab.send(*"ab")
    # After two messages it would be the turn of one with an ordinary priority.
    assert lab.bodies() == "ab"
    lab.host.queue("q").purge()
    lab.send("c")
    lab.send("d", priority=6)
    assert lab.bodies() == "dc"


@pytest.mark.parametrize(
    ("overflow", "left", "dead"),
    [("drop-head", "bc", "a"), ("reject-publish", "ab", ""), ("reject-publish-dlx", "ab", "c")],
)
def test_classic_queues_apply_each_overflow_behaviour(overflow: str, left: str, dead: str) -> None:
    lab = Lab()
    lab.queue("q", max_length=2, overflow=overflow, dead_letter_exchange="", dead_letter_routing_key="d")
    lab.queue("d")
    assert lab.send("a", "b", "c") == [True, True, overflow == "drop-head"]
    assert (lab.bodies(), lab.bodies("d")) == (left, dead)


def test_a_limit_in_bytes_drops_the_oldest_messages() -> None:
    lab = Lab()
    lab.queue("q", max_length_bytes=5)
    lab.send("aaa", "bb", "c")
    assert lab.bodies() == "bbc"


def test_a_full_quorum_queue_accepts_messages_again_at_80_percent() -> None:
    lab = Lab()
    lab.queue("q", queue_type="quorum", max_length=5, overflow="reject-publish")
    assert lab.send(*"abcdefg") == [True] * 6 + [False]
    lab.get()
    assert lab.send("h") == [False]
    lab.get()
    assert lab.send("i") == [True]


def test_messages_dropped_together_are_dead_lettered_in_reverse_below_4_3() -> None:
    for release, dead in ((V3, "ba"), (V40, "ba"), (V43, "ab")):
        lab = Lab(release)
        lab.queue("q", queue_type="quorum", max_length=1, dead_letter_exchange="", dead_letter_routing_key="d")
        lab.queue("d")
        channel = lab.listen()
        lab.send("a", "b", "c")
        channel.close()
        assert (lab.bodies(), lab.bodies("d")) == ("c", dead)


@pytest.mark.parametrize("release", [V3, V40, V43])
def test_x_death_lists_the_latest_death_first(release: tuple[int, ...]) -> None:
    lab = Lab(release)
    lab.queue("q", message_ttl=1000, dead_letter_exchange="", dead_letter_routing_key="d")
    lab.queue("d", dead_letter_exchange="", dead_letter_routing_key="e")
    lab.queue("e")
    lab.send("a", headers={"CC": ["e"], "h": 1}, expiration="500")
    assert lab.bodies("e") == "a"
    lab.clock.advance("1s")
    lab.channel.reject(lab.take("d"), multiple=False, requeue=False, failed=False)
    found = headers(lab.get("e"))
    latest, first = found["x-death"]
    assert (latest["queue"], latest["reason"], latest["count"], latest["routing-keys"]) == ("d", "rejected", 1, ["d"])
    assert (first["queue"], first["reason"], first["routing-keys"]) == ("q", "expired", ["q", "e"])
    assert first["original-expiration"] == "500"
    assert "original-expiration" not in latest
    assert (found["x-first-death-queue"], found.get("x-last-death-queue")) == ("q", "d" if release >= V40 else None)
    assert ("CC" in found) == (release >= V40)


def test_x_death_is_not_ordered_by_time_below_4_0() -> None:
    for release, order in ((V3, ["d2", "d0", "d1"]), (V43, ["d2", "d1", "d0"])):
        lab = Lab(release)
        for number in range(3):
            lab.queue(f"d{number}", message_ttl=0, dead_letter_exchange="", dead_letter_routing_key=f"d{number + 1}")
        lab.queue("d3")
        lab.send("a", to="d0")
        assert [one["queue"] for one in headers(lab.get("d3"))["x-death"]] == order


def test_a_dead_letter_cycle_without_rejection_drops_the_message() -> None:
    for release in (V3, V43):
        lab = Lab(release)
        lab.queue("q", message_ttl=1000, dead_letter_exchange="", dead_letter_routing_key="w")
        lab.queue("w", message_ttl=1000, dead_letter_exchange="", dead_letter_routing_key="q")
        lab.send("a")
        lab.clock.advance("1s")
        assert lab.host.queue("w").message_count == 1
        lab.clock.advance("1s")
        assert lab.host.queue("q").message_count == 0


def test_a_dead_letter_cycle_with_rejection_is_counted_and_not_dropped() -> None:
    lab = Lab()
    lab.queue("q", dead_letter_exchange="", dead_letter_routing_key="w")
    lab.queue("w", message_ttl=1000, dead_letter_exchange="", dead_letter_routing_key="q")
    lab.send("a")
    for _ in range(3):
        lab.channel.reject(lab.take(), multiple=False, requeue=False, failed=False)
        lab.clock.advance("1s")
    assert [(one["queue"], one["count"]) for one in headers(lab.get())["x-death"]] == [("w", 3), ("q", 3)]


def test_a_published_x_death_counts_for_cycles_below_4_0_only() -> None:
    forged = {"x-death": [{"queue": "d", "reason": "expired", "count": 1}]}
    for release, arrives in ((V3, False), (V43, True)):
        lab = Lab(release)
        lab.queue("q", message_ttl=0, dead_letter_exchange="", dead_letter_routing_key="d")
        lab.queue("d")
        lab.send("a", headers=forged)
        assert (lab.get("d") is not None) == arrives


def test_at_least_once_dead_lettering_retries_after_three_minutes() -> None:
    lab = Lab(dead_letter_prefetch=2)
    at_least_once = {"dead_letter_strategy": "at-least-once", "overflow": "reject-publish"}
    lab.queue("q", queue_type="quorum", message_ttl=1000, dead_letter_exchange="x", max_length=9, **at_least_once)
    lab.send("a", "b", "c")
    lab.clock.advance("1s")
    assert lab.host.queue("q").message_count == 0
    lab.host.declare_exchange(Exchange("x", "fanout"))
    lab.queue("d")
    lab.host.bind(Binding("x", "d"), owner=lab.connection)
    lab.clock.advance("179s")
    assert lab.bodies("d") == ""
    lab.clock.advance(f"{RETRY_INTERVAL // 1000 - 179_000}ms")
    assert lab.bodies("d") == "abc"


def test_dead_lettering_to_the_same_queue_keeps_a_copy_below_4_0() -> None:
    for release, fits in ((V3, False), (V43, True)):
        lab = Lab(release)
        at_least_once = {"dead_letter_strategy": "at-least-once", "overflow": "reject-publish"}
        lab.queue("q", queue_type="quorum", dead_letter_exchange="", max_length=2, **at_least_once)
        lab.send("a", "b")
        lab.channel.reject(lab.take(), multiple=False, requeue=False, failed=False)
        other = lab.open()
        assert other.publish("", "q", {}, b"c").stored == fits


def test_a_message_is_dead_lettered_when_it_exceeds_the_delivery_limit() -> None:
    for release, how_often in ((V3, 3), (V40, 3), (V43, 3)):
        lab = Lab(release)
        lab.queue("q", queue_type="quorum", delivery_limit=2, dead_letter_exchange="", dead_letter_routing_key="d")
        lab.queue("d")
        lab.send("a")
        for _ in range(how_often):
            lab.channel.reject(lab.take(), multiple=False, requeue=True, failed=True)
        assert headers(lab.get("d"))["x-death"][0]["reason"] == "delivery_limit"


@pytest.mark.parametrize("release", [V3, V40, V43])
def test_on_3_10_exceeding_the_delivery_limit_adds_one_to_the_prefetch(release: tuple[int, ...]) -> None:
    lab = Lab(release)
    lab.queue("q", queue_type="quorum", delivery_limit=0)
    lab.send(*"abcde")
    channel = lab.listen(prefetch=1)
    channel.reject(1, multiple=False, requeue=True, failed=True)
    assert "".join(one.body.decode() for one in lab.received) == ("abc" if release == V3 else "ab")
    # From then on: it holds as many when it acknowledges.
    channel.ack(2, multiple=False)
    assert "".join(one.body.decode() for one in lab.received) == ("abcd" if release == V3 else "abc")


def test_a_nack_does_not_count_as_a_delivery_from_4_3_on() -> None:
    for release, count in ((V3, 3), (V40, 3), (V43, None)):
        lab = Lab(release)
        lab.queue("q", queue_type="quorum", delivery_limit=9)
        lab.send("a")
        for _ in range(3):
            lab.channel.reject(lab.take(), multiple=False, requeue=True, failed=False)
        found = headers(lab.get())
        assert found.get("x-delivery-count") == count
        assert found.get("x-acquired-count") == (3 if release >= V43 else None)


def test_without_a_delivery_limit_a_requeued_message_goes_to_the_end_below_4_3() -> None:
    for release, limit, order in ((V3, 9, "ab"), (V40, -1, "ba"), (V43, 9, "ab"), (V43, -1, "ab")):
        lab = Lab(release)
        lab.queue("q", queue_type="quorum", delivery_limit=limit)
        lab.send("a", "b")
        lab.channel.reject(lab.take(), multiple=False, requeue=True, failed=False)
        assert lab.bodies() == order


@pytest.mark.parametrize("strategy", ["at-least-once", "at-most-once"])
def test_delivery_counts_survive_dead_lettering_from_4_0_to_4_2(strategy: str) -> None:
    for steps, taken, again in (("j", 1, 2), ("rj", 1, 2), ("rrj", 1, 2), ("lj", 2, 3), ("rx", None, 1), ("lx", 1, 2)):
        lab = Lab(V40)
        dead_letters = {"dead_letter_exchange": "", "dead_letter_strategy": strategy, "overflow": "reject-publish"}
        lab.queue("q", queue_type="quorum", message_ttl=1000, dead_letter_routing_key="c", **dead_letters)
        # A classic queue hands it on, and shows and counts nothing.
        lab.queue("c", dead_letter_exchange="", dead_letter_routing_key="d")
        lab.queue("d", queue_type="quorum", dead_letter_routing_key="e", **dead_letters)
        lab.queue("e", queue_type="quorum")
        lab.send("a")
        for step in steps:
            if step == "x":
                lab.clock.advance("1s")
            elif step == "l":
                lost = lab.open()
                assert lost.get("q", no_ack=False) is not None
                lost.close()
            else:
                lab.channel.reject(lab.take(), multiple=False, requeue=step == "r", failed=True)
        delivery = lab.channel.get("c", no_ack=False)
        assert delivery is not None
        assert not delivery.redelivered
        assert "x-delivery-count" not in headers(delivery)
        lab.channel.reject(delivery.delivery_tag, multiple=False, requeue=False, failed=False)
        delivery = lab.channel.get("d", no_ack=False)
        assert delivery is not None
        assert delivery.redelivered == (taken is not None)
        assert headers(delivery).get("x-delivery-count") == taken
        lab.channel.reject(delivery.delivery_tag, multiple=False, requeue=False, failed=False)
        assert headers(lab.get("e"))["x-delivery-count"] == again


def test_from_4_3_on_delivery_counts_survive_dead_lettering() -> None:
    for release, count in ((V40, None), (V43, 1)):
        lab = Lab(release)
        lab.queue("q", message_ttl=1000, dead_letter_exchange="", dead_letter_routing_key="d")
        lab.queue("d", queue_type="quorum")
        lab.send("a")
        lab.channel.reject(lab.take(), multiple=False, requeue=True, failed=True)
        lab.clock.advance("1s")
        delivery = lab.get("d")
        assert delivery is not None
        assert (headers(delivery).get("x-delivery-count"), delivery.redelivered) == (count, count is not None)


def test_a_purge_removes_pending_dead_letters_from_4_3_on() -> None:
    for release, number in ((V3, 0), (V40, 0), (V43, 1)):
        lab = Lab(release)
        at_least_once = {"dead_letter_strategy": "at-least-once", "overflow": "reject-publish"}
        lab.queue("q", queue_type="quorum", message_ttl=1000, dead_letter_exchange="nowhere", **at_least_once)
        lab.send("a")
        lab.clock.advance("1s")
        assert lab.host.queue("q").purge() == number


def test_the_delayed_retry_of_4_3_grows_up_to_its_maximum() -> None:
    lab = Lab()
    rests = {"delayed_retry_type": "failed", "delayed_retry_min": 1000, "delayed_retry_max": 2500}
    lab.queue("q", queue_type="quorum", **rests)
    lab.send("a")
    for rest in (1000, 2000, 2500, 2500):
        lab.channel.reject(lab.take(), multiple=False, requeue=True, failed=True)
        lab.clock.advance(f"{rest - 1}ms")
        assert lab.get() is None
        lab.clock.advance("1ms")
    lab.channel.reject(lab.take(), multiple=False, requeue=True, failed=False)
    assert lab.bodies() == "a"


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_the_next_single_active_consumer_takes_over_when_the_first_ends(kind: str) -> None:
    lab = Lab()
    lab.queue("q", queue_type=kind, single_active_consumer=True)
    first = lab.listen(tag="one", prefetch=2)
    lab.listen(tag="two", prefetch=1)
    lab.send(*"abc")
    assert [(one.consumer_tag, one.body) for one in lab.received] == [("one", b"a"), ("one", b"b")]
    lab.received.clear()
    first.close()
    assert [(one.consumer_tag, one.body, one.redelivered) for one in lab.received] == [("two", b"a", True)]


@pytest.mark.parametrize(
    ("release", "kind", "order"),
    [(V3, "quorum", "012"), (V40, "quorum", "021"), (V43, "quorum", "021"), (V43, "classic", "012")],
)
def test_from_4_0_on_the_consumer_with_the_largest_free_prefetch_becomes_active(
    release: tuple[int, ...], kind: str, order: str
) -> None:
    lab = Lab(release)
    lab.queue("q", queue_type=kind, single_active_consumer=True)
    channels = [lab.listen(tag=str(number), prefetch=prefetch) for number, prefetch in enumerate((1, 1, 3))]
    for number in order:
        lab.send("a")
        delivery = lab.received[-1]
        assert delivery.consumer_tag == number
        channels[int(number)].ack(delivery.delivery_tag, multiple=False)
        channels[int(number)].close()


def test_without_a_prefetch_a_quorum_queue_delivers_2000_messages() -> None:
    for kind, number in (("quorum", 2000), ("classic", 2001)):
        lab = Lab()
        lab.queue("q", queue_type=kind)
        lab.send(*["a"] * 2001)
        lab.listen()
        assert len(lab.received) == number


def test_deliveries_alternate_between_consumers_of_the_highest_priority() -> None:
    lab = Lab()
    lab.queue("q")
    for tag in ("one", "two"):
        lab.listen(tag=tag, prefetch=2)
    channel = lab.open()
    channel.qos(1)
    channel.consume("q", "urgent", no_ack=False, exclusive=False, arguments={"x-priority": 5})()
    lab.send(*"abcde")
    assert [one.consumer_tag for one in lab.received] == ["urgent", "one", "two", "one", "two"]


def test_a_full_consumer_of_an_empty_classic_queue_keeps_its_turn() -> None:
    for kind, turn in (("classic", "one"), ("quorum", "two")):
        lab = Lab()
        lab.queue("q", queue_type=kind)
        first = lab.listen(tag="one", prefetch=1)
        lab.send("a")
        lab.listen(tag="two", prefetch=1)
        first.ack(1, multiple=False)
        lab.send("b")
        assert [one.consumer_tag for one in lab.received] == ["one", turn]


def test_unused_exclusive_and_auto_delete_queues_are_deleted() -> None:
    lab = Lab()
    lab.queue("idle", expires=1000)
    lab.queue("used", expires=1000)
    lab.host.declare_queue(Queue("own", exclusive=True), owner=lab.connection)
    lab.host.declare_queue(Queue("passing", auto_delete=True), owner=lab.connection)
    used, passing = lab.listen("used"), lab.listen("passing")
    lab.clock.advance("999ms")
    lab.get("idle")
    lab.clock.advance("999ms")
    assert {one.name for one in lab.host.queues} == {"idle", "used", "own", "passing"}
    lab.clock.advance("1ms")
    passing.cancel("c")
    lab.host.remove_owned(lab.connection)
    assert {one.name for one in lab.host.queues} == {"used"}
    used.cancel("c")
    lab.clock.advance("1s")
    assert not lab.host.queues


def test_deleting_a_queue_cancels_its_consumers() -> None:
    lab = Lab()
    lab.queue("q")
    lab.listen(tag="c")
    lab.send("a")
    lab.host.delete_queue("q", owner=lab.connection)
    assert lab.ended == ["c"]


def test_an_exclusive_queue_is_locked_for_other_connections() -> None:
    lab = Lab()
    lab.host.declare_queue(Queue("own", exclusive=True), owner=lab.connection)
    with pytest.raises(BrokerError, match="RESOURCE_LOCKED"):
        lab.host.queue("own", owner=object())


def test_an_auto_delete_exchange_is_deleted_with_its_last_binding() -> None:
    lab = Lab()
    lab.queue("q")
    lab.host.declare_exchange(Exchange("x", "fanout", auto_delete=True))
    lab.host.bind(Binding("x", "q"), owner=lab.connection)
    lab.host.delete_queue("q", owner=lab.connection)
    with pytest.raises(BrokerError, match="no exchange 'x'"):
        lab.send("a", exchange="x")


def test_removing_one_of_two_hash_bindings_removes_all_buckets_of_the_queue() -> None:
    lab = Lab()
    lab.queue("q")
    lab.host.declare_exchange(Exchange("x", "x-consistent-hash"))
    for key in ("1", "3"):
        lab.host.bind(Binding("x", "q", key), owner=lab.connection)
    lab.send("a", exchange="x", key="k")
    lab.host.unbind(Binding("x", "q", "3"), owner=lab.connection)
    lab.send("b", exchange="x", key="k")
    assert lab.bodies() == "a"


@pytest.mark.parametrize(
    ("queue", "reason"),
    [
        (Queue("amq.mine"), "reserved prefix"),
        (Queue("q", arguments={"x-message-ttl": -1}), "x-message-ttl"),
        (Queue("q", arguments={"x-queue-type": "quorum", "x-max-priority": 3}), "x-max-priority"),
        (Queue("q", durable=False, arguments={"x-queue-type": "quorum"}), "non-durable"),
        (Queue("q", arguments={"x-queue-type": "other"}), "x-queue-type"),
    ],
)
def test_invalid_queues_are_refused(queue: Queue, reason: str) -> None:
    lab = Lab()
    with pytest.raises(BrokerError, match=reason):
        lab.host.declare_queue(queue, owner=lab.connection)


def test_acknowledging_an_unknown_delivery_tag_is_refused() -> None:
    lab = Lab()
    with pytest.raises(BrokerError, match="unknown delivery tag 7"):
        lab.channel.ack(7, multiple=False)


def test_direct_reply_to_delivers_the_reply_to_the_requester() -> None:
    lab = Lab()
    lab.queue("requests")
    requester, responder = lab.open(), lab.open()
    with pytest.raises(BrokerError, match="does not exist"):
        requester.publish("", "requests", {"reply_to": REPLY_TO}, b"?")
    with pytest.raises(BrokerError, match="cannot acknowledge"):
        requester.consume(REPLY_TO, "c", no_ack=False, exclusive=False, arguments={})
    requester.consume(REPLY_TO, "answers", no_ack=True, exclusive=False, arguments={})()
    requester.publish("", "requests", {"reply_to": REPLY_TO}, b"?")
    request = lab.get("requests")
    assert request is not None
    address = request.properties["reply_to"]
    assert address.startswith(f"{REPLY_TO}.")
    assert responder.publish("", address, {}, b"!").routed
    assert [(one.consumer_tag, one.body) for one in lab.received] == [("answers", b"!")]
    requester.close()
    assert not responder.publish("", address, {}, b"too late").routed
