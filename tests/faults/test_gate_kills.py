"""Gates, clients and a broker, killed while schedules are changed; see ``make race``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.schedule_race.checking import check
from tests.schedule_race.history import HistoryWriter, read_history
from tests.schedule_race.race import Plan, Race
from tests.support import Rabbitmq
from tests.timeouts import TIMEOUT


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_no_message_is_both_cancelled_and_delivered_or_neither(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    plan = Plan(
        seed=1,
        operations=3000,
        rate=60,
        gate_kill_every=180,
        client_kill_every=250,
        broker_kills=1,
        seconds=3 * TIMEOUT,
    )
    with rabbitmq.start(ephemeral=True) as broker, HistoryWriter(tmp_path / "history") as history:
        await Race(plan, broker, tmp_path, history).run()
    found = check(read_history(tmp_path / "history"))
    assert found.violations == []
    assert found.kills["gate"] >= 3
    assert found.kills["client"] >= 2  # each of the two gets twice the requests after which it is killed at the latest
    assert found.kills["broker"] == 1
    outcomes = found.outcomes
    assert min(outcomes[one] for one in ("cancel cancelled", "cancel too-late", "replace-if scheduled")) > 0
    assert found.log.void_claims > 0
