"""Discovery of the streams that an audit reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from bide.admin.locate import stream_port
from bide.delay.by_name import Layout, make_infrastructure
from bide.endpoint.events import EVENTS
from bide.errors import AccessRefusedError, NotAppliedError, TargetNotFoundError
from bide.pipelines.audit.fact_rows import zone_of
from bide.pipelines.audit.run import BATCH_ROWS, Sources
from bide.pipelines.audit.schedule_log import SCHEDULE_NAMES
from bide.runtime.logs import logger
from bide.schedules.names import PARTITIONS
from bide.streams.log import Address, StreamLogs

if TYPE_CHECKING:
    from bide.delay.protocol import DelayInfrastructure

TAPPED_LAYOUTS: Final[tuple[Layout, ...]] = ("clock", "nservicebus", "nservicebus-v1", "celery")
"""The layouts that have taps."""

log = logger(__name__)

_PREFIXED: Final = ("clock", "celery")


def candidates(layouts: Iterable[str] = (), *, prefix: str | None = None) -> list[DelayInfrastructure]:
    """The delay infrastructures whose taps the audit looks for.

    Args:
        layouts: the names of the layouts; if empty, all layouts with taps.
        prefix: the prefix of names, for layouts that support a prefix; None for the default of each layout.

    Raises:
        InvalidInputError: a layout is unknown, or the prefix is invalid.
    """
    return [
        make_infrastructure(layout, prefix=prefix if layout in _PREFIXED else None)
        for layout in layouts or TAPPED_LAYOUTS
    ]


def find_sources(
    url: str,
    infrastructures: Iterable[DelayInfrastructure],
    *,
    all_tapped: bool = False,
    events: Sequence[str] = (),
    port: int | None = None,
    batch_rows: int = BATCH_ROWS,
    allow_gaps: bool = False,
    time_zone: str = "UTC",
) -> Sources:
    """Find the streams that exist: those of the taps of these infrastructures, of events, and of the schedule log.

    Args:
        url: the URL of the broker, with the password.
        infrastructures: the infrastructures whose taps to look for.
        all_tapped: whether each infrastructure must have taps. If not, infrastructures without taps are left out.
        events: the names of events streams, which must exist; if empty, the default one, which is left out if missing.
        port: the port of the stream protocol; None for :func:`bide.admin.locate.stream_port`, or else the default.
        batch_rows: see :class:`~bide.pipelines.audit.run.Sources`.
        allow_gaps: see :class:`~bide.pipelines.audit.run.Sources`.
        time_zone: the time zone of Celery's due times without an offset.

    Raises:
        InvalidInputError: the time zone is unknown.
        NotAppliedError: no stream exists, or an infrastructure that must have taps has none.
        TargetNotFoundError: a named events stream does not exist.
        BrokerError: the broker cannot be reached, or refuses.
    """
    zone_of(time_zone)
    scheduled: dict[str, str] = {}
    delivered: dict[str, str] = {}
    for infrastructure in infrastructures:
        taps = infrastructure.taps()
        if taps is not None:
            scheduled[taps.scheduled] = delivered[taps.delivered] = infrastructure.name
    named, events = events, events or (EVENTS,)
    port = port or stream_port(url, os.environ)
    schedules = tuple(map(SCHEDULE_NAMES.log, range(PARTITIONS)))
    with StreamLogs(Address.of(url, port)) as logs:
        existing = {name for name in (*scheduled, *delivered, *events) if _exists(logs, name)}
        existing |= _readable(logs, schedules)
    if missing := [name for name in named if name not in existing]:
        raise TargetNotFoundError(
            f"there is no events stream {', '.join(map(repr, missing))} on this virtual host: name a stream that "
            "endpoints write with bide.EventStream(), or leave out the name for the default stream",
        )
    tapped = {layout for name, layout in (*scheduled.items(), *delivered.items()) if name in existing}
    if all_tapped and (untapped := sorted({*scheduled.values()} - tapped)):
        raise NotAppliedError(
            f"no streams of taps exist on this virtual host for {' and '.join(untapped)}: call "
            "bide.admin.taps.turn_on(...) with the same layout and prefix"
        )
    if not existing:
        raise NotAppliedError(
            f"there is nothing to audit: neither the streams of taps ({', '.join(scheduled)}) nor the events stream "
            f"{' or '.join(events)} nor a schedule log ({SCHEDULE_NAMES.operations}) exist on this virtual host: call "
            "bide.admin.taps.turn_on(...) with the same layout and prefix, or give endpoints a bide.EventStream()"
        )
    return Sources(
        url=url,
        scheduled=_filter(scheduled, existing),
        delivered=_filter(delivered, existing),
        events=tuple(name for name in events if name in existing),
        schedules=tuple(name for name in schedules if name in existing),
        port=port,
        batch_rows=batch_rows,
        allow_gaps=allow_gaps,
        time_zone=time_zone,
    )


def _filter(streams: Mapping[str, str], existing: set[str]) -> dict[str, str]:
    return {name: layout for name, layout in streams.items() if name in existing}


def _readable(logs: StreamLogs, schedules: Sequence[str]) -> set[str]:
    """The streams of the schedule log that exist; none if the user may not read them, because many audits need none."""
    try:
        return {name for name in schedules if _exists(logs, name)}
    except AccessRefusedError as error:
        log.warning("leaving out the schedule log: %s", error)
        return set()


def _exists(logs: StreamLogs, stream: str) -> bool:
    try:
        logs.end(stream)
    except TargetNotFoundError:
        return False
    return True
