"""What connections of other clients still have to declare, as time passes."""

from __future__ import annotations

import time

import pytest

import bide
from bide.integrations import Delays

SERVER = {"version": "3.10.8"}


class Connection:
    """A key."""


def test_a_binding_in_use_is_declared_again_while_new_delays_are_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delay that is new on a connection does not count as a check of the target's binding."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    delays, connection = Delays(), Connection()

    def declared(delay: str) -> list[str]:
        """The queues that a message with this delay declares and binds."""
        publish = delays.route(bide.QueueTarget("mail"), delay=delay, server_properties=SERVER)
        calls = list(delays.declarations(publish, connection=connection))
        delays.declared(publish, connection=connection)
        return [one.arguments["queue"] for one in calls if one.method == "queue_bind"]

    assert declared("1s")[-2:] == ["bide.v1.s1", "mail"]
    assert declared("1s") == []
    now += 20
    assert declared("2s") == ["bide.v1.s2"]
    now += 20
    assert declared("2s") == ["mail"]
    assert declared("1s") == ["bide.v1.s1"]
