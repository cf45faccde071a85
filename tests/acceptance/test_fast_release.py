"""The dead-letter prefetch in ``bide delay verify`` and docs/delays.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

import bide
from bide.local_broker import LocalBroker
from tests.polling import wait_until
from tests.support import Rabbitmq
from tests.timeouts import TIMEOUT

PAGE = Path(__file__).parents[2] / "docs" / "delays.md"
SMALL = ("--max-delay", "1s", "--resolution", "500ms")
SMALL_CLOCK = bide.Clock(max_delay="1s", resolution="500ms")
MESSAGES = 40

_UNDER_WAY = (
    '{ok, Q} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"held">>)), '
    "{ok, {_, Overview}, _} = ra:local_query(amqqueue:get_pid(Q), fun rabbit_fifo:overview/1), "
    "maps:get(num_discard_checked_out, Overview)."
)
_LOSE_WORKER = (
    'Worker = spawn(fun() -> ok end), Queue = list_to_existing_atom("%2F_bide.v1.s1"), '
    "{ok, ok, _} = ra:process_command({Queue, node()}, rabbit_fifo_dlx:make_checkout(Worker, 32))."
)
_WORKERS = "[erlang:pid_to_list(P) || {_, P, _, _} <- supervisor:which_children(rabbit_fifo_dlx_sup)]."


@dataclass(frozen=True, slots=True)
class Private:
    """A broker where ``bide broker start`` would have started it, for a user whose state is kept elsewhere."""

    broker: LocalBroker
    state: Path

    def bide(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "XDG_STATE_HOME": str(self.state),
            "BIDE_URL": self.broker.url,
            "BIDE_MANAGEMENT_URL": self.broker.management_url,
        }
        command = [sys.executable, "-m", "bide", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT, check=False)

    def verify(self) -> tuple[int, dict[str, dict[str, str]]]:
        """The exit code, and the findings by check."""
        done = self.bide("delay", "verify", "--json", *SMALL)
        assert not done.stderr, done.stderr
        findings = json.loads(done.stdout)["findings"]
        by_check = {one["check"]: one for one in findings}
        assert len(by_check) == len(findings)
        return done.returncode, by_check

    def verified(self) -> tuple[int, str, str]:
        """The exit code; and of the prefetch, the status and the text."""
        code, findings = self.verify()
        found = findings.pop("dead-letter prefetch")
        assert [one for one in findings.values() if one["status"] != "ok"] == []
        return code, found["status"], found["text"]

    def stuck(self) -> str:
        """What is found about stuck messages."""
        return self.verify()[1]["stuck messages"]["text"]

    def unconfirmed(self, queue: str) -> int | None:
        """Number of dead letters that no target had confirmed when the queue counted them, or None before it does."""
        found = self.broker.management.call("GET", "queues", "/", queue)
        if "messages" not in found:
            return None
        return int(found["messages"] - found["messages_ready"] - found["messages_unacknowledged"])

    def run(self, line: str) -> str:
        """A command of the page, on this broker."""
        program, *arguments = shlex.split(line)
        assert program == "rabbitmqctl"
        return self.broker.rabbitmqctl(*arguments)

    def under_way(self) -> int:
        """Number of unconfirmed messages of the dead-letter worker of the queue ``held``."""
        return int(self.broker.rabbitmqctl("eval", _UNDER_WAY))

    def workers(self) -> set[str]:
        return set(re.findall(r"<[\d.]+>", self.broker.rabbitmqctl("eval", _WORKERS)))


@pytest.fixture(scope="module")
def private(rabbitmq: Rabbitmq, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Private]:
    state = tmp_path_factory.mktemp("state")
    with rabbitmq.start(state / "bide" / "broker", ephemeral=True) as broker:
        started = Private(broker, state)
        done = started.bide("delay", "apply", *SMALL)
        assert done.returncode == 0, done.stderr
        yield started


def receive(client: bide.SyncClient, queue: str) -> None:
    """Receive a message and acknowledge it."""
    with client.consume(queue, timeout=timedelta(seconds=TIMEOUT)) as messages:
        next(iter(messages)).ack()


def commands() -> tuple[str, str]:
    """The commands of the page that set the prefetch and replace the workers without a restart."""
    sets, replaces = re.findall(r"^rabbitmqctl .+$", PAGE.read_text(), re.M)
    assert "1000" in sets
    return sets, replaces


def test_verify_shows_the_dead_letter_prefetch_and_warns_when_it_is_low(private: Private) -> None:
    assert private.verified() == (0, "ok", "1000")
    sets, _ = commands()
    private.run(sets.replace("1000", "32"))
    code, status, text = private.verified()
    assert (code, status) == (0, "ok")
    assert text.startswith("32; ")
    assert text.endswith(" with dead_letter_worker_consumer_prefetch 1000")
    private.run(sets.replace("1000", "8"))
    code, status, text = private.verified()
    assert (code, status) == (1, "problem")
    assert text.startswith(
        "8: a delay queue releases only this many messages at a time; set dead_letter_worker_consumer_prefetch"
    )
    private.run(sets)
    assert private.verified() == (0, "ok", "1000")


def hold_a_message(private: Private, client: bide.SyncClient) -> None:
    """Let the delay queue ``bide.v1.s1`` lose its dead-letter worker, which the next message then waits for."""
    client.declare(bide.Topology(queues=[bide.Queue.quorum("parcels")]))
    client.publish(b"", to="parcels", delay="1s")
    receive(client, "parcels")
    wait_until(lambda: private.unconfirmed("bide.v1.s1") == 0, what="nothing waits")
    private.broker.rabbitmqctl("eval", _LOSE_WORKER)
    client.publish(b"", to="parcels", delay="1s")


@pytest.mark.long
def test_new_dead_letter_workers_release_what_a_lost_one_holds(private: Private) -> None:
    """If two leaders follow each other quickly, the worker of the first may take the place of the second's."""
    _, replaces = commands()
    with bide.connect_sync(private.broker.url, infrastructure=SMALL_CLOCK) as client:
        hold_a_message(private, client)
        wait_until(lambda: "1 message is stuck in 'bide.v1.s1'" in private.stuck(), what="verify reports it")
        assert "as in docs/clusters.md" in private.stuck()
        private.run(replaces)
        receive(client, "parcels")
        assert private.stuck() == "none"


@pytest.mark.long
def test_a_count_from_before_the_release_reports_no_stuck_message(private: Private) -> None:
    """A quorum queue counts its messages every 5 seconds, so several answers may show the same count."""
    _, replaces = commands()
    with bide.connect_sync(private.broker.url, infrastructure=SMALL_CLOCK) as client:
        hold_a_message(private, client)
        wait_until(lambda: private.unconfirmed("bide.v1.s1") == 1, what="the message is counted")
        private.run(replaces)
        receive(client, "parcels")
    assert private.stuck() == "none"


@pytest.mark.long
def test_restarted_dead_letter_workers_read_the_prefetch_and_lose_nothing(private: Private) -> None:
    """Their messages stay unconfirmed, because nothing is bound to the target exchange."""
    sets, replaces = commands()
    with bide.connect_sync(private.broker.url) as client:
        arguments: dict[str, str | int] = {
            "x-message-ttl": 1,
            "x-dead-letter-exchange": "onward",
            "x-dead-letter-routing-key": "found",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
        onward, found = bide.Exchange("onward", "direct"), bide.Queue.quorum("found")
        client.declare(bide.Topology([onward], [bide.Queue.quorum("held", arguments), found]))
        for number in range(MESSAGES):
            client.publish(str(number), to="held")
        wait_until(lambda: private.under_way() == MESSAGES, what="all are under way")

        private.run(sets.replace("1000", "8"))
        assert private.under_way() == MESSAGES, "the worker goes on with what it read when it started"
        before = private.workers()
        private.run(replaces)
        wait_until(lambda: private.under_way() == 8, what="a new worker takes eight")
        wait_until(lambda: len(private.workers()) == len(before), what="each has a successor")
        assert not private.workers() & before

        client.declare(bide.Topology([onward], [found], [bide.Binding("onward", "found", "found")]))
        private.run(sets)
        private.run(replaces)
        missing = set(range(MESSAGES))
        with client.consume("found", timeout=timedelta(seconds=TIMEOUT)) as messages:
            for message in messages:
                missing.discard(int(message.body))
                message.ack()
                if not missing:
                    break
        assert missing == set()
