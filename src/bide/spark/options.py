"""The options of the data source, as Spark hands them over: texts under names of any case."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from bide.admin.locate import STREAM_PORT_VARIABLE
from bide.amqp.url import DEFAULT_URL, ENVIRONMENT_VARIABLE
from bide.errors import InvalidOptionError

VARIABLES: Final = (ENVIRONMENT_VARIABLE, STREAM_PORT_VARIABLE)
"""Of the driver's environment: where the broker is."""

_OF_SPARK: Final = frozenset({"checkpointlocation", "queryname"})
"""What Spark itself reads from the same options."""

_YES: Final = {"true": True, "false": False}


class Options:
    """The options of one read or write. Each accessor takes the name as it is documented.

    Its messages name the option and never show the value of ``url``, which has a password.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): str(value) for name, value in given.items()}

    def refuse_unknown(self, known: frozenset[str], *, purpose: str) -> None:
        """Refuse what is not in *known*, the documented names; *purpose* says whose, such as ``"reading"``.

        Raises:
            InvalidOptionError: an option has another name.
        """
        unknown = sorted(self._given.keys() - {name.lower() for name in known} - _OF_SPARK)
        if unknown:
            raise InvalidOptionError(
                f"unknown option{'s' if len(unknown) > 1 else ''} for {purpose}: {', '.join(unknown)}; "
                f"known are {', '.join(sorted(known))}"
            )

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._given

    def text(self, name: str) -> str | None:
        """The option's text, or None if it was not given.

        Raises:
            InvalidOptionError: it was given empty.
        """
        value = self._given.get(name.lower())
        if value is not None and not value.strip():
            raise InvalidOptionError(f"the option {name} is empty: give a value, or leave it out")
        return value

    def choice(self, name: str, *choices: str) -> str:
        """One of a few words, whatever their case; the first is the default.

        Raises:
            InvalidOptionError: another word.
        """
        text = self.text(name)
        if text is None:
            return choices[0]
        for one in choices:
            if text.strip().lower() == one.lower():
                return one
        raise InvalidOptionError(f"the option {name} is {text!r}: give one of {', '.join(choices)}")

    def flag(self, name: str, *, default: bool) -> bool:
        """``true`` or ``false``.

        Raises:
            InvalidOptionError: another word.
        """
        text = self.text(name)
        if text is None:
            return default
        if (value := _YES.get(text.strip().lower())) is None:
            raise InvalidOptionError(f"the option {name} is {text!r}: give true or false")
        return value

    def count(self, name: str, *, lowest: int = 1, highest: int = 2**63 - 1) -> int | None:
        """A whole number, or None if it was not given.

        Raises:
            InvalidOptionError: not a whole number from *lowest* to *highest*.
        """
        text = self.text(name)
        if text is None:
            return None
        # What a strip takes away is more than what int() forgives.
        digits = text.strip()
        if not re.fullmatch(r"[0-9]{1,19}", digits) or not lowest <= int(digits) <= highest:
            raise InvalidOptionError(
                f"the option {name} is {text!r}: give a whole number from {lowest:,} to {highest:,}"
            )
        return int(digits)

    def time(self, name: str) -> datetime | None:
        """A point in time, in milliseconds since 1970 as Kafka's or ISO 8601 with a zone; None if it was not given.

        Raises:
            InvalidOptionError: neither.
        """
        text = self.text(name)
        return None if text is None else parse_time(text, name)

    def url(self, environment: Mapping[str, str]) -> str:
        """The broker's address: the option ``url``, else ``BIDE_URL``, else RabbitMQ's default on this machine.

        Call it on the driver: executors have another environment.

        Raises:
            InvalidOptionError: the option was given empty.
        """
        return self.text("url") or environment.get(ENVIRONMENT_VARIABLE) or DEFAULT_URL


def parse_time(text: str, option: str) -> datetime:
    """Read a point in time: milliseconds since 1970, or ISO 8601 with a zone.

    Raises:
        InvalidOptionError: neither; the message names the *option*.
    """
    stripped = text.strip()
    try:
        if re.fullmatch(r"[0-9]{1,15}", stripped):
            return datetime.fromtimestamp(int(stripped) / 1000, UTC)
        time = datetime.fromisoformat(stripped)
    except (ValueError, OverflowError, OSError):
        time = None
    if time is None or time.tzinfo is None:
        raise InvalidOptionError(
            f"the option {option} is {text!r}: give milliseconds since 1970-01-01 UTC, or a time with its zone "
            "such as 2026-11-21T06:00:00Z"
        )
    return time.astimezone(UTC)
