"""``bide console``: a web page for the people who run bide."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from bide.cli.advice import with_options
from bide.cli.output import echo
from bide.cli.running import run_until_signal
from bide.cli.settings import Settings, layout_options, management_options, pass_settings
from bide.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bide.console.settings import Access, ProxyAccess
    from bide.console.vhost import ConsoleVhost
    from bide.delay.protocol import DelayInfrastructure


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8642,
    show_default=True,
    metavar="PORT",
    help="Port on 127.0.0.1; 0 takes a free one.",
)
@click.option("--read-only", is_flag=True, help="Refuse all changes.")
@click.option(
    "--vhost", "vhosts", multiple=True, metavar="NAME", help="Virtual host. Repeatable. [default: that of the URL]"
)
@click.option("--origin", metavar="URL", help="Address behind a proxy: https://bide.example.org.")
@click.option("--user-header", metavar="NAME", help="Header in which the proxy sends the user.")
@click.option(
    "--allow-user", "users", multiple=True, metavar="PATTERN", help="Allowed user: '*@example.org'. Repeatable."
)
@layout_options()
@management_options
@pass_settings
def console(
    settings: Settings,
    /,
    *,
    port: int,
    read_only: bool,
    vhosts: tuple[str, ...],
    origin: str | None,
    user_header: str | None,
    users: tuple[str, ...],
    infrastructure: DelayInfrastructure,
) -> None:
    """Serve a web page that shows what waits and what failed, until Ctrl-C or SIGTERM.

    The page shows what waits, schedules, failed messages, problems, lateness and the operator log. It changes schedules
    and failed messages as 'bide schedule' and 'bide errors' do. Every change is recorded in the stream bide.audit.

    The page is served on this machine only, and needs the token in the printed address. Behind a proxy that signs users
    in, give --origin, --user-header and --allow-user instead.
    """
    proxy = _proxy(origin, user_header, users)
    require_console()
    from bide.console.settings import Access
    from bide.console.vhost import ConsoleVhost

    url = settings.broker_url()
    served = [
        ConsoleVhost(
            url=replace(url, vhost=name), infrastructure=infrastructure, management_url=settings.management_url
        )
        for name in dict.fromkeys(vhosts or (url.vhost,))
    ]
    serve_console(served, Access(port=port, is_read_only=read_only, proxy=proxy))


def require_console() -> None:
    """Check that the extra of the console is installed.

    Raises:
        ClickException: the extra is missing.
    """
    try:
        import bide.console.server  # noqa: F401 (whether it can be imported)
    except ImportError as error:
        raise click.ClickException(
            "the console needs starlette and uvicorn: install them with pip install 'bide[console]'"
        ) from error


def serve_console(vhosts: Sequence[ConsoleVhost], access: Access) -> None:
    """Print the address of a console, and serve it until Ctrl-C or SIGTERM."""
    from bide.console.server import serve

    stopping = asyncio.Event()
    run_until_signal(serve(vhosts, access, started=_announce, stopping=stopping, advise=with_options), stopping.set)


def _proxy(origin: str | None, user_header: str | None, users: tuple[str, ...]) -> ProxyAccess | None:
    if origin is None and user_header is None and not users:
        return None
    if origin is None or user_header is None or not users:
        raise InvalidInputError("a proxy needs all of --origin, --user-header and --allow-user: give the missing ones")
    from bide.console.settings import ProxyAccess

    return ProxyAccess(origin=origin, user_header=user_header, users=users)


def _announce(access: Access) -> None:
    mode = " (read-only)" if access.is_read_only else ""
    echo(f"console{mode} on {access.url}")
    if access.proxy is not None:
        echo(f"let the proxy connect to http://127.0.0.1:{access.port}", err=True)
