"""Common settings of commands, such as broker URL and verbosity, and their options."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from bide.cli.advice import with_options
from bide.errors import InvalidDelayError, InvalidInputError
from bide.foreign_text import visible

if TYPE_CHECKING:
    from bide.amqp.url import BrokerUrl

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

PROGRAM: Final = "bide"

_LEVELS: Final = (logging.WARNING, logging.INFO, logging.DEBUG)


@dataclass(slots=True)
class Settings:
    """The options of the program. ``--url`` after a command overrides ``--url`` before the command.

    Attributes:
        url: the URL of the broker, or None if none was given.
        management_url: the URL of its management API, or None.
        verbosity: the number of ``-v`` options.
        arguments: the arguments of the program, as given.
        started: when the program started, by :func:`time.monotonic`.
    """

    url: str | None = None
    management_url: str | None = None
    verbosity: int = 0
    arguments: tuple[str, ...] = ()
    started: float = field(default_factory=time.monotonic)

    def broker_url(self) -> BrokerUrl:
        """The broker's URL; by default RabbitMQ's default URL on this machine.

        Raises:
            InvalidUrlError: the URL cannot be read.
        """
        from bide.amqp.url import DEFAULT_URL, BrokerUrl

        return BrokerUrl.parse(self.url or DEFAULT_URL)


pass_settings = click.make_pass_decorator(Settings)


class _Formatter(logging.Formatter):
    """Formats a record as one line, with a traceback only if details are wanted.

    Warnings of bide name options and commands, as its errors do.
    """

    def __init__(self, *, details: bool) -> None:
        super().__init__(f"{PROGRAM}: %(asctime)s %(name)s: %(message)s" if details else f"{PROGRAM}: %(message)s")
        self._details = details

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name is logging's)
        text = super().formatMessage(record)
        is_advice = record.levelno >= logging.WARNING and record.name.startswith(f"{PROGRAM}.")
        return with_options(text) if is_advice else text

    def formatException(self, ei: Any) -> str:  # noqa: N802 (the name is logging's)
        return super().formatException(ei) if self._details else ""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return visible(text, keep="\n\t") if self._details else visible(text.partition("\n")[0])


def duration_of(option: str, text: str) -> timedelta:
    """Parse an option's value as a duration.

    Raises:
        InvalidDelayError: the value is not a duration; the error names the option.
    """
    from bide.durations import parse_delay

    try:
        return parse_delay(text)
    except InvalidDelayError as error:
        raise InvalidDelayError(f"{option}: {error}") from error


def configure_logging(verbosity: int) -> None:
    """Log to standard error: warnings, with ``-v`` also progress, with ``-vv`` all details."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(details=verbosity > 0))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[min(verbosity, len(_LEVELS) - 1)])


def _store_url(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value:
        assert parameter.name is not None
        setattr(context.find_object(Settings), parameter.name, value)


def _store_verbosity(context: click.Context, _: click.Parameter, value: int) -> None:
    settings = context.find_object(Settings)
    assert settings is not None
    if value:
        settings.verbosity += value
        configure_logging(settings.verbosity)


def _url_option(environment_variable: str | None) -> Callable[[_Decorated], _Decorated]:
    return click.option(
        "--url",
        metavar="URL",
        envvar=environment_variable,
        show_envvar=True,
        expose_value=False,
        callback=_store_url,
        help="Broker URL: amqp[s]://user:password@host:port/vhost.",
    )


def _management_url_option(command: _Decorated) -> _Decorated:
    # BIDE_MANAGEMENT_URL is not read here, because it applies only to the broker of BIDE_URL.
    return click.option(
        "--management-url",
        metavar="URL",
        expose_value=False,
        callback=_store_url,
        help="Management API: http[s]://user:password@host:port.",
    )(command)


def verbose_option(command: _Decorated) -> _Decorated:
    """Add ``-v``."""
    return click.option(
        "-v",
        "--verbose",
        count=True,
        expose_value=False,
        callback=_store_verbosity,
        help="Log progress and internal tracebacks; -vv logs details.",
    )(command)


def program_options(command: _Decorated) -> _Decorated:
    """Add the options before the command. They alone read the environment; options after the command override them."""
    return _url_option("BIDE_URL")(_management_url_option(verbose_option(command)))


def broker_options(command: _Decorated) -> _Decorated:
    """Add the options of a command that talks to a broker."""
    return _url_option(None)(verbose_option(command))


def management_options(command: _Decorated) -> _Decorated:
    """Add the options of a command that talks to a broker and to its management API."""
    return _url_option(None)(_management_url_option(verbose_option(command)))


def json_option(what: str, *, lines: bool = False) -> Callable[[_Decorated], _Decorated]:
    """Add ``--json``.

    Args:
        what: the printed values, for the help text.
        lines: whether each value is one line.
    """
    text = f"Print {what} as JSON{', one per line' if lines else ''}."
    return click.option("--json", "as_json", is_flag=True, help=text)


def allow_option(command: _Decorated) -> _Decorated:
    """Add ``--allow``."""
    return click.option(
        "--allow",
        multiple=True,
        required=True,
        metavar="PATTERN",
        help="Allowed target: 'orders.*', q:QUEUE, x:EXCHANGE. Repeatable.",
    )(command)


def layout_options(
    *, fewer_levels: bool = False, taps: bool = False, which: str = "", argument: str = "infrastructure"
) -> Callable[[_Decorated], _Decorated]:
    """Add the options that choose a delay infrastructure, and pass it as an argument.

    Args:
        fewer_levels: let ``--levels`` also shorten the cascade of NServiceBus, for commands that use no broker.
        taps: leave out the waiting hall, which has no taps.
        which: the start of the names of the options, for commands with two infrastructures: ``from`` or ``to``. The
            layout then has no default.
        argument: the name of the argument.
    """
    from bide.delay.by_name import LAYOUTS, QUEUE_TYPES, ROUTINGS

    hall = "" if taps else ", waiting-hall"
    start = f"--{which}-" if which else "--"
    default: dict[str, Any] = {"required": True} if which else {"default": "clock", "show_default": True}
    options = [
        click.option(
            f"{start}layout",
            type=click.Choice([one for one in LAYOUTS if not (taps and one == "waiting-hall")]),
            help="Delay infrastructure.",
            **default,
        ),
        click.option(f"{start}prefix", metavar="NAME", help="Start of all names. [default: bide; none with celery]"),
        click.option(f"{start}max-delay", metavar="DELAY", help="Longest delay that gets queues (clock)."),
        click.option(f"{start}resolution", metavar="DELAY", help=f"Round delays up to this: 10ms, 1s (clock{hall})."),
        click.option(f"{start}lanes", type=int, metavar="N", help="Parallel queues per digit (clock)."),
        click.option(
            f"{start}routing",
            type=click.Choice(ROUTINGS),
            help="NServiceBus routing topology. [default: conventional]",
        ),
        click.option(
            f"{start}queue-type",
            type=click.Choice(QUEUE_TYPES),
            help="Type of the delay queues (celery). [default: quorum]",
        ),
    ]
    if not taps:
        levels_help = f"Number of levels (waiting-hall{', nservicebus' if fewer_levels else ''})."
        options.append(click.option(f"{start}levels", type=int, metavar="N", help=levels_help))

    def decorate(command: _Decorated) -> _Decorated:
        wrapped = _with_infrastructure(command, which, argument, fewer_levels=fewer_levels)
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return decorate


def _with_infrastructure(command: _Decorated, which: str, argument: str, *, fewer_levels: bool) -> _Decorated:
    from functools import wraps

    names = ("layout", "prefix", "max_delay", "resolution", "lanes", "routing", "queue_type", "levels")
    start = f"{which}_" if which else ""

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from bide.delay.by_name import make_infrastructure

        given = {name: kwargs.pop(f"{start}{name}", None) for name in names}
        if given["levels"] is not None and given["layout"].startswith("nservicebus") and not fewer_levels:
            raise InvalidInputError(
                "the layout nservicebus always has 28 levels, as its other endpoints do: leave out "
                f"--{start.replace('_', '-')}levels"
            )
        return command(*args, **kwargs, **{argument: make_infrastructure(**given)})

    return wrapper  # type: ignore[return-value]  # fewer parameters


def hall_options(command: _Decorated) -> _Decorated:
    """Add the options of a waiting hall, and pass it as the argument ``hall``."""
    from functools import wraps

    @click.option("--prefix", metavar="NAME", help="Start of all names. [default: bide]")
    @click.option("--levels", type=int, metavar="N", help="Number of levels, each twice as long. [default: 20]")
    @click.option("--resolution", metavar="DELAY", help="Wait of the lowest level. [default: 1s]")
    @wraps(command)
    def wrapper(*args: Any, prefix: str | None, levels: int | None, resolution: str | None, **kwargs: Any) -> Any:
        from bide.delay.by_name import make_infrastructure

        hall = make_infrastructure("waiting-hall", prefix=prefix, levels=levels, resolution=resolution)
        return command(*args, hall=hall, **kwargs)

    return wrapper  # type: ignore[return-value]  # fewer parameters
