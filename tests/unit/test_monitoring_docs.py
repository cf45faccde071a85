"""The dashboard and the alerts of docs/monitoring.md, compared with the exported metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from bide.observability.metrics import Metrics
from tests.readme import code, table

FOLDER: Final = Path(__file__).parents[2] / "docs" / "monitoring"
PAGE: Final = "docs/monitoring.md"


class _Recorder(CollectorRegistry):
    """A registry that remembers its collectors."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Any] = []

    def register(self, collector: Collector) -> None:
        self.collectors.append(collector)
        super().register(collector)


def exported() -> dict[str, set[str]]:
    """Name of each sample that bide exports -> its labels."""
    registry = _Recorder()
    Metrics(registry)
    labels = {one._name: one._labelnames for one in registry.collectors if hasattr(one, "_labelnames")}
    samples = {}
    for family in registry.collect():
        # Families that are made at each scrape have no collector with labels.
        of_family: tuple[str, ...] = labels.get(family.name) or getattr(family, "_labelnames", None) or ()
        match family.type:
            case "counter":
                samples[f"{family.name}_total"] = set(of_family)
            case "histogram":
                samples |= {f"{family.name}_{end}": set(of_family) for end in ("count", "sum")}
                samples[f"{family.name}_bucket"] = {"le", *of_family}
            case _:
                samples[family.name] = set(of_family)
    return samples


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "bide-dashboard.json").read_text())
    return loaded


def alerts() -> list[dict[str, Any]]:
    ((group),) = json.loads((FOLDER / "bide-alerts.json").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def expressions() -> Iterator[tuple[str, str]]:
    """Expression, and the text that shows its labels."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]
    for rule in alerts():
        yield rule["expr"], rule["annotations"]["summary"].replace("$labels.", "")


def test_every_metric_and_every_label_is_exported() -> None:
    known = exported()
    for expression, shown in expressions():
        names = re.findall(r"\bbide_\w+", expression)
        assert names, expression
        assert set(names) <= known.keys(), expression
        grouped = {one.strip() for found in re.findall(r"by \(([^)]*)\)", expression) for one in found.split(",")}
        assert grouped <= set.intersection(*(known[name] for name in names)), expression
        assert set(re.findall(r"{{ ?(\w+) ?}}", shown)) <= grouped, f"{expression}: {shown}"


def test_counters_are_rates_and_gauges_are_not() -> None:
    for expression, _ in expressions():
        for name in re.findall(r"\bbide_\w+", expression):
            is_rate = re.search(rf"(rate|increase)\({name}\[", expression) is not None
            assert is_rate == name.endswith(("_total", "_bucket")), expression


def test_every_exported_metric_is_on_the_dashboard() -> None:
    shown = " ".join(target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ()))
    families = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in exported()}
    assert [name for name in sorted(families) if name not in shown] == []


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for one in panels:
        place = one["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, one["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_page_lists_the_alerts() -> None:
    assert [code(row[0])[0] for row in table(PAGE, "Alerts")] == [rule["alert"] for rule in alerts()]
