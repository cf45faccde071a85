"""Options that choose failed messages, and values of the form NAME=VALUE."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from bide.recoverability.selection import Selection

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


def queue_option(command: _Decorated) -> _Decorated:
    """Add the option ``--queue``."""
    return click.option(
        "--queue",
        default="error",
        show_default=True,
        metavar="NAME",
        help="Error queue or dead-letter queue.",
    )(command)


def selection_options(command: _Decorated) -> _Decorated:
    """Add the options that choose messages, and pass them as the argument ``selection``."""
    options = [
        click.argument("ids", nargs=-1, metavar="[ID]..."),
        click.option("--group", metavar="NAME", help="Group of 'bide errors groups'."),
        click.option("--failed-on", metavar="QUEUE", help="Queue of the failure, or a pattern such as 'orders.*'."),
        click.option("--endpoint", metavar="NAME", help="Endpoint of the failure."),
        click.option("--exception", metavar="TYPE", help="Exception type, with or without its module."),
        click.option("--text", metavar="PART", help="Part of the exception text, ignoring case."),
        click.option("--body-text", metavar="PART", help="Part of the body, matching case."),
        click.option("--type", "message_type", metavar="NAME", help="Message type."),
        click.option("--key", metavar="KEY", help="Key of the schedule."),
        click.option("--reason", metavar="WORD", help="Reason: failed, rejected, expired, maxlen, delivery_limit."),
        click.option("--older-than", metavar="DELAY", help="Minimum time since the failure: 90s, 2h, 3d."),
        click.option("--newer-than", metavar="DELAY", help="Maximum time since the failure: 90s, 2h, 3d."),
        click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Header value. Repeatable."),
    ]
    wrapped = _with_selection(command)
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


def _with_selection(command: _Decorated) -> _Decorated:
    @wraps(command)
    def wrapper(
        *args: Any,
        ids: tuple[str, ...],
        group: str | None,
        failed_on: str | None,
        endpoint: str | None,
        exception: str | None,
        text: str | None,
        body_text: str | None,
        message_type: str | None,
        key: str | None,
        reason: str | None,
        older_than: str | None,
        newer_than: str | None,
        headers: tuple[str, ...],
        **kwargs: Any,
    ) -> Any:
        from bide.durations import parse_delay
        from bide.recoverability.selection import Selection

        selection: Selection = Selection(
            ids=frozenset(ids),
            group=group,
            queue=failed_on,
            endpoint=endpoint,
            exception=exception,
            text=text,
            body_text=body_text,
            message_type=message_type,
            key=key,
            reason=reason,
            older_than=None if older_than is None else parse_delay(older_than),
            newer_than=None if newer_than is None else parse_delay(newer_than),
            headers=pairs_of("--header", headers),
        )
        return command(*args, selection=selection, **kwargs)

    return wrapper  # type: ignore[return-value]  # fewer parameters


def pairs_of(option: str, pairs: tuple[str, ...], *, form: str = "NAME=VALUE") -> dict[str, str]:
    """The values of a repeatable option as a mapping.

    Raises:
        click.UsageError: a value does not have this form.
    """
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise click.UsageError(f"{option} {pair!r} is not of the form {form}")
        found[name] = value
    return found
