"""Every error that bide raises, in one tree.

::

    BideError
    ├── InvalidInputError (also a ValueError): the caller passed an invalid value; nothing was sent
    │   ├── InvalidDelayError          not a number, negative, or longer than the infrastructure can hold
    │   ├── InvalidDueTimeError        a datetime without a time zone, or beyond the longest delay
    │   ├── InvalidNameError           a name, key or address that the broker or the infrastructure cannot use
    │   ├── ReservedHeaderError        a header that bide or the broker sets itself
    │   ├── UnsupportedTargetError     this infrastructure cannot deliver to this kind of target
    │   ├── TargetNotAllowedError      a message names a target that is not on the allow-list
    │   ├── InvalidRecurrenceError     a rule for repeated runs that cannot be read, or never matches
    │   ├── DelayQueueError            a queue or exchange of a delay infrastructure, where another one is needed
    │   ├── MessageTooLargeError       a body over the limit
    │   ├── InvalidUrlError            a broker URL that cannot be read
    │   ├── InvalidOptionError         an option of the Spark data source that is unknown or cannot be read
    │   ├── InvalidColumnError         a table to be written has a column that is missing, unknown or of a wrong type
    │   ├── InvalidRowError            rows of a table that cannot be sent
    │   └── InvalidTopologyError       a topology that contradicts itself
    ├── BrokerError: the broker refused an operation, or the connection to it failed
    │   ├── BrokerUnreachableError     nothing answers at that address
    │   │   └── TlsError               the TLS handshake failed
    │   ├── AuthenticationError        wrong user name or password
    │   ├── VirtualHostError           the virtual host is unknown, or not open to this user
    │   ├── AccessRefusedError         the user lacks the permission for this exchange or queue
    │   ├── UnsupportedBrokerError     the release is too old, or a feature is switched off
    │   │   └── NotModelledError       the broker in memory has no rules for this feature of RabbitMQ
    │   ├── DeclarationMismatchError   an exchange or queue of this name exists with other properties
    │   ├── NotEmptyError              a queue to delete still holds messages
    │   ├── QueueBusyError             a quorum queue does not answer the broker, so its messages cannot be counted
    │   ├── TargetNotFoundError        the exchange or queue does not exist
    │   ├── NotAppliedError            the delay infrastructure is not on this virtual host
    │   ├── ScheduleLogError           records of a schedule log were lost, or it is full
    │   ├── MigrationRunningError      another migration of this delay infrastructure runs
    │   ├── DeliveryLimitError         the queue drops a message before the endpoint has made all its attempts
    │   ├── OffsetsLostError           the stream no longer has the messages to read
    │   ├── ConsumerCancelledError     the broker ended the consumer (its queue was deleted)
    │   ├── ConnectionLostError        the connection broke
    │   │   └── DeliveryLostError      settled too late: the broker delivers that message again
    │   ├── ManagementApiError         the management API gave an unexpected answer
    │   ├── ProtocolError              the peer broke the rules of AMQP 0-9-1
    │   └── PublishError: a message was not accepted
    │       ├── UnroutableError        the broker returned it: no queue takes it
    │       ├── PublishRefusedError    negatively confirmed: no queue stored it
    │       ├── PublishInDoubtError    the connection broke before the confirm came
    │       │   └── BulkInDoubtError   the same for the unconfirmed messages of a bulk publish
    │       ├── UnsentError            the bulk publish ended before it sent this message
    │       └── BulkPublishError       some messages of a bulk publish were not accepted
    ├── MessageError: a received message cannot be handled
    │   ├── UndecodableMessageError    its body cannot be read (also a ValueError)
    │   ├── ScheduleRecordError        a record of a schedule log that cannot be read
    │   │   └── NewerRecordError       a later release of bide wrote it
    │   ├── UnknownMessageTypeError    the endpoint has no handler for its type
    │   ├── PoisonMessageError         the consumer stopped during every attempt to process it
    │   └── NotFoundError              no such message is in the queue
    ├── TimeoutStoreError              a database refuses, lacks timeouts, or has an unfinished run
    ├── FolderInUseError               another process works with this ledger, audit folder or index
    ├── ScheduleIndexError             the index of a gate is damaged, or lacks records; the gate builds it anew
    ├── CallError: a request got no successful reply
    │   ├── ReplyTimeoutError          no reply came in time
    │   ├── ReplyLostError             the reply queue is gone
    │   ├── NoGateAnswerError          no gate answered in time: an operation on schedules is recorded
    │   └── RemoteError                the server replied that it failed
    ├── ClosedError                    an object was used after it was closed
    └── LocalBrokerError: the private broker failed
        └── BrokerNotFoundError        no RabbitMQ is installed where bide looks

The first paragraph of a class's docstring is its default message.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from typing import Any


class BideError(Exception):
    """Something in bide failed."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(
            message if message is not None else (self.__doc__ or type(self).__name__).partition("\n\n")[0].strip()
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is unpickled by calling its class with the message alone; some classes need more.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]  # not in typeshed


class InvalidInputError(BideError, ValueError):
    """An invalid value was passed; nothing was sent."""


class InvalidDelayError(InvalidInputError):
    """The delay is not a number, negative, or longer than the infrastructure can hold."""


class InvalidDueTimeError(InvalidInputError):
    """The due time has no time zone, or lies beyond the longest delay."""


class InvalidNameError(InvalidInputError):
    """The broker or the delay infrastructure cannot use this name, key or address."""


class ReservedHeaderError(InvalidInputError):
    """bide or the broker sets this header itself."""


class UnsupportedTargetError(InvalidInputError):
    """This delay infrastructure cannot deliver to this kind of target."""


class TargetNotAllowedError(InvalidInputError):
    """The message names a target that is not on the allow-list."""


class InvalidRecurrenceError(InvalidInputError):
    """The rule for repeated runs cannot be read, or no time ever matches it."""


class DelayQueueError(InvalidInputError):
    """The queue or exchange belongs to a delay infrastructure or a schedule log: name another one."""


class MessageTooLargeError(InvalidInputError):
    """The body is larger than the broker accepts."""


class InvalidUrlError(InvalidInputError):
    """The broker URL cannot be read."""


class InvalidOptionError(InvalidInputError):
    """An option of the data source is unknown, or its value cannot be read."""


class InvalidColumnError(InvalidInputError):
    """A column of the table to be written is missing, unknown, or of a wrong type."""


class InvalidRowError(InvalidInputError):
    """Rows of the table to be written cannot be sent."""


class InvalidTopologyError(InvalidInputError):
    """The topology contradicts itself.

    Attributes:
        problems: every problem found, one sentence each.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


class BrokerError(BideError):
    """The broker refused an operation, or the connection to it failed.

    Attributes:
        reply_code: the AMQP 0-9-1 reply code that the broker gave, if it gave one.
    """

    def __init__(self, message: str | None = None, *, reply_code: int | None = None) -> None:
        super().__init__(message)
        self.reply_code = reply_code


class BrokerUnreachableError(BrokerError):
    """Nothing answers at the broker's address."""


class TlsError(BrokerUnreachableError):
    """The TLS handshake failed."""


class AuthenticationError(BrokerError):
    """The broker does not accept this user name and password."""


class VirtualHostError(BrokerError):
    """The virtual host does not exist, or this user may not enter it."""


class AccessRefusedError(BrokerError):
    """The user lacks the permission for this operation."""


class UnsupportedBrokerError(BrokerError):
    """The broker is too old, or lacks a feature that bide needs."""


class NotModelledError(UnsupportedBrokerError):
    """The broker in memory has no rules for this feature of RabbitMQ: use a real one, see ``bide broker start``."""


class DeclarationMismatchError(BrokerError):
    """An exchange or a queue of this name exists with other properties.

    Attributes:
        kind: ``"exchange"`` or ``"queue"``.
        name: its name.
        argument: the property or argument that differs.
        wanted: the value in the declaration, as the broker prints it.
        found: the value on the broker, as the broker prints it.
        applied: the items declared before the mismatch, as text.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        name: str,
        argument: str | None = None,
        wanted: str | None = None,
        found: str | None = None,
        applied: str = "",
        reply_code: int | None = None,
    ) -> None:
        super().__init__(message, reply_code=reply_code)
        self.kind = kind
        self.name = name
        self.argument = argument
        self.wanted = wanted
        self.found = found
        self.applied = applied


class NotEmptyError(BrokerError):
    """A queue still holds messages.

    Attributes:
        counts: messages by queue name.
    """

    def __init__(self, message: str, *, counts: Mapping[str, int], reply_code: int | None = None) -> None:
        super().__init__(message, reply_code=reply_code)
        self.counts = dict(counts)


class QueueBusyError(BrokerError):
    """A quorum queue is too busy to count its messages."""


class TargetNotFoundError(BrokerError):
    """The target exchange or queue does not exist."""


class NotAppliedError(BrokerError):
    """The delay infrastructure is not on this virtual host."""


class ScheduleLogError(BrokerError):
    """Records of a schedule log were lost, or it is full."""


class MigrationRunningError(BrokerError):
    """Another migration of this delay infrastructure runs."""


class DeliveryLimitError(BrokerError):
    """The queue drops a message before the endpoint has made all its attempts."""


class OffsetsLostError(BrokerError):
    """The stream no longer has the messages to read.

    Attributes:
        stream: its name.
        offset: the first missing offset.
        found: the next offset that the stream still has; None if there is none.
    """

    def __init__(self, message: str | None = None, *, stream: str = "", offset: int = 0, found: int | None = None):
        super().__init__(message)
        self.stream = stream
        self.offset = offset
        self.found = found


class ConsumerCancelledError(BrokerError):
    """The broker cancelled the consumer."""


class ConnectionLostError(BrokerError):
    """The connection to the broker broke."""


class DeliveryLostError(ConnectionLostError):
    """The connection that delivered this message was lost; the broker delivers it again."""


class ManagementApiError(BrokerError):
    """The management API gave an unexpected answer."""


class ProtocolError(BrokerError):
    """The peer broke the rules of AMQP 0-9-1."""


class PublishError(BrokerError):
    """A message was not accepted.

    Attributes:
        message_id: its message id.
    """

    def __init__(self, message: str | None = None, *, message_id: str | None = None, reply_code: int | None = None):
        super().__init__(message, reply_code=reply_code)
        self.message_id = message_id


class UnroutableError(PublishError):
    """The broker returned the message: no queue takes it."""


class PublishRefusedError(PublishError):
    """The broker confirmed negatively: no queue stored the message."""


class PublishInDoubtError(PublishError):
    """The connection broke before the confirm came: the message may or may not have been stored."""


class BulkInDoubtError(PublishInDoubtError):
    """A bulk publish ended before all confirms came. It does not send the unconfirmed messages again.

    Attributes:
        reason: why it ended.
        in_doubt: a :class:`bide.PublishResult` for each message that was sent and not confirmed.
        unsent: a :class:`bide.PublishResult` for each message that was taken from the input and not sent.
        report: a :class:`bide.PublishSummary` of the other messages, if their results were not returned one by one.
    """

    def __init__(
        self,
        reason: str | None = None,
        *,
        in_doubt: tuple[Any, ...] = (),
        unsent: tuple[Any, ...] = (),
        report: Any = None,
    ) -> None:
        super().__init__(
            None
            if reason is None
            else f"it is not known whether the broker has {len(in_doubt)} of the messages, and {len(unsent)} more were "
            f"taken and not sent: {reason}; send them again with the same message ids"
            if in_doubt or unsent
            else f"the publishing ended early: {reason}"
        )
        self.reason = reason or ""
        self.in_doubt = in_doubt
        self.unsent = unsent
        self.report = report


class UnsentError(PublishError):
    """The bulk publish ended before it sent this message, which it had taken from the input."""


class BulkPublishError(PublishError):
    """Some messages were not accepted.

    Attributes:
        report: a :class:`bide.PublishSummary` with the counts, and the results of the messages not accepted.
    """

    def __init__(self, message: str | None = None, *, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class MessageError(BideError):
    """A received message cannot be handled."""


class UndecodableMessageError(MessageError, ValueError):
    """The body of the message cannot be read."""


class ScheduleRecordError(MessageError):
    """The record of a schedule log cannot be read."""


class NewerRecordError(ScheduleRecordError):
    """A later release of bide wrote this record of a schedule log."""


class UnknownMessageTypeError(MessageError):
    """The endpoint has no handler for messages of this type."""


class PoisonMessageError(MessageError):
    """The message was delivered repeatedly, and no attempt to process it came to an end."""


class NotFoundError(MessageError):
    """No such message is in the queue."""


class TimeoutStoreError(BideError):
    """The timeout database refuses an operation, has no timeouts, or has an unfinished run."""


class FolderInUseError(BideError):
    """Another process works with this folder."""


class ScheduleIndexError(BideError):
    """The index of a gate is damaged, or lacks records. The gate builds it anew."""


class CallError(BideError):
    """The request got no successful reply.

    Attributes:
        correlation_id: the correlation id of the request; empty if it had none.
    """

    def __init__(self, message: str | None = None, *, correlation_id: str = "") -> None:
        super().__init__(message)
        self.correlation_id = correlation_id


class ReplyTimeoutError(CallError):
    """No reply came in time: the server may have done the work, or may still do it."""


class ReplyLostError(CallError):
    """The reply queue is gone: the server may have done the work."""


class NoGateAnswerError(CallError):
    """No gate answered in time: an operation that is recorded takes effect when a gate reads it."""


class RemoteError(CallError):
    """The server took the request and failed."""


class ClosedError(BideError):
    """This object was closed and can no longer be used."""


class LocalBrokerError(BideError):
    """The private broker failed."""


class BrokerNotFoundError(LocalBrokerError):
    """No RabbitMQ server is installed where bide looks for one."""
