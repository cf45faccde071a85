"""What an operator does with failed messages: look, retry, edit, archive, discard; and the record of it."""

from __future__ import annotations

from bide.lifecycle.audit import AuditRecord, read_audit
from bide.lifecycle.error_queue import ErrorQueue
from bide.lifecycle.moved import Moved
from bide.lifecycle.summary import Group, Summary
from bide.recoverability.failed import FailedMessage
from bide.recoverability.selection import Selection

__all__ = ["AuditRecord", "ErrorQueue", "FailedMessage", "Group", "Moved", "Selection", "Summary", "read_audit"]
