"""Test vectors of the wire contract, made by the code: ``docs/wire-vectors.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import bide
from bide.delay.clock_digits import LEVELS, MAX_DELAY
from bide.delay.protocol import HEADER_DUE, HEADER_KEY
from bide.delay.received import restore
from bide.durations import from_milliseconds
from bide.errors import InvalidInputError
from bide.messages.outgoing import OutgoingMessage
from bide.messages.prepared import check_message, checked_headers
from bide.schedules.encoding import encode, with_reserve
from bide.schedules.entries import UnderWay, WaitingSchedule
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import PARTITIONS, ScheduleNames, partition_of
from bide.schedules.outgoing import OutgoingSchedule
from bide.schedules.prepared import check_schedule
from bide.schedules.questions import KeyQuestion, QuestionAnswer, encode_question, encode_question_answer
from bide.schedules.records import ACTIONS, ChangeSchedule, Operation, ScheduleFilter
from bide.schedules.requests import RequestId
from bide.topology import Topology
from tests.readme import ROOT

FILE: Final = ROOT / "docs" / "wire-vectors.json"

NOW: Final = 1_795_420_800_000
"""2026-11-23 08:00 UTC."""

_MILLISECOND: Final = timedelta(milliseconds=1)
_LONGEST: Final = MAX_DELAY // _MILLISECOND
_UNITS: Final = {level.letter: level.unit // _MILLISECOND for level in LEVELS}
_ONE_OF_EACH: Final = sum(_UNITS.values())
_RELEASES: Final = ("3.10.8", "4.0.5")
_ORDERS: Final = {"queue": "orders"}
_SHOP: Final = {"exchange": "shop", "routing_key": "order.created"}
_REQUEST: Final = RequestId("5f2c8a", 17)

Json = dict[str, Any]


def vectors() -> Json:
    """All vectors."""
    return {
        "layout": "bide.v1",
        "routes": list(_routes()),
        "refused": list(_refused()),
        "hashed": [_route({"queue": "q" * 253}, 1000), _route({"exchange": "x" * 240, "routing_key": "a"}, 1000)],
        "received": list(_received()),
        "partitions": {key: partition_of(key) for key in ("", "a", "invoice:42", "größe", "~", "k" * 255) if key},
        "records": list(_records()),
        "questions": list(_questions()),
    }


def text() -> str:
    """The content of the file: a line for each vector."""
    lines = []
    for name, value in vectors().items():
        if isinstance(value, list):
            items = ",\n".join(f"    {_json(one)}" for one in value)
            lines.append(f'  "{name}": [\n{items}\n  ]')
        else:
            lines.append(f'  "{name}": {_json(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# -- delayed messages


def _routes() -> Iterator[Json]:
    units = [value for unit in _UNITS.values() for value in (unit - 10, unit, unit + 10) if value > 0]
    delays = [0, 1, 9, 11, 990, 59_990, 90_000, 300_000, _ONE_OF_EACH, 20 * _UNITS["d"], _LONGEST - 10, _LONGEST]
    for delay in sorted({*units, *delays}):
        yield _route(_ORDERS, delay)
    targets: list[Json] = [
        {"queue": "orders.eu"},
        {"queue": "größe %"},
        {"queue": "q" * 252},
        {"queue": "orders", "isolated": True},
        {"exchange": "shop", "routing_key": ""},
        {"exchange": "shop", "routing_key": "order"},
        _SHOP,
        {"exchange": "shop.v1%2E", "routing_key": "a.b.c.d"},
        {"exchange": "shop", "routing_key": "a..b.c.d"},
        {"exchange": "shop", "routing_key": "." * 8},
    ]
    for target in targets:
        yield _route(target, 90_000)
        yield _route(target, 0)
    for release in ("3.13.7", "4.0.0", "4.3.6", "10.0.0"):
        yield _route(_SHOP, 3_605_000, release=release)
    headers = {"tenant": "größe", "attempt": 3, "number": 2**40}
    properties: Json = {"headers": headers, "priority": 3, "expiration": "5000"}
    for delay in (0, 5_000):
        yield _route(_ORDERS, delay, properties=properties)


def _route(
    target: Mapping[str, Any], delay: int, *, release: str = _RELEASES[0], properties: Mapping[str, Any] | None = None
) -> Json:
    given = dict(properties or {})
    expiration = given.pop("expiration", None)
    message = check_message(
        OutgoingMessage(
            b"",
            **_address(target),
            **given,
            expiration=None if expiration is None else int(expiration) * _MILLISECOND,
            delay=delay * _MILLISECOND,
        )
    )
    now = from_milliseconds(NOW)
    assert now is not None
    message = message.starting(now)
    clock = bide.Clock().for_release(tuple(int(one) for one in release.split(".")))
    route = message.route(clock, now)
    assert route is not None
    values = message.wire_values(route, now)
    sent = {name: value for name, value in values.items() if name in ("headers", "priority", "expiration")}
    # 'bide delay apply' binds the digits for short routing keys only.
    digits = [one for one in route.digits if not clock.has_core_bindings(one.padding)]
    found: Json = {"target": dict(target), "delay": delay, "now": NOW, "release": release}
    if properties is not None:
        found["properties"] = dict(properties)
    return {
        **found,
        "publish": {"exchange": route.exchange, "routing_key": route.routing_key, "properties": sent},
        "waits_in": [clock.digit_queue(one.level, one.value) for one in route.digits if one.value],
        "declare": _declarations(route.requires, Topology(bindings=clock.digit_topology(digits).bindings)),
    }


def _address(target: Mapping[str, Any]) -> dict[str, Any]:
    return {"to" if name == "queue" else name: value for name, value in target.items()}


def _declarations(*parts: Topology) -> Json:
    return {
        "queues": [{"name": one.name, "arguments": dict(one.arguments)} for part in parts for one in part.queues],
        "bindings": [
            {
                "source": one.source,
                "destination": one.destination,
                "destination_type": one.destination_type,
                "routing_key": one.routing_key,
            }
            for part in parts
            for one in part.bindings
        ],
    }


def _refused() -> Iterator[Json]:
    cases: list[tuple[Json, int, str]] = [
        (_ORDERS, -1, "the delay is negative"),
        (_ORDERS, _LONGEST + 1, "the delay is longer than all digits together"),
        ({"queue": ""}, 1000, "the queue has no name"),
        ({"exchange": "", "routing_key": "orders"}, 1000, "the default exchange: name the queue"),
        ({"queue": "ö" * 128}, 1000, "the name takes 256 bytes"),
        ({"exchange": "shop", "routing_key": "~h5"}, 1000, "the routing key has the form of a transport key"),
        ({"queue": "~.~q:orders"}, 1000, "the queue has the form of a transport key"),
        ({"exchange": "shop", "routing_key": "." * 125}, 1000, "the key of the target takes 257 bytes"),
    ]
    for target, delay, reason in cases:
        try:
            _route(target, delay)
        except InvalidInputError:
            yield {"target": target, "delay": delay, "reason": reason}
        else:
            raise AssertionError(reason)


# -- received messages


def _received() -> Iterator[Json]:
    own: Json = {"bide-to": "q:orders", "bide-due": NOW, "bide-sent": NOW - 5000}
    death = {"queue": "bide.v1.s5", "exchange": "bide.v1.in.s", "reason": "expired", "count": 1}
    deaths: Json = {
        "x-death": [death],
        "x-first-death-exchange": "bide.v1.in.s",
        "x-first-death-queue": "bide.v1.s5",
        "x-first-death-reason": "expired",
        "x-last-death-exchange": "bide.v1.s",
        "x-last-death-queue": "bide.v1.s5",
        "x-last-death-reason": "expired",
        "x-delivery-count": 2,
    }
    for headers in (
        {"tenant": "a"},
        {**own, **deaths, "CC": ["~s5", "~c0", "~q:orders"], "tenant": "a", "attempt": 3},
        {**own, **deaths, "bide-priority": 3, "bide-expiration": "5000"},
        {**own, "bide-key": "invoice:42", "bide-schedule-id": str(_REQUEST)},
    ):
        sent = restore("", "orders", {"headers": headers})
        copied = {name: value for name, value in sent.values.items() if name in ("priority", "expiration")}
        yield {
            "headers": headers,
            "due": headers.get(HEADER_DUE),
            "key": sent.schedule.get(HEADER_KEY),
            "copy": {**copied, "headers": checked_headers(sent.values["headers"], delayed=True)},
        }


# -- schedules


def _records() -> Iterator[Json]:
    json_message = {
        "properties": {
            "content_type": "application/json",
            # In the order of their names, as programs write them that keep no other order.
            "headers": {"a-number": 2**40, "attempt": 3, "bank": "größe"},
            "priority": 3,
            "correlation_id": "c-1",
            "reply_to": "replies",
            "expiration": "60000",
            "message_id": "m-1",
            "type": "reminder",
            "app_id": "shop",
        },
        "body": '{"invoice": 42, "name": "größe"}\n',
    }
    plain = {"properties": {"message_id": "m-2"}, "body": "pay"}
    yield _added({"key": "invoice:42", "target": {"queue": "reminders"}}, json_message)
    yield _added({"key": "größe/ü", "target": {"queue": "größe"}, "if_absent": True}, plain)
    yield _added({"key": "a", "target": _SHOP, "if_version": "5f2c8a-9"}, plain)
    yield _added({"key": "poll", "target": {"queue": "mail"}, "interval": 900_000}, plain)
    # At this size a record gets spaces.
    yield _added({"key": "large", "target": {"queue": "reminders"}}, {**plain, "body": "x" * 70_000})
    for action in ACTIONS:
        due, at = (NOW + 60_000 if action == "move" else None), (NOW if action == "resume" else None)
        change = ChangeSchedule(request=_REQUEST, action=action, key="invoice:42", due=due, at=at)
        times = {name: value for name, value in (("due", due), ("at", at)) if value is not None}
        yield _record({"kind": action, "key": "invoice:42", **times}, change)
    versioned = ChangeSchedule(request=_REQUEST, action="cancel", key="invoice:42", if_version="5f2c8a-9")
    yield _record({"kind": "cancel", "key": "invoice:42", "if_version": "5f2c8a-9"}, versioned)
    chosen = ScheduleFilter(prefix="invoice:", target="q:reminders", due_from=NOW, due_before=NOW + 1000)
    fields = {"prefix": "invoice:", "target": {"queue": "reminders"}, "due_from": NOW, "due_before": NOW + 1000}
    many = ChangeSchedule(request=_REQUEST, action="cancel", filter=chosen)
    yield _record({"kind": "cancel", "filter": fields}, many)
    everything = ChangeSchedule(request=_REQUEST, action="pause", filter=ScheduleFilter())
    yield _record({"kind": "pause", "filter": {}}, everything)


def _added(operation: Json, message: Json) -> Json:
    now = from_milliseconds(NOW)
    assert now is not None
    interval = operation.get("interval")
    given = dict(message["properties"])
    expiration = given.pop("expiration", None)
    due = now + timedelta(days=3) if interval is None else now + interval * _MILLISECOND
    prepared = check_schedule(
        OutgoingSchedule(
            message["body"],
            key=operation["key"],
            **_address(operation["target"]),
            **given,
            expiration=None if expiration is None else int(expiration) * _MILLISECOND,
            deliver_at=due if interval is None else None,
            every=None if interval is None else interval * _MILLISECOND,
            if_absent=operation.get("if_absent", False),
            if_version=operation.get("if_version"),
        ),
        now,
    )
    record = prepared.record(_REQUEST, now)
    assert record.due == (due - now) // _MILLISECOND + NOW
    # What the contract leaves to the program is in the operation: persistence, and the time of sending.
    operation = {"kind": "schedule", **operation, "due": record.due}
    properties = record.message.values
    shown = {"properties": properties, "body": message["body"]}
    if len(message["body"]) > 1000:
        shown["body"] = {"repeat": message["body"][0], "times": len(message["body"])}
    assert ScheduledMessage.of(properties, message["body"].encode()) == record.message
    return _record({**operation, "message": shown}, record)


def _record(operation: Json, record: Operation) -> Json:
    body = with_reserve(encode(record))
    head, _, tail = body.partition(b"\n")
    partitions = range(PARTITIONS) if record.key is None else [partition_of(record.key)]
    return {
        "now": NOW,
        "operation": {**operation, "request": str(_REQUEST)},
        "append": {
            "exchange": ScheduleNames().operations,
            "routing_keys": [str(one) for one in partitions],
            "head": json.loads(head),
            "tail": tail.hex() if len(tail) < 1000 else {"sha256": hashlib.sha256(tail).hexdigest()},
            "spaces": len(body) - len(encode(record)),
        },
    }


def _questions() -> Iterator[Json]:
    key, message = "invoice:42", ScheduledMessage(bytes(2), b"pay\n")
    waiting = WaitingSchedule(
        key=key,
        id="5f2c8a-1",
        version="5f2c8a-9",
        target="q:mail",
        routing_key="",
        nominal=NOW,
        due=NOW + 1,
        recurrence=None,
        message=message,
    )
    under_way = UnderWay(
        occurrence="5f2c8a-1",
        key=key,
        id="5f2c8a-1",
        target="q:mail",
        routing_key="",
        nominal=NOW,
        due=NOW,
        is_recurring=False,
        message=message,
    )
    known = {"due": waiting.due, "version": waiting.version}
    answers: list[tuple[QuestionAnswer, Json]] = [
        (QuestionAnswer(), {"state": "none"}),
        (QuestionAnswer(waiting=(waiting,), under_way=(under_way,)), {"state": "waiting", **known}),
        (QuestionAnswer(waiting=(replace(waiting, is_paused=True),)), {"state": "paused", **known}),
        (QuestionAnswer(under_way=(under_way,)), {"state": "under-way", "due": under_way.due}),
    ]
    for answer, found in answers:
        yield {
            "key": key,
            "publish": {
                "exchange": ScheduleNames().operations,
                "routing_key": f"queries.{partition_of(key)}",
                "body": json.loads(encode_question(KeyQuestion(key=key))),
            },
            "answer": encode_question_answer(answer).decode(),
            "found": found,
        }
