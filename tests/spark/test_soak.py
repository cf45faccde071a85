"""A short soak that is interrupted and continued."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.polling import wait_until
from tests.soak import processes
from tests.soak.account import Account
from tests.support import Rabbitmq


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_soak_is_continued(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak", "--kills", "2", "--jvm", "0", "--folder", str(tmp_path)]
    if rabbitmq.chroot is not None:
        command += ["--root", str(rabbitmq.chroot)]
    account = Account(tmp_path / "account.jsonl")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as first:
        try:
            wait_until(
                lambda: account.totals().all > 0 or first.poll() is not None, "it has killed something", seconds=600
            )
        finally:
            first.send_signal(signal.SIGKILL)
    assert first.returncode == -signal.SIGKILL, "it ended before"
    before = account.totals()
    assert before.rounds == 0
    # What it had started may live on for a moment, and must not disturb.
    second = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert second.returncode == 0, second.stdout + second.stderr
    totals = account.totals()
    assert totals.all == totals.kills.total() == 2
    assert (totals.runs, totals.rounds, totals.failures) == (2, 1, [])
    assert totals.found["read"] > 0
    assert totals.found["written"] > 0
    assert totals.found["stored"] > 0
    assert totals.found["keyed_written"] > 0
    assert "kills: 2 in 1 rounds" in second.stdout
    assert not processes.marked(tmp_path / "round-0001")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["account.jsonl", "lock"]
