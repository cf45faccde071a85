"""Advice of errors in terms of the command line: commands for calls, options for arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

COMMANDS: Final[Mapping[str, str]] = {
    "Client.list_scheduled": "schedule list",
    "ErrorQueue.messages": "errors list",
    "ErrorQueue.retry": "errors retry",
    "LocalBroker.restart": "broker node start",
    "LocalCluster.start": "broker start",
    "bide.Gate": "gate",
    "bide.Relay": "relay",
    "bide.admin.infrastructure.install": "delay apply",
    "bide.admin.infrastructure.install_guard": "delay apply --guard",
    "bide.admin.protection.protect": "delay apply --protect",
    "bide.admin.taps.read_status": "tap status",
    "bide.admin.taps.turn_off": "tap off",
    "bide.admin.taps.turn_on": "tap on",
    "bide.admin.to_quorum.convert": "queue to-quorum",
    "bide.admin.verify.verify": "delay verify",
    "bide.delayed_plugin.export.export": "migrate-plugin export",
    "bide.delayed_plugin.replacing.replace_exchanges": "migrate-plugin apply",
    "bide.error_queues.ErrorQueue": "errors list",
    "bide.error_queues.undeliverable.resend": "delay resend",
    "bide.pipelines.audit.run.run": "pipeline audit",
    "bide.timeouts.TimeoutMigration": "timeouts migrate",
    "bide.timeouts.abort_run": "timeouts abort",
}
"""The command for each call that an error can name."""


_CALL: Final = (
    r"(?:\bcall )?(?<![\w.])(?P<call>\w+(?:\.\w+)*)\((?P<arguments>[^()]*)\)(?: for the layout '(?P<layout>[\w-]+)')?"
)
_VALUE: Final = r"\.\.\.|\[\.\.\.\]|\{\.\.\.\}|True\b|False\b"
_ARGUMENT: Final = rf"(?<![\w.-])(?P<name>[a-z_]+)=(?P<value>{_VALUE})"
_ADVICE: Final = re.compile(rf"{_CALL}|{_ARGUMENT}")


def with_options(text: str) -> str:
    """A text of the Python API, as the command line prints it.

    Errors name calls and arguments, because most of their readers are programs. ``call bide.Relay(allow=[...])``
    becomes ``run 'bide relay --allow ...'``, and ``allow=[...]`` elsewhere becomes ``--allow``.
    """
    return _ADVICE.sub(_advice, text)


def _advice(found: re.Match[str]) -> str:
    if found["name"] is not None:
        return _option(found["name"], found["value"])
    if found["call"] not in COMMANDS:
        return found[0]
    parts = ["bide", COMMANDS[found["call"]]]
    for argument in found["arguments"].split(", "):
        name, equals, value = argument.partition("=")
        if equals:
            parts.append(_option(name, value))
            if value not in ("True", "False"):
                parts.append("..." if value == "[...]" else value.strip("'"))
    if found["layout"] is not None:
        parts += ["--layout", found["layout"]]
    verb = "run " if found[0].startswith("call ") else ""
    return f"{verb}'{' '.join(parts)}'"


def _option(argument: str, value: str) -> str:
    # Imported here, because only errors need it.
    from bide.patterns.options import option_name

    name = option_name(argument, repeatable=value in ("[...]", "{...}"))
    return f"--no-{name}" if value == "False" else f"--{name}"
