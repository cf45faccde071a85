"""Messages of an endpoint to ServiceControl."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from bide.delay.recognition import refuse_target
from bide.messages.outgoing import OutgoingMessage
from bide.messages.prepared import check_message
from bide.recoverability.history import SERVICECONTROL_RETRY, nservicebus_time

if TYPE_CHECKING:
    from bide.messages.prepared import PreparedMessage

_CONFIRMATION_QUEUE: Final = "ServiceControl.Retry.AcknowledgementQueue"
"""Header of a message that ServiceControl retried: the queue for the confirmation that it was handled."""

_SUCCESSFUL: Final = "ServiceControl.Retry.Successful"
_CONTROL_MESSAGE: Final = "NServiceBus.ControlMessage"


def retry_confirmation(headers: Mapping[str, Any], now: datetime) -> PreparedMessage | None:
    """The message that reports a successful retry to ServiceControl; None if ServiceControl did not retry the message.

    Without it, ServicePulse shows the retry as issued for ever.

    Raises:
        InvalidInputError: the queue in the headers is not a possible target.
    """
    retried, queue = headers.get(SERVICECONTROL_RETRY), headers.get(_CONFIRMATION_QUEUE)
    if not isinstance(retried, str) or not isinstance(queue, str):
        return None
    refuse_target(queue)
    report = {_SUCCESSFUL: nservicebus_time(now), SERVICECONTROL_RETRY: retried, _CONTROL_MESSAGE: "True"}
    return check_message(OutgoingMessage(b"", to=queue, headers=report))
