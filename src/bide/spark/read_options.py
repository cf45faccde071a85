"""Checked options of the source: streams or a queue, start, end, limits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

from bide.admin.locate import stream_port
from bide.amqp.url import BrokerUrl
from bide.errors import InvalidOptionError
from bide.spark.admission import DEFAULT_MAX_DELAY, TriggerLimits
from bide.spark.options import Options, parse_time

NamedPosition = Literal["earliest", "latest"]
Position = NamedPosition | int | datetime
"""Where to begin or to end: a name, an offset, or a time."""

Positions = Position | Mapping[str, Position]
"""One position for all streams, or one for each."""

SOURCE_OPTIONS: Final = frozenset(
    {
        "columns",
        "endingOffsets",
        "endingOffsetsByTimestamp",
        "endingTimestamp",
        "failOnDataLoss",
        "includeHeaders",
        "limit",
        "maxBytesPerTrigger",
        "maxOffsetsPerTrigger",
        "maxTriggerDelay",
        "minOffsetsPerTrigger",
        "minPartitions",
        "mode",
        "queue",
        "startingOffsets",
        "startingOffsetsByTimestamp",
        "startingTimestamp",
        "stream",
        "streamPort",
        "superStream",
        "undecodable",
        "url",
    }
)
QUEUE_OPTIONS: Final = frozenset({"columns", "includeHeaders", "limit", "mode", "queue", "url"})
_STREAM_OPTIONS: Final = SOURCE_OPTIONS - {"limit", "mode", "queue"}
_FOR_BATCHES: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
_FOR_QUERIES: Final = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The options of a read from streams.

    Attributes:
        url: the URL of the broker, with the password.
        port: the port of the stream protocol; None for the default.
        streams: the names of the streams; empty with ``super_stream``, or with the option ``stream`` set to ``[]``.
        super_stream: the name of the super stream; None with ``streams``.
        start: where a batch, or a new query, begins.
        end: where a batch ends; not used by a query.
        start_option: the option that gave the start, for errors.
        end_option: the option that gave the end, for errors.
        limits: the limits of micro-batches.
        min_partitions: split a read into at least this many tasks, if it has enough offsets.
        fail_on_data_loss: fail when messages are missing, rather than leave them out.
        raw: read undecodable messages as raw bytes, rather than fail.
    """

    url: str = field(repr=False)
    port: int | None
    streams: tuple[str, ...]
    super_stream: str | None
    start: Positions
    end: Positions
    start_option: str
    end_option: str
    limits: TriggerLimits
    min_partitions: int | None
    fail_on_data_loss: bool
    raw: bool

    @classmethod
    def read(cls, given: Options, environment: Mapping[str, str], *, streaming: bool) -> ReadOptions:
        """Check the options of a batch, or of a query.

        Raises:
            InvalidOptionError: an option is unknown, has an invalid value, or contradicts another one.
            InvalidUrlError: the URL is invalid, or ``BIDE_STREAM_PORT`` is not a port.
        """
        if given.is_empty:
            raise InvalidOptionError(
                "there are no options: give stream, superStream or queue. Spark does not pass on the options of CREATE "
                "TABLE ... USING rabbitmq: use CREATE TEMPORARY VIEW ... USING rabbitmq OPTIONS (...), or a DataFrame "
                "and its createOrReplaceTempView"
            )
        given.refuse_unknown(_STREAM_OPTIONS, purpose="reading streams")
        if sum(name in given for name in ("stream", "superStream")) != 1:
            raise InvalidOptionError(
                "the source needs one of the options stream (names separated by commas), superStream and queue: set "
                "exactly one"
            )
        for name in _FOR_BATCHES if streaming else _FOR_QUERIES:
            if name in given:
                raise InvalidOptionError(
                    f"the option {name} is for {'batches' if streaming else 'streaming queries'} only: leave it out"
                )
        start = _positions(given, "starting", "latest" if streaming else "earliest")
        end = _positions(given, "ending", "latest")
        if not streaming:
            _refuse_empty(start, "latest", "startingOffsets", "an earlier position")
        _refuse_empty(end, "earliest", "endingOffsets", "a later position")
        streams = _names(given.text("stream"))
        for which, positions in (("starting", start), ("ending", end)):
            name = _positions_option(given, which)
            if isinstance(positions, Mapping) and streams and set(positions) != set(streams):
                raise InvalidOptionError(
                    f"the option {name} gives positions of {', '.join(sorted(positions)) or 'no stream'}, "
                    f"but the option stream names {', '.join(sorted(streams))}: name the same streams in both"
                )
        url = given.url(environment)
        return cls(
            url=url,
            port=given.count("streamPort", highest=65535) or stream_port(url, environment),
            streams=streams,
            super_stream=given.text("superStream"),
            start=start,
            end=end,
            start_option=_positions_option(given, "starting"),
            end_option=_positions_option(given, "ending"),
            limits=_limits(given),
            min_partitions=given.count("minPartitions", highest=100_000),
            fail_on_data_loss=given.flag("failOnDataLoss", default=True),
            raw=given.choice("undecodable", "fail", "raw") == "raw",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """The options of a read from a queue.

    Attributes:
        url: the URL of the broker, with the password.
        queue: the name of the queue.
        limit: the largest number of messages to read; None for all.
    """

    url: str = field(repr=False)
    queue: str
    limit: int | None

    @classmethod
    def read(cls, given: Options, environment: Mapping[str, str], *, streaming: bool) -> QueueOptions:
        """Check the options.

        Raises:
            InvalidOptionError: an option is unknown or has an invalid value, or a streaming query would read a queue.
            InvalidUrlError: the URL is invalid.
        """
        if streaming:
            raise InvalidOptionError(
                "a streaming query cannot read a queue, which has no offsets. Bind a stream to the same exchange and "
                "read that, or drain the queue in batches with bide.spark.drain"
            )
        for name in ("stream", "superStream"):
            if name in given:
                raise InvalidOptionError(f"the options {name} and queue were both given: give one of them")
        given.refuse_unknown(QUEUE_OPTIONS, purpose="reading a queue")
        if given.choice("mode", "peek", "drain") == "drain":
            raise InvalidOptionError(
                "the option mode is 'drain', but Spark does not notify a reader when its rows are written, so a reader "
                "must not remove messages. Use bide.spark.drain(spark, queue, write=...)"
            )
        queue = given.text("queue")
        assert queue is not None
        url = given.url(environment)
        BrokerUrl.parse(url)  # Checked on the driver, because errors of a task arrive in a Java stack trace.
        return cls(url=url, queue=queue, limit=given.count("limit"))


def _limits(given: Options) -> TriggerLimits:
    most, least = given.count("maxOffsetsPerTrigger"), given.count("minOffsetsPerTrigger")
    if least is not None and most is not None and least > most:
        raise InvalidOptionError(
            f"the option minOffsetsPerTrigger is {least:,}, more than maxOffsetsPerTrigger, {most:,}: give at most that"
        )
    delay = given.duration("maxTriggerDelay")
    if delay is not None and least is None:
        raise InvalidOptionError("the option maxTriggerDelay needs minOffsetsPerTrigger: set both, or neither")
    return TriggerLimits(
        max_offsets=most,
        max_bytes=given.count("maxBytesPerTrigger"),
        min_offsets=least,
        max_delay=DEFAULT_MAX_DELAY if delay is None else delay,
    )


def _names(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    names: object = text.split(",")
    if text.lstrip().startswith("["):
        names = _json(text, "stream")
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        raise InvalidOptionError(
            f"the option stream is {text!r}: give names separated by commas, or a JSON list of names"
        )
    stripped = [name.strip() for name in names]
    if len(set(stripped)) < len(stripped):
        raise InvalidOptionError(f"the option stream is {text!r}, which names a stream twice: name each one once")
    return tuple(stripped)


def _positions(given: Options, which: str, default: NamedPosition) -> Positions:
    by_offset, by_time, by_times = f"{which}Offsets", f"{which}Timestamp", f"{which}OffsetsByTimestamp"
    if len(chosen := [name for name in (by_offset, by_time, by_times) if name in given]) > 1:
        raise InvalidOptionError(f"the options {' and '.join(chosen)} were given together: leave out all but one")
    if (times := given.text(by_times)) is not None:
        found = _json(times, by_times)
        if not isinstance(found, dict):
            raise InvalidOptionError(
                f'the option {by_times} is {times!r}: give JSON with a time for each stream, such as {{"orders": '
                '"2026-11-21T06:00:00Z"}'
            )
        return {name: parse_time(str(value), f"{by_times} of {name}") for name, value in found.items()}
    if (time := given.time(by_time)) is not None:
        return time
    text = given.text(by_offset)
    if text is None:
        return default
    if text.lstrip().startswith("{"):
        found = _json(text, by_offset)
        assert isinstance(found, dict)
        return {name: _position(value, f"{by_offset} of {name}") for name, value in found.items()}
    return _position(text, by_offset)


def _position(value: object, option: str) -> Position:
    match value:
        case bool():
            pass
        case int() if value >= 0:
            return value
        case -1:
            return "latest"
        case -2:
            return "earliest"
        case str():
            word = value.strip().lower()
            if word in ("earliest", "latest"):
                return "earliest" if word == "earliest" else "latest"
            if not re.fullmatch("[0-9]+", word):
                return parse_time(value, option)
        case _:
            pass
    raise InvalidOptionError(
        f"the option {option} is {value!r}: give earliest, latest, a time such as 2026-11-21T06:00:00Z, or JSON "
        'with one of these or an offset for each stream, such as {"orders": 23}'
    )


def _positions_option(given: Options, which: str) -> str:
    by_times = f"{which}OffsetsByTimestamp"
    return by_times if by_times in given else f"{which}Offsets"


def _refuse_empty(positions: Positions, word: NamedPosition, option: str, way_out: str) -> None:
    if positions == word:
        raise InvalidOptionError(f"the option {option} is {word}, so the batch would be empty: give {way_out}")
    if isinstance(positions, Mapping):
        for stream, position in positions.items():
            if position == word:
                raise InvalidOptionError(
                    f"the option {option} is {word} for {stream!r}, so nothing would be read from it: give {way_out}"
                )


def _json(text: str, option: str) -> object:
    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(items)
        if len(found) < len(items):
            raise InvalidOptionError(f"the option {option} is {text!r}, which gives a stream twice: give each one once")
        return found

    try:
        return json.loads(text, object_pairs_hook=pairs)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidOptionError(f"the option {option} is not JSON: {error}") from error
