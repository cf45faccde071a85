"""Options of the data source as Spark passes them: texts with case-insensitive names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from bide.admin.locate import STREAM_PORT_VARIABLE
from bide.amqp.url import DEFAULT_URL, ENVIRONMENT_VARIABLE
from bide.durations import parse_delay
from bide.errors import InvalidInputError, InvalidOptionError

BROKER_VARIABLES: Final = (ENVIRONMENT_VARIABLE, STREAM_PORT_VARIABLE)
"""Environment variables of the driver that locate the broker."""

_SPARK_OPTIONS: Final = frozenset({"checkpointlocation", "queryname"})
"""Options that Spark itself reads."""

_DIGITS: Final = re.compile(r"[0-9]{1,16}")
_BOOLEANS: Final = {"true": True, "false": False}


class Options:
    """The options of one read or write. Each method takes the name of an option as it is documented.

    Errors name the option and never show the value of ``url``, which may contain a password.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): str(value) for name, value in given.items()}

    def refuse_unknown(self, known: frozenset[str], *, purpose: str) -> None:
        """Refuse options other than the *known* ones.

        Args:
            known: the names as they are documented.
            purpose: what the options are for, such as ``"writing"``; part of the error.

        Raises:
            InvalidOptionError: an option is unknown.
        """
        unknown = sorted(self._given.keys() - {name.lower() for name in known} - _SPARK_OPTIONS)
        if unknown:
            raise InvalidOptionError(
                f"unknown option{'s' if len(unknown) > 1 else ''} for {purpose}: {', '.join(unknown)}: "
                f"choose from {', '.join(sorted(known))}"
            )

    @property
    def is_empty(self) -> bool:
        """Whether no option was given."""
        return not self._given

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._given

    def text(self, name: str) -> str | None:
        """The value of an option as text; None if it is not set.

        Raises:
            InvalidOptionError: the value is empty.
        """
        value = self._given.get(name.lower())
        if value is not None and not value.strip():
            raise InvalidOptionError(f"the option {name} is empty: give a value, or leave it out")
        return value

    def names(self, name: str) -> tuple[str, ...] | None:
        """The value of an option that is a list of different names, separated by commas; None if it is not set.

        Raises:
            InvalidOptionError: a name is empty or repeated.
        """
        text = self.text(name)
        if text is None:
            return None
        found = tuple(one.strip() for one in text.split(","))
        if not all(found) or len(set(found)) < len(found):
            raise InvalidOptionError(f"the option {name} is {text!r}: give different names, separated by commas")
        return found

    def duration(self, name: str) -> timedelta | None:
        """The value of an option that is a duration. A plain number is milliseconds, as in a column of integers.

        Raises:
            InvalidOptionError: the value is not a duration.
        """
        text = self.text(name)
        if text is None:
            return None
        # str.strip() removes characters that int() does not accept around a number.
        digits = text.strip()
        try:
            if _DIGITS.fullmatch(digits):
                return timedelta(milliseconds=int(digits))
            return parse_delay(text)
        except (InvalidInputError, OverflowError) as error:
            raise InvalidOptionError(f"the option {name}: {error}") from error

    def choice(self, name: str, *choices: str) -> str:
        """The value of an option that is one of a few words, in upper or lower case; the first is the default.

        Raises:
            InvalidOptionError: the value is another word.
        """
        text = self.text(name)
        if text is None:
            return choices[0]
        for one in choices:
            if text.strip().lower() == one.lower():
                return one
        raise InvalidOptionError(f"the option {name} is {text!r}: give one of {', '.join(choices)}")

    def flag(self, name: str, *, default: bool) -> bool:
        """The value of an option that is ``true`` or ``false``.

        Raises:
            InvalidOptionError: the value is another word.
        """
        text = self.text(name)
        if text is None:
            return default
        if (value := _BOOLEANS.get(text.strip().lower())) is None:
            raise InvalidOptionError(f"the option {name} is {text!r}: give true or false")
        return value

    def count(self, name: str, *, lowest: int = 1, highest: int = 2**63 - 1) -> int | None:
        """The value of an option that is a whole number; None if it is not set.

        Raises:
            InvalidOptionError: the value is not a whole number from *lowest* to *highest*.
        """
        text = self.text(name)
        if text is None:
            return None
        # str.strip() removes characters that int() does not accept around a number.
        digits = text.strip()
        if not re.fullmatch(r"[0-9]{1,19}", digits) or not lowest <= int(digits) <= highest:
            raise InvalidOptionError(
                f"the option {name} is {text!r}: give a whole number from {lowest:,} to {highest:,}"
            )
        return int(digits)

    def time(self, name: str) -> datetime | None:
        """The value of an option that is a time, see :func:`parse_time`; None if it is not set.

        Raises:
            InvalidOptionError: the value is not a time.
        """
        text = self.text(name)
        return None if text is None else parse_time(text, name)

    def url(self, environment: Mapping[str, str]) -> str:
        """The URL of the broker: the option ``url``, else ``BIDE_URL``, else RabbitMQ's default on this machine.

        Call this on the driver, because executors have another environment.

        Raises:
            InvalidOptionError: the option is empty.
        """
        return self.text("url") or environment.get(ENVIRONMENT_VARIABLE) or DEFAULT_URL


def parse_time(text: str, option: str) -> datetime:
    """Parse a time: milliseconds since 1970, as in Spark's Kafka source, or ISO 8601 with a zone.

    Raises:
        InvalidOptionError: the text is not a time; the error names the *option*.
    """
    stripped = text.strip()
    try:
        if re.fullmatch(r"[0-9]{1,15}", stripped):
            return datetime.fromtimestamp(int(stripped) / 1000, UTC)
        time = datetime.fromisoformat(stripped)
        in_utc = None if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        in_utc = None
    if in_utc is None:
        raise InvalidOptionError(
            f"the option {option} is {text!r}: give milliseconds since 1970-01-01 UTC, or a time with its zone "
            "such as 2026-11-21T06:00:00Z"
        )
    return in_utc
