"""The commands of docs/checking.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bide.check.plan import FAULTS, WORKLOADS
from bide.check.rules import RULES
from tests.readme import Shell, blocks, code, commands_of, shape, table
from tests.support import Rabbitmq

PAGE = "docs/checking.md"


def verdict(output: str) -> list[str]:
    """The lines of a verdict without those of faults and waits, which depend on the speed of the machine."""
    output = re.sub(r"\b[0-9a-f]{64}\b", "0", output)
    lines = shape(output.partition("\nworkload")[2])
    return [line for line in lines if not line.startswith(("faults:", "during ", "at other times "))]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_page_shows_the_output_of_a_run(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    if rabbitmq.chroot is not None:
        pytest.skip("the page shows the installed RabbitMQ")
    (_, block), *_ = blocks(PAGE)
    [(command, output)] = commands_of(block)
    # How late messages may be is a matter of the machine.
    assert verdict(Shell(tmp_path, rabbitmq).paste(f"{command} --max-lateness 5m")) == verdict(output)


def test_the_page_lists_all_workloads_faults_and_promises() -> None:
    workloads, faults, promises = (table(PAGE, title) for title in ("Workloads", "Faults", "The promises"))
    assert {code(row[0])[0] for row in workloads} == {*WORKLOADS, "all"}
    assert [code(row[0])[0] for row in promises] == [rule.name for rule in RULES]
    named = {name: row for row in faults for name in code(row[0])}
    assert set(named) == set(FAULTS)
    for name, fault in FAULTS.items():
        assert named[name][2:] == ["yes" if fault.late else "no", "yes" if fault.twice else "no"], name
