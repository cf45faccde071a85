"""``bide pipeline plan``: estimate the load of a workload on a broker."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from bide.cli.output import echo, print_json
from bide.cli.pipeline.engine_choice import PATHS_ON_CLUSTER
from bide.cli.pipeline.options import engine_options, refuse_missing_packages, refuse_without_spark
from bide.cli.pipeline.plan_view import plan_lines
from bide.cli.pipeline.view import engine_facts, progress
from bide.cli.selecting import pairs_of
from bide.cli.settings import Settings, duration_of, json_option, pass_settings, verbose_option
from bide.errors import InvalidInputError
from bide.pipelines.formats import FORMATS, is_uri, refuse_missing, refuse_unwritable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bide.cli.pipeline.engine_choice import EngineChoice
    from bide.delay.protocol import DelayInfrastructure
    from bide.pipelines.engine import Engine
    from bide.pipelines.plan.arrays import ArrayWorkload
    from bide.pipelines.plan.capacity import Capacity
    from bide.pipelines.plan.columns import Columns
    from bide.pipelines.plan.figures import PlanReport
    from bide.pipelines.plan.flows import Flow
    from bide.pipelines.plan.levels import PlanLevels
    from bide.pipelines.plan.workload import Workload

_BROKERS: Final = ("3.10", "4.3")
_PREFETCHES: Final = ("32", "1000")
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@click.command()
@click.argument("source", required=False)
@click.option("--format", type=click.Choice(FORMATS), help="Format of SOURCE. [default: by its suffix]")
@click.option("--read-option", "read_options", multiple=True, metavar="KEY=VALUE",
              help="Option of Spark's reader for SOURCE. Repeatable.")  # fmt: skip
@click.option("--at-column", metavar="COLUMN", default="at", show_default=True, help="Column of times of sending.")
@click.option("--delay-column", metavar="COLUMN", help="Column of delays: intervals, or milliseconds.")
@click.option("--due-column", metavar="COLUMN", help="Column of due times, instead of --delay-column.")
@click.option("--size-column", metavar="COLUMN", help="Column of body sizes in bytes. [default: --size]")
@click.option("--count-column", metavar="COLUMN", help="Column of the number of messages per row. [default: 1]")
@click.option("--grain", metavar="DELAY", default="10ms", show_default=True,
              help="Step to round times of sending down to; coarser is faster.")  # fmt: skip
@click.option("--rate", metavar="RATE", help="Message rate, as 5000/s or 1e9/d. Needs --delay.")
@click.option("--delay", "delays", multiple=True, metavar="DELAY[=WEIGHT]",
              help="Delay with --rate, as 5m or 1h..2h. Repeatable.")  # fmt: skip
@click.option("--flows", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="TOML or JSON file of rates, instead of SOURCE.")  # fmt: skip
@click.option("--for", "length", metavar="DELAY", default="1d", show_default=True, help="Time for which a rate lasts.")
@click.option("--size", type=click.IntRange(0), default=200, show_default=True, metavar="BYTES",
              help="Size of a body in bytes.")  # fmt: skip
@click.option("--layout", "layouts", type=click.Choice(["clock", "nservicebus"]), multiple=True,
              help="Layout to plan for. Repeatable. [default: both]")  # fmt: skip
@click.option("--lanes", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N",
              help="Queues per digit (clock).")  # fmt: skip
@click.option("--every", metavar="DELAY", default="1h", show_default=True, help="Length of each reporting interval.")
@click.option("--tick", metavar="DELAY", default="1s", show_default=True, help="Time over which peaks are averaged.")
@click.option("--broker", type=click.Choice(_BROKERS), default="4.3", show_default=True,
              help="Release of RabbitMQ whose measured capacity applies.")  # fmt: skip
@click.option("--prefetch", type=click.Choice(_PREFETCHES), default="32", show_default=True,
              help="dead_letter_worker_consumer_prefetch of the broker.")  # fmt: skip
@click.option("--hops", type=click.FloatRange(0, min_open=True), metavar="N",
              help="Capacity of the broker in hops/s. [default: measured]")  # fmt: skip
@click.option("--release", type=click.FloatRange(0, min_open=True), metavar="N",
              help="Capacity of a queue in releases/s. [default: measured]")  # fmt: skip
@click.option("--disk", metavar="SIZE", help="Disk for messages, as 200G. [default: no limit]")
@click.option("--memory", metavar="SIZE", help="Memory for messages, as 8G. [default: no limit]")
@click.option("--out", metavar="DIR", help="Folder for the figures by layout, as Parquet files.")
@json_option("all figures")
@engine_options
@verbose_option
@pass_settings
def plan(
    settings: Settings,
    /,
    *,
    every: str,
    tick: str,
    layouts: tuple[str, ...],
    lanes: int,
    broker: str,
    prefetch: str,
    hops: float | None,
    release: float | None,
    disk: str | None,
    memory: str | None,
    out: str | None,
    as_json: bool,
    choice: EngineChoice,
    **rest: Any,
) -> None:
    """Estimate a workload's load on a broker: messages held, bytes, hops and releases, level by level.

    The workload is SOURCE, a table with a row for each message (or for several, with --count-column), or is given by
    --rate and --delay, or by --flows. Nothing is sent, and no broker is needed. The capacity was measured on a machine
    with four cores; --hops and --release replace it.
    """
    from bide.pipelines.plan.capacity import Capacity
    from bide.pipelines.plan.ticks import check_spans

    # Errors in the options are reported before Spark starts.
    spans = {"every": duration_of("--every", every), "tick": duration_of("--tick", tick)}
    check_spans(**spans)
    plan_levels = {layout: _plan_levels(layout, lanes) for layout in layouts or ("clock", "nservicebus")}
    given = _check_workload(tuple(plan_levels.values()), reads_local_paths=choice.reads_local_paths, **rest)
    capacities = {
        layout: Capacity.measured(
            layout,
            broker=broker,
            prefetch=int(prefetch),
            hops=hops,
            release=release,
            disk=size_of("--disk", disk),
            memory=size_of("--memory", memory),
        )
        for layout in plan_levels
    }
    folders = {layout: None if out is None else f"{out}/{layout}" for layout in plan_levels}
    for place in filter(None, folders.values()):
        refuse_unwritable("--out", place, is_local=choice.reads_local_paths)
    engine, small = _engine_for(given, choice, out, spans)
    workload: Workload | ArrayWorkload
    if small is None:
        refuse_without_spark(engine)
        with choice.open_session("bide pipeline plan", engine, quiet=not settings.verbosity) as spark:
            workload, reports = _plan_with_spark(given, plan_levels, capacities, folders, spans, spark)
    else:
        workload, reports = small, _plan_in_process(small, plan_levels, capacities, folders, spans)
    seconds = time.monotonic() - settings.started
    if as_json:
        facts = {"messages": workload.messages, "undelayed": workload.undelayed, "body_bytes": workload.bytes}
        figures = [one.to_dict() for one in reports]
        print_json({**facts, "layouts": figures, "seconds": round(seconds, 3), "out": out, **engine_facts(engine)})
    else:
        for line in plan_lines(workload, reports, spans["every"], seconds):
            echo(line)
        if out is not None:
            echo(f"tables: {out}/<layout>/levels and {out}/<layout>/queues")
        echo(f"engine: {engine}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkloadOptions:
    """The workload that the options describe: flows, or a table.

    Attributes:
        flows: the flows; None for a table.
        source: the table.
        columns: the columns of the table.
        grain: the step to which times of sending in the table are rounded down.
    """

    flows: list[Flow] | None
    source: str = ""
    format: str | None = None
    read_options: Mapping[str, str] = field(default_factory=dict)
    columns: Columns | None = None
    grain: timedelta = timedelta(0)


def _engine_for(
    given: _WorkloadOptions, choice: EngineChoice, out: str | None, spans: Mapping[str, timedelta]
) -> tuple[Engine, ArrayWorkload | None]:
    """The engine of a plan, and the workload if the engine is this process."""
    from bide.pipelines.engine import Engine, NeedsSparkError
    from bide.pipelines.plan.arrays import of_flows

    forced = choice.forced()
    if forced is not None and forced.is_spark:
        return forced, None
    if out is not None and is_uri(out):
        return choice.choose_spark(NeedsSparkError(f"--out {out} is a URI")), None
    if given.flows is None:
        return _engine_of_table(given, choice, spans["every"])
    if forced is None and out is not None and not choice.reads_local_paths:
        return choice.choose_spark(NeedsSparkError(PATHS_ON_CLUSTER)), None
    return forced or Engine(False, "rates need no table"), of_flows(given.flows, tick=spans["tick"])


def _engine_of_table(
    given: _WorkloadOptions, choice: EngineChoice, every: timedelta
) -> tuple[Engine, ArrayWorkload | None]:
    refuse_missing_packages(pyarrow="PyArrow", numpy="numpy")

    def convert(table: Any, zone: tzinfo) -> ArrayWorkload:
        from bide.pipelines.plan.small import of_small_table, refuse_many_spans

        assert given.columns is not None
        workload = of_small_table(table, given.columns, zone, grain=given.grain)
        # With --engine local, neither the number of spans nor the size of the table has a limit.
        if choice.option != "local":
            refuse_many_spans(workload, every)
        return workload

    with progress("reading the workload"):
        return choice.of_table(given.source, convert, format=given.format, options=given.read_options)


def _plan_in_process(
    workload: ArrayWorkload,
    plan_levels: Mapping[str, PlanLevels],
    capacities: Mapping[str, Capacity],
    folders: Mapping[str, str | None],
    spans: Mapping[str, timedelta],
) -> list[PlanReport]:
    """Plan in this process."""
    from bide.pipelines.plan.arrays import ArrayTimeline, array_report, clear

    timelines = {layout: ArrayTimeline(workload, levels, **spans) for layout, levels in plan_levels.items()}
    for folder in filter(None, folders.values()):
        clear(folder)
    reports = []
    for layout, timeline in timelines.items():
        with progress(f"planning for {layout}"):
            reports.append(array_report(timeline, capacities[layout], out=folders[layout]))
    return reports


def _plan_with_spark(
    given: _WorkloadOptions,
    plan_levels: Mapping[str, PlanLevels],
    capacities: Mapping[str, Capacity],
    folders: Mapping[str, str | None],
    spans: Mapping[str, timedelta],
    spark: SparkSession,
) -> tuple[Workload, list[PlanReport]]:
    """Plan in a Spark session."""
    from bide.pipelines.plan.occupancy import Timeline
    from bide.pipelines.plan.report import clear, report
    from bide.pipelines.plan.workload import of_flows, of_table
    from bide.pipelines.session import read, spark_errors

    with spark_errors():
        with progress("reading the workload"):
            if given.flows is not None:
                workload = of_flows(spark, given.flows, tick=spans["tick"])
            else:
                assert given.columns is not None
                rows = read(spark, given.source, format=given.format, options=given.read_options)
                workload = of_table(rows, given.columns, grain=given.grain)
        timelines = {layout: Timeline(workload, levels, **spans) for layout, levels in plan_levels.items()}
        for layout, timeline in timelines.items():
            if (folder := folders[layout]) is not None:
                clear(timeline, folder)
        reports = []
        for layout, timeline in timelines.items():
            with progress(f"planning for {layout}"):
                reports.append(report(timeline, capacities[layout], out=folders[layout]))
            timeline.close()
    return workload, reports


def _flows(
    *,
    source: str | None,
    rate: str | None,
    delays: tuple[str, ...],
    flows: Path | None,
    length: str,
    size: int,
) -> list[Flow] | None:
    """The flows of the options; None if the workload is a table."""
    from bide.pipelines.plan.flows import flows_of

    if sum(one is not None for one in (source, rate, flows)) != 1:
        raise click.UsageError("give one workload: SOURCE, or --rate with --delay, or --flows")
    if (rate is None) != (not delays):
        raise click.UsageError("--rate and --delay go together: give both or neither")
    if source is not None:
        return None
    given = _read_flows(flows) if flows is not None else [{"rate": rate, "delay": _delay_weights(delays)}]
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return flows_of(given, start=midnight, length=duration_of("--for", length), size=size)


def _check_workload(
    layouts: tuple[PlanLevels, ...],
    *,
    reads_local_paths: bool,
    source: str | None,
    format: str | None,
    read_options: tuple[str, ...],
    at_column: str,
    delay_column: str | None,
    due_column: str | None,
    size_column: str | None,
    count_column: str | None,
    grain: str,
    size: int,
    **rest: Any,
) -> _WorkloadOptions:
    """Check the options of the workload."""
    from bide.pipelines.plan.columns import Columns, check_grain
    from bide.pipelines.plan.levels import check_delays

    step = duration_of("--grain", grain)
    check_grain(step)
    options = pairs_of("--read-option", read_options, form="KEY=VALUE")
    flows = _flows(source=source, size=size, **rest)
    if flows is not None:
        for layout in layouts:
            check_delays(max(one.longest for one in flows), layout)
        return _WorkloadOptions(flows=flows)
    assert source is not None
    if (delay_column is None) == (due_column is None):
        raise click.UsageError("give the delays of the messages: either --delay-column or --due-column")
    refuse_missing(source, format, reads_local_paths=reads_local_paths)
    columns = Columns(
        at=at_column, delay=delay_column, due=due_column, size=size_column, count=count_column, constant_size=size
    )
    return _WorkloadOptions(flows=None, source=source, format=format, read_options=options, columns=columns, grain=step)


def _read_flows(path: Path) -> Any:
    """Read the flows of a file: a list in JSON, or tables named ``flow`` in TOML."""
    import json
    import tomllib

    found: Any
    try:
        if path.suffix == ".toml":
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        else:
            found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InvalidInputError(f"the flows in {path} cannot be read: {error}; give a TOML or JSON file") from error
    flows = found.get("flow") if isinstance(found, dict) else found
    if not isinstance(flows, list) or not flows:
        raise InvalidInputError(f"{path} has no flows: give tables [[flow]] in TOML, or a list in JSON")
    return flows


def _delay_weights(delays: tuple[str, ...]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for one in delays:
        text, equals, weight = one.partition("=")
        try:
            found[text] = found.get(text, 0.0) + (float(weight) if equals else 1.0)
        except ValueError as error:
            raise click.UsageError(
                f"--delay {one!r} has a weight that is not a number: give one such as 5m=2"
            ) from error
    return found


def _plan_levels(layout: str, lanes: int) -> PlanLevels:
    from bide.delay.by_name import make_infrastructure
    from bide.pipelines.plan.levels import PlanLevels

    infrastructure: DelayInfrastructure = make_infrastructure(layout, lanes=lanes if layout == "clock" else None)
    return PlanLevels.of(infrastructure)


def size_of(option: str, text: str | None) -> int | None:
    """Parse a size such as ``200G``, ``1.5T``, or a number of bytes.

    Raises:
        UsageError: the size is invalid.
    """
    if text is None:
        return None
    plain = text.strip().lower().removesuffix("b")
    unit = plain[-1] if plain and plain[-1].isalpha() else ""
    try:
        found = float(plain.removesuffix(unit)) * _UNITS[unit]
    except (KeyError, ValueError) as error:
        raise click.UsageError(f"{option} {text!r} is not a size: give one such as 200G") from error
    if not 0 < found < 1e21:
        raise click.UsageError(f"{option} {text!r} is out of range: give a size from 1 byte to 1e21 bytes")
    return int(found)
