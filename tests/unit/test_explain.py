"""``explain``: table and diagram as in the NServiceBus manual, for all infrastructures."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from bide.delay.celery import Celery
from bide.delay.clock import Clock
from bide.delay.explain import COLUMNS, explain, mermaid, rows
from bide.delay.nservicebus import NServiceBus
from bide.delay.protocol import ExchangeTarget, QueueTarget
from bide.errors import InvalidDelayError

if TYPE_CHECKING:
    from bide.delay.protocol import DelayInfrastructure, Target

DESTINATION = QueueTarget("destination")
TEN_SECONDS = timedelta(seconds=10)

MANUAL = """\
Exchange | Routing Key Segment | Routing Value | Routed To | Delay in Queue | Dead-letter To
Level 03 | 1.0.1.0.destination | 1 | Level 03 Queue | 8 seconds | Level 02 Exchange
Level 02 | 1.0.1.0.destination | 0 | Level 01 Exchange | - | -
Level 01 | 1.0.1.0.destination | 1 | Level 01 Queue | 2 seconds | Level 00 Exchange
Level 00 | 1.0.1.0.destination | 0 | Delivery Exchange | - | -
Delivery Exchange | 1.0.1.0.destination | destination | destination | - | -"""
"""Ten seconds to ``destination`` with four levels, as the manual has it."""


def cells(table: str) -> list[list[str]]:
    """The rows of a table, without the line under the heading."""
    lines = [line for line in table.splitlines() if not set(line) <= set("|-")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("routing", ["conventional", "direct"])
def test_the_table_equals_the_example_of_the_nservicebus_manual(version: int, routing: str) -> None:
    infrastructure = NServiceBus(version=version, routing=routing, levels=4)  # type: ignore[arg-type]  # generated values
    table = explain(infrastructure, TEN_SECONDS, DESTINATION)
    assert cells(table) == [line.split(" | ") for line in MANUAL.splitlines()]


def test_the_table_is_aligned() -> None:
    assert explain(NServiceBus(levels=2), seconds(2), QueueTarget("orders")) == (
        "| Exchange          | Routing Key Segment | Routing Value | Routed To         | Delay in Queue "
        "| Dead-letter To    |\n"
        "|-------------------|---------------------|---------------|-------------------|----------------"
        "|-------------------|\n"
        "| Level 01          | 1.0.orders          | 1             | Level 01 Queue    | 2 seconds      "
        "| Level 00 Exchange |\n"
        "| Level 00          | 1.0.orders          | 0             | Delivery Exchange | -              "
        "| -                 |\n"
        "| Delivery Exchange | 1.0.orders          | orders        | orders            | -              "
        "| -                 |"
    )


def test_with_28_levels_the_table_starts_at_the_entry_level() -> None:
    key = "0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.1.0.1.0.destination"
    expected = [line.replace("1.0.1.0.destination", key).split(" | ") for line in MANUAL.splitlines()]
    assert cells(explain(NServiceBus(), TEN_SECONDS, DESTINATION)) == expected


def test_the_longest_delay_passes_every_level_and_the_shortest_none() -> None:
    longest = cells(explain(NServiceBus(), seconds(268_435_455), DESTINATION))
    assert len(longest) == 1 + 28 + 1
    assert longest[1][3:] == ["Level 27 Queue", "134217728 seconds", "Level 26 Exchange"]
    assert longest[28][3:] == ["Level 00 Queue", "1 second", "Delivery Exchange"]
    none = cells(explain(NServiceBus(levels=4), seconds(0), DESTINATION))
    assert none[1:] == [
        ["Level 00", "0.0.0.0.destination", "0", "Delivery Exchange", "-", "-"],
        ["Delivery Exchange", "0.0.0.0.destination", "destination", "destination", "-", "-"],
    ]


def test_an_address_with_dots_stays_whole() -> None:
    last = cells(explain(NServiceBus(levels=4), TEN_SECONDS, QueueTarget("billing.orders")))[-1]
    assert last == ["Delivery Exchange", "1.0.1.0.billing.orders", "billing.orders", "billing.orders", "-", "-"]


def test_rows_carry_the_names_on_the_broker() -> None:
    found = rows(NServiceBus(version=2, levels=4), TEN_SECONDS, DESTINATION)
    assert json.loads(json.dumps(found)) == [
        {
            "exchange": "nsb.v2.delay-level-03",
            "segment": "1.0.1.0.destination",
            "value": "1",
            "routed_to": "nsb.v2.delay-level-03",
            "delay": 8,
            "dead_letter_to": "nsb.v2.delay-level-02",
        },
        {
            "exchange": "nsb.v2.delay-level-02",
            "segment": "1.0.1.0.destination",
            "value": "0",
            "routed_to": "nsb.v2.delay-level-01",
            "delay": None,
            "dead_letter_to": None,
        },
        {
            "exchange": "nsb.v2.delay-level-01",
            "segment": "1.0.1.0.destination",
            "value": "1",
            "routed_to": "nsb.v2.delay-level-01",
            "delay": 2,
            "dead_letter_to": "nsb.v2.delay-level-00",
        },
        {
            "exchange": "nsb.v2.delay-level-00",
            "segment": "1.0.1.0.destination",
            "value": "0",
            "routed_to": "nsb.v2.delay-delivery",
            "delay": None,
            "dead_letter_to": None,
        },
        {
            "exchange": "nsb.v2.delay-delivery",
            "segment": "1.0.1.0.destination",
            "value": "destination",
            "routed_to": "destination",
            "delay": None,
            "dead_letter_to": None,
        },
    ]


@pytest.mark.parametrize(
    ("infrastructure", "target"),
    [
        (NServiceBus(), QueueTarget("billing.orders")),
        (NServiceBus(version=1, routing="direct"), QueueTarget("billing.orders")),
        (Celery(), QueueTarget("orders")),
        (Celery(prefix="shop"), ExchangeTarget("tasks", "order.created")),
        (Clock(), QueueTarget("orders")),
        (Clock(), QueueTarget("orders", isolated=True)),
        (Clock(), ExchangeTarget("tasks", "order.created")),
    ],
)
@pytest.mark.parametrize("delay", [0, 1, 10, 93_784])
def test_the_rows_of_every_infrastructure_add_up_to_the_delay(
    infrastructure: DelayInfrastructure, target: Target, delay: int
) -> None:
    data = rows(infrastructure, seconds(delay), target)
    assert sum(row["delay"] or 0 for row in data) == delay
    table = cells(explain(infrastructure, seconds(delay), target))
    assert table[0] == list(COLUMNS)
    assert len(table) == len(data) + 1
    assert {len(line) for line in table} == {len(COLUMNS)}
    # An arrow out of every exchange on the way, and another out of every queue.
    chart = mermaid(infrastructure, seconds(delay), target)
    waits = sum(1 for row in data if row["dead_letter_to"] is not None)
    assert chart.count("==>") == len(data) + waits


def test_fractions_of_a_second_are_shown() -> None:
    waits = [row["delay"] for row in rows(Clock(), seconds(1.25), DESTINATION) if row["delay"]]
    assert waits == [1, 0.25]
    assert "| 0.25 seconds " in explain(Clock(), seconds(1.25), DESTINATION)


def test_the_diagram_equals_the_example_of_the_nservicebus_manual() -> None:
    assert mermaid(NServiceBus(levels=4), TEN_SECONDS, DESTINATION).splitlines() == [
        "graph LR",
        '    subgraph route["Delay of 10 seconds"]',
        '        exchange0("Level 03")',
        '        exchange1("Level 02")',
        '        exchange2("Level 01")',
        '        exchange3("Level 00")',
        '        exchange4("Delivery")',
        '        queue0["⏳ 8 s"]',
        '        queue1["⏳ 4 s"]',
        '        queue2["⏳ 2 s"]',
        '        queue3["⏳ 1 s"]',
        '        target0["destination"]',
        "        exchange0 ==> queue0",
        "        queue0 ==> exchange1",
        "        exchange0 -.-> exchange1",
        "        exchange1 ==> exchange2",
        "        exchange1 -.-> queue1",
        "        queue1 -.-> exchange2",
        "        exchange2 ==> queue2",
        "        queue2 ==> exchange3",
        "        exchange2 -.-> exchange3",
        "        exchange3 ==> exchange4",
        "        exchange3 -.-> queue3",
        "        queue3 -.-> exchange4",
        "        exchange4 ==> target0",
        "    end",
        "    classDef exchangeClass stroke:#000000,stroke-width:2px;",
        "    class exchange0,exchange1,exchange2,exchange3,exchange4 exchangeClass",
        "    classDef usedQueue fill:#11ff00;",
        "    class queue0,queue2 usedQueue",
    ]


def test_the_diagram_counts_exchanges_and_queues_that_it_omits() -> None:
    chart = mermaid(Clock(), timedelta(minutes=5), DESTINATION)
    assert '["1 more exchange, 58 more queues"]' in chart
    assert len(chart.splitlines()) < 50


def test_the_diagram_draws_every_node_once_and_only_arrows_between_nodes() -> None:
    for infrastructure in (NServiceBus(), Celery(), Clock()):
        chart = mermaid(infrastructure, seconds(93_784), DESTINATION)
        nodes = re.findall(r"^ {8}(\w+)[(\[]\"", chart, re.MULTILINE)
        arrows = re.findall(r"^ {8}(\w+) (?:==>|-\.->) (\w+)$", chart, re.MULTILINE)
        assert len(nodes) == len(set(nodes))
        assert {node for arrow in arrows for node in arrow} == set(nodes)
        assert len(arrows) == len(set(arrows))


@pytest.mark.parametrize(
    ("name", "written"),
    [('a"b', "a#quot;b"), ("a#b", "a#35;b"), ("<b>", "#lt;b#gt;"), ("a\nb", "a b"), ("a];b", "a];b")],
)
def test_names_are_escaped_in_the_diagram(name: str, written: str) -> None:
    chart = mermaid(NServiceBus(levels=4), TEN_SECONDS, QueueTarget(name))
    assert f'        target0["{written}"]' in chart.splitlines()


def test_a_target_named_like_an_exchange_is_drawn_as_a_target() -> None:
    chart = mermaid(NServiceBus(routing="direct", levels=4), TEN_SECONDS, QueueTarget("nsb.v2.delay-level-03"))
    assert '        target0["nsb.v2.delay-level-03"]' in chart.splitlines()
    assert "        exchange4 ==> target0" in chart.splitlines()


def test_delays_that_cannot_be_routed_are_refused() -> None:
    for function in (explain, rows, mermaid):
        with pytest.raises(InvalidDelayError, match="is longer"):
            function(NServiceBus(levels=4), seconds(16), DESTINATION)
