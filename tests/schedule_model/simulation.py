"""Random histories of a schedule log, with planted faults.

usage: python -m tests.schedule_model.simulation [runs] [first seed] [--fault NAME]

The gates use the fold, the records and the snapshots of ``bide.schedules``; the rest of them is a sketch. The judge
reads the whole history afterwards. Each step does one thing at random: a client sends an operation, or repeats one; a
record lands in the log; a connection breaks, so that what was not confirmed is sent again while old copies may still
land; a gate reads, claims, delivers, reports, carries, crashes, starts from an old index, or stands still; retention
trims; the clock of a gate is stepped.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator

from bide.schedules.names import PARTITIONS
from bide.schedules.records import ChangeSchedule
from bide.schedules.state import ScheduleMemory
from tests.schedule_model.broker import KEYS, PARTITION, World
from tests.schedule_model.gate import Gate
from tests.schedule_model.judge import Verdict, judge


def add_gate(w: World, *indexes: ScheduleMemory | None) -> None:
    """Start a gate, with one of these indexes."""
    w.gate_names += 1
    w.gates.append(Gate(w, f"g{w.gate_names}", w.rng.choice(indexes or [None])))


def run(seed: int, fault: str | None = None) -> list[str]:
    """One exploration; what is wrong with it."""
    w = World(seed, fault)
    add_gate(w)
    rng = w.rng
    busy = rng.choice([300, 1500, 4000])
    quiet_gates = rng.random() < 0.2
    is_calm = False
    for step in range(10_000):
        w.now += rng.randint(0, 4)
        roll = rng.random()
        if not is_calm and step > busy:
            is_calm = True
            calm(w)
        if roll < 0.12 and not is_calm:
            w.operate(rng.choice(w.clients))
        elif roll < 0.16:
            w.repeat(rng.choice(w.clients))
        elif roll < 0.40:
            for _ in range(rng.randint(1, 3)):
                w.land()
            w.leave_limbo()
            w.trim()
        elif roll < 0.43:
            w.confirm()
        elif roll < 0.436 and not is_calm:
            w.break_connection(rng.choice(w.publishers))
        elif roll < 0.436 + w.crashes and not is_calm:
            disturb(w)
        elif not (quiet_gates and not is_calm and step > 150):
            # Some gates are quick, some hardly ever run.
            rng.choice(w.gates[-3:] if rng.random() < 0.8 else w.gates).step()
        if is_calm and step % 100 == 0:
            w.now += 500
            if at_rest(w):
                return found(w, seed)
    return [*found(w, seed), f"seed {seed}: does not come to rest"]


def disturb(w: World) -> None:
    rng, gate = w.rng, w.rng.choice(w.gates)
    match rng.randint(0, 5):
        case 0:
            gate.crash()
        case 1 | 2:
            gate.save()
        case 3 if len(w.gates) < 4:
            add_gate(w, None, *gate.saved)
        case 4:
            # Clocks that are wrong alike confirm each other, so one gate is wrong at a time.
            if gate.name == w.gates[0].name and all(not one.clock_error for one in w.gates[1:]):
                gate.clock_error = rng.choice([0, 400, -300])
        case 5 if len(w.gates) > 1:
            # It is gone for good, and what it had sent may still land.
            w.break_connection(gate.publisher)
            gate.publisher.flying = []
            w.gates.remove(gate)


def calm(w: World) -> None:
    """The end begins: no more disturbances, and what is paused goes on."""
    for gate in w.gates:
        gate.clock_error = 0
    w.reservations, w.crashes_in_carry, w.has_naps = 0, 0, False
    # Gates that stopped because too much is not carried go on when the retention is raised.
    w.retention = 1_000_000
    for key in KEYS:
        client = w.clients[0]
        w.send(client, ChangeSchedule(request=client.request(), action="resume", key=key, at=w.now))


def at_rest(w: World) -> bool:
    if any(one.flying for one in w.publishers if not one.name.startswith("g")) or w.limbo:
        return False
    if any(one.unanswered for one in w.clients):
        return False
    return all(
        gate.is_stopped
        or (
            (gate.has_read_all or gate is not w.gates[-1])
            and all(one.is_paused for one in gate.state._waiting.values())
            and all(one.target == "q:stuck" for one in gate.state._under_way.values())
        )
        for gate in w.gates
    )


def found(w: World, seed: int) -> list[str]:
    verdict = judge(w.history, PARTITION, PARTITIONS)
    return [
        f"seed {seed}: {text}" for text in (*w.problems, *_wrong_answers(w, verdict), *_wrong_deliveries(w, verdict))
    ]


def _wrong_answers(w: World, verdict: Verdict) -> Iterator[str]:
    for request, several in w.answers.items():
        expected = verdict.answers.get(request)
        for answer in several:
            if answer.outcome == "forgotten" and request in verdict.repeats:
                continue
            given: tuple[object, ...] = (answer.outcome, answer.version)
            if answer.keys or expected == (answer.outcome, ()):
                given = (answer.outcome, answer.keys)
            if answer.outcome in ("too-late", "not-found"):
                given = (answer.outcome,)
            if given != expected and (given, expected) != (("not-found",), ("too-late",)):
                yield f"{request} is answered {given}, and the log says {expected}"


def _wrong_deliveries(w: World, verdict: Verdict) -> Iterator[str]:
    delivered = {one for one, _, _ in w.delivered}
    for occurrence, body, at in w.delivered:
        life = verdict.lives.get(occurrence)
        if life is None:
            yield f"{occurrence} was delivered, and the log does not know it"
        elif life.fate not in ("under way", "delivered", "undeliverable"):
            yield f"{occurrence} is {life.fate} by the log, and was delivered"
        elif at < life.due:
            yield f"{occurrence} was delivered {life.due - at} ms early"
        elif body != life.body:
            yield f"{occurrence} was delivered with the message of another"
    paused = {entry["occurrence"] for entry in verdict.waiting.values() if entry["paused"]}
    for occurrence, life in verdict.lives.items():
        if occurrence in paused:
            continue
        if life.fate == "delivered" and occurrence not in delivered:
            yield f"{occurrence} is delivered by the log, and was not"
        elif life.fate == "waiting" or (life.fate == "under way" and life.target != "q:stuck"):
            yield f"{occurrence} never came"
        elif life.fate == "undeliverable" and life.target != "q:gone":
            yield f"{occurrence} is undeliverable, and its target exists"


if __name__ == "__main__":
    chosen = sys.argv[sys.argv.index("--fault") + 1] if "--fault" in sys.argv else None
    numbers = [int(one) for one in sys.argv[1:] if one.isdigit()]
    runs, first = [*numbers, 1000, 0][:2] if len(numbers) != 1 else (numbers[0], 0)
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    bad = 0
    for seed in range(first, first + runs):
        lines = run(seed, chosen)
        bad += bool(lines)
        if chosen and bad == 3:
            runs = seed + 1 - first
            break
        for line in lines:
            words = line.split(":", 1)[1].split()
            kinds[" ".join(one for one in words if not any(c.isdigit() for c in one))[:70]].append(line)
    print(f"{runs} runs, {bad} bad, {sum(map(len, kinds.values()))} violations", f"(fault: {chosen})" if chosen else "")
    for kind, lines in sorted(kinds.items(), key=lambda one: -len(one[1]))[:6]:
        print(f"  {len(lines)} x {kind} ... e.g. {lines[0]}")
