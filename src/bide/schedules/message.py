"""The message of a schedule, as the log keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from bide.amqp import codec, decoding
from bide.errors import ScheduleRecordError

_BEFORE_FLAGS: Final = bytes(19)
"""The bytes before the property flags in a content header frame."""


@dataclass(frozen=True, slots=True)
class ScheduledMessage:
    """The message of a schedule, opaque to the fold.

    Attributes:
        properties: flags and property list of a content header. A stream drops lists and tables from headers (3.10 to
            4.3), so the properties travel in the body of the record.
        body: the body as its sender gave it.
    """

    properties: bytes
    body: bytes = field(repr=False)

    @classmethod
    def of(cls, values: Mapping[str, Any], body: bytes) -> Self:
        """Encode properties.

        Args:
            values: the properties by their AMQP names.

        Raises:
            InvalidInputError: a value cannot be encoded.
        """
        return cls(codec.properties(values), body)

    @property
    def values(self) -> dict[str, Any]:
        """The properties by their AMQP names.

        Raises:
            ScheduleRecordError: the properties cannot be decoded.
        """
        try:
            return decoding.properties(_BEFORE_FLAGS + self.properties)
        except ValueError as error:
            raise ScheduleRecordError(f"the properties of a scheduled message cannot be decoded: {error}") from error
