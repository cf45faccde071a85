"""The check of ``bide delay verify`` for stuck messages, with counts that are old."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import bide
from bide.admin import verify
from bide.admin.report import Finding
from bide.admin.snapshot import Snapshot

QUEUE = "bide.v1.s1"


async def checked(monkeypatch: pytest.MonkeyPatch, left_after: float) -> Finding:
    """The finding about a queue whose count stays above 0 for this number of seconds."""
    now = 0.0

    def queues() -> Any:
        return {QUEUE: SimpleNamespace(between=int(now < left_after))}

    async def find_owned(*_: object) -> Any:
        return {}, queues()

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(verify, "find_owned", find_owned)
    monkeypatch.setattr(verify, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(verify, "asyncio", SimpleNamespace(sleep=sleep))
    api: Any = None
    (finding,) = await verify._check_stuck(Snapshot(queues=queues()), api, "/", bide.Clock())
    return finding


async def test_messages_counted_for_14_s_are_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue updates its counts every 5 s, and the management API collects them every 5 s, later on a busy machine."""
    assert (await checked(monkeypatch, 14.0)).status == "ok"


async def test_messages_that_stay_counted_are_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await checked(monkeypatch, 600.0)
    assert (found.status, QUEUE in found.text) == ("problem", True)
