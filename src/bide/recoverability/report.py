"""Headers that describe a failure on a parked message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from bide.durations import to_milliseconds
from bide.recoverability.exception_text import ExceptionText
from bide.recoverability.history import HEADER_ATTEMPT_TIMES, History, nservicebus_time

HEADER_ENDPOINT: Final = "bide-endpoint"
"""Header with the name of the endpoint that failed."""

HEADER_FAILED_QUEUE: Final = "bide-failed-queue"
"""Header with the queue that the message failed on."""

HEADER_FAILED_AT: Final = "bide-failed-at"
"""Header with the time of the failure: milliseconds since the Unix epoch."""

HEADER_ERROR_TYPE: Final = "bide-error-type"
"""Header with the class of the exception."""

HEADER_ERROR_MESSAGE: Final = "bide-error-message"
"""Header with the message of the exception."""

HEADER_ERROR_STACK: Final = "bide-error-stack"
"""Header with the traceback of the exception."""

HEADER_ERROR_FRAME: Final = "bide-error-frame"
"""Header with the frame that raised the exception."""

HEADER_INNER_TYPE: Final = "bide-inner-error-type"
"""Header with the class of the exception's cause."""

HEADER_INNER_MESSAGE: Final = "bide-inner-error-message"
"""Header with the message of the exception's cause."""

HEADER_HOST: Final = "bide-host"
"""Header with the host of the endpoint."""

HEADER_PROCESS: Final = "bide-process"
"""Header with the process id of the endpoint."""

NSB_ENDPOINT: Final = "NServiceBus.ProcessingEndpoint"
NSB_MACHINE: Final = "NServiceBus.ProcessingMachine"
NSB_HOST_ID: Final = "$.diagnostics.hostid"
NSB_HOST: Final = "$.diagnostics.hostdisplayname"
NSB_FAILED_QUEUE: Final = "NServiceBus.FailedQ"
NSB_FAILED_AT: Final = "NServiceBus.TimeOfFailure"
NSB_EXCEPTION: Final = "NServiceBus.ExceptionInfo."

FAILURE_HEADERS: Final = frozenset(
    {
        *(HEADER_ENDPOINT, HEADER_FAILED_QUEUE, HEADER_FAILED_AT, HEADER_HOST, HEADER_PROCESS),
        *(HEADER_ERROR_TYPE, HEADER_ERROR_MESSAGE, HEADER_ERROR_STACK, HEADER_ERROR_FRAME),
        *(HEADER_INNER_TYPE, HEADER_INNER_MESSAGE),
        *(NSB_ENDPOINT, NSB_MACHINE, NSB_FAILED_QUEUE, NSB_FAILED_AT, "NServiceBus.FLRetries"),
        *(NSB_HOST_ID, NSB_HOST),
    }
)
"""Headers that describe a failure, in addition to all that start with :data:`NSB_EXCEPTION`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """The failure that a message is parked for.

    Attributes:
        endpoint: the endpoint that it failed on.
        queue: the queue that it failed on.
        failed_at: when it failed.
        explanation: the exception.
        history: the attempts, including the last one.
        host: the host name of the machine that it failed on.
        process: the id of the process that it failed in.
        host_id: the id of the endpoint on that machine, for ServiceControl; empty to leave it out.
    """

    endpoint: str
    queue: str
    failed_at: datetime
    explanation: ExceptionText
    history: History
    host: str
    process: int
    host_id: str = ""

    def headers(self, *, nservicebus: bool) -> dict[str, Any]:
        """The headers of the parked message.

        Args:
            nservicebus: use the header names that ServiceControl reads, and bide's own where it has none.
        """
        history = self.history.headers(max_failure_times=len(self.history.times))
        # The attempt times need no unused elements, because a parked message is not retried.
        history[HEADER_ATTEMPT_TIMES] = [to_milliseconds(one) for one in self.history.times]
        what = self.explanation
        headers: dict[str, Any] = {
            **history,
            HEADER_PROCESS: self.process,
            HEADER_ERROR_FRAME: what.frame,
        }
        if what.inner_message is not None:
            headers[HEADER_INNER_MESSAGE] = what.inner_message
        names: Mapping[str, Any] = self._nservicebus() if nservicebus else self._own()
        return headers | {name: value for name, value in names.items() if value is not None}

    def _own(self) -> Mapping[str, Any]:
        return {
            HEADER_ENDPOINT: self.endpoint,
            HEADER_FAILED_QUEUE: self.queue,
            HEADER_FAILED_AT: to_milliseconds(self.failed_at),
            HEADER_HOST: self.host,
            HEADER_ERROR_TYPE: self.explanation.type,
            HEADER_ERROR_MESSAGE: self.explanation.message,
            HEADER_ERROR_STACK: self.explanation.stack,
            HEADER_INNER_TYPE: self.explanation.inner_type,
        }

    def _nservicebus(self) -> Mapping[str, Any]:
        return {
            NSB_ENDPOINT: self.endpoint,
            NSB_MACHINE: self.host,
            NSB_HOST_ID: self.host_id or None,
            NSB_HOST: self.host,
            NSB_FAILED_QUEUE: self.queue,
            NSB_FAILED_AT: nservicebus_time(self.failed_at),
            f"{NSB_EXCEPTION}ExceptionType": self.explanation.type,
            f"{NSB_EXCEPTION}InnerExceptionType": self.explanation.inner_type,
            f"{NSB_EXCEPTION}Message": self.explanation.message,
            f"{NSB_EXCEPTION}Source": self.explanation.frame,
            f"{NSB_EXCEPTION}StackTrace": self.explanation.dotnet_stack,
        }


def without_failure(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the headers that describe a failure."""
    return {
        name: value
        for name, value in headers.items()
        if name not in FAILURE_HEADERS and not name.startswith(NSB_EXCEPTION)
    }
