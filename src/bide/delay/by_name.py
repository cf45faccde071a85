"""Delay infrastructures by their names on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from bide.durations import DelayLike, parse_delay
from bide.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bide.delay.protocol import DelayInfrastructure

Layout = Literal["clock", "nservicebus", "nservicebus-v1", "celery", "waiting-hall"]
Routing = Literal["conventional", "direct"]
QueueType = Literal["quorum", "classic"]

LAYOUTS: Final[tuple[Layout, ...]] = get_args(Layout)
ROUTINGS: Final[tuple[Routing, ...]] = get_args(Routing)
QUEUE_TYPES: Final[tuple[QueueType, ...]] = get_args(QueueType)

_SETTINGS: Final[Mapping[str, frozenset[str]]] = {
    "clock": frozenset({"prefix", "max_delay", "resolution", "lanes"}),
    "nservicebus": frozenset({"routing", "levels"}),
    "nservicebus-v1": frozenset({"routing", "levels"}),
    "celery": frozenset({"prefix", "queue_type"}),
    "waiting-hall": frozenset({"prefix", "resolution", "levels"}),
}
"""The settings of each layout."""


def make_infrastructure(
    layout: str = "clock",
    *,
    prefix: str | None = None,
    max_delay: DelayLike | None = None,
    resolution: DelayLike | None = None,
    lanes: int | None = None,
    routing: Routing | None = None,
    levels: int | None = None,
    queue_type: QueueType | None = None,
) -> DelayInfrastructure:
    """Create the infrastructure of a layout. A setting of None keeps the layout's default.

    Args:
        layout: one of :data:`LAYOUTS`.
        prefix: starts every name (``clock``, ``celery`` and ``waiting-hall``).
        max_delay: the longest delay that gets queues (``clock``).
        resolution: delays are rounded up to a multiple of it (``clock`` and ``waiting-hall``).
        lanes: parallel queues per digit (``clock``).
        routing: ``conventional`` or ``direct`` (the two ``nservicebus`` layouts).
        levels: the number of levels (``waiting-hall``; also the ``nservicebus`` layouts, where fewer than 28 are for
            explanations and experiments only).
        queue_type: ``quorum`` or ``classic`` for the queues of the levels (``celery``).

    Raises:
        InvalidInputError: the layout is unknown, has no such setting, or refuses its value.
    """
    if layout not in _SETTINGS:
        raise InvalidInputError(f"the layout {layout!r} is unknown: give one of {', '.join(_SETTINGS)}")
    given: dict[str, Any] = {
        name: value
        for name, value in (
            ("prefix", prefix),
            ("max_delay", None if max_delay is None else parse_delay(max_delay)),
            ("resolution", None if resolution is None else parse_delay(resolution)),
            ("lanes", lanes),
            ("routing", routing),
            ("levels", levels),
            ("queue_type", queue_type),
        )
        if value is not None
    }
    _refuse_foreign(layout, given)
    if layout == "clock":
        from bide.delay.clock import Clock

        return Clock(**given)
    if layout == "celery":
        from bide.delay.celery import Celery

        return Celery(**given)
    if layout == "waiting-hall":
        from bide.delay.waiting_hall import WaitingHall

        return WaitingHall(**given)
    from bide.delay.nservicebus import NServiceBus

    return NServiceBus(version=1 if layout == "nservicebus-v1" else 2, **given)


def _refuse_foreign(layout: str, given: Mapping[str, Any]) -> None:
    """Refuse a setting that this layout does not have, instead of silently ignoring it."""
    for name in given:
        if name not in _SETTINGS[layout]:
            owners = " and ".join(one for one, settings in _SETTINGS.items() if name in settings)
            raise InvalidInputError(
                f"the layout {layout!r} has no setting {name.replace('_', ' ')!r}, which belongs to {owners}: "
                "leave it out, or choose another layout"
            )
