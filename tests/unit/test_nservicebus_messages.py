"""Messages to and from NServiceBus and ServiceControl: types, counts, due times, groups."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import bide
from bide.amqp.delivery import Delivery
from bide.endpoint.handlers import Handlers
from bide.endpoint.service_control import retry_confirmation
from bide.errors import DelayQueueError, UnknownMessageTypeError
from bide.recoverability import copies
from bide.recoverability.exception_text import ExceptionText
from bide.recoverability.history import History
from bide.recoverability.message_types import message_type, message_types

NOW = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC)
DELAY = "NServiceBus.Transport.RabbitMQ.DelayInSeconds"

FRAME = re.compile(
    r"^[ \t]*\w+[ \t]+(?P<type>[^ \t]+)\.(?P<method>[^ \t]+?)[ \t]*\([ \t]*\)"
    r"([ \t]+\w+[ \t]+([a-z]:|/).+?:\w+[ \t]+[0-9]+)?\s*$",
    re.MULTILINE | re.IGNORECASE,
)
"""The lines that ServiceControl takes for a stack frame without parameters."""


def received(headers: dict[str, Any], *, exchange: str = "", routing_key: str = "q", **values: Any) -> bide.Message:
    values["headers"] = headers
    delivery = Delivery(
        exchange=exchange, routing_key=routing_key, redelivered=False, delivery_tag=1, values=values, body=b""
    )
    return bide.Message(delivery, None, NOW)


def group_in_servicepulse(error: BaseException) -> str | None:
    """The frame by which ServiceControl groups a failure; None for "No stacktrace"."""
    text = ExceptionText.of(error)
    stack = text.dotnet_stack.replace(text.message, "") if text.message else text.dotnet_stack
    found = FRAME.search(stack)
    return None if found is None else f"{found['type']}.{found['method']}"


def caught(function: Callable[[], None]) -> BaseException:
    try:
        function()
    except Exception as error:  # noqa: BLE001 (any that the function raises)
        return error
    raise AssertionError


def fails() -> None:
    raise ValueError("the shop is closed (until 9)")


def fails_with_a_number() -> None:
    raise KeyError(1)


def fails_silently() -> None:
    raise ValueError


def fails_from_another() -> None:
    try:
        fails()
    except ValueError as error:
        raise RuntimeError("no receipt") from error


@pytest.mark.parametrize("function", [fails, fails_with_a_number, fails_silently, fails_from_another])
def test_servicepulse_groups_failures_by_the_function_that_raised(function: Callable[[], None]) -> None:
    assert group_in_servicepulse(caught(function)) == f"{__name__}.{function.__name__}"


def test_servicepulse_groups_failures_of_nested_functions() -> None:
    def inner() -> None:
        raise ValueError("x")

    name = test_servicepulse_groups_failures_of_nested_functions.__name__
    assert group_in_servicepulse(caught(inner)) == f"{__name__}.{name}.<locals>.inner"


def test_servicepulse_groups_failures_of_code_without_a_file() -> None:
    code = compile("def fail(): raise ValueError('x y')", "<string>", "exec")
    names: dict[str, Any] = {"__name__": "generated"}
    exec(code, names)
    assert group_in_servicepulse(caught(names["fail"])) == "generated.fail"


def test_servicepulse_groups_failures_of_a_program_by_its_file() -> None:
    code = compile("def fail(): raise ValueError('x y')", "/srv/my shop/billing.py", "exec")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)
    assert group_in_servicepulse(caught(names["fail"])) == "billing.fail"
    assert ExceptionText.of(caught(names["fail"])).dotnet_frame == "at billing.fail() in /srv/my shop/billing.py:line 1"


def test_an_error_that_was_not_raised_has_no_frame() -> None:
    text = ExceptionText.of(ValueError("never raised"))
    assert text.dotnet_stack == text.stack


ENCLOSED = (
    "Shop.RushOrder, Shop.Messages, Version=1.0.0.0, Culture=neutral, PublicKeyToken=null;"
    "Shop.Envelope`1[[Shop.Order, Shop.Messages, Version=1.0.0.0]], Shop.Messages;"
    "Shop.IPlaceOrder, Shop.Messages;; "
)


def test_all_enclosed_types_are_read_in_order() -> None:
    values = {"type": "Shop.RushOrder", "headers": {"NServiceBus.EnclosedMessageTypes": ENCLOSED}}
    generic = "Shop.Envelope`1[[Shop.Order, Shop.Messages, Version=1.0.0.0]]"
    assert message_types(values) == ("Shop.RushOrder", generic, "Shop.IPlaceOrder")
    assert message_type({"headers": values["headers"]}) == "Shop.RushOrder"
    assert message_types({"type": "order"}) == ("order",)
    assert message_types({"headers": {"NServiceBus.EnclosedMessageTypes": "]];[Shop.A"}}) == ("]]", "[Shop.A")
    assert message_types({"headers": None}) == ()
    assert message_type({}) is None


async def test_a_message_reaches_the_handler_of_its_most_derived_type() -> None:
    handlers, called = Handlers(1), list[str]()

    async def base(_: bide.Message) -> None:
        called.append("base")

    async def derived(_: bide.Message) -> None:
        called.append("derived")

    handlers.add(base, "Shop.IPlaceOrder")
    message = received({"NServiceBus.EnclosedMessageTypes": ENCLOSED}, type="Shop.RushOrder")
    await handlers.handle(message)
    handlers.add(derived, "Shop.RushOrder")
    await handlers.handle(message)
    assert called == ["base", "derived"]
    with pytest.raises(UnknownMessageTypeError, match=r"'Shop\.A' or 'Shop\.B'"):
        await handlers.handle(received({"NServiceBus.EnclosedMessageTypes": "Shop.A;Shop.B"}))


RETRIED = {"ServiceControl.Retry.UniqueMessageId": "u"}


@pytest.mark.parametrize(
    ("headers", "retries"),
    [
        ({"bide-retries": 2}, 2),
        ({"NServiceBus.Retries": "2"}, 2),
        # A .NET endpoint on the same queue has counted on.
        ({"bide-retries": "1", "NServiceBus.Retries": "2"}, 2),
        # ServiceControl removes NServiceBus.Retries.
        ({"bide-retries": "3", **RETRIED}, 0),
        ({"bide-retries": "3", "ServiceControl.EditOf": "u"}, 0),
        # bide has counted since.
        ({"bide-retries": 1, **RETRIED}, 1),
        ({"bide-retries": 1, "NServiceBus.Retries": "1", **RETRIED}, 1),
    ],
)
def test_a_retry_by_servicecontrol_starts_the_count_again(headers: dict[str, Any], retries: int) -> None:
    assert History.read(headers).retries == retries


def test_a_retry_by_servicecontrol_starts_the_count_of_deliveries_again() -> None:
    assert History.read({"bide-deliveries": "9", **RETRIED}).deliveries == 0
    assert History.read({"bide-deliveries": 9, **RETRIED}).deliveries == 9


@pytest.mark.parametrize("header", ["ServiceControl.Retry.UniqueMessageId", "ServiceControl.EditOf"])
def test_a_message_that_servicecontrol_retries_does_not_expire(header: str) -> None:
    """As with a retry by ``bide errors``, the decision of the operator takes precedence."""
    expiring = {"bide-expiration": "1000", "bide-expires": "1", "bide-due": 1}
    assert received(expiring).expired
    retried = received({name: str(value) for name, value in expiring.items()} | {header: "u"})
    assert not retried.expired
    assert retried.expiration is None
    # Nor do the copies that bide makes of it.
    again = copies.copy_of(retried.as_sent(), b"", queue="q", headers={}, sent_by=None, delay=timedelta(seconds=1))
    late = received({**again.headers, "bide-due": 1})
    assert not late.expired


SENT = NOW - timedelta(minutes=10)


def wire(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%S:%f Z")


@pytest.mark.parametrize(
    ("headers", "late"),
    [
        ({"NServiceBus.DeliverAt": wire(NOW - timedelta(milliseconds=40)), DELAY: 60}, timedelta(milliseconds=40)),
        ({"NServiceBus.TimeSent": wire(SENT), DELAY: 599}, timedelta(seconds=1)),
        # A delayed retry keeps the due time of the sender.
        (
            {
                "NServiceBus.DeliverAt": wire(SENT),
                "NServiceBus.Retries": "2",
                "NServiceBus.Retries.Timestamp": wire(NOW - timedelta(seconds=21)),
                DELAY: 20,
            },
            timedelta(seconds=1),
        ),
        # Copies that were not delayed, such as a retry by ServiceControl.
        ({"NServiceBus.DeliverAt": wire(SENT)}, None),
        ({"NServiceBus.TimeSent": wire(SENT)}, None),
        ({DELAY: 60}, None),
        ({DELAY: "many", "NServiceBus.TimeSent": wire(SENT)}, None),
    ],
)
def test_messages_delayed_by_dotnet_have_a_due_time(headers: dict[str, Any], late: timedelta | None) -> None:
    message = received(headers)
    assert message.lateness == late
    assert message.due == (None if late is None else NOW - late)


@pytest.mark.parametrize("exchange", ["nsb.v2.delay-level-00", "nsb.delay-level-03", "nsb.v2.delay-delivery"])
def test_a_message_delayed_by_dotnet_was_sent_to_a_queue(exchange: str) -> None:
    message = received({DELAY: 60}, exchange=exchange, routing_key="0." * 28 + "Billing.Sales")
    assert (message.exchange, message.routing_key) == ("", "Billing.Sales")
    assert received({}, exchange=exchange).exchange == exchange


def test_a_confirmation_needs_a_retry_and_a_queue() -> None:
    acknowledge = {"ServiceControl.Retry.AcknowledgementQueue": "error"}
    assert retry_confirmation(RETRIED, NOW) is None
    assert retry_confirmation(acknowledge, NOW) is None
    confirmation = retry_confirmation(RETRIED | acknowledge, NOW)
    assert confirmation is not None
    assert (str(confirmation.target), confirmation.body) == ("q:error", b"")
    assert confirmation.headers == {
        "ServiceControl.Retry.Successful": "2026-11-22 12:00:00:000000 Z",
        "ServiceControl.Retry.UniqueMessageId": "u",
        "NServiceBus.ControlMessage": "True",
    }
    with pytest.raises(DelayQueueError):
        retry_confirmation(RETRIED | {"ServiceControl.Retry.AcknowledgementQueue": "nsb.v2.delay-level-00"}, NOW)
