"""The benchmark without measurements: numbers, tables, charts, pages and targets."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.suite import burst, page, table, targets
from benchmarks.suite.catalogue import MEASUREMENTS, NAMES, chosen
from benchmarks.suite.chart import Chart, Group
from benchmarks.suite.confirmed import Confirmed
from benchmarks.suite.fine_cascade import FineCascade
from benchmarks.suite.lateness import UNDELAYED
from benchmarks.suite.measurement import Measurement, Plan
from benchmarks.suite.percentiles import lateness, percentile
from benchmarks.suite.plots import highest_rates, plots
from benchmarks.suite.quantities import QUANTITIES
from benchmarks.suite.results import Results, Row, Run, Spread, newest
from benchmarks.suite.task import Answer, Job
from bide.delay.protocol import ExchangeTarget, QueueTarget
from bide.errors import InvalidInputError, UnsupportedTargetError

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def results(*rows: Row, release: str = "4.3.6", scale: float = 1.0, day: int = 21) -> Results:
    return Results(
        date=f"2026-11-{day}T08:00:00+00:00",
        scale=scale,
        rounds=3,
        machine={"processor": "a processor", "cores": "4", "memory": "24 GB", "kernel": "Linux", "python": "CPython"},
        releases={"RabbitMQ": release, "bide": "0.1.0"},
        rows=list(rows),
    )


def row(measurement: str, case: str, setting: str = "", **values: list[float]) -> Row:
    return Row(measurement=measurement, case=case, setting=setting, values=values)


def late(case: str, *, setting: str = "1,500/s", sustained: float = 1, **values: float) -> Row:
    return row("lateness", case, setting, sustained=[sustained], **{name: [value] for name, value in values.items()})


EXAMPLE = results(
    row("publish", "raw limit", "200 B", rate=[25_000, 20_000, 30_000]),
    row("publish", "bide bulk", "200 B", rate=[24_000, 21_000, 26_000]),
    row("publish", "bide", "200 B", rate=[7_000, 7_000, 7_000]),
    row("publish", "aio-pika", "200 B", rate=[5_000, 5_200, 5_100]),
    Row(measurement="publish", case="Celery", setting="200 B", notes=["not installed"]),
    late("Clock", p50=4.0, p99=20.0, broker_cpu=1_300),
    late("binary cascade", p50=10.0, p99=40.0, broker_cpu=1_800),
    late("dramatiq", setting="500/s", p50=200.0, p99=990.0, broker_cpu=1_600),
    late("dramatiq", setting="1,500/s", sustained=0, p50=9_000.0, p99=20_000.0, broker_cpu=1_700),
)


class TestNumbers:
    def test_a_spread_is_the_median_and_its_limits(self) -> None:
        assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)

    @given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
    def test_a_percentile_is_the_smallest_value_that_covers_enough(self, values: list[float], percent: int) -> None:
        ordered = sorted(values)
        found = percentile(ordered, percent)
        assert sum(one <= found for one in ordered) * 100 >= percent * len(ordered)
        below = [one for one in ordered if one < found]
        assert len(below) * 100 < percent * len(ordered)

    def test_lateness_counts_lost_and_early_messages(self) -> None:
        values = lateness([-1.5, -0.4, 3.0, 8.0], expected=5, sent_per_second=100, rate=100)
        assert values == {
            "sent": 100,
            "p50": -0.4,
            "p99": 8.0,
            "max": 8.0,
            "min": -1.5,
            "early": 1,
            "lost": 1,
            "sustained": 0.0,
        }

    @pytest.mark.parametrize(
        ("sent", "slowest", "sustained"), [(98.0, 4_000.0, 1.0), (96.0, 4_000.0, 0.0), (98.0, 6_000.0, 0.0)]
    )
    def test_a_rate_is_sustained_when_it_is_reached_and_nothing_falls_behind(
        self, sent: float, slowest: float, sustained: float
    ) -> None:
        values = lateness([1.0, slowest], expected=2, sent_per_second=sent, rate=100)
        assert values["sustained"] == sustained

    @given(st.data())
    def test_confirms_are_counted_in_any_order(self, data: st.DataObject) -> None:
        pending = set(range(1, data.draw(st.integers(1, 40)) + 1))
        total, confirmed = len(pending), Confirmed()
        while pending:
            tag, multiple = data.draw(st.sampled_from(sorted(pending))), data.draw(st.booleans())
            confirmed.add(tag, multiple=multiple)
            pending -= {one for one in pending if one <= tag} if multiple else {tag}
            assert confirmed.count == total - len(pending)


class TestPlan:
    def test_sizes_shrink_with_the_scale_down_to_a_least(self) -> None:
        plan = Plan(scale=0.1)
        assert plan.count(200_000) == 20_000
        assert plan.count(200) == 100
        assert plan.seconds(60) == pytest.approx(6)
        assert plan.seconds(60, least=10) == 10

    def test_only_numbers_of_messages_grow_with_a_scale_over_one(self) -> None:
        plan = Plan(scale=10)
        assert plan.count(200_000) == 2_000_000
        assert plan.seconds(60) == 60

    @pytest.mark.parametrize("scale", [0.0, -1.0, 10.5, float("nan")])
    def test_a_scale_out_of_range_is_refused(self, scale: float) -> None:
        with pytest.raises(InvalidInputError, match="out of range"):
            Plan(scale=scale)

    @pytest.mark.parametrize("measurement", MEASUREMENTS, ids=NAMES)
    @pytest.mark.parametrize("scale", [10.0, 1.0, 0.001])
    def test_every_case_can_be_run(self, measurement: Measurement, scale: float) -> None:
        cases = measurement.cases(Plan(scale=scale))
        assert len({(case.name, case.setting) for case in cases}) == len(cases) > 0
        for case in cases:
            module, _, name = case.work.partition(":")
            assert callable(getattr(importlib.import_module(module), name))
            job = Job(work=case.work, options=case.options, url="amqp://u:secret@localhost/", pid=1)
            assert Job.from_json(job.to_json()) == job
            assert "secret" not in repr(job)

    @pytest.mark.parametrize("scale", [1.0, 0.1])
    def test_a_smaller_scale_does_not_shorten_the_delays(self, scale: float) -> None:
        late, through = (measurement.cases(Plan(scale=scale)) for measurement in chosen(["lateness", "sustained"]))
        assert {case.options["longest"] for case in late if case.name != UNDELAYED} == {60}
        assert {case.options["bits"] for case in through} == {12}
        assert all(case.options["warm_up"] >= 40.96 for case in through)

    def test_messages_that_wait_are_published_before_the_first_is_due(self) -> None:
        (measurement,) = chosen(["store"])
        for scale in (1, 10):
            for case in measurement.cases(Plan(scale=scale)):
                assert case.options["hold"] - case.options["messages"] / 8_000 == 175
                assert case.timeout > case.options["hold"] + case.options["spread"] + case.options["messages"] / 2_000

    @pytest.mark.parametrize("name", ["burst", "million"])
    def test_a_clock_holds_the_messages_of_a_burst_until_they_are_due(self, name: str) -> None:
        (measurement,) = chosen([name])
        for case in [case for case in measurement.cases(Plan()) if case.name in (burst.ONE_MOMENT, burst.FOUR_LANES)]:
            clock = burst.infrastructure_of(Job(work=case.work, options=case.options))
            assert clock.max_delay.total_seconds() > case.options["messages"] / 8_000 + 5.5
            assert case.timeout > burst.timeout_of(case.options["messages"]) + clock.max_delay.total_seconds()

    def test_a_rate_depends_only_on_lower_rates(self) -> None:
        (measurement,) = chosen(["lateness"])
        cases = measurement.cases(Plan())
        settings = list(dict.fromkeys(case.setting for case in cases))
        for case in cases:
            if case.unless_failed is not None:
                assert settings.index(case.unless_failed) < settings.index(case.setting)

    def test_measurements_are_chosen_in_a_fixed_order(self) -> None:
        assert [one.name for one in chosen(["store", "publish"])] == ["publish", "store"]
        assert [one.name for one in chosen([])] == list(NAMES)


class TestResults:
    def test_kept_results_can_be_loaded_again(self, tmp_path: Path) -> None:
        file = EXAMPLE.keep(tmp_path / "new")
        assert file.name == "2026-11-21-4.3.6.json"
        assert Results.load(file) == EXAMPLE

    def test_results_of_other_measurements_of_the_day_are_kept(self, tmp_path: Path) -> None:
        old, new = row("publish", "bide", rate=[1.0]), row("publish", "bide", rate=[2.0])
        store = row("store", "Clock", lost=[0.0])
        first = results(old, row("publish", "pika"), store)
        first.failures += ["publish, pika: broken", "store, binary cascade: broken"]
        first.keep(tmp_path)
        kept = Results.load(results(new).keep(tmp_path))
        assert kept.rows == [store, new]
        assert kept.failures == ["store, binary cascade: broken"]

    def test_results_of_another_size_are_not_overwritten(self, tmp_path: Path) -> None:
        file = results(row("publish", "bide", rate=[1.0])).keep(tmp_path)
        before = file.read_text()
        for other in (
            results(scale=0.1),
            replace(results(), machine={}),
            replace(results(), releases={"RabbitMQ": "4.3.6", "bide": "2"}),
        ):
            with pytest.raises(InvalidInputError, match="another size"):
                other.keep(tmp_path)
        assert file.read_text() == before

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1}', '{"format": 1, "rows": [{}]}'])
    def test_another_file_is_refused(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "other.json"
        file.write_text(text)
        with pytest.raises(InvalidInputError, match=r"other\.json holds no results"):
            Results.load(file)

    def test_a_row_collects_the_values_of_all_rounds(self) -> None:
        gathered = results()
        runs = [Run(begun=f"2026-11-21T08:0{minute}:00+00:00", source="0123456789", busy=0.1) for minute in range(2)]
        for rate, run in zip((1.0, 2.0), runs, strict=True):
            gathered.row("publish", "bide").add(Answer(values={"rate": rate}, note="slow"), run)
        assert gathered.rows == [
            Row(measurement="publish", case="bide", values={"rate": [1.0, 2.0]}, runs=runs, notes=["slow"])
        ]
        assert Results.from_dict(json.loads(json.dumps(gathered.to_dict()))) == gathered
        assert gathered.median("publish", "bide", "", "rate") == 1.5
        assert gathered.median("publish", "bide", "", "p50") is None
        assert gathered.median("publish", "pika", "", "rate") is None

    def test_partial_results_replace_only_their_cases(self, tmp_path: Path) -> None:
        results(row("burst", "a", rate=[1]), row("burst", "b", rate=[2])).keep(tmp_path)
        file = results(row("burst", "b", rate=[3])).keep(tmp_path, partial=True)
        kept = Results.load(file)
        assert [(one.case, one.values) for one in kept.rows] == [("a", {"rate": [1]}), ("b", {"rate": [3]})]
        results(row("burst", "b", rate=[4])).keep(tmp_path)
        assert [one.case for one in Results.load(file).rows] == ["b"]

    def test_failures_are_kept_until_their_case_is_measured_again(self, tmp_path: Path) -> None:
        first = results(row("burst", "a", rate=[1]), row("burst", "b"), row("store", "a"))
        first.failures += ["burst, b: boom", "store, a: boom"]
        file = first.keep(tmp_path)
        results(row("burst", "a", rate=[2])).keep(tmp_path, partial=True)
        assert Results.load(file).failures == ["burst, b: boom", "store, a: boom"]
        results(row("burst", "b", rate=[3])).keep(tmp_path, partial=True)
        assert Results.load(file).failures == ["store, a: boom"]
        failed = results(row("burst", "b"))
        failed.failures.append("burst, b: bang")
        failed.keep(tmp_path, partial=True)
        assert Results.load(file).failures == ["store, a: boom"]
        assert [(one.case, one.values) for one in Results.load(file).of("burst")] == [
            ("a", {"rate": [2]}),
            ("b", {"rate": [3]}),
        ]
        failed.keep(tmp_path)
        assert Results.load(file).failures == ["store, a: boom", "burst, b: bang"]

    def test_newest_takes_the_last_results_of_each_release_and_measurement(self) -> None:
        old = results(row("burst", "a", rate=[1]), row("store", "a", lost=[0]), row("startup", "a", seconds=[1]))
        old.failures += ["burst, b: boom", "store, b: boom"]
        failed = results(row("burst", "a", rate=[2]), row("startup", "a"), day=22)
        failed.failures.append("startup, a: boom")
        elsewhere, long_ago = (
            results(row("burst", "a", rate=[3]), release=one, day=23) for one in ("4.3.10", "3.10.8")
        )
        superseded = results(row("burst", "a", rate=[0]), day=20)
        found = newest([long_ago, superseded, old, elsewhere, failed])
        assert found == [elsewhere, failed, replace(old, rows=old.rows[1:], failures=["store, b: boom"]), long_ago]
        assert len(old.rows) == 3, "what was read is left as it was"

    def test_results_of_a_multiple_of_the_full_size_are_shown_beside_the_others(self, tmp_path: Path) -> None:
        whole, tenfold = (
            results(row("store", "Clock", memory=[1_000 * scale]), scale=scale, day=day)
            for scale, day in ((1.0, 21), (10.0, 22))
        )
        assert whole.keep(tmp_path).name == "2026-11-21-4.3.6.json"
        assert tenfold.keep(tmp_path).name == "2026-11-22-4.3.6-x10.json"
        assert newest([whole, tenfold]) == [tenfold, whole]
        text = page.text([whole, tenfold], MEASUREMENTS)
        assert re.findall(r"^(RabbitMQ.*):$", text, re.MULTILINE) == [
            "RabbitMQ 4.3.6, 2026-11-22, 10 times the messages",
            "RabbitMQ 4.3.6, 2026-11-21",
        ]

    def test_partial_results_do_not_replace_a_whole_measurement(self, tmp_path: Path) -> None:
        whole = results(row("burst", "a", seconds=[1]), row("burst", "b", seconds=[2]))
        some = results(row("burst", "b", rate=[3]), day=22)
        failed = results(row("burst", "a"), day=23)
        assert newest([whole, some, failed]) == [failed, some, whole]
        assert newest([whole, replace(whole, date=some.date)]) == [replace(whole, date=some.date)]
        page.write(tmp_path, [failed, whole], MEASUREMENTS)
        assert (tmp_path / "benchmarks/burst.svg").exists()


class TestBars:
    def test_targets_are_judged_by_ratios_of_medians(self) -> None:
        found = {one.bar.title: one for one in targets.verdicts(EXAMPLE)}
        bulk = found["publish 200 B: bide bulk / raw limit"]
        assert (bulk.reached, bulk.bar.wanted, bulk.word) == ("0.96 (0.87–1.05)", "at least 0.9", "met")
        tasks = found["publish 200 B: bide / aio-pika"]
        assert (tasks.reached, tasks.word) == ("1.37 (1.35–1.40)", "not met")
        cpu = found["lateness at 1,500/s, broker CPU: Clock / binary cascade"]
        assert (cpu.reached, cpu.bar.wanted, cpu.word) == ("0.72", "at most 0.65", "not met")

    def test_ratios_are_taken_round_by_round(self) -> None:
        clock, cascade = row("sustained", "Clock", rate=[4, 8]), row("sustained", "binary cascade", rate=[2, 2.5])
        (verdict,) = targets.verdicts(results(clock, cascade))
        assert (verdict.rounds, verdict.reached) == ([2, 3.2], "2.67 (2.00–3.20)")
        cascade.values["rate"].append(2.5)
        (verdict,) = targets.verdicts(results(clock, cascade))
        assert verdict.reached == "2.40", "rounds that are not the same are no pairs"

    def test_a_target_without_a_ratio_shows_the_spread_of_its_rounds(self) -> None:
        (verdict,) = targets.verdicts(results(row("memory", "bide bulk", growth=[1, 3, 9])))
        assert (verdict.reached, verdict.word) == ("3.00 (1.00–9.00)", "met")

    def test_unmeasured_cases_have_no_verdict(self) -> None:
        titles = [one.bar.title for one in targets.verdicts(EXAMPLE)]
        assert not [one for one in titles if "Celery" in one or one.startswith(("burst", "sustained", "store"))]

    @pytest.mark.parametrize(("release", "word"), [("3.10.8", "not met"), ("4.3.6", "met")])
    def test_old_releases_have_a_different_target(self, release: str, word: str) -> None:
        rows = (row("sustained", "Clock", rate=[1_800]), row("sustained", "binary cascade", rate=[1_000]))
        (verdict,) = targets.verdicts(results(*rows, release=release))
        assert verdict.word == word

    def test_every_target_names_measured_cases(self) -> None:
        measured = {
            (measurement.name, case.name, case.setting)
            for measurement in MEASUREMENTS
            for case in measurement.cases(Plan())
        }
        for bar in targets.bars("4.3.6"):
            for place in [one for one in (bar.of, bar.to) if one is not None]:
                assert (place.measurement, place.case, place.setting) in measured
                assert place.quantity in QUANTITIES


class TestTable:
    def test_a_cell_shows_minimum_and_maximum_where_they_differ(self) -> None:
        rate = QUANTITIES["rate"]
        assert table.cell(rate, Spread(25_000.4, 20_000, 30_000)) == "25,000 (20,000–30,000)"
        assert table.cell(rate, Spread(25_000, 25_000, 25_000)) == "25,000"
        assert table.cell(rate, None) == ""

    def test_the_table_holds_every_row_note_and_verdict(self) -> None:
        console = Console(width=160, file=StringIO())
        with console.capture() as captured:
            console.print(table.tables(EXAMPLE, MEASUREMENTS))
            console.print(table.bars_table(EXAMPLE))
        text = captured.get()
        assert "24,000 (21,000–26,000)" in text
        assert "200 B Celery: not installed" in text
        assert re.search(r"bide bulk / raw limit +at least 0.9 +0.96 \(0.87–1.05\) +met", text)


class TestChart:
    def drawn(self, chart: Chart) -> list[float]:
        """The widths of the targets."""
        rectangles = ElementTree.fromstring(chart.svg()).iter(f"{SVG}rect")
        return [float(one.attrib["width"]) for one in rectangles if one.attrib["height"] == "13"]

    def test_bars_are_proportional_to_their_medians(self) -> None:
        groups = [Group("a", [Spread(50, 40, 100)]), Group("b", [Spread(25, 25, 25)])]
        one, other = self.drawn(Chart(heading="t", series=["s"], groups=groups))
        assert one == pytest.approx(2 * other, abs=0.2)

    def test_a_logarithmic_axis_begins_at_a_power_of_ten(self) -> None:
        groups = [
            Group("a", [Spread(10, 10, 10)]),
            Group("b", [Spread(100, 100, 1_000)]),
            Group("c", [Spread(5, 4, 6)]),
        ]
        ten, hundred, five = self.drawn(Chart(heading="t", series=["s"], groups=groups, logarithmic=True))
        assert hundred == pytest.approx(2 * ten, abs=0.2)
        assert 0 < five < ten

    @given(st.floats(0.001, 1e9))
    def test_an_axis_has_two_to_seven_ticks(self, value: float) -> None:
        chart = Chart(heading="t", series=["s"], groups=[Group("a", [Spread(value, value, value)])])
        drawn = ElementTree.fromstring(chart.svg()).iter(f"{SVG}polyline")
        lines = [one for one in drawn if one.attrib["class"] == "s-grid"]
        assert 2 <= len(lines) <= 7

    def test_a_note_moves_the_bars_down(self) -> None:
        groups = [Group("a", [Spread(1, 1, 1), Spread(2, 2, 2)])]
        bare, noted = (Chart(heading="t", note=note, series=["s", "u"], groups=groups) for note in ("", "A < B."))
        heights = [float(ElementTree.fromstring(one.svg()).attrib["height"]) for one in (bare, noted)]
        assert heights[1] > heights[0]
        tops = [
            min(
                float(one.attrib["y"])
                for one in ElementTree.fromstring(chart.svg()).iter(f"{SVG}rect")
                if "y" in one.attrib
            )
            for chart in (bare, noted)
        ]
        assert tops[1] - tops[0] == heights[1] - heights[0]
        assert "A < B." in [one.text for one in ElementTree.fromstring(noted.svg()).iter(f"{SVG}text")]
        assert (bare.title, noted.title) == ("t", "t. A < B.")

    def test_missing_values_are_left_out_and_text_is_escaped(self) -> None:
        chart = Chart(heading="a < b", series=["s", "t"], groups=[Group("<x>", [None, Spread(1, 1, 1)])])
        assert len(self.drawn(chart)) == 1
        texts = [one.text for one in ElementTree.fromstring(chart.svg()).iter(f"{SVG}text")]
        assert {"a < b", "<x>", "s", "t"} <= set(texts)


class TestPage:
    def test_other_clients_are_shown_at_their_highest_sustained_rate(self) -> None:
        charts = dict(plots(EXAMPLE, "lateness"))
        assert [group.label for group in charts["lateness"].groups] == [
            "Clock, 1,500/s",
            "binary cascade, 1,500/s",
            "dramatiq, 500/s",
        ]

    def test_the_highest_sustained_rates_are_summarised_in_a_sentence(self) -> None:
        rows = [
            *(late(case, setting=rate) for case in ("Clock", "no delay") for rate in ("500/s", "1,500/s")),
            late("Clock", setting="3,000/s"),
            late("no delay", setting="3,000/s", sustained=0),
            late("Celery", setting="500/s", sustained=0),
            *EXAMPLE.of("lateness")[-2:],
            Row(measurement="lateness", case="dramatiq", setting="3,000/s", notes=["not tried"]),
        ]
        summary = "Of the rates tried, Celery sustains none, dramatiq sustains 500/s, bide 1,500/s with every layout."
        assert highest_rates(rows) == summary
        assert highest_rates(rows[:6]) == ""
        (name, chart), _ = plots(results(*rows), "lateness")
        assert (name, chart.title) == ("lateness", f"Late, in ms (logarithmic). {summary}")

    def test_every_plot_of_the_page_is_written(self, tmp_path: Path) -> None:
        written = page.write(tmp_path, [EXAMPLE], MEASUREMENTS).read_text()
        shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", written)
        assert shown == ["benchmarks/publish.svg", "benchmarks/lateness.svg", "benchmarks/broker-cpu.svg"]
        for name in shown:
            ElementTree.parse(tmp_path / name)

    def test_the_page_names_machine_and_releases(self) -> None:
        text = page.text([EXAMPLE], MEASUREMENTS)
        assert "a processor, 4 cores" in text
        assert "RabbitMQ 4.3.6, bide 0.1.0" in text
        assert "| 200 B | bide bulk | 24,000 (21,000–26,000) |" in text
        assert "- 200 B Celery: not installed" in text
        assert "Preliminary" not in text

    def test_the_page_shows_time_commit_load_and_steal_of_each_measurement(self) -> None:
        kept = results(row("publish", "bide", rate=[1]), row("burst", "Clock, 1 lane", seconds=[1]))
        assert "\n| publish | 1 |  |  |  |  |\n| burst | 1 |  |  |  |  |\n" in page.text([kept], MEASUREMENTS)
        for minute, busy, stolen in ((7, 0.25, 0.125), (5, 0.5, None)):
            run = Run(begun=f"2026-11-21T08:0{minute}:30+00:00", source="0123456789", busy=busy, stolen=stolen)
            kept.row("publish", "bide").add(Answer(values={"rate": 2}), run)
        assert "| publish | 3 | 2026-11-21 08:05 UTC | 0123456789 | 0.50 | 0.12 |" in page.text([kept], MEASUREMENTS)
        kept.row("publish", "pika").values["rate"] = [1]
        assert "| publish | 1 to 3 | 2026-11-21 08:05 UTC |" in page.text([kept], MEASUREMENTS)

    def test_results_of_several_days_have_their_own_headings(self, tmp_path: Path) -> None:
        sustained = results(row("sustained", "Clock", rate=[4]), release="3.10.8")
        before = results(row("publish", "bide", rate=[1]), row("consume", "bide", rate=[2]))
        later = replace(results(row("publish", "bide", rate=[3]), day=22), machine={**EXAMPLE.machine, "cores": "8"})
        runs = [sustained, before, later]
        text = page.write(tmp_path, runs, MEASUREMENTS).read_text()
        heads = ["RabbitMQ 4.3.6, 2026-11-22", "RabbitMQ 4.3.6, 2026-11-21", "RabbitMQ 3.10.8, 2026-11-21"]
        assert re.findall(r"^## (RabbitMQ.*)$", text, re.MULTILINE) == heads
        assert re.findall(r"^(RabbitMQ.*):$", text, re.MULTILINE) == heads
        assert re.findall(r"(\d) cores", text) == ["8", "4", "4"]
        assert [rate in text for rate in ("| bide | 3 |", "| bide | 2 |", "| bide | 1 |")] == [True, True, False]
        assert {file.stem for file in (tmp_path / "benchmarks").iterdir()} == {"publish", "consume", "sustained"}

    def test_a_small_run_is_called_preliminary(self) -> None:
        assert "**Preliminary: 0.1 of the full size" in page.text([replace(EXAMPLE, scale=0.1)], MEASUREMENTS)

    def test_the_documentation_shows_the_newest_results(self, tmp_path: Path) -> None:
        """``make bench-docs`` was run after the last change."""
        kept = [Results.load(file) for file in (ROOT / "benchmarks/results").glob("*.json")]
        assert (ROOT / "docs/benchmarks.md").read_text() == page.write(tmp_path, kept, MEASUREMENTS).read_text()
        shown, drawn = (
            {file.name: file.read_text() for file in (folder / "benchmarks").iterdir()}
            for folder in (ROOT / "docs", tmp_path)
        )
        assert shown == drawn

    def test_kept_results_name_machine_and_releases(self) -> None:
        for file in (ROOT / "benchmarks/results").glob("*.json"):
            kept = json.loads(file.read_text())
            assert {"RabbitMQ", "Erlang", "bide", "aio-pika", "pika", "kombu", "celery", "dramatiq"} <= set(
                kept["releases"]
            )
            assert {"processor", "cores", "memory", "kernel", "python"} <= set(kept["machine"])


class TestFineCascade:
    CASCADE = FineCascade(levels=12)

    @given(st.integers(0, 4095))
    def test_the_waits_of_a_route_add_up_to_the_delay(self, units: int) -> None:
        delay, target = units * timedelta(milliseconds=10), QueueTarget("orders")
        route, steps = self.CASCADE.route(delay, target), self.CASCADE.steps(delay, target)
        assert route.delay == sum((step.delay for step in steps), timedelta(0)) == delay
        assert route.hops == units.bit_count()
        assert route.exchange == steps[0].exchange

    def test_its_queues_wait_10_ms_doubled_at_every_level(self) -> None:
        queues = self.CASCADE.topology().queues
        assert [one.arguments["x-message-ttl"] for one in queues] == [10 << level for level in range(12)]
        assert all(one.type == "quorum" for one in queues)
        assert all(one.arguments["x-dead-letter-strategy"] == "at-least-once" for one in queues)
        assert self.CASCADE.max_delay == timedelta(seconds=40.95)

    def test_it_owns_its_names_and_its_probes_exist(self) -> None:
        topology = self.CASCADE.topology()
        assert set(self.CASCADE.probes().queues) <= set(topology.queues)
        names = [one.name for one in topology.queues] + [one.name for one in topology.exchanges]
        assert all(self.CASCADE.owns(name) for name in names)

    def test_exchange_targets_are_refused(self) -> None:
        with pytest.raises(UnsupportedTargetError):
            self.CASCADE.route(timedelta(seconds=1), ExchangeTarget("shop", "order"))
