"""Which streams of a virtual host an audit reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from bide.admin.locate import stream_port
from bide.delay.by_name import Layout, make_infrastructure
from bide.endpoint.events import EVENTS
from bide.errors import NotAppliedError, TargetNotFoundError
from bide.pipelines.audit.run import BATCH_ROWS, Sources
from bide.streams.log import Address, StreamLogs

if TYPE_CHECKING:
    from bide.delay.protocol import DelayInfrastructure

TAPPED: Final[tuple[Layout, ...]] = ("clock", "nservicebus", "nservicebus-v1", "celery")
"""The layouts that have taps."""

_PREFIXED: Final = ("clock", "celery")


def candidates(layouts: Iterable[str] = (), *, prefix: str | None = None) -> list[DelayInfrastructure]:
    """The infrastructures whose taps are looked for.

    Args:
        layouts: all that have taps, if empty.
        prefix: of those layouts that have one.

    Raises:
        InvalidInputError: a layout is unknown, or the prefix is no prefix.
    """
    return [make_infrastructure(layout, prefix=prefix if layout in _PREFIXED else None) for layout in layouts or TAPPED]


def find_sources(
    url: str,
    infrastructures: Iterable[DelayInfrastructure],
    *,
    all_tapped: bool = False,
    events: Sequence[str] = (),
    port: int | None = None,
    batch_rows: int = BATCH_ROWS,
    allow_gaps: bool = False,
) -> Sources:
    """The taps of these infrastructures and the events streams, those that are there.

    Args:
        url: the broker's, with the password.
        all_tapped: whether each of the infrastructures has to have its taps, since it was named.
        events: names of events streams; the usual one, if empty.
        port: of the stream protocol; None for that of :func:`bide.admin.locate.stream_port`, or the usual one.

    Raises:
        NotAppliedError: nothing is there, or the taps of an infrastructure that has to have some are not.
        TargetNotFoundError: an events stream that was named is not there.
        BrokerError: the broker cannot be asked.
    """
    scheduled: dict[str, str] = {}
    delivered: dict[str, str] = {}
    for infrastructure in infrastructures:
        taps = infrastructure.taps()
        if taps is not None:
            scheduled[taps.scheduled] = delivered[taps.delivered] = infrastructure.name
    named, events = events, events or (EVENTS,)
    port = port or stream_port(url, os.environ)
    with StreamLogs(Address.of(url, port)) as logs:
        there = {name for name in (*scheduled, *delivered, *events) if _exists(logs, name)}
    if absent := [name for name in named if name not in there]:
        raise TargetNotFoundError(
            f"there is no events stream {', '.join(map(repr, absent))} on this virtual host: name one that endpoints "
            "write by bide.EventStream(), or none for the usual one",
        )
    tapped = {layout for name, layout in (*scheduled.items(), *delivered.items()) if name in there}
    if all_tapped and (bare := sorted({*scheduled.values()} - tapped)):
        raise NotAppliedError(
            f"there are no streams of taps of the layout {' and '.join(bare)} on this virtual host: run 'bide tap on' "
            "with the same --layout and --prefix"
        )
    if not there:
        raise NotAppliedError(
            f"there is nothing to audit: neither the streams of taps ({', '.join(scheduled)}) nor {', '.join(events)} "
            "exist. Run 'bide tap on' with the same --layout and --prefix, or give endpoints a bide.EventStream()"
        )
    return Sources(
        url=url,
        scheduled=_those(scheduled, there),
        delivered=_those(delivered, there),
        events=tuple(name for name in events if name in there),
        port=port,
        batch_rows=batch_rows,
        allow_gaps=allow_gaps,
    )


def _those(streams: Mapping[str, str], there: set[str]) -> dict[str, str]:
    return {name: layout for name, layout in streams.items() if name in there}


def _exists(logs: StreamLogs, stream: str) -> bool:
    try:
        logs.end(stream)
    except TargetNotFoundError:
        return False
    return True
