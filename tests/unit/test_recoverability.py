"""Decisions on failed messages, without a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bide
from bide.amqp.delivery import Delivery
from bide.delay.received import SentMessage, restore
from bide.durations import LONGEST, to_milliseconds
from bide.endpoint.dedup import REMEMBERED, FailedAttempts, HandledMessages
from bide.endpoint.limiter import Limiter
from bide.errors import InvalidDelayError, InvalidInputError, ReservedHeaderError, UndecodableMessageError
from bide.recoverability import copies, history, redrive
from bide.recoverability.exception_text import ExceptionText, truncate
from bide.recoverability.failed import FailedMessage, first_frame, group_of
from bide.recoverability.history import History, nservicebus_time, read_nservicebus_time
from bide.recoverability.report import FailureReport
from bide.recoverability.retry_policy import poison_limit
from bide.recoverability.selection import Selection
from tests.timeouts import TIMEOUT

NOW = datetime(2026, 11, 21, 3, 0, 0, 123000, tzinfo=UTC)


def failure(error: BaseException | None = None, **changes: Any) -> bide.Failure:
    values: dict[str, Any] = {
        "endpoint": "orders",
        "queue": "orders",
        "message_id": "m",
        "error": error or ValueError("no"),
        "attempt": 1,
        "delayed_retries": 0,
        "first_failed_at": NOW,
        "failed_at": NOW,
    } | changes
    return bide.Failure(**values)


# -- policies


def path(policy: bide.Retry, error: BaseException, *, message_id: str = "m") -> list[Any]:
    """All decisions about a message that always fails."""
    decisions: list[Any] = []
    attempt, retries, now = 1, 0, NOW
    while len(decisions) < 10_000:
        decision = policy(
            failure(error, attempt=attempt, delayed_retries=retries, failed_at=now, message_id=message_id)
        )
        decisions.append(decision)
        if isinstance(decision, bide.RetryNow):
            attempt += 1
        elif isinstance(decision, bide.RetryLater):
            attempt, retries, now = 1, retries + 1, now + decision.delay
        else:
            return decisions
    raise AssertionError("it never ends")


def test_the_default_policy_equals_that_of_nservicebus() -> None:
    decisions = path(bide.Retry(), ValueError())
    assert len(decisions) == bide.Retry().attempts == 24
    assert [one.delay.total_seconds() for one in decisions if isinstance(one, bide.RetryLater)] == [10, 20, 30]
    assert decisions[:6] == [bide.RetryNow()] * 5 + [bide.RetryLater(timedelta(seconds=10))]
    assert decisions[-1] == bide.Park()


@given(
    immediate=st.integers(0, 5),
    delays=st.lists(st.integers(0, 10_000), max_size=5),
    jitter=st.floats(0, 1),
    message_id=st.text(),
)
def test_a_message_is_attempted_as_often_as_the_policy_allows(
    immediate: int, delays: list[int], jitter: float, message_id: str
) -> None:
    policy = bide.Retry(immediate=immediate, delays=[timedelta(milliseconds=one) for one in delays], jitter=jitter)
    decisions = path(policy, ValueError(), message_id=message_id)
    assert len(decisions) == policy.attempts
    found = [one.delay for one in decisions if isinstance(one, bide.RetryLater)]
    assert len(found) == len(delays)
    for delay, wanted in zip(found, delays, strict=True):
        assert wanted * (1 - jitter) - 0.01 <= delay / timedelta(milliseconds=1) <= wanted * (1 + jitter) + 0.01
    # The same failure gives the same decision.
    assert decisions == path(policy, ValueError(), message_id=message_id)


def test_jitter_spreads_delays_by_message_id() -> None:
    policy = bide.Retry(immediate=0, delays=["100s"], jitter=0.5)
    found = [policy(failure(message_id=f"{number}")) for number in range(200)]
    seconds = [one.delay.total_seconds() for one in found if isinstance(one, bide.RetryLater)]
    assert min(seconds) < 60
    assert max(seconds) > 140
    assert 90 < sum(seconds) / len(seconds) < 110


def test_jitter_spreads_messages_without_an_id() -> None:
    policy = bide.Retry(immediate=0, delays=["100s"], jitter=0.5)
    found = [policy(failure(message_id=None, failed_at=NOW + timedelta(milliseconds=number))) for number in range(200)]
    seconds = [one.delay.total_seconds() for one in found if isinstance(one, bide.RetryLater)]
    assert min(seconds) < 60
    assert max(seconds) > 140
    # Still pure.
    assert policy(failure(message_id=None)) == policy(failure(message_id=None))


@pytest.mark.parametrize(
    ("delays", "jitter", "longest"),
    [([], 1.0, 0), (["1s", "40s", "20s"], 0.0, 40), (["40s"], 0.5, 60)],
)
def test_the_longest_delay_includes_jitter(delays: list[str], jitter: float, longest: int) -> None:
    assert bide.Retry(delays=delays, jitter=jitter).longest_delay == timedelta(seconds=longest)
    assert bide.Retry(delays=[LONGEST], jitter=1.0).longest_delay == LONGEST


def test_a_message_is_parked_when_the_next_retry_would_exceed_the_limit() -> None:
    never = bide.Retry(immediate=0, delays=[LONGEST], give_up_after="1h")
    assert never(failure()) == bide.Park()
    policy = bide.Retry(immediate=0, delays=["1h", "1h", "1h"], give_up_after="90m")
    assert [type(one) for one in path(policy, ValueError())] == [bide.RetryLater, bide.Park]
    late = failure(failed_at=NOW + timedelta(hours=2))
    assert bide.Retry(give_up_after="90m")(late) == bide.Park()


def test_exception_rules_choose_the_decision() -> None:
    policy = bide.Retry(
        immediate=1,
        delays=["1s"],
        later=(OSError,),
        never=(PermissionError,),
        at_once=(TimeoutError,),
        discard=(KeyboardInterrupt,),
    )
    assert path(policy, PermissionError()) == [bide.Park()]
    assert path(policy, FileNotFoundError()) == [bide.RetryLater(timedelta(seconds=1)), bide.Park()]
    assert path(policy, TimeoutError()) == [bide.RetryNow(), bide.Park()]
    assert isinstance(path(policy, KeyboardInterrupt())[0], bide.Discard)
    assert path(policy, UndecodableMessageError()) == [bide.Park()]
    # An explicit setting allows retries of undecodable messages.
    assert path(bide.Retry(immediate=1, delays=(), at_once=(UndecodableMessageError,)), UndecodableMessageError()) == [
        bide.RetryNow(),
        bide.Park(),
    ]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"immediate": -1}, "immediate"),
        ({"immediate": True}, "immediate"),
        ({"delays": "5s"}, "list"),
        ({"delays": ["soon"]}, "soon"),
        ({"delays": ["1s"] * 1001}, "1000"),
        ({"jitter": 1.5}, "jitter"),
        ({"never": ValueError}, "tuple"),
        ({"never": ("ValueError",)}, "not an exception class"),
        ({"never": (ValueError,), "later": (ValueError,)}, "both never and later"),
        ({"give_up_after": "-1s"}, "negative"),
    ],
)
def test_invalid_policies_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidInputError, match=what):
        bide.Retry(**options)


def test_linear_and_exponential_schedules_grow() -> None:
    def seconds(delays: tuple[timedelta, ...]) -> list[float]:
        return [one.total_seconds() for one in delays]

    assert seconds(bide.linear("10s", times=3)) == [10, 20, 30]
    assert seconds(bide.exponential("5s", times=6, longest="1m")) == [5, 10, 20, 40, 60, 60]
    assert seconds(bide.exponential("1s", times=3, factor=10)) == [1, 10, 100]
    assert len(bide.exponential("1s", times=1000, factor=1000)) == 1000
    with pytest.raises(InvalidInputError, match="times"):
        bide.linear("1s", times=0)
    with pytest.raises(InvalidInputError, match="factor"):
        bide.exponential("1s", times=3, factor=0.5)
    with pytest.raises(InvalidInputError, match="9999"):
        bide.linear(timedelta(days=999_999_999), times=3)


def test_a_broker_retry_sets_queue_arguments_and_parks_after_its_attempts() -> None:
    policy = bide.BrokerRetry(first="10s", longest="1m", times=3, never=(TypeError,), discard=(KeyError,))
    assert dict(policy.queue_arguments) == {
        "x-delayed-retry-type": "failed",
        "x-delayed-retry-min": 10_000,
        "x-delayed-retry-max": 60_000,
    }
    assert [policy(failure(attempt=number)) for number in (1, 3, 4)] == [bide.RetryNow(), bide.RetryNow(), bide.Park()]
    assert policy(failure(TypeError())) == bide.Park()
    assert isinstance(policy(failure(KeyError())), bide.Discard)
    with pytest.raises(InvalidInputError, match="not longer than"):
        bide.BrokerRetry(first="2m", longest="1m", times=3)


def test_the_poison_limit_exceeds_the_immediate_retries() -> None:
    assert poison_limit(bide.Retry()) == 10
    assert poison_limit(bide.Retry(immediate=50)) == 55
    assert poison_limit(lambda _: bide.Park()) == 10


# -- histories and copies

HEADER_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.text()
    | st.binary()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
KNOWN = st.sampled_from(
    [
        *("bide-retries", "bide-attempts", "bide-attempt-times", "bide-first-failure", "bide-expires", "bide-to"),
        *("bide-failed-queue", "bide-failed-at", "bide-error-type", "bide-error-stack", "bide-process", "x-death"),
        *("NServiceBus.Retries", "NServiceBus.FailedQ", "NServiceBus.TimeOfFailure", "x-first-death-queue"),
        *("NServiceBus.ExceptionInfo.Message", "NServiceBus.EnclosedMessageTypes", "bide-sent", "bide-due"),
    ]
)


@given(headers=st.dictionaries(KNOWN | st.text(max_size=10), HEADER_VALUES, max_size=8), body=st.binary(max_size=10))
def test_any_foreign_headers_can_be_read(headers: dict[str, Any], body: bytes) -> None:
    History.read(headers)
    values = {"headers": headers, "message_id": "m"}
    message = FailedMessage.read("e", "k", values, body)
    assert message.id
    assert message.group


def sent(**changes: Any) -> SentMessage:
    values: dict[str, Any] = {
        "message_id": "m",
        "type": "Order",
        "user_id": "shop",
        "expiration": "60000",
        "headers": {"tenant": 7, "x-death": [{"queue": "q"}], "CC": ["other"]},
    }
    return SentMessage(exchange="shop", routing_key="order.created", values=values | changes, due=None, sent_at=NOW)


def size_of(headers: dict[str, Any]) -> int:
    from bide.amqp import codec

    return len(codec.table_items(headers))


@given(attempts=st.lists(st.integers(1, 3), min_size=2, max_size=40), max_failure_times=st.integers(1, 100))
def test_headers_do_not_grow_from_retry_to_retry(attempts: list[int], max_failure_times: int) -> None:
    arrival, sizes = sent(), set()
    history = History()
    for number, count in enumerate(attempts):
        times = tuple(NOW + timedelta(seconds=number, milliseconds=one) for one in range(count))
        history = history.with_failures(times, attempts=count, expires_at=NOW)
        copy = copies.delayed_retry(
            arrival,
            b"",
            queue="orders",
            history=history,
            max_failure_times=max_failure_times,
            delay=timedelta(seconds=1),
            now=NOW,
            nservicebus=False,
            sent_by="shop",
        )
        headers = copy.values["headers"]
        sizes.add(size_of(headers))
        assert not {"x-death", "CC"} & set(headers)
        assert not {"user_id", "expiration"} & set(copy.values)
        assert (copy.message_id, copy.values["type"], headers["tenant"]) == ("m", "Order", 7)
        arrival = restore("", "orders", copy.values)
        assert (arrival.exchange, arrival.routing_key, arrival.sent_at) == ("shop", "order.created", NOW)
        assert arrival.values["expiration"] == "60000"
        assert arrival.values["headers"] == {"tenant": 7}
        history = History.read(headers)
        assert (history.retries, history.attempts) == (number + 1, sum(attempts[: number + 1]))
        assert len(history.times) == min(sum(attempts[: number + 1]), max_failure_times)
    assert len(sizes) == 1


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


def parked(error: Exception, *, nservicebus: bool = False, **changes: Any) -> FailedMessage:
    report = FailureReport(
        endpoint="billing",
        queue="orders",
        failed_at=NOW,
        explanation=ExceptionText.of(error),
        history=History(attempts=2, times=(NOW, NOW), first_failed_at=NOW, retries=1),
        host="h",
        process=7,
    )
    copy = copies.parked(
        sent(**changes), b"body", queue="error", headers=report.headers(nservicebus=nservicebus), sent_by="shop"
    )
    return FailedMessage.read("", "error", copy.values, copy.body)


@pytest.mark.parametrize("nservicebus", [False, True])
def test_a_parked_message_is_read_with_all_its_facts(nservicebus: bool) -> None:
    message = parked(raised(ValueError("no ü")), nservicebus=nservicebus)
    assert (message.queue, message.endpoint, message.exception, message.text) == (
        "orders",
        "billing",
        "ValueError",
        "no ü",
    )
    assert (message.reason, message.message_id, message.message_type) == ("failed", "m", "Order")
    assert message.failed_at == NOW
    assert (message.host, message.process, message.sent_by) == ("h", 7, "shop")
    assert message.history.times == (NOW, NOW)
    assert message.group == "ValueError at test_recoverability.py in raised"
    assert (message.exchange, message.routing_key) == ("shop", "order.created")
    assert "expiration" not in message.values
    assert dict(message.headers) == {"tenant": 7}
    names = set(message.values["headers"])
    assert ("NServiceBus.FailedQ" in names) == nservicebus
    assert ("bide-failed-queue" in names) != nservicebus


def test_a_message_failed_by_nservicebus_is_read() -> None:
    headers = {
        "NServiceBus.FailedQ": "Sales@MACHINE",
        "NServiceBus.TimeOfFailure": "2026-11-21 03:00:00:123000 Z",
        "NServiceBus.ExceptionInfo.ExceptionType": "System.InvalidOperationException",
        "NServiceBus.ExceptionInfo.Message": "no",
        "NServiceBus.ExceptionInfo.StackTrace": "System.InvalidOperationException: no\r\n"
        "   at Sales.Handler.Handle(Order order) in C:\\src\\Handler.cs:line 12\r\n   at NServiceBus.Pipeline()",
        "NServiceBus.ProcessingEndpoint": "Sales",
        "NServiceBus.ProcessingMachine": "MACHINE",
        "NServiceBus.OriginatingEndpoint": "Shop",
        "NServiceBus.EnclosedMessageTypes": "Shop.OrderPlaced, Shop.Messages, Version=1.0.0.0;Shop.IEvent",
        "NServiceBus.MessageId": "id",
    }
    message = FailedMessage.read("", "error", {"headers": headers}, b"")
    assert (message.queue, message.endpoint, message.host, message.sent_by) == ("Sales", "Sales", "MACHINE", "Shop")
    assert (message.failed_at, message.message_id, message.message_type) == (NOW, "id", "Shop.OrderPlaced")
    assert message.group == "System.InvalidOperationException at Sales.Handler.Handle"
    assert not [name for name in message.headers if name.startswith("NServiceBus.ExceptionInfo")]


def test_an_undeliverable_message_says_why_it_was_set_aside() -> None:
    headers = {"bide-to": "q:mail", "bide-set-aside": "the target 'q:mail' matches no allowed pattern"}
    message = FailedMessage.read("", "bide.v1.schedule.undeliverable", {"headers": headers}, b"")
    assert (message.reason, message.queue) == ("undeliverable", "mail")
    assert message.text == "the target 'q:mail' matches no allowed pattern"
    # In an error queue the header is only one of the sender's.
    failed = FailedMessage.read("", "error", {"headers": {**headers, "bide-failed-queue": "orders"}}, b"")
    assert (failed.reason, failed.text) == ("failed", None)


def test_the_id_of_a_failed_message_does_not_depend_on_its_deliveries() -> None:
    values: dict[str, Any] = {"headers": {"a": 1}, "type": "Order"}
    first = FailedMessage.read("e", "k", values, b"body")
    again = FailedMessage.read("e", "k", {**values, "headers": {"a": 1, "x-delivery-count": 3}}, b"body")
    assert first.id == again.id
    assert first.id != FailedMessage.read("e", "k", values, b"other").id
    with_id = {"message_id": "m", "headers": {"bide-failed-queue": "a"}}
    other_queue = {"message_id": "m", "headers": {"bide-failed-queue": "b"}}
    assert FailedMessage.read("", "e", with_id, b"1").id == FailedMessage.read("", "e", with_id, b"2").id
    assert FailedMessage.read("", "e", with_id, b"").id != FailedMessage.read("", "e", other_queue, b"").id


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (history.HEADER_RETRIES, 1),
        (history.HEADER_ATTEMPTS, 1),
        (history.HEADER_ATTEMPT_TIMES, [1]),
        (history.HEADER_FIRST_FAILURE, 1),
        (history.HEADER_EXPIRES, 1),
        (history.HEADER_DELIVERIES, 1),
        (history.HEADER_FIRST_DUE, 1),
        (history.HEADER_OPERATOR_RETRIES, 1),
        (history.HEADER_OPERATOR_RUN, "r"),
        (history.HEADER_EDIT_OF, "m"),
        (history.NSERVICEBUS_RETRIES, "1"),
    ],
)
def test_each_header_of_a_history_is_read_without_the_others(name: str, value: object) -> None:
    found = History.read({"own": 1, name: value})
    assert [one for one in fields(found) if getattr(found, one.name) != getattr(History(), one.name)]


def test_copies_made_by_operators_carry_their_history() -> None:
    message = parked(ValueError("no"))
    back = redrive.back(message)
    headers = back.values["headers"]
    assert (str(back.target), back.message_id, back.is_copy) == ("q:orders", "m", True)
    assert headers["bide-operator-retries"] == 1
    assert (headers["bide-retries"], headers["bide-attempts"]) == (0, 2)
    assert not [name for name in headers if "error" in name or "failed" in name]
    assert "bide-expiration" not in headers
    twice = FailedMessage.read("", "error", {**back.values, "headers": {**headers, "bide-failed-queue": "orders"}}, b"")
    assert redrive.back(twice).values["headers"]["bide-operator-retries"] == 2
    archived = redrive.archived(message, queue="a", keep=timedelta(days=1), now=NOW)
    assert archived.values["expiration"] == "86400000"
    again = redrive.unarchived(FailedMessage.read("", "a", archived.values, archived.body), queue="error")
    assert dict(again.values) == dict(message.values)
    edited = redrive.edited(message, body=b"new", headers={"x": "1"}, without=frozenset({"tenant"}))
    assert edited.message_id != "m"
    assert edited.values["message_id"] == edited.message_id
    assert (edited.body, edited.values["headers"]["bide-edit-of"], edited.values["headers"]["x"]) == (b"new", "m", "1")
    assert "tenant" not in edited.values["headers"]
    for name in ("bide-due", "CC", "x-death"):
        with pytest.raises(ReservedHeaderError):
            redrive.edited(message, body=None, headers={name: "1"}, without=frozenset())
    nowhere = replace(message, queue=None)
    with pytest.raises(InvalidInputError, match=r"to=\.\.\."):
        redrive.back(nowhere)
    assert str(redrive.back(nowhere, to="q").target) == "q:q"


def received(values: Mapping[str, Any]) -> bide.Message:
    delivery = Delivery(exchange="", routing_key="orders", redelivered=False, delivery_tag=1, values=values)
    return bide.Message(delivery, None, NOW)


def due_of(values: Mapping[str, Any]) -> datetime | None:
    """The sender's due time, as an endpoint reads it on a message with these properties."""
    message = received(values)
    return copies.senders_due(message.as_sent(), message.history)


NET_SENT = {"NServiceBus.TimeSent": nservicebus_time(NOW)}
NET_DELAY = {"NServiceBus.Transport.RabbitMQ.DelayInSeconds": 86_400}
NET_DUE = {"NServiceBus.DeliverAt": nservicebus_time(NOW + timedelta(days=1))}


@pytest.mark.parametrize(
    ("headers", "due"),
    [
        ({}, None),
        (NET_SENT, None),
        (NET_DELAY, None),
        (NET_SENT | dict.fromkeys(NET_DELAY, 1 << 28), None),
        ({"NServiceBus.TimeSent": "9999-12-31 23:59:59:000000 Z", **NET_DELAY}, None),
        (NET_SENT | NET_DELAY, NOW + timedelta(days=1)),
        (NET_SENT | NET_DUE, NOW + timedelta(days=1)),
        (NET_SENT | NET_DUE | NET_DELAY | {"bide-due": to_milliseconds(NOW)}, NOW),
    ],
)
def test_every_copy_keeps_the_due_time_of_the_sender(headers: dict[str, Any], due: datetime | None) -> None:
    """For all delay infrastructures, and copies of endpoints and operators, immediate and delayed."""
    first = {"message_id": "m", "headers": headers}
    assert due_of(first) == due
    message = received(first)
    own: dict[str, Any] = {"queue": "orders", "history": message.history, "max_failure_times": 3, "sent_by": None}
    later: dict[str, Any] = {"delay": timedelta(days=2), "now": NOW, "nservicebus": True}
    made = [copies.counted(message.as_sent(), b"", **own), copies.delayed_retry(message.as_sent(), b"", **own, **later)]
    for values in (first, *(one.values for one in made)):
        dead = {**values, "headers": {**values["headers"], "bide-to": "q:orders"}}
        back = redrive.back(FailedMessage.read("", "error", dead, b""))
        made += [back, redrive.back(FailedMessage.read("", "error", back.values, b""), to="orders")]
    assert [due_of(copy.values) for copy in made] == [due] * 8
    another = {"bide-due": to_milliseconds(NOW + timedelta(days=3))}
    for copy in made[1:]:
        assert due_of({**copy.values, "headers": copy.values["headers"] | another}) == due, "its own is the copy's"


def test_a_delayed_retry_of_nservicebus_does_not_change_the_due_time() -> None:
    again = {"NServiceBus.Retries": "1", **NET_SENT, **NET_DELAY}
    assert due_of({"headers": again}) is None, "that is the delay of the retry"
    assert due_of({"headers": again | NET_DUE}) == NOW + timedelta(days=1)


# -- in words


@given(text=st.text(max_size=200), size=st.integers(0, 100), keep_end=st.booleans())
def test_text_is_cut_to_bytes(text: str, size: int, keep_end: bool) -> None:
    found = truncate(text, size, keep_end=keep_end)
    assert len(found.encode()) <= size + len(" [...]")
    if len(text.encode(errors="backslashreplace")) <= size:
        assert "[...]" not in found or "[...]" in text


def test_exception_text_is_limited_and_never_fails() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    found = ExceptionText.of(raised(BrokenError()))
    assert "cannot be printed" in found.message
    assert found.type.endswith("BrokenError")
    long = ExceptionText.of(raised(ValueError("x" * 100_000)))
    assert len(long.message) <= 4096 + 6
    assert len(long.stack) <= 16_384 + 6
    assert ExceptionText.of(ValueError("never raised")).frame == ""


@pytest.mark.parametrize(
    ("stack", "frame"),
    [
        (None, None),
        ("", None),
        ('  File "/a/b.py", line 3, in one\n  File "C:\\c\\d.py", line 4, in two\nValueError', "d.py:4 in two"),
        ("E: no\n   at A.B.C(String s) in f.cs:line 3\n   at D.E()", "A.B.C"),
    ],
)
def test_the_last_frame_of_a_stack_is_found(stack: str | None, frame: str | None) -> None:
    assert first_frame(stack) == frame


def test_groups_do_not_depend_on_line_numbers() -> None:
    assert group_of("E", "a.py:12 in f") == group_of("E", "a.py:99 in f") == "E at a.py in f"
    assert group_of("E", None) == "E"


def test_times_of_nservicebus_are_formatted_and_parsed() -> None:
    assert nservicebus_time(NOW) == "2026-11-21 03:00:00:123000 Z"
    assert read_nservicebus_time("2026-11-21 03:00:00:123000 Z") == NOW
    assert read_nservicebus_time("2026-11-21T03:00:00Z") is None
    assert read_nservicebus_time(7) is None


# -- the parts of an endpoint


async def test_the_limiter_bounds_concurrency_and_slows_down_after_failures() -> None:
    limiter = Limiter("g", 2, slow_down_after=2, pause=0)

    def slow() -> bool:
        return limiter.slow

    await limiter.enter()
    await limiter.enter()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(limiter.enter(), 0.05)
    await limiter.failed()
    assert not slow()
    await limiter.failed()
    assert slow()
    limiter.leave()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(limiter.enter(), 0.05)
    limiter.leave()
    await limiter.enter()
    limiter.succeeded()
    assert limiter.inside == 1
    await asyncio.wait_for(limiter.enter(), TIMEOUT)
    assert limiter.inside == 2


async def test_handled_messages_are_remembered_for_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    time, passed = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: time() + passed)
    handled = HandledMessages(timedelta(hours=1))
    assert await handled.begin("a")
    second = asyncio.create_task(handled.begin("a"))
    await asyncio.sleep(0)  # starts the second
    assert not second.done()
    handled.add("a")
    handled.end("a")
    assert not await second
    passed = 3601
    assert await handled.begin("a")
    # One that failed may be handled by the next.
    third = asyncio.create_task(handled.begin("a"))
    handled.end("a")
    assert await third


def test_old_failures_are_forgotten() -> None:
    attempts = FailedAttempts()
    attempts.add("a", NOW)
    assert attempts.add("a", NOW) == (NOW, NOW)
    for number in range(REMEMBERED):
        attempts.add(number, NOW)
    assert attempts.of("a") == ()
    assert attempts.of(5) == (NOW,)
    attempts.forget(5)
    assert attempts.of(5) == ()


def test_invalid_durations_are_refused() -> None:
    with pytest.raises(InvalidDelayError):
        bide.EventStream(keep="1ms")


# -- which messages are meant


@pytest.mark.parametrize(
    ("pattern", "held"),
    [("orders.eu", True), ("orders.*", True), ("*", True), ("orders", False), ("Orders.*", False), ("salaries", False)],
)
def test_a_selection_holds_messages_of_matching_queues_only(pattern: str, held: bool) -> None:
    message = FailedMessage.read("", "error", {"headers": {"bide-failed-queue": "orders.eu"}}, b"")
    assert Selection(queue=pattern).holds(message, NOW) is held


def test_a_queue_name_with_wildcards_matches_itself() -> None:
    message = FailedMessage.read("", "error", {"headers": {"bide-failed-queue": "orders[1]"}}, b"")
    assert Selection(queue="orders[1]").holds(message, NOW)


@pytest.mark.parametrize(
    ("part", "held"),
    [("Gr\u00fc\u00dfe", True), ("\udcff", True), ("gr\u00fc\u00dfe", False), ("an", True), ("or", False)],
)
def test_the_body_is_searched_case_sensitively(part: str, held: bool) -> None:
    message = FailedMessage.read("", "orders", {"message_id": "1"}, "Gr\u00fc\u00dfe an alle".encode() + b"\xff")
    assert Selection(body_text=part).holds(message, NOW) is held


def test_an_empty_search_text_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="empty"):
        Selection(text="")
    with pytest.raises(InvalidInputError, match="empty"):
        Selection(body_text="")
