"""Messages of an endpoint to ServiceControl: confirmed retries, audit copies, heartbeats."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from bide.delay.received import SERVICECONTROL_RETRY
from bide.delay.recognition import refuse_target
from bide.errors import (
    AccessRefusedError,
    BideError,
    ClosedError,
    InvalidInputError,
    TargetNotFoundError,
    UnroutableError,
)
from bide.messages.outgoing import OutgoingMessage
from bide.messages.prepared import check_message
from bide.recoverability import copies
from bide.recoverability.history import (
    NSERVICEBUS_RETRIES,
    NSERVICEBUS_SENT,
    nservicebus_time,
)
from bide.recoverability.message_types import ENCLOSED_TYPES
from bide.recoverability.report import NSB_ENDPOINT, NSB_HOST, NSB_HOST_ID, NSB_MACHINE
from bide.runtime.host import HOST, host_id
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from bide.client.client import Client
    from bide.client.forwarder import Forwarder
    from bide.client.message import Message
    from bide.endpoint.event import Event
    from bide.endpoint.settings import EndpointSettings
    from bide.messages.prepared import PreparedMessage

log = logger(__name__)

HEARTBEAT: Final = timedelta(seconds=10)
"""The interval of heartbeats: NServiceBus's default. ServiceControl reports an endpoint after 40 s without one."""

_LIFETIME: Final = 4
"""How many intervals a heartbeat is valid."""

_CONFIRMATION_QUEUE: Final = "ServiceControl.Retry.AcknowledgementQueue"
"""Header of a message that ServiceControl retried: the queue for the confirmation that it was handled."""

_SUCCESSFUL: Final = "ServiceControl.Retry.Successful"
_CONFIRMED: Final = "ServiceControl.Retry.AcknowledgementSent"
_CONTROL_MESSAGE: Final = "NServiceBus.ControlMessage"
_MESSAGE_ID: Final = "NServiceBus.MessageId"
_PLUGIN: Final = "ServiceControl.Plugin.Heartbeat.Messages"

_UNREACHABLE: Final = (InvalidInputError, TargetNotFoundError, UnroutableError, AccessRefusedError)
"""Errors of a report whose target is missing or refused. Repeating it could leave a handled message unsettled."""


def retry_confirmation(headers: Mapping[str, Any], now: datetime) -> PreparedMessage | None:
    """The message that reports a successful retry to ServiceControl; None if ServiceControl did not retry the message.

    Without this message, ServicePulse shows the retry as issued for ever.

    Raises:
        InvalidInputError: the queue in the headers is not a possible target.
    """
    retried, queue = headers.get(SERVICECONTROL_RETRY), headers.get(_CONFIRMATION_QUEUE)
    if not isinstance(retried, str) or not isinstance(queue, str):
        return None
    refuse_target(queue)
    report = {_SUCCESSFUL: nservicebus_time(now), SERVICECONTROL_RETRY: retried, _CONTROL_MESSAGE: "True"}
    return check_message(OutgoingMessage(b"", to=queue, headers=report))


def audit_copy(message: Message, event: Event, *, queue: str, confirmed: bool) -> PreparedMessage:
    """The copy of a handled message for the audit queue, with headers that describe the processing.

    Args:
        event: the event of the processing.
        queue: the audit queue.
        confirmed: whether a retry by ServiceControl was confirmed.
    """
    sent = message.as_sent()
    headers = {
        NSB_ENDPOINT: event.endpoint,
        NSB_MACHINE: HOST,
        NSB_HOST_ID: host_id(event.endpoint),
        NSB_HOST: HOST,
        "NServiceBus.ProcessingStarted": nservicebus_time(event.started_at or event.ended_at),
        "NServiceBus.ProcessingEnded": nservicebus_time(event.ended_at),
    }
    if (retries := message.headers.get(NSERVICEBUS_RETRIES)) is not None:
        headers[NSERVICEBUS_RETRIES] = retries
    if confirmed:
        headers[_CONFIRMED] = "true"
    if _MESSAGE_ID not in message.headers and message.message_id is not None:
        # To a message without this header, the client would add headers that make the copy look newly sent.
        headers[_MESSAGE_ID] = message.message_id
        if sent.sent_at is not None:
            headers[NSERVICEBUS_SENT] = nservicebus_time(sent.sent_at)
    return copies.copy_of(sent, message.body, queue=queue, headers=headers, sent_by=message.sent_by)


class ProcessingReports:
    """Reports that a message was handled: the confirmation of a retry by ServiceControl, and the copy for audits.

    Args:
        settings: how the endpoint treats its messages.
        forwarder: sends the reports.
        now: returns the current time.
    """

    def __init__(self, settings: EndpointSettings, forwarder: Forwarder, *, now: Callable[[], datetime]) -> None:
        self._settings = settings
        self._forwarder = forwarder
        self._now = now

    async def confirm_retry(self, message: Message) -> bool:
        """Report to ServiceControl that a message that it retried was handled. True if a report was sent."""
        try:
            confirmation = retry_confirmation(message.headers, self._now()) if self._settings.nservicebus else None
            if confirmation is not None:
                await self._forwarder.send(confirmation, final=_UNREACHABLE)
        except _UNREACHABLE as error:
            # Any sender can write the header that names the queue, so this must not fail a message that was handled.
            log.error("%s: cannot confirm the retry of %s: %s", self._settings.endpoint, message.message_id, error)
            return False
        return confirmation is not None

    async def audit(self, message: Message, event: Event, *, confirmed: bool) -> None:
        """Send the copy of a handled message to the audit queue, if the endpoint has one."""
        if (queue := self._settings.audit_queue) is None:
            return
        try:
            copy = audit_copy(message, event, queue=queue, confirmed=confirmed)
            await self._forwarder.send(copy, final=_UNREACHABLE)
        except _UNREACHABLE as error:
            log.error("%s: cannot audit %s: %s", self._settings.endpoint, message.message_id, error)


class Heartbeats:
    """Reports to ServiceControl that an endpoint has started, and then regularly that it runs.

    A heartbeat that cannot be sent does not stop the endpoint. It is logged as a warning if the heartbeat before was
    sent, or failed with another kind of error.

    Args:
        endpoint: the endpoint's name.
        address: the queue that it consumes.
        queue: the queue of the ServiceControl instance.
    """

    def __init__(self, endpoint: str, *, address: str, queue: str) -> None:
        self._endpoint = endpoint
        self._address = address
        self._queue = queue

    async def run(self, client: Client) -> None:
        """Send heartbeats until cancelled, or until the client is closed."""
        started, is_registered = datetime.now(UTC), False
        last: type[BideError] | None = None
        while True:
            try:
                if not is_registered:
                    await client.forward(self._registration(started))
                    is_registered = True
                await client.forward(self._heartbeat(datetime.now(UTC)))
                last = None
            except ClosedError:
                return
            except BideError as error:
                level = logging.DEBUG if type(error) is last else logging.WARNING
                log.log(level, "%s: cannot send a heartbeat to %s: %s", self._endpoint, self._queue, error)
                last = type(error)
            await asyncio.sleep(HEARTBEAT.total_seconds())  # until the next heartbeat

    def _registration(self, started: datetime) -> PreparedMessage:
        properties = {"Machine": HOST, "ProcessID": str(os.getpid()), "PathToExecutable": sys.executable}
        values = {
            "HostId": self._host_id,
            "Endpoint": self._endpoint,
            "StartedAt": _json_time(started),
            "HostProperties": properties,
            "HostDisplayName": HOST,
            "Host": HOST,
        }
        return self._message("RegisterEndpointStartup", values)

    def _heartbeat(self, now: datetime) -> PreparedMessage:
        values = {
            "ExecutedAt": _json_time(now),
            "EndpointName": self._endpoint,
            "HostId": self._host_id,
            "Host": HOST,
        }
        return self._message("EndpointHeartbeat", values)

    @property
    def _host_id(self) -> str:
        return str(UUID(host_id(self._endpoint)))

    def _message(self, kind: str, values: Mapping[str, Any]) -> PreparedMessage:
        return check_message(
            OutgoingMessage(
                json.dumps(values),
                to=self._queue,
                type=f"{_PLUGIN}.{kind}",
                headers={ENCLOSED_TYPES: f"{_PLUGIN}.{kind}"},
                content_type="application/json",
                reply_to=self._address,
                expiration=HEARTBEAT * _LIFETIME,
            )
        )


def _json_time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
