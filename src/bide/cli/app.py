"""The program ``bide``: its commands, and exit codes for errors."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from typing import Final

import click

from bide.cli.advice import with_options
from bide.cli.lazy_group import LazyCommand, LazyGroup
from bide.cli.output import echo
from bide.cli.settings import PROGRAM, Settings, configure_logging, program_options
from bide.errors import BideError, InvalidInputError
from bide.runtime.logs import logger
from bide.version import VERSION

log = logger(__name__)

FAILED: Final = 1
BAD_USAGE: Final = 2
INTERRUPTED: Final = 130


COMMANDS: Final = {
    "broker": LazyCommand("bide.cli.broker", "Run a private RabbitMQ on this machine."),
    "check": LazyCommand("bide.cli.check", "Check a cluster: send messages, inject faults, judge the history."),
    "console": LazyCommand("bide.cli.console", "Serve a web page for the people who run bide."),
    "delay": LazyCommand("bide.cli.delay", "Install, check and explain a delay infrastructure."),
    "demo": LazyCommand("bide.cli.demo", "Watch delayed messages arrive on time, and draw a report."),
    "endpoint": LazyCommand("bide.cli.endpoint", "Create the queues and exchanges of endpoints."),
    "errors": LazyCommand("bide.cli.errors", "List failed messages; retry, edit, archive or discard them."),
    "gate": LazyCommand("bide.cli.gate", "Deliver scheduled messages until interrupted."),
    "migrate-plugin": LazyCommand(
        "bide.cli.migrate_plugin", "Leave the delayed-message plugin, with what waits in it."
    ),
    "pipeline": LazyCommand("bide.cli.pipeline.commands", "Schedule, audit, replay or plan many messages."),
    "queue": LazyCommand("bide.cli.queue", "Turn queues into quorum queues; raise delivery limits."),
    "receive": LazyCommand("bide.cli.receive", "Print the messages of a queue until interrupted."),
    "relay": LazyCommand("bide.cli.relay", "Relay the messages of a waiting hall until interrupted."),
    "schedule": LazyCommand("bide.cli.schedule", "Schedule messages by a key; list, cancel or move them."),
    "send": LazyCommand("bide.cli.send", "Send messages now, after a delay or at a due time."),
    "tap": LazyCommand("bide.cli.tap", "Record every delayed message in two streams."),
    "timeouts": LazyCommand("bide.cli.timeouts", "Move the timeouts that NServiceBus stored in a database."),
    "topology": LazyCommand("bide.cli.topology", "List, draw and check patterns of exchanges and queues."),
}


@click.group(
    cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@program_options
@click.version_option(VERSION, prog_name=PROGRAM, message="%(prog)s %(version)s")
def cli() -> None:
    """Delayed delivery on RabbitMQ, with nothing but exchanges, queues, TTL and dead-lettering.

    Delays are sums of numbers with units (250ms, 90s, 1h30m, 3d) or ISO 8601 (PT1H30M). Due times are ISO 8601 with an
    offset (2026-12-24T18:00:00+01:00).

    --url or BIDE_URL names the broker; the default is RabbitMQ's default URL on this machine. --management-url names
    its management API, and for the broker of BIDE_URL also BIDE_MANAGEMENT_URL. The default has the user, password and
    host of the broker's URL, and port 15672.

    Exit codes: 0 done; 1 a check or an operation failed, or the answer to a question was no; 2 bad usage, nothing was
    done; 130 interrupted, 143 by SIGTERM.
    """


def run(
    arguments: Sequence[str],
    *,
    command: click.Command = cli,
    program: str = PROGRAM,
    started: float | None = None,
) -> int:
    """Run one command and return the exit code. An error is printed as one line on standard error.

    Args:
        command: the command that the arguments are for.
        program: the program's name in help and errors.
        started: when the program started, by :func:`time.monotonic`; None for now.
    """
    settings = Settings(arguments=tuple(arguments), started=time.monotonic() if started is None else started)
    configure_logging(0)
    try:
        result = command.main(args=_as_options(arguments), prog_name=program, obj=settings, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return BAD_USAGE
    except click.UsageError as error:
        who = error.ctx.command_path if error.ctx is not None else program
        return _fail(f"{error.format_message().rstrip('.')}; see '{who} --help'", BAD_USAGE, who=who)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code, who=program)
    except click.Abort as error:
        # click treats every EOFError as a Ctrl-D, even one from a file that is cut off.
        if isinstance(error.__cause__, EOFError):
            return _fail_internally(error.__cause__, settings, program)
        return INTERRUPTED
    except InvalidInputError as error:
        return _fail(with_options(str(error)), BAD_USAGE, who=program)
    except BideError as error:
        log.debug("where it failed", exc_info=True)
        return _fail(with_options(str(error)), FAILED, who=program)
    except BrokenPipeError:
        # The reader of the output ended first, for example "head".
        return FAILED
    except OSError as error:
        log.debug("where it failed", exc_info=True)
        what = f"{error.filename}: " if error.filename is not None else "input or output failed: "
        return _fail(f"{what}{error.strerror or error}", FAILED, who=program)
    except Exception as error:  # noqa: BLE001 (the last line of defence: a stranger gets no traceback)
        return _fail_internally(error, settings, program)
    return result if isinstance(result, int) else 0


def _as_options(arguments: Sequence[str]) -> list[str]:
    """``help send`` as ``send --help``, and ``version`` as ``--version``: many programs have both forms."""
    match list(arguments):
        case ["help", *command]:
            return [*command, "--help"]
        case ["version"]:
            return ["--version"]
        case others:
            return others


def _fail_internally(error: Exception, settings: Settings, program: str) -> int:
    if settings.verbosity:
        echo("".join(traceback.format_exception(error)).rstrip("\n"), keep="\n\t", err=True)
        return FAILED
    return _fail(f"internal error: {type(error).__name__}: {error} (with -v: the traceback)", FAILED, who=program)


def _fail(message: str, code: int, *, who: str) -> int:
    echo(f"{who}: {' '.join(message.split())}", err=True)
    return code
