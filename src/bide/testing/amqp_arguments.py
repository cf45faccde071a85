"""Decoder of the arguments of AMQP methods."""

from __future__ import annotations

import struct
from typing import Any

from bide.amqp import decoding


class MethodArguments:
    """Reads the arguments of one method, one after the other.

    Args:
        payload: the payload of the method frame, starting with the class id.

    Raises:
        ValueError: raised by every method if the frame is too short.
    """

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._place = 4

    def short(self) -> int:
        """An unsigned 16-bit integer."""
        return self._number(">H")

    def long(self) -> int:
        """An unsigned 32-bit integer."""
        return self._number(">I")

    def long_long(self) -> int:
        """An unsigned 64-bit integer."""
        return self._number(">Q")

    def octet(self) -> int:
        """One byte, which can contain up to eight flags."""
        return self._number(">B")

    def flags(self, number: int) -> list[bool]:
        """Several flags, packed into one octet."""
        octet = self.octet()
        return [bool(octet >> position & 1) for position in range(number)]

    def text(self) -> str:
        """A short string."""
        size = self.octet()
        raw = self._payload[self._place : self._place + size]
        if len(raw) < size:
            raise ValueError(f"a short string of {size} bytes has only {len(raw)}")
        self._place += size
        return raw.decode(errors="backslashreplace")

    def table(self) -> dict[str, Any]:
        """A field table."""
        items, self._place = decoding.table(self._payload, self._place)
        return items

    def _number(self, form: str) -> int:
        try:
            (value,) = struct.unpack_from(form, self._payload, self._place)
        except struct.error as error:
            raise ValueError(f"the method frame is too short ({error})") from error
        self._place += struct.calcsize(form)
        return int(value)
