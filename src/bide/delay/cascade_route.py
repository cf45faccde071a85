"""Compiled routes through a binary cascade: everything but the digits of the delay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bide.delay.compiled import WireFormat

_SECOND: Final = 1_000_000
"""One second in microseconds."""


class CascadeRoute:
    """See :class:`bide.delay.compiled.CompiledRoute`.

    Args:
        level_names: the exchanges of the levels, lowest first.
        address: the end of the routing key.
        target_hops: the number of queues after the levels.
        headers: the headers that do not depend on the delay; only bide sets them.
        delay_header: the name of a header for the delay in seconds, which comes before the others; None for none.
    """

    routing_key = None

    def __init__(
        self,
        wire: WireFormat,
        *,
        level_names: Sequence[str],
        address: str,
        target_hops: int,
        headers: Mapping[str, str],
        delay_header: str | None = None,
    ) -> None:
        self.names = frozenset([delay_header] if delay_header else [])
        self._level_names = level_names
        self._digits = f"0{len(level_names)}b"
        self._address = f".{address}"
        self._target_hops = target_hops
        self._delay_header = wire.short_string(delay_header) if delay_header else b""
        self._headers = wire.table_items(headers)
        self._field_value = wire.field_value

    def after(self, wait: int, message_id: str) -> tuple[str, str, bytes, int] | None:
        """See :meth:`bide.delay.compiled.CompiledRoute.after`."""
        seconds = -(-wait // _SECOND)
        level = seconds.bit_length() - 1
        if level >= len(self._level_names):
            return None
        headers = self._headers
        if self._delay_header:
            headers = self._delay_header + self._field_value(seconds) + headers
        return (
            self._level_names[level],
            ".".join(format(seconds, self._digits)) + self._address,
            headers,
            seconds.bit_count() + self._target_hops,
        )
