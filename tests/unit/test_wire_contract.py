"""The tables and the test vectors of docs/wire-contract.md, compared with the code."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import bide
from bide.amqp.codec import PROPERTY_FLAGS
from bide.client.schedule_requests import MAX_LOST, REPEAT_AFTER
from bide.delay import protocol
from bide.delay.clock_digits import LEVELS, MAX_DELAY
from bide.delay.clock_keys import _TRANSPORT_KEY
from bide.delay.protocol import MAX_NAME_BYTES, ExchangeTarget, QueueTarget, Target
from bide.schedules import encoding
from bide.schedules.encoding import decode, encode
from bide.schedules.entries import ANSWER_OUTCOMES, StateEntry, UnderWay, WaitingSchedule
from bide.schedules.entry_fields import EntryWriter
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import MAX_KEY_BYTES, PARTITIONS, RECORD_OVERHEAD, RESERVATION_BYTES, ScheduleNames
from bide.schedules.records import ACTIONS, AddSchedule, ChangeSchedule, ScheduleFilter
from bide.schedules.recurrence import CATCH_UPS, SHORTEST_INTERVAL, Recurrence
from bide.schedules.requests import RequestId
from tests import readme
from tests.readme import blocks, code
from tests.wire_vectors import FILE, NOW, text, vectors

PAGE = "docs/wire-contract.md"
CLOCK = bide.Clock().for_release((3, 10, 8))
REQUEST = RequestId("5f2c8a", 17)
MESSAGE = ScheduledMessage(bytes(2), b"pay")
TARGETS: Mapping[str, Target] = {
    "the queue `orders`": QueueTarget("orders"),
    "the queue `orders`, isolated": QueueTarget("orders", isolated=True),
    "the exchange `shop`, routing key `order`": ExchangeTarget("shop", "order"),
    "the exchange `shop`, routing key `order.created`": ExchangeTarget("shop", "order.created"),
    "the exchange `shop.v1`, routing key `a.b.c`": ExchangeTarget("shop.v1", "a.b.c"),
}


def section(title: str) -> str:
    return readme.section(PAGE, title)


def table(title: str, number: int = 0) -> list[list[str]]:
    return readme.table(PAGE, title, number)


def test_the_snapshot_of_the_vectors_is_what_the_code_gives() -> None:
    if "BIDE_WRITE_SNAPSHOT" in os.environ:
        FILE.write_text(text(), encoding="utf-8")
    assert text() == FILE.read_text(encoding="utf-8"), "if the change is meant: scripts/write-public-api.sh"
    assert json.loads(text()) == vectors()


def test_the_page_counts_the_vectors_and_names_their_groups() -> None:
    groups = {name: value for name, value in vectors().items() if not isinstance(value, str)}
    assert f"{sum(map(len, groups.values()))} vectors are right" in section("Test vectors")
    assert [code(row[0])[0] for row in table("Test vectors")] == list(groups)


def test_the_levels_are_those_of_the_clock() -> None:
    rows = table("Delay a message")
    assert [
        (letter, int(unit.removesuffix(" ms").replace(",", "")), int(highest)) for letter, unit, highest in rows
    ] == [(level.letter, level.unit.total_seconds() * 1000, level.highest) for level in LEVELS]
    assert f"{int(MAX_DELAY.total_seconds() * 1000):,} ms" in section("Delay a message")


def test_the_example_of_a_delay_is_a_vector() -> None:
    vector = next(one for one in vectors()["routes"] if (one["target"], one["delay"]) == ({"queue": "orders"}, 90_000))
    publish, headers = vector["publish"], vector["publish"]["properties"]["headers"]
    wanted = [publish["exchange"], publish["routing_key"]]
    wanted += [json.dumps(headers.pop(name)) for name in ("CC",)]
    wanted += [str(headers.pop(name)) for name in ("bide-to", "bide-due", "bide-sent")]
    assert not headers
    assert [code(row[2]) for row in table("Delay a message", 1)] == [[one] for one in wanted]
    assert [code(row[0]) for row in table("Delay a message", 1)][3:] == [["bide-to"], ["bide-due"], ["bide-sent"]]


def test_the_page_has_the_pattern_of_transport_keys() -> None:
    assert f"`{_TRANSPORT_KEY.pattern.replace('?:', '')}`" in section("Delay a message")


def test_the_carrier_is_that_of_the_release() -> None:
    assert "Use `CC` on RabbitMQ below 4.0, and `BCC` from 4.0 on." in section("Delay a message")
    assert [bide.Clock().for_release(one).carrier for one in ((3, 13, 7), (4, 0, 0))] == ["CC", "BCC"]


def test_the_names_on_the_way_are_those_of_the_topology() -> None:
    topology = CLOCK.topology()
    exchanges = {one.name: one.type for one in [*topology.exchanges, CLOCK.complete_mark]}
    queues = {one.name for one in topology.queues} - {CLOCK.undeliverable}
    for name, kind, _ in table("Delay a message", 2):
        names = code(name)
        if kind == "quorum queue":
            first, last = LEVELS[0], LEVELS[-1]
            assert names == [CLOCK.digit_queue(first, 1), CLOCK.digit_queue(last, last.highest)]
            queues -= {CLOCK.digit_queue(level, digit) for level in LEVELS for digit in range(1, level.highest + 1)}
        elif len(names) == 2:
            stem = names[0].removesuffix(LEVELS[0].letter)
            assert names[1] == stem + LEVELS[-1].letter
            assert {exchanges.pop(stem + level.letter) for level in LEVELS} == {kind}
        else:
            assert exchanges.pop(names[0]) == kind
    assert (exchanges, queues) == ({}, set())


def test_the_keys_of_targets_are_those_of_the_clock() -> None:
    rows = table("Targets")
    assert [row[0] for row in rows] == list(TARGETS)
    for (_, key, bound, to), target in zip(rows, TARGETS.values(), strict=True):
        topology = CLOCK.target_topology(target)
        (binding,) = topology.bindings
        assert (code(key), code(bound), code(to)) == ([binding.routing_key], [binding.destination], [str(target)])
        assert binding.source == CLOCK.delivery_exchange


def test_the_arguments_of_release_queues_are_those_of_the_clock() -> None:
    rows = table("Targets", 1)
    for column, target in ((1, TARGETS["the queue `orders`, isolated"]), (2, ExchangeTarget("shop", "order"))):
        (queue,) = CLOCK.target_topology(target).queues
        names = {"": "empty: the default exchange", "shop": "the exchange", "orders": "the queue"}
        found = {name: names.get(str(value), f"`{value}`") for name, value in queue.arguments.items()}
        assert found == {code(row[0])[0]: row[column] for row in rows if row[column] != "none"}


def test_names_that_need_a_hash_are_those_above_the_limit() -> None:
    assert f"takes more than {MAX_NAME_BYTES} bytes, bide uses a hash" in section("Targets")
    for target in ({"queue": "q" * 252}, {"queue": "q" * 253}):
        assert ("#" in CLOCK.target_key(QueueTarget(target["queue"]))) == (len(target["queue"]) > 252)


@pytest.mark.parametrize("words", [4, 5])
def test_keys_of_up_to_four_words_need_no_bindings_of_digits(words: int) -> None:
    assert "routing keys of up to four words" in section("Longer routing keys")
    found = next(
        one
        for one in vectors()["routes"]
        if one["target"].get("routing_key", "").count(".") == (3 if words == 4 else 8) and one["delay"]
    )
    sources = [one["source"] for one in found["declare"]["bindings"]]
    assert sources[0] == CLOCK.delivery_exchange
    assert sources[1:] == ([] if words == 4 else [CLOCK.level_exchange(level) for level in LEVELS[3:]])


def test_the_headers_of_received_messages_are_those_of_the_protocol() -> None:
    named = [one for row in table("Receive and settle") for one in code(row[0])]
    known = {value for name, value in vars(protocol).items() if name.startswith("HEADER_")}
    # The others are those of a waiting hall, of retries and of undeliverable messages.
    others = {
        protocol.HEADER_PICK_UP_KEY,
        protocol.HEADER_SET_ASIDE,
        protocol.HEADER_EXCHANGE,
        protocol.HEADER_ROUTING_KEY,
    }
    assert set(named) == known - others


def test_the_numbers_of_the_schedule_log_are_those_of_the_code() -> None:
    text = " ".join(section("Schedule by key, and cancel").split())
    for part in (
        f"modulo {PARTITIONS}",
        f"append {RESERVATION_BYTES:,} bytes of records",
        f"counts with {RECORD_OVERHEAD} bytes more",
        f"when {MAX_LOST} requests of the old one were not confirmed",
        f"after {REPEAT_AFTER:.0f} s",
        f"exchange `{ScheduleNames().operations}`",
    ):
        assert part in text
    records = " ".join(section("Records").split())
    spaces, large = encoding.RESERVE, encoding._LARGE
    assert f'takes {large:,} bytes or more, put {spaces:,} spaces behind `{{"v":`' in records
    assert f"1 to {MAX_KEY_BYTES} bytes" in records
    assert f"at least {SHORTEST_INTERVAL.total_seconds() * 1000:,.0f})" in records
    assert all(f"`{one}`" in records for one in CATCH_UPS)


def test_the_example_of_a_record_is_one() -> None:
    (example,) = [shown for language, shown in blocks(PAGE, "Records") if not language]
    head, newline, tail = example.rstrip("\n").partition("\\n\n")
    assert newline
    body = f"{head}\n".encode() + tail.replace("\\0", "\0").encode()
    found = decode(body)
    assert isinstance(found, AddSchedule)
    assert (found.key, found.message) == ("invoice:42", MESSAGE)
    assert encode(found) == body


def _largest(kind: str) -> dict[str, Any]:
    """The fields of a record of this kind that has all of them."""
    if kind == "schedule":
        record: AddSchedule | ChangeSchedule = AddSchedule(
            request=REQUEST,
            key="k",
            target="x:shop",
            routing_key="a",
            nominal=NOW,
            due=NOW,
            recurrence={"interval": 1000, "catch_up": "last"},
            if_absent=True,
            if_version="v",
            message=MESSAGE,
        )
    else:
        action = next(one for one in ACTIONS if one == kind)
        record = ChangeSchedule(
            request=REQUEST,
            action=action,
            key="k",
            due=NOW if action == "move" else None,
            at=NOW if action == "resume" else None,
            if_version="v",
        )
    body = encode(record)
    assert decode(body) == record
    return dict(json.loads(body.partition(b"\n")[0]))


def test_the_fields_of_records_are_those_of_the_encoding() -> None:
    rows = table("Records")
    assert {code(row[0])[0] for row in rows} == {"schedule", *ACTIONS}
    for kind, required, optional in rows:
        fields = set(_largest(code(kind)[0])) - {"v", "kind", "request"}
        assert set(code(required)) | set(code(optional)) == fields
        for name in code(required):
            assert name in fields - set(code(optional))


def test_a_record_without_a_field_that_the_page_requires_is_refused() -> None:
    for kind, required, optional in table("Records"):
        fields = _largest(code(kind)[0])
        tail = MESSAGE.properties + MESSAGE.body if "message" in fields else b""
        smallest = {name: value for name, value in fields.items() if name not in code(optional)}
        decode(json.dumps(smallest, separators=(",", ":")).encode() + b"\n" + tail)
        for name in code(required):
            left = {one: value for one, value in smallest.items() if one != name}
            with pytest.raises(bide.errors.ScheduleRecordError):
                decode(json.dumps(left, separators=(",", ":")).encode() + b"\n" + tail)


def test_the_fields_of_recurrences_are_those_of_the_page() -> None:
    text = " ".join(section("Records").split()).partition("`every` is an object.")[2].partition("- Instead")[0]
    times = {"catch_up": "last", "first": NOW, "last": NOW}
    for spec in (
        {"interval": 1000, "anchor": NOW, **times},
        {"cron": "0 8 * * *", "time_zone": "Europe/Berlin", **times},
    ):
        assert Recurrence.parse(spec).spec() == spec
        assert set(spec) <= set(code(text))


def test_the_conditions_of_a_filter_are_those_of_the_encoding() -> None:
    chosen = ScheduleFilter(prefix="p", target="q:orders", due_from=1, due_before=2)
    listed = " ".join(section("Records").split()).partition("an object with any of ")[2].partition(". ")[0]
    assert code(listed) == list(encoding.filter_fields(chosen))


def test_the_flags_of_properties_are_those_of_the_codec() -> None:
    rows = table("Message properties in records")
    known = {name: flag for name, flag in PROPERTY_FLAGS if name != "cluster_id"}
    assert [(code(row[1])[0], int(code(row[0])[0], 16)) for row in rows] == list(known.items())


def test_the_outcomes_are_those_of_answers() -> None:
    assert [code(row[0])[0] for row in table("Answers")] == list(ANSWER_OUTCOMES)


def test_the_entries_of_answers_have_the_fields_of_the_page() -> None:
    waiting = WaitingSchedule(
        key="k",
        id="i",
        version="v",
        target="x:shop",
        routing_key="a",
        nominal=1,
        due=2,
        recurrence={"interval": 1000},
        is_paused=True,
        resumed_at=3,
        message=MESSAGE,
    )
    under_way = UnderWay(
        occurrence="o",
        key="k",
        id="i",
        target="x:shop",
        routing_key="a",
        nominal=1,
        due=2,
        is_recurring=True,
        is_run_now=True,
        message=MESSAGE,
    )
    smallest: tuple[StateEntry, StateEntry] = (
        replace(waiting, routing_key="", recurrence=None, is_paused=False, resumed_at=None),
        replace(under_way, routing_key="", is_recurring=False, is_run_now=False),
    )
    largest: tuple[StateEntry, StateEntry] = (waiting, under_way)
    for (kind, fields), full, small in zip(table("See what waits"), largest, smallest, strict=True):
        always, _, sometimes = fields.partition(";")
        every, least = EntryWriter().entry(full), EntryWriter().entry(small)
        assert least.pop("is") == every.pop("is") == code(kind)[0]
        assert set(code(always)) == set(least)
        assert set(code(sometimes)) == set(every) - set(least)
