"""Makes what bide receives from the broker late at random, to find races in tests.

``make test-slowed`` puts this folder on the path of all Python processes, which import this module as they start. A
test that waits for a sign, such as a queue that exists, may rely on a later step of the other side. On a quick broker
that step follows at once.
"""
# ruff: noqa: I002 (a test looks at what a process imports)

import random
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# asyncio is imported where it is used, because some tests interrupt a process while it imports asyncio.

_PAUSE = (0.1, 1.2)
"""The shortest and the longest pause, in seconds."""

_EVERY = 5.0
"""The mean time between two pauses of a connection, in seconds. Every second connection begins with one."""

_SHARE_OF_CALLS = 0.2
"""How many of the calls of the management API are held up."""


def _slow_down_connections(module: Any) -> None:
    connect = module.Tcp.connect

    async def connect_slowed(self: Any, factory: Any, host: str, port: int, *, loop: Any, context: Any) -> Any:
        protocol = await connect(self, factory, host, port, loop=loop, context=context)
        take_data, take_end = protocol.data_received, protocol.connection_lost
        held: list[tuple[Callable[[Any], None], Any]] = []
        pause_at = loop.time() + random.choice((0.0, random.expovariate(1 / _EVERY)))

        def release() -> None:
            waiting = held.copy()
            held.clear()
            for take, value in waiting:
                take(value)

        def receive(take: Callable[[Any], None], value: Any) -> None:
            nonlocal pause_at
            if not held and loop.time() < pause_at:
                take(value)
                return
            if not held:
                pause = random.uniform(*_PAUSE)
                pause_at = loop.time() + pause + random.expovariate(1 / _EVERY)
                loop.call_later(pause, release)
            held.append((take, value))

        protocol.data_received = lambda data: receive(take_data, data)
        protocol.connection_lost = lambda error: receive(take_end, error)
        return protocol

    module.Tcp.connect = connect_slowed


def _slow_down_management(module: Any) -> None:
    call = module.ManagementApi.call

    async def call_slowed(*values: Any, **options: Any) -> Any:
        import asyncio

        if random.random() < _SHARE_OF_CALLS:
            await asyncio.sleep(random.uniform(*_PAUSE))  # the slowness that is tested
        return await call(*values, **options)

    module.ManagementApi.call = call_slowed


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "bide.amqp.transport": _slow_down_connections,
    "bide.management.api": _slow_down_management,
}


class _Finder(MetaPathFinder):
    """Finds the modules to change, and changes them when they are imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _CHANGES else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            _CHANGES[name](module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign] # loaders have no hook after a module
        return spec


sys.meta_path.insert(0, _Finder())
