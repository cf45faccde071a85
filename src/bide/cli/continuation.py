"""The command that goes on after one that was interrupted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Final

from bide.cli.settings import PROGRAM

_PASSWORD: Final = re.compile(r"(://[^:/@]*):[^@]*@")


def command(
    arguments: Sequence[str], *, changed: Mapping[str, str | None] | None = None, without: Collection[str] = ()
) -> str:
    """The same command once more, as a shell takes it. Passwords are not shown.

    Args:
        arguments: of the program.
        changed: options with other values, where they were given; None leaves one out.
        without: arguments to leave out.
    """
    kept, changed = [], changed or {}
    given = iter(arguments)
    for one in given:
        name, equals, _ = one.partition("=")
        if name in changed:
            if not equals:
                next(given, None)
            if (value := changed[name]) is not None:
                kept += [name, value]
        elif one not in without:
            kept.append(_PASSWORD.sub(r"\1:***@", one))
    return shlex.join([PROGRAM, *kept])


def rest_of(period: timedelta, *, left: int, total: int) -> str:
    """The time over which to spread what is left at the same pace, at least 1 s, as ``--over`` takes it."""
    return f"{max(round(period.total_seconds() * left / max(total, 1)), 1)}s"
