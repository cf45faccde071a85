"""A click group whose commands are imported when they run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click


class LazyCommand(NamedTuple):
    """The module and the summary of a command.

    Attributes:
        module: the module, which has the command under its name, with underscores.
        summary: the text for the help of the group, which imports no command.
    """

    module: str
    summary: str


class LazyGroup(click.Group):
    """A group of commands that are imported when they run.

    Args:
        lazy: the commands by name.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands."""
        return sorted(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if (command := self._lazy.get(cmd_name)) is None:
            return None
        found = getattr(import_module(command.module), cmd_name.replace("-", "_"))
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._lazy[name].summary) for name in self.list_commands(ctx)])
