"""Error queues: browse, retry, edit, archive and discard failed messages."""

from __future__ import annotations

from bide.error_queues.error_queue import ErrorQueue
from bide.error_queues.grouping import Group, Summary
from bide.error_queues.operation_result import OperationResult
from bide.error_queues.operator_log import OperatorLogRecord, read_operator_log
from bide.recoverability.failed import FailedMessage
from bide.recoverability.selection import Selection

__all__ = [
    "ErrorQueue",
    "FailedMessage",
    "Group",
    "OperationResult",
    "OperatorLogRecord",
    "Selection",
    "Summary",
    "read_operator_log",
]
