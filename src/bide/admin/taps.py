"""Taps of a delay infrastructure on a broker: switch them on and off, and read their status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from bide.admin.apply import apply, check_release, check_streams, exists, message_counts
from bide.admin.declaring import Declaring
from bide.admin.report import Finding, judged, listed, unchecked
from bide.admin.snapshot import Snapshot
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.delay.protocol import DelayInfrastructure
from bide.delay.taps import Retention, Taps, taps_of
from bide.errors import (
    DeclarationMismatchError,
    ManagementApiError,
    NotAppliedError,
    UnsupportedBrokerError,
)
from bide.management.api import ManagementApi
from bide.topology import Binding, Exchange, Queue, Topology

State = Literal["on", "off", "incomplete", "unknown"]

_STREAM_PROTOCOL: Final = "stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedOn:
    """The result of :func:`turn_on`.

    Attributes:
        created: the streams that were declared.
        kept: the streams that existed already, with their messages.
        bindings: the number of bindings to the streams.
    """

    created: tuple[str, ...]
    kept: tuple[str, ...]
    bindings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedOff:
    """The result of :func:`turn_off`.

    Attributes:
        kept: the streams that stay, with their messages.
        deleted: the streams that were deleted.
        messages: the number of messages deleted with them. The broker updates this count every five seconds.
    """

    kept: tuple[str, ...]
    deleted: tuple[str, ...]
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatus:
    """The status of one of the two streams.

    Attributes:
        exists: whether the stream is declared.
        messages: the number of its messages. The broker updates this count every five seconds.
        bindings: how many of its bindings exist; None if the management API does not report them.
        wanted: how many bindings it should have.
        arguments: the arguments of its declaration, including the limits; empty if the management API does not report
            them.
    """

    name: str
    exists: bool
    messages: int
    bindings: int | None
    wanted: int
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TapStatus:
    """The status of the taps of one infrastructure.

    Attributes:
        state: ``on``: all streams and bindings exist; ``off``: the streams have no bindings; ``incomplete``: some are
            missing; ``unknown``: the management API, which knows the bindings, did not answer.
        streams: ``scheduled`` and ``delivered``.
        port: the broker's port for the stream protocol, the fastest way to read the streams; 0 if it has none, None if
            the management API does not report it.
        why: why something is unknown; empty if everything is known.
    """

    layout: str
    broker: str
    vhost: str
    state: State
    streams: Mapping[str, StreamStatus]
    port: int | None
    why: str

    def to_dict(self) -> dict[str, Any]:
        """The status as ``--json`` prints it."""
        return asdict(self)


async def turn_on(
    connection: Connection, infrastructure: DelayInfrastructure, *, retention: Retention | None = None
) -> TurnedOn:
    """Declare the streams of the taps and bind them. Existing streams and bindings stay unchanged.

    Args:
        connection: a connection to the virtual host.
        infrastructure: the infrastructure, which has to exist.
        retention: the limits of the streams. By default existing streams keep theirs, and new ones get the defaults of
            :class:`Retention`.

    Raises:
        InvalidInputError: taps are not possible for this infrastructure.
        UnsupportedBrokerError: the broker does not support streams.
        NotAppliedError: the infrastructure does not exist.
        DeclarationMismatchError: a stream exists with limits other than those given.
    """
    taps = taps_of(infrastructure)
    check_release(connection)
    await _check_streams(connection, taps)
    if not await exists(connection, Topology(Exchange(name) for name in taps.sources)):
        raise NotAppliedError(
            f"the {infrastructure.name} infrastructure is not on {connection.address}, virtual host "
            f"{connection.url.vhost!r}: call bide.admin.infrastructure.install(...) with the same settings, or start a "
            "program that uses it"
        )
    wanted = taps.topology(retention or Retention())
    there = await _message_counts(connection, taps)
    queues = wanted.queues if retention else [one for one in wanted.queues if one.name not in there]
    try:
        await apply(
            connection,
            Topology(wanted.exchanges, queues, wanted.bindings),
            external=(*taps.sources, *taps.names),
        )
    except DeclarationMismatchError as error:
        raise DeclarationMismatchError(
            f"the stream {error.name!r} exists with {error.argument} = {error.found}, where {error.wanted} is wanted: "
            "give no limits to keep it unchanged, or call bide.admin.taps.turn_off(delete=True), which deletes it with "
            "its messages",
            kind=error.kind,
            name=error.name,
            argument=error.argument,
            wanted=error.wanted,
            found=error.found,
            applied=error.applied,
            reply_code=error.reply_code,
        ) from error
    return TurnedOn(
        created=tuple(name for name in taps.names if name not in there),
        kept=tuple(name for name in taps.names if name in there),
        bindings=len(taps.bindings),
    )


async def turn_off(connection: Connection, infrastructure: DelayInfrastructure, *, delete: bool = False) -> TurnedOff:
    """Remove the bindings of the taps, if they exist.

    Args:
        connection: a connection to the virtual host.
        infrastructure: the infrastructure, which need not exist.
        delete: also delete the streams with their messages.

    Raises:
        InvalidInputError: taps are not possible for this infrastructure.
    """
    taps = taps_of(infrastructure)
    there = await _message_counts(connection, taps)
    async with Declaring(connection) as declaring:
        # In the reverse order of their creation, so that a message recorded as scheduled is recorded as delivered too.
        await declaring.all(Channel.unbind, reversed(taps.bindings))
        if delete:
            await declaring.all(Channel.delete_queue, [*there, *(one.name for one in taps.passage.queues)])
            await declaring.all(Channel.delete_exchange, [one.name for one in taps.passage.exchanges])
    names = tuple(there)
    return TurnedOff(
        kept=() if delete else names, deleted=names if delete else (), messages=sum(there.values()) if delete else 0
    )


async def read_status(
    connection: Connection, infrastructure: DelayInfrastructure, api: ManagementApi | None
) -> TapStatus:
    """Read the status of the taps.

    Args:
        connection: a connection to the virtual host.
        infrastructure: the infrastructure of the taps.
        api: the management API, which reports the bindings; None reads only what AMQP shows.

    Raises:
        InvalidInputError: taps are not possible for this infrastructure.
    """
    taps = taps_of(infrastructure)
    vhost = connection.url.vhost
    counts = await _message_counts(connection, taps)
    # Without streams there are no bindings.
    bound: set[Binding] | None = None if counts else set()
    details: dict[str, Mapping[str, Any]] = {}
    port: int | None = None
    why = "the management API was not asked"
    if api is not None:
        try:
            bound = await _existing_bindings(api, vhost, taps)
            for name in counts:
                details[name] = await api.call("GET", "queues", vhost, name) or {}
            port = _stream_port(await api.overview())
            why = ""
        except ManagementApiError as error:
            why = str(error)
    streams: dict[str, StreamStatus] = {}
    for which, name, wanted in (
        ("scheduled", taps.scheduled, taps.to_scheduled),
        ("delivered", taps.delivered, taps.to_delivered + taps.passage.bindings),
    ):
        found = details.get(name, {})
        streams[which] = StreamStatus(
            name=name,
            exists=name in counts,
            # Over AMQP, a node without the stream's leader counts no messages; the API asks the leader's node.
            messages=max(counts.get(name, 0), int(found.get("messages") or 0)),
            bindings=None if bound is None else len(bound.intersection(wanted)),
            wanted=len(wanted),
            arguments=dict(found.get("arguments") or {}),
        )
    return TapStatus(
        layout=infrastructure.name,
        broker=connection.address,
        vhost=vhost,
        state=_state(taps, bound),
        streams=streams,
        port=port,
        why=why,
    )


def tap_findings(snapshot: Snapshot, infrastructure: DelayInfrastructure) -> list[Finding]:
    """The findings of ``bide delay verify`` about the taps; empty if there are none."""
    taps = infrastructure.taps()
    if taps is None:
        return []
    there = [name for name in taps.names if name in snapshot.queues]
    bound = bound_taps(snapshot, taps)
    if not bound:
        kept = f"off; {listed(there)} stay with their messages"
        return [Finding(check="taps", status="ok", text=kept)] if there else []
    missing = len(taps.bindings) - len(bound)
    problem = (
        f"{missing} of the {len(taps.bindings)} bindings of the taps are missing, so that they do not see every "
        "message: call bide.admin.taps.turn_on(...) with the same settings"
    )
    price = f"; messages without a target are only in {taps.delivered!r}" if taps.defeats else ""
    return judged("taps", [problem] if missing else [], f"on: {taps.scheduled!r} and {taps.delivered!r}{price}")


async def unseen_taps(connection: Connection, infrastructure: DelayInfrastructure, why: str) -> list[Finding]:
    """The findings about the taps without the management API, which is the only source for bindings."""
    taps = infrastructure.taps()
    there = [] if taps is None else list(await _message_counts(connection, taps))
    return [unchecked("taps", f"{listed(there)} exist; {why}")] if there else []


def bound_taps(snapshot: Snapshot, taps: Taps) -> list[Binding]:
    """The bindings of the taps that exist."""
    there = set(snapshot.bindings)
    return [one for one in taps.bindings if one in there]


async def find_tap_bindings(
    connection: Connection, infrastructure: DelayInfrastructure, api: ManagementApi | None
) -> dict[str, list[Binding]]:
    """The existing streams of the taps, each with its bindings; without the API the lists of bindings are empty."""
    taps = infrastructure.taps()
    if taps is None:
        return {}
    vhost = connection.url.vhost
    there = await _message_counts(connection, taps)
    return {name: await api.bindings(vhost, to_queue=name) if api is not None else [] for name in there}


async def _message_counts(connection: Connection, taps: Taps) -> dict[str, int]:
    """The number of messages in each stream that exists."""
    return await message_counts(connection, [Queue(name) for name in taps.names])


async def _check_streams(connection: Connection, taps: Taps) -> None:
    try:
        await check_streams(connection, prefix=taps.scheduled)
    except UnsupportedBrokerError as error:
        raise UnsupportedBrokerError(
            f"taps are streams, and the broker at {connection.address} has the feature flag stream_queue switched off: "
            "run 'rabbitmqctl enable_feature_flag stream_queue'"
        ) from error


async def _existing_bindings(api: ManagementApi, vhost: str, taps: Taps) -> set[Binding]:
    """The bindings to the streams, or to the passage before a stream."""
    names = [*taps.names, *(one.name for one in taps.passage.queues)]
    return {binding for name in names for binding in await api.bindings(vhost, to_queue=name)}


def _state(taps: Taps, bound: set[Binding] | None) -> State:
    if bound is None:
        return "unknown"
    if bound.isdisjoint(taps.bindings):
        return "off"
    return "on" if bound.issuperset(taps.bindings + taps.passage.bindings) else "incomplete"


def _stream_port(overview: Mapping[str, Any]) -> int | None:
    """The port of the stream protocol; 0 if there is none, None if this user may not read it."""
    listeners = overview.get("listeners")
    if not listeners:
        return None
    return next((int(one["port"]) for one in listeners if one.get("protocol") == _STREAM_PROTOCOL), 0)
