"""Messages made of stored timeouts."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from bide.delay.allowed_targets import AllowedTargets
from bide.delay.cascade_keys import HEADER_DELAY
from bide.delay.nservicebus import NATIVE_MESSAGE_ID, format_timestamp, is_blank
from bide.delay.protocol import QueueTarget
from bide.durations import format_delay
from bide.errors import InvalidInputError
from bide.messages.json_headers import headers_from_json
from bide.messages.outgoing import OutgoingMessage
from bide.schedules.outgoing import NumberedSchedule
from bide.schedules.requests import RequestId
from bide.timeouts.tables import StoredTimeout

DELIVER_AT: Final = "NServiceBus.DeliverAt"
_SAGA: Final = "NServiceBus.SagaId"


def timeout_message(
    timeout: StoredTimeout, *, now: datetime, max_delay: timedelta, allowed: AllowedTargets
) -> OutgoingMessage:
    """The message of a stored timeout, as NServiceBus would send it.

    It has the stored headers and body, and the properties that NServiceBus.RabbitMQ derives from the headers. Its
    message id is the header ``NServiceBus.MessageId`` if it is not blank, or else the id of the timeout. So copies have
    the same id.

    Args:
        timeout: the stored timeout.
        now: the current time.
        max_delay: the longest delay of the infrastructure.
        allowed: the targets that timeouts may have.

    Raises:
        InvalidInputError: the destination is not allowed; or the destination, the headers or the body cannot be read;
            or the delay is too long.
    """
    if timeout.due - now > max_delay:
        # The text does not contain the delay, so that all such timeouts are counted under one reason.
        raise InvalidInputError(f"the delay is longer than the infrastructure can hold ({format_delay(max_delay)})")
    destination, body = timeout.destination, timeout.state
    if not isinstance(destination, str) or not destination:
        raise InvalidInputError("the timeout has no destination")
    allowed.check_delivery(QueueTarget(destination))
    if body is None:
        body = b""
    elif not isinstance(body, bytes | str):
        raise InvalidInputError(f"the body is of type {type(body).__name__}: bytes or text is needed")
    headers = headers_from_json(timeout.headers)
    # The transport writes its own header with the delay.
    headers.pop(HEADER_DELAY, None)
    if is_blank(headers.get(NATIVE_MESSAGE_ID)):
        headers[NATIVE_MESSAGE_ID] = id_text(timeout.id)
    headers.setdefault(DELIVER_AT, format_timestamp(timeout.due))
    types = headers.get("NServiceBus.EnclosedMessageTypes")
    return OutgoingMessage(
        body,
        to=destination,
        deliver_at=timeout.due,
        headers=headers,
        message_id=headers[NATIVE_MESSAGE_ID],
        correlation_id=headers.get("NServiceBus.CorrelationId"),
        reply_to=headers.get("NServiceBus.ReplyToAddress"),
        content_type=headers.get("NServiceBus.ContentType"),
        type=types.partition(",")[0] if types else None,
    )


def id_text(identity: Any) -> str:
    """An id as text; a binary one in hexadecimal."""
    return identity.hex() if isinstance(identity, bytes) else str(identity)


def timeout_schedule(
    timeout: StoredTimeout, *, endpoint: str, request: RequestId, allowed: AllowedTargets
) -> NumberedSchedule:
    """The message of a stored timeout as a schedule, with the key ``timeout:<endpoint>:<saga>:<id>``.

    So ``bide schedule cancel --prefix timeout:Sales:<saga>:`` cancels the timeouts of a saga. The saga is the value of
    the header ``NServiceBus.SagaId``, or ``-`` without this header.

    Args:
        timeout: the stored timeout.
        endpoint: the name of the endpoint, as in the name of its table.
        request: the id of the operation. Give the same id when you send the timeout again.
        allowed: the targets that timeouts may have.

    Raises:
        InvalidInputError: the destination is not allowed; or the destination, the headers or the body cannot be read.
    """
    message = timeout_message(timeout, now=timeout.due, max_delay=timedelta(0), allowed=allowed)
    assert message.headers is not None
    saga = message.headers.get(_SAGA) or "-"
    return NumberedSchedule(
        message.body,
        key=f"timeout:{endpoint}:{saga}:{id_text(timeout.id)}",
        request=request,
        to=message.to,
        deliver_at=timeout.due,
        headers=message.headers,
        message_id=message.message_id,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        content_type=message.content_type,
        type=message.type,
    )
