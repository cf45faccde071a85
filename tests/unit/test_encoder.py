"""The compiled encoder, compared byte for byte with the plain one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import bide
from bide.amqp import codec
from bide.client.encoding import Encoded, Encoder
from bide.delay.clock import Clock
from bide.delay.growing import ReadyDigits
from bide.delay.protocol import DelayInfrastructure
from bide.durations import DelayLike, parse_delay
from bide.errors import InvalidInputError
from bide.messages.checker import MessageChecker
from bide.messages.outgoing import OutgoingMessage
from bide.messages.prepared import PreparedMessage, check_message

NOW = datetime(2026, 7, 1, 12, 0, 0, 123456, tzinfo=UTC)
FIELDS = tuple(one.name for one in fields(OutgoingMessage))
FRAME_MAX = 600
CLOCKS = (
    bide.Clock(carrier="CC"),
    bide.Clock(carrier="BCC", lanes=5),
    bide.Clock(max_delay=timedelta(seconds=30), resolution=timedelta(milliseconds=50)),
    bide.Clock(prefix="other", resolution=timedelta(seconds=15)),
    bide.Clock(carrier="CC", hides_keys=True),
    bide.NServiceBus(),
    bide.NServiceBus(version=1, routing="direct"),
    bide.NServiceBus(levels=5),
    bide.Celery(),
    bide.Celery(prefix="é", queue_type="classic"),
    bide.WaitingHall(),
)

words = st.text(alphabet="ab.é", max_size=12)
names = st.text(alphabet="abc-é", min_size=1, max_size=12)
optional_words = st.none() | words
moments = st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 (the zone is added)
addresses = st.one_of(
    st.fixed_dictionaries({"to": names}, optional={"isolated": st.booleans()}),
    st.fixed_dictionaries({"exchange": names, "routing_key": words}),
)
times: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"delay": st.timedeltas(timedelta(0), timedelta(days=3500))}),
    st.fixed_dictionaries({"delay": st.integers(0, 400).map(lambda seconds: f"{seconds}s")}),
    st.fixed_dictionaries({"deliver_at": st.timedeltas(timedelta(0), timedelta(days=400)).map(NOW.__add__)}),
    st.fixed_dictionaries({"deliver_at": moments}),
)
headers = st.dictionaries(
    st.text(alphabet="xyzé", min_size=1, max_size=8),
    st.one_of(
        words,
        st.integers(-(1 << 40), 1 << 40),
        st.booleans(),
        st.none(),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    max_size=4,
)
bodies: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"body": st.binary(max_size=40) | words}),
    st.fixed_dictionaries({"body": st.integers(FRAME_MAX - 10, 3 * FRAME_MAX).map(bytes)}),
    st.fixed_dictionaries({"json": st.dictionaries(words, st.integers(), max_size=3)}),
)
properties = st.fixed_dictionaries(
    {},
    optional={
        "mandatory": st.booleans(),
        "headers": st.none() | headers,
        "message_id": optional_words,
        "correlation_id": optional_words,
        "reply_to": optional_words,
        "content_type": optional_words,
        "content_encoding": optional_words,
        "type": optional_words,
        "user_id": optional_words,
        "app_id": optional_words,
        "timestamp": st.none() | moments,
        "persistent": st.booleans(),
        "priority": st.none() | st.integers(0, 255),
        "expiration": st.none() | st.timedeltas(timedelta(0), timedelta(days=30)),
    },
)
outgoing_messages = st.tuples(addresses, times, bodies, properties).map(
    lambda parts: OutgoingMessage(**{name: value for part in parts for name, value in part.items()})
)


def made(message: OutgoingMessage) -> PreparedMessage:
    """The same message, by the full check alone."""
    return check_message(OutgoingMessage(**{name: getattr(message, name) for name in FIELDS if name != "mandatory"}))


@given(st.sampled_from(CLOCKS), st.lists(outgoing_messages, min_size=1, max_size=4))
@example(CLOCKS[0], [OutgoingMessage(b"", to="q", delay="90s", priority=3, expiration=timedelta(seconds=1))])
@example(
    CLOCKS[0],
    [OutgoingMessage(b"", to="q", delay="1d", expiration="77ms", reply_to="r", correlation_id="c", timestamp=NOW)],
)
@example(CLOCKS[1], [OutgoingMessage(b"", exchange="x", routing_key="a.b.c", delay="3199d", message_id="m")])
@example(CLOCKS[0], [OutgoingMessage(b"", to="q", deliver_at=datetime(1970, 1, 5, tzinfo=UTC))])
@example(CLOCKS[2], [OutgoingMessage(b"", to="q", delay="31s")])
@example(CLOCKS[0], [OutgoingMessage(b"", to="q", headers={"big": "x" * FRAME_MAX})])
@example(CLOCKS[0], [OutgoingMessage(b"", exchange="x", routing_key="." * 130, delay="1s")])
@example(CLOCKS[0], [OutgoingMessage(b"", exchange="x", routing_key="." * 130, deliver_at=NOW)])
def test_messages_of_a_known_kind_are_encoded_to_the_same_bytes(
    infrastructure: DelayInfrastructure, several: list[OutgoingMessage]
) -> None:
    check = MessageChecker()
    encoder = Encoder(infrastructure, frame_max=FRAME_MAX)
    # The second time the kind of each message is known.
    for outgoing_message in several + several:
        quick = check.check(outgoing_message).starting(NOW)
        slow = made(outgoing_message).starting(NOW)
        if outgoing_message.message_id is None:
            slow = _with_id(outgoing_message, quick.message_id).starting(NOW)
        assert quick == slow
        assert quick.template is not None
        expected, found = (_encoded(encoder, message, outgoing_message) for message in (slow, quick))
        assert found == expected


def _encoded(
    encoder: Encoder, message: PreparedMessage, outgoing_message: OutgoingMessage
) -> Encoded | tuple[type[Exception], str] | None:
    """The encoded message, or its error."""
    try:
        return encoder.encode(message, NOW, channel=7, mandatory=outgoing_message.mandatory)
    except InvalidInputError as error:
        return type(error), str(error)


def _with_id(message: OutgoingMessage, message_id: str) -> PreparedMessage:
    values = {name: getattr(message, name) for name in FIELDS if name not in ("mandatory", "message_id")}
    return check_message(OutgoingMessage(**values, message_id=message_id))


def invalid_messages() -> Iterator[OutgoingMessage]:
    """Messages that differ from valid ones in one field."""
    yield OutgoingMessage(b"")
    yield OutgoingMessage(b"", to="q", exchange="x")
    yield OutgoingMessage(b"", to="q", routing_key="k")
    yield OutgoingMessage(b"", to=["q"])  # type: ignore[arg-type]  # wrong on purpose
    yield OutgoingMessage(3, to="q")  # type: ignore[arg-type]  # wrong on purpose
    yield OutgoingMessage(b"", json=1, to="q")
    yield OutgoingMessage("text", json=1, to="q")
    yield OutgoingMessage("\ud800", to="q")
    yield OutgoingMessage(b"", to="q", delay=3)  # type: ignore[arg-type]  # wrong on purpose
    yield OutgoingMessage(b"", to="q", delay="later")
    yield OutgoingMessage(b"", to="q", delay=timedelta(seconds=-1))
    yield OutgoingMessage(b"", to="q", delay="1s", deliver_at=NOW)
    yield OutgoingMessage(b"", to="q", deliver_at=NOW.replace(tzinfo=None))
    yield OutgoingMessage(b"", to="q", priority=True)
    yield OutgoingMessage(b"", to="q", priority=256)
    yield OutgoingMessage(b"", to="q", message_id="x" * 256)
    yield OutgoingMessage(b"", to="q", message_id="é" * 128)
    yield OutgoingMessage(b"", to="q", message_id=7)  # type: ignore[arg-type]  # wrong on purpose
    yield OutgoingMessage(b"", to="q", correlation_id="\ud800")
    yield OutgoingMessage(b"", to="q", reply_to="x" * 256)
    yield OutgoingMessage(b"", to="q", timestamp=NOW.replace(tzinfo=None))
    yield OutgoingMessage(b"", to="q", timestamp="now")  # type: ignore[arg-type]  # wrong on purpose
    yield OutgoingMessage(b"", to="q", headers={"bide-x": 1})
    yield OutgoingMessage(b"", to="q", headers={"CC": ["a"]}, delay="1s")
    yield OutgoingMessage(b"", to="q", headers={1: 1})  # type: ignore[dict-item]  # wrong on purpose
    yield OutgoingMessage(b"", to="q", headers=["a"])  # type: ignore[arg-type]  # wrong on purpose
    yield OutgoingMessage(b"", to="q", expiration="-1s")
    yield OutgoingMessage(json=object(), to="q")


RIGHT = tuple(
    OutgoingMessage(body, to="q", json=json, delay=delay, priority=priority)
    for body, json in ((b"", None), (None, {"a": 1}))
    for delay in (None, "1s")
    for priority in (None, 1)
)


@pytest.mark.parametrize(
    "message", list(invalid_messages()), ids=lambda message: repr(message).replace(repr(message.json), "...")
)
def test_an_invalid_message_is_refused_after_valid_ones(message: OutgoingMessage) -> None:
    with pytest.raises(InvalidInputError) as expected:
        made(message)
    check = MessageChecker()
    for right in RIGHT:
        check.check(right)
    with pytest.raises(type(expected.value)) as caught:
        check.check(message)
    assert str(caught.value) == str(expected.value)


def test_at_most_10_000_kinds_are_cached() -> None:
    check = MessageChecker()
    for number in range(25_000):
        check.check(OutgoingMessage(b"", to=f"q{number}"))
    assert len(check._templates) <= 10_000
    encoder = Encoder(CLOCKS[0], frame_max=FRAME_MAX)
    for number in range(25_000):
        encoder.encode(check.check(OutgoingMessage(b"", to=f"q{number}")), NOW, channel=1, mandatory=True)
    assert len(encoder._encoders) <= 10_000


def test_every_digit_of_every_level_is_encoded_the_same() -> None:
    """Each wait of one digit, and a wait of all digits at their highest."""
    check = MessageChecker()
    for clock in CLOCKS[:2]:
        encoder = Encoder(clock, frame_max=FRAME_MAX)
        waits: list[DelayLike] = [clock.max_delay]
        for unit, highest in (("10ms", 99), ("1s", 59), ("1m", 59), ("1h", 23), ("1d", 99), ("100d", 31)):
            step = parse_delay(unit)
            waits += [step * digit for digit in range(1, highest + 1)]
        for wait in waits:
            message = OutgoingMessage(b"x", to="q", delay=wait, message_id=f"m{wait}")
            check.check(message)
            quick = check.check(message).starting(NOW)
            found = encoder.encode(quick, NOW, channel=1, mandatory=True)
            assert found == encoder.encode(made(message).starting(NOW), NOW, channel=1, mandatory=True)


@pytest.mark.parametrize("routing_key", ["one", "one.two.three.four.five"])
@pytest.mark.parametrize("alike", [True, False])
def test_a_message_is_not_encoded_before_its_digits_are_ready(routing_key: str, *, alike: bool) -> None:
    clock = Clock(lanes=2)
    ready = ReadyDigits(clock, codec.field_value)
    encoder = Encoder(clock, frame_max=FRAME_MAX, ready=ready)
    outgoing_message = OutgoingMessage(b"x", exchange="shop", routing_key=routing_key, delay="1h1s", message_id="m")
    checked = MessageChecker().check(outgoing_message).starting(NOW)
    message = checked if alike else replace(checked, template=None)
    assert message.due is not None
    digits = clock.route(message.due - NOW, message.target, message_id="m").digits
    for digit in digits:
        assert encoder.encode(message, NOW, channel=7, mandatory=True) is None
        ready.add(digit)
    complete = Encoder(clock, frame_max=FRAME_MAX)
    expected = complete.encode(message, NOW, channel=7, mandatory=True)
    assert encoder.encode(message, NOW, channel=7, mandatory=True) == expected
    ready.reset()
    assert encoder.encode(message, NOW, channel=7, mandatory=True) is None
