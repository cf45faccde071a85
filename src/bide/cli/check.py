"""``bide check``: messages, faults, and a judgement of what arrived."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from bide.cli.output import echo, print_json, working
from bide.cli.running import run_async
from bide.cli.settings import duration_of, json_option, verbose_option
from bide.local_broker.cluster import MAX_NODES

if TYPE_CHECKING:
    from bide.check.faults.fault import Cluster
    from bide.check.foreign import ForeignCluster
    from bide.check.judgement import JudgedPromise, Verdict
    from bide.check.plan import CheckPlan

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

_HANDLING: Final = ("ignore", "pause_minority", "autoheal")
_MEASURED: Final = ("early", "late")
_MILLISECOND: Final = 1_000
_SECOND: Final = 1_000_000

_folder_argument = click.argument("folder", type=click.Path(path_type=Path, file_okay=False))


def _lateness_option(command: _Decorated) -> _Decorated:
    return click.option(
        "--max-lateness",
        default="5s",
        show_default=True,
        metavar="DELAY",
        help="Lateness that is allowed outside faults.",
    )(command)


@click.group()
def check() -> None:
    """Send messages to a cluster while faults happen, and judge what arrived.

    The history of each run is a folder of Parquet files. SQL queries over it check that no message was lost, early,
    doubled or changed, and that none was delivered although it was refused or cancelled.
    """


@check.command()
@_folder_argument
@click.option("--workload", "workloads", multiple=True, metavar="NAME",
              help="Kind of messages, repeatable. [default: queues]")  # fmt: skip
@click.option("--fault", "faults", multiple=True, metavar="NAME", help="Kind of fault, repeatable; see above.")
@click.option("--duration", default="1m", show_default=True, metavar="DELAY", help="How long messages are sent.")
@click.option("--rate", default=100.0, show_default=True, metavar="N",
              help="Messages per second of all workloads together.")  # fmt: skip
@click.option("--longest", default="20s", show_default=True, metavar="DELAY", help="Longest delay of a message.")
@click.option("--every", default="20s", show_default=True, metavar="DELAY", help="Mean time between two faults.")
@click.option("--length", default="10s", show_default=True, metavar="DELAY",
              help="Longest time from a fault to its repair.")  # fmt: skip
@click.option("--at-once", default=1, show_default=True, metavar="N", help="Largest number of simultaneous faults.")
@click.option("--seed", type=int, metavar="N", help="Random seed. [default: a new one for each run]")
@click.option("--continue", "again", is_flag=True, help="Add a run to those in the folder.")
@click.option("--cluster", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Folder of a cluster of 'bide broker start'.")  # fmt: skip
@click.option("--url", metavar="URL", help="URL of another cluster, with a new virtual host.")
@click.option("--management-url", metavar="URL", help="Management API of --url. [default: that of its host]")
@click.option("--nodes", type=click.IntRange(1, MAX_NODES), default=3, show_default=True,
              help="Number of nodes of a new cluster.")  # fmt: skip
@click.option("--partition-handling", type=click.Choice(_HANDLING), help="How RabbitMQ up to 4.2 handles partitions.")
@click.option("--home", type=click.Path(path_type=Path, file_okay=False), help="Folder of RabbitMQ, with sbin/.")
@click.option("--root", type=click.Path(path_type=Path, file_okay=False),
              help="Root folder of a system with RabbitMQ.")  # fmt: skip
@_lateness_option
@json_option("the verdict")
@verbose_option
def run(
    *,
    folder: Path,
    workloads: tuple[str, ...],
    faults: tuple[str, ...],
    duration: str,
    rate: float,
    longest: str,
    every: str,
    length: str,
    at_once: int,
    seed: int | None,
    again: bool,
    cluster: Path | None,
    url: str | None,
    management_url: str | None,
    nodes: int,
    partition_handling: str | None,
    home: Path | None,
    root: Path | None,
    max_lateness: str,
    as_json: bool,
) -> int:
    """Send and receive messages while faults happen, write the history to FOLDER, and judge it.

    The run starts a cluster of its own, or uses one of 'bide broker start --nodes 3' (--cluster). Faults happen on
    such clusters only. The run uses the virtual host bide-check, and deletes it at the end. The next run cleans up
    after a run that was killed. Without faults, it can use any other cluster (--url): it creates the virtual host of
    the URL, and deletes it at the end.

    Workloads: queues, topic, isolated, retries, gate, relay, bulk; 'all' for all of these; spark (needs Java).

    Faults: kill, pause, replace (nodes), kill-process (gates and relays), partition, one-way (root, Linux), leaders,
    policy, memory, disk (alarms), disk-full (root, Linux), clock-step, clock-drift (libfaketime).

    Exit code 1 means that a promise was broken.
    """
    from bide.check.foreign import foreign_cluster
    from bide.check.history import next_run
    from bide.check.plan import ALL_WORKLOADS, CheckPlan
    from bide.check.run import run_check
    from bide.check.site import working_folder
    from bide.runtime.wording import quantity

    if url is not None and cluster is not None:
        raise click.UsageError("--cluster and --url name two clusters: omit one of them")
    if management_url is not None and url is None:
        raise click.UsageError("--management-url belongs to --url: give --url too, or omit it")
    if (cluster or url) is not None and (home or root or partition_handling):
        raise click.UsageError(
            "--home, --root and --partition-handling are for new clusters: omit them, or omit "
            f"{'--url' if cluster is None else '--cluster'}"
        )
    if partition_handling and nodes == 1:
        raise click.UsageError("--partition-handling is for clusters, and --nodes is 1: give --nodes 2 or more")
    plan = CheckPlan(
        seed=secrets.randbits(32) if seed is None else seed,
        workloads=_workloads(workloads, ALL_WORKLOADS),
        faults=faults,
        duration=duration_of("--duration", duration),
        rate=rate,
        longest=duration_of("--longest", longest),
        every=duration_of("--every", every),
        length=duration_of("--length", length),
        at_once=at_once,
    )
    bound = duration_of("--max-lateness", max_lateness)
    next_run(folder, again=again)
    plan.check_requirements()

    async def execute(one: Cluster | ForeignCluster) -> None:
        echo(f"seed {plan.seed}, RabbitMQ {one.release}, {quantity(len(one.nodes), 'node')}", err=True)
        await run_check(plan, one, folder, work_folder, again=again, on_event=lambda text: echo(text, err=True))

    async def execute_on(address: str) -> None:
        plan.check_no_faults()
        async with foreign_cluster(address, management_url) as one:
            await execute(one)

    with working_folder() as work_folder:
        if url is not None:
            run_async(execute_on(url))
        else:
            with _cluster(plan, work_folder, cluster, nodes, partition_handling, home, root) as one:
                run_async(execute(one))
    return _judge(folder, "duckdb", bound, None, as_json=as_json)


@check.command()
@_folder_argument
@click.option("--engine", type=click.Choice(["duckdb", "spark"]), default="duckdb", show_default=True,
              help="Engine that runs the queries.")  # fmt: skip
@click.option("--master", metavar="URL", help="URL of the Spark master. [default: this machine]")
@_lateness_option
@json_option("the verdict")
@verbose_option
def judge(*, folder: Path, engine: str, master: str | None, max_lateness: str, as_json: bool) -> int:
    """Judge the history in FOLDER again; exit with 1 if a promise was broken.

    DuckDB runs the queries in this process, for up to ten million messages. Spark runs them for more.
    """
    return _judge(folder, engine, duration_of("--max-lateness", max_lateness), master, as_json=as_json)


def _workloads(given: tuple[str, ...], every: tuple[str, ...]) -> tuple[str, ...]:
    names = [name for one in given or ("queues",) for name in (every if one == "all" else (one,))]
    return tuple(dict.fromkeys(names))


@contextmanager
def _cluster(
    plan: CheckPlan,
    work_folder: Path,
    cluster: Path | None,
    nodes: int,
    partition_handling: str | None,
    home: Path | None,
    root: Path | None,
) -> Iterator[Cluster]:
    from bide.check.site import own_cluster, users_cluster
    from bide.errors import InvalidInputError

    if cluster is not None:
        if plan.needs("faketime"):
            raise InvalidInputError("clock faults need a cluster that is started for the run: omit --cluster")
        if plan.needs("disks"):
            raise InvalidInputError("disk-full needs a cluster that is started for the run: omit --cluster")
        with users_cluster(work_folder, cluster) as one:
            yield one
        return
    with ExitStack() as stack:
        with working("starting a cluster"):
            own = own_cluster(
                work_folder,
                nodes=nodes,
                namespaces=plan.needs("namespaces"),
                clocks=plan.needs("faketime"),
                disks=plan.needs("disks"),
                partition_handling=partition_handling,
                home=home,
                chroot=root,
            )
            started = stack.enter_context(own)
        yield started


def _judge(folder: Path, engine: str, bound: Any, master: str | None, *, as_json: bool) -> int:
    from bide.check.judgement import judge as judge_history

    verdict = judge_history(
        folder, engine="spark" if engine == "spark" else "duckdb", max_lateness=bound, master=master
    )
    if as_json:
        print_json(verdict.to_dict())
    else:
        _show(verdict)
    return int(verdict.violations > 0)


def _show(verdict: Verdict) -> None:
    from bide.runtime.wording import quantity

    left_out = f"; unfinished and left out: {', '.join(verdict.unfinished)}" if verdict.unfinished else ""
    echo(
        f"{quantity(verdict.runs, 'run')}, {verdict.seconds / 3600:.2f} h, RabbitMQ {', '.join(verdict.releases)}, "
        f"seeds {', '.join(map(str, verdict.seeds))}{left_out}"
    )
    echo()
    echo(f"{'workload':<10}{'sent':>12}{'confirmed':>12}{'refused':>10}{'delivered':>12}{'twice':>8}{'latest':>10}")
    for one in verdict.workloads:
        echo(
            f"{one.workload:<10}{one.sent:>12,}{one.confirmed:>12,}{one.refused:>10,}{one.delivered:>12,}"
            f"{one.twice:>8,}{one.latest / _SECOND:>8.2f} s"
        )
    echo()
    happened = ", ".join(f"{count} {kind}" for kind, count in verdict.faults.items())
    echo(f"faults: {happened or 'none'}; undeliverable: {verdict.undeliverable:,}")
    echo()
    echo(f"{'longest time':<24}{'without confirm':>17}{'of a publish':>15}{'without delivery':>18}")
    for waits in sorted(verdict.waits, key=lambda one: (not one.during, one.during)):
        during = f"during {waits.during}" if waits.during else "at other times"
        echo(f"{during:<24}{_wait(waits.unconfirmed):>17}{_wait(waits.slowest):>15}{_wait(waits.undelivered):>18}")
    echo()
    echo(
        f"clock: due times are exact to {verdict.clock_error / _MILLISECOND:.1f} ms; {verdict.early_by_clock:,} "
        f"messages were early because a node's clock was wrong, by {verdict.earliest_by_clock / _SECOND:.2f} s at most"
    )
    echo(f"history: {verdict.folder}, SHA-256 {verdict.digest}")
    echo()
    for finding in verdict.findings:
        echo(f"{_result(finding):<20}{finding.rule:<12}{finding.promise}")
        for example in finding.examples:
            off = f", {example.off / _SECOND:.3f} s {finding.rule}" if finding.rule in _MEASURED else ""
            echo(f"{'':<20}{example.id} in {example.place} ({example.run}){off}")


def _wait(microseconds: int) -> str:
    return f"{microseconds / _SECOND:.2f} s" if microseconds else "under 0.1 s"


def _result(finding: JudgedPromise) -> str:
    if finding.violations == 0:
        return "kept"
    return "BROKEN once" if finding.violations == 1 else f"BROKEN {finding.violations:,} times"
