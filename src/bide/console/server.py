"""The HTTP server of the console, on the loopback interface."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import Final

import uvicorn

from bide.console.app import make_app
from bide.console.settings import Access
from bide.console.vhost import ConsoleVhost
from bide.errors import InvalidInputError

_HOST: Final = "127.0.0.1"


class _Server(uvicorn.Server):
    """A server that leaves signals to the command."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


async def serve(
    vhosts: Sequence[ConsoleVhost],
    access: Access,
    *,
    started: Callable[[Access], None],
    stopping: asyncio.Event,
    advise: Callable[[str], str] = str,
) -> None:
    """Serve the console until an event is set.

    Args:
        access: who may use the console, and the port; 0 takes a free port.
        started: called with the settings and the port in use, when a browser can open the console.
        stopping: ends the console when it is set.
        advise: rewrites the texts of errors and findings, to name commands and options instead of Python calls.

    Raises:
        BrokerError: a broker cannot be reached.
        InvalidInputError: the port cannot be used.
    """
    listener = _listen(access.port)
    with listener:
        access = replace(access, port=listener.getsockname()[1])
        # In the lifespan of the application, uvicorn would log connection errors with tracebacks.
        async with AsyncExitStack() as stack:
            for one in vhosts:
                await stack.enter_async_context(one)
            config = uvicorn.Config(
                make_app(vhosts, access, advise),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=5,
            )
            server = _Server(config)
            running = asyncio.create_task(server.serve(sockets=[listener]))
            stopped = asyncio.create_task(stopping.wait())
            started(access)
            try:
                await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
            finally:
                server.should_exit = True
                stopped.cancel()
                await running


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise InvalidInputError(
            f"port {port} cannot be used: {error.strerror}; give another one with port=..."
        ) from error
    return listener
