"""Settings of a write from its options, checked on the driver before any task starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

import pyarrow as pa
from pyarrow import fs

from bide.admin.locate import stream_port
from bide.amqp.url import DEFAULT_URL, ENVIRONMENT_VARIABLE, BrokerUrl
from bide.delay.by_name import LAYOUTS, QUEUE_TYPES, ROUTINGS, QueueType, Routing, make_infrastructure
from bide.delay.protocol import DelayInfrastructure
from bide.durations import parse_due_time
from bide.errors import InvalidInputError, InvalidOptionError
from bide.messages.checker import MessageChecker
from bide.messages.outgoing import OutgoingMessage
from bide.runtime.arguments import whole_number
from bide.spark.header_values import BIDE_HEADERS, BideHeaders
from bide.spark.options import Options
from bide.spark.overdue import OVERDUE_ACTIONS, OVERDUE_GRACE, OverdueAction

TEXT_OPTIONS: Final = (
    "correlation_id",
    "reply_to",
    "content_type",
    "content_encoding",
    "type",
    "user_id",
    "app_id",
)
"""Properties that are text, by their names as columns, as options and in OutgoingMessage."""

TARGET_OPTIONS: Final = ("queue", "exchange", "routing_key")
_FOR_ROWS: Final = (*TARGET_OPTIONS, "delay", "deliver_at", "priority", "persistent", "expiration", *TEXT_OPTIONS)

SINK_OPTIONS: Final = frozenset(
    {
        *("url", "declare", "isolated", "window", "timeout", "idPrefix", "rejects", "past", "bideHeaders"),
        *("producerName", "streamPort", "messagesPerSecond"),
        *("layout", "prefix", "maxDelay", "resolution", "lanes", "routing", "queueType"),
        *_FOR_ROWS,
    }
)
"""All options of a write. An option that replaces a column has the name of the column."""

_NOT_FOR_STREAMS: Final = ("exchange", "delay", "deliver_at", "isolated", "idPrefix", "rejects", "past")
"""Options that contradict ``producerName``."""

_WINDOW: Final = 10_000
_TIMEOUT: Final = timedelta(seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSettings:
    """The settings of a write, which are pickled for the tasks.

    Attributes:
        url: the URL of the broker.
        infrastructure: the delay infrastructure.
        declare: whether to declare the infrastructure on the broker if it is missing.
        constants: fields of all messages, by the names of :class:`bide.OutgoingMessage`; they replace columns.
        window: the largest number of unconfirmed messages of a task.
        timeout: time without any confirm after which a task fails.
        id_prefix: the prefix of the message ids that the sink generates; None for a default.
        rejects: the folder for invalid rows, unconfirmed messages, and overdue rows with ``past="reject"``; None to
            fail the task.
        past: what to do with rows that were due more than :data:`bide.spark.overdue.OVERDUE_GRACE` before the write
            began; None to fail the task.
        bide_headers: what to do with headers that bide set itself when the message was sent before; None to refuse
            them.
        rate: the largest number of messages that a task sends in a second; None without a limit.
        producer: the name under which a stream recognizes repeated rows; None to publish over AMQP 0-9-1.
        stream_port: the port of the stream protocol; None for RabbitMQ's default.
    """

    url: str = field(repr=False)
    infrastructure: DelayInfrastructure
    declare: bool = True
    constants: Mapping[str, Any] = field(default_factory=dict)
    window: int = _WINDOW
    timeout: timedelta = _TIMEOUT
    id_prefix: str | None = None
    rejects: str | None = None
    past: OverdueAction | None = None
    bide_headers: BideHeaders | None = None
    rate: int | None = None
    producer: str | None = None
    stream_port: int | None = None

    @classmethod
    def make(
        cls,
        url: str | None,
        *,
        infrastructure: DelayInfrastructure,
        declare: bool = True,
        constants: Mapping[str, Any],
        rejects: str | None = None,
        window: int = _WINDOW,
        past: OverdueAction | None = None,
    ) -> SinkSettings:
        """Create settings from values, for a write outside the data source.

        Args:
            url: the URL of the broker; None for ``BIDE_URL`` of this process, or RabbitMQ's default on this machine.
            rejects: a path or a URI.
            past: see the attribute.

        Raises:
            InvalidInputError: a value is invalid.
        """
        address = url or os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT_URL
        BrokerUrl.parse(address)
        # Rows may have targets of their own.
        target: dict[str, Any] = {} if {"to", "exchange"} & constants.keys() else {"to": "any"}
        MessageChecker().check(OutgoingMessage(b"", **target, **constants))
        folder = None if rejects is None else _folder(Options({"rejects": rejects}), "rejects")
        return cls(
            url=address,
            infrastructure=infrastructure,
            declare=declare,
            constants=constants,
            rejects=folder,
            window=whole_number("window", window, 1, 1_000_000),
            past=past,
        )

    @classmethod
    def read(cls, options: Options, environment: Mapping[str, str], *, is_keyed: bool = False) -> SinkSettings:
        """Read the options of a write.

        Args:
            is_keyed: whether the table has keys. Its rows are schedules then, which do not use the infrastructure.

        Raises:
            InvalidOptionError: an option is unknown or invalid, or contradicts another one.
            InvalidUrlError: the URL is invalid.
        """
        options.refuse_unknown(SINK_OPTIONS, purpose="writing")
        url = options.url(environment)
        BrokerUrl.parse(url)
        timeout = options.duration("timeout")
        if timeout == timedelta(0):
            raise InvalidOptionError("the option timeout is zero: give a longer time, such as 30s")
        infrastructure = _infrastructure(options)
        constants = _constants(options, None if is_keyed else infrastructure)
        producer = _producer(options)
        return cls(
            url=url,
            infrastructure=infrastructure,
            declare=options.flag("declare", default=True),
            constants=constants,
            window=options.count("window", highest=1_000_000) or _WINDOW,
            timeout=_TIMEOUT if timeout is None else timeout,
            id_prefix=_short_text(options, "idPrefix"),
            rejects=_folder(options, "rejects"),
            past=_overdue_action(options, constants),
            bide_headers=_bide_headers(options, is_keyed=is_keyed),
            rate=options.count("messagesPerSecond", highest=1_000_000),
            producer=producer,
            stream_port=None
            if producer is None
            else options.count("streamPort", highest=65535) or stream_port(url, environment),
        )


def _overdue_action(options: Options, constants: Mapping[str, Any]) -> OverdueAction | None:
    past = cast("OverdueAction", options.choice("past", *OVERDUE_ACTIONS)) if "past" in options else None
    if past == "reject" and "rejects" not in options:
        raise InvalidOptionError("the option past is 'reject', but the option rejects is not set: set it to a folder")
    due = constants.get("deliver_at")
    if due is not None and past != "send" and due < datetime.now(UTC) - OVERDUE_GRACE:
        raise InvalidOptionError(
            f"the option deliver_at is {due.isoformat()}, which is in the past: give a later time, or past=send to "
            "send all rows immediately"
        )
    return past


def _bide_headers(options: Options, *, is_keyed: bool) -> BideHeaders:
    chosen = cast("BideHeaders", options.choice("bideHeaders", *BIDE_HEADERS))
    if chosen == "keep" and is_keyed:
        raise InvalidOptionError(
            "the option bideHeaders is 'keep', but rows with keys are new schedules: set it to drop"
        )
    return chosen


def _infrastructure(options: Options) -> DelayInfrastructure:
    try:
        return make_infrastructure(
            options.choice("layout", *LAYOUTS),
            prefix=options.text("prefix"),
            max_delay=options.duration("maxDelay"),
            resolution=options.duration("resolution"),
            lanes=options.count("lanes", highest=64),
            routing=cast("Routing", options.choice("routing", *ROUTINGS)) if "routing" in options else None,
            queue_type=cast("QueueType", options.choice("queueType", *QUEUE_TYPES)) if "queueType" in options else None,
        )
    except InvalidOptionError:
        raise
    except InvalidInputError as error:
        raise InvalidOptionError(f"the options of the layout are invalid: {error}") from error


def _constants(options: Options, infrastructure: DelayInfrastructure | None) -> dict[str, Any]:
    """The fields that all messages have in common, each checked in a sample message.

    Args:
        infrastructure: the delay infrastructure that the messages pass; None for schedules.
    """
    for one, other in (("queue", "exchange"), ("queue", "routing_key"), ("delay", "deliver_at")):
        if one in options and other in options:
            raise InvalidOptionError(f"the options {one} and {other} were both given: give one of them")
    values: dict[str, Any] = {
        "to": options.text("queue"),
        "exchange": options.text("exchange"),
        "routing_key": options.text("routing_key"),
        "delay": options.duration("delay"),
        "expiration": options.duration("expiration"),
        "priority": options.count("priority", lowest=0, highest=255),
        **{name: options.text(name) for name in TEXT_OPTIONS},
    }
    if (due := options.text("deliver_at")) is not None:
        try:
            values["deliver_at"] = parse_due_time(due)
        except InvalidInputError as error:
            raise InvalidOptionError(f"the option deliver_at: {error}") from error
    if "persistent" in options:
        values["persistent"] = options.flag("persistent", default=True)
    if options.flag("isolated", default=False):
        values["isolated"] = True
    constants = {name: value for name, value in values.items() if value is not None}
    now = datetime.now(UTC)
    for name, value in constants.items():
        # The sample goes to a queue, because some layouts refuse an exchange as the target of a delayed message.
        target: dict[str, Any] = {"exchange": "any"} if name == "routing_key" else {"to": "any"}
        if name in ("to", "exchange"):
            target = {}
        try:
            message = MessageChecker().check(OutgoingMessage(b"", **{**target, name: value}))
            if infrastructure is not None:
                message.starting(now).route(infrastructure, now)
        except InvalidInputError as error:
            raise InvalidOptionError(f"the option {'queue' if name == 'to' else name}: {error}") from error
    return constants


def _producer(options: Options) -> str | None:
    producer = _short_text(options, "producerName")
    if producer is None:
        if "streamPort" in options:
            raise InvalidOptionError(
                "the option streamPort needs producerName, with which the sink writes over the stream protocol: leave "
                "out streamPort, or set producerName"
            )
        return None
    if "queue" not in options:
        raise InvalidOptionError("the option producerName needs the option queue: set it to the name of a stream")
    for name in _NOT_FOR_STREAMS:
        if name in options:
            raise InvalidOptionError(
                f"the options producerName and {name} were both given: with producerName, a task stores all its rows "
                "in a stream immediately, or none of them. Leave out one of the options"
            )
    return producer


def _short_text(options: Options, name: str) -> str | None:
    text = options.text(name)
    if text is not None and len(text.encode()) > 100:
        raise InvalidOptionError(f"the option {name} has {len(text.encode())} bytes: give at most 100")
    return text


def _folder(options: Options, name: str) -> str | None:
    """A folder as a URI or an absolute path, because tasks have another working directory."""
    text = options.text(name)
    if text is None:
        return None
    place = text if "://" in text else os.path.abspath(text)  # noqa: PTH100 (unlike Path.resolve, it keeps links)
    try:
        fs.FileSystem.from_uri(place)
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidOptionError(
            f"the option {name} is {text!r}, which is not a usable folder: {error}. Name another folder"
        ) from error
    return place
