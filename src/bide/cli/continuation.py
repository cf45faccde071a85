"""The command that continues an interrupted one."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Final

from bide.cli.settings import PROGRAM

_PASSWORD: Final = re.compile(r"(://[^:/]*):[^/]*@")
"""The user and password of a URL. A password may have an unescaped ``@`` or ``:``, so the last ``@`` ends it."""

_PASSWORD_OPTION: Final = re.compile(r"([?&]\w*password=)[^&]*", re.IGNORECASE)
"""A password in the query of a URL, as PostgreSQL reads it."""


def command(
    arguments: Sequence[str], *, changed: Mapping[str, str | None] | None = None, without: Collection[str] = ()
) -> str:
    """The command line to run again, quoted for a shell, without passwords.

    Args:
        arguments: the arguments of the program.
        changed: new values for some of the options; None leaves an option out.
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
            kept.append(_PASSWORD.sub(r"\1:***@", _PASSWORD_OPTION.sub(r"\1***", one)))
    return shell_command([PROGRAM, *kept])


def shell_command(words: Sequence[str]) -> str:
    r"""Words as one line for a shell. Words with unprintable characters are quoted as ``$'\033'``."""
    return " ".join(shlex.quote(one) if one.isprintable() else _quote_bytes(one) for one in words)


def _quote_bytes(word: str) -> str:
    shown = (chr(one) if 32 <= one < 127 and one not in b"'\\" else f"\\{one:03o}" for one in os.fsencode(word))
    return f"$'{''.join(shown)}'"


def rest_of(period: timedelta, *, left: int, total: int) -> str:
    """The value of ``--over`` that sends the remaining messages at the same rate; at least 1 s."""
    return f"{max(round(period.total_seconds() * left / max(total, 1)), 1)}s"
