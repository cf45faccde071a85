"""View of lateness: p50 and p99 of each minute, from the tap of delivered messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from bide.console.parameters import Parameters
from bide.console.tap_index import MAX_READ
from bide.console.taps import read_tap
from bide.console.vhost import ConsoleVhost
from bide.durations import to_milliseconds

_MINUTE: Final = 60_000
_DEFAULT_MINUTES: Final = 60
_MAX_MINUTES: Final = 24 * 60


async def lateness(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """The lateness of delayed messages by minute. Only messages that passed the tap are counted."""
    minutes = parameters.number("minutes", lowest=1, highest=_MAX_MINUTES) or _DEFAULT_MINUTES
    now = to_milliseconds(vhost.client.now())
    since = (now // _MINUTE - minutes + 1) * _MINUTE
    found = await read_tap(vhost, "delivered", since=since)
    by_minute: dict[int, list[int]] = defaultdict(list)
    for one in found.records:
        if one.due is not None:
            by_minute[one.stored_at // _MINUTE].append(max(one.stored_at - one.due, 0))
    rows = [
        {
            "at": minute * _MINUTE,
            "count": len(values),
            "p50": percentile(values, 50),
            "p99": percentile(values, 99),
            "max": values[-1],
        }
        for minute, values in sorted((minute, sorted(values)) for minute, values in by_minute.items())
    ]
    return {
        "stream": found.stream,
        "why": found.why,
        "is_whole": found.is_whole,
        "limit": MAX_READ,
        "since": since,
        "now": now,
        "minutes": rows,
        "without_due": sum(1 for one in found.records if one.due is None),
    }


def percentile(ordered: Sequence[int], percent: int) -> int:
    """The nearest-rank percentile: the smallest of the sorted values that ``percent`` % of them do not exceed."""
    return ordered[max(-(-len(ordered) * percent // 100), 1) - 1]
