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

    def counted() -> Snapshot:
        queues: Any = {QUEUE: SimpleNamespace(between=int(now < left_after))}
        return Snapshot(queues=queues)

    async def take_snapshot(*_: object) -> Snapshot:
        return counted()

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(verify, "take_snapshot", take_snapshot)
    monkeypatch.setattr(verify, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(verify, "asyncio", SimpleNamespace(sleep=sleep))
    api: Any = None
    (finding,) = await verify._check_stuck(counted(), api, "/", bide.Clock())
    return finding


async def test_a_count_that_two_updates_made_old_is_not_of_stuck_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue updates its counts every 5 s, and the management API collects them every 5 s, later on a busy machine."""
    assert (await checked(monkeypatch, 14.0)).status == "ok"


async def test_a_count_that_stays_is_of_stuck_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await checked(monkeypatch, 600.0)
    assert (found.status, QUEUE in found.text) == ("problem", True)
