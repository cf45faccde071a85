"""Fixtures for all tests: a shared private broker, and a virtual host per test.

The tests run against the RabbitMQ that is installed, or the one that ``BIDE_TEST_BROKER_ROOT`` (the root
folder of another system, see scripts/broker-root.sh) or ``BIDE_TEST_BROKER_HOME`` (an unpacked RabbitMQ) names.
Without one they fail: nothing is skipped.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from bide.local_broker import LocalBroker, configuration
from bide.local_broker.installation import HOME_VARIABLE, numbers
from tests.support import Rabbitmq, Vhost

if TYPE_CHECKING:
    from tests.databases import DatabaseServer

_ROOT_VARIABLE = "BIDE_TEST_BROKER_ROOT"
_HOME_VARIABLE = "BIDE_TEST_BROKER_HOME"

_KEPT = {
    _ROOT_VARIABLE,
    _HOME_VARIABLE,
    HOME_VARIABLE,
    "BIDE_WRITE_SNAPSHOT",
    "BIDE_SOAK",
    "BIDE_TEST_MYSQLD",
    "BIDE_TEST_NUMBER",
    "BIDE_TEST_START",
}

# What the user has set for bide itself must not lead the tests to his broker.
for _name in [name for name in os.environ if name.startswith("BIDE_")]:
    if _name not in _KEPT:
        del os.environ[_name]

# Each process that imports numpy would start a thread for each core, which spin before they sleep.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell ignores Ctrl-C in what it runs in the background, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each worker chooses the ports of its brokers among its own: a broker that a test has stopped, and starts again, would
# find one of its ports in use if another worker had started a broker meanwhile. Brokers that are started in other
# processes still choose among all ports.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = (configuration._LAST_PORT - configuration._FIRST_PORT + 1) // _workers
_first_port = configuration._FIRST_PORT + _worker % _workers * _ports  # one that replaces a worker has a higher number
vars(configuration).update(_FIRST_PORT=_first_port, _LAST_PORT=_first_port + _ports - 1)

# The objects of imports and collection stay: looking for garbage among them takes a sixth of the time of collection.
gc.disable()

# Time limits are pytest-timeout's: on a loaded machine a single example may well be slow.
settings.register_profile(
    "bide",
    deadline=None,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("bide"), max_examples=25)  # for make check; make test takes 100
settings.register_profile("thorough", settings.get_profile("bide"), max_examples=2000)  # --hypothesis-profile=thorough
settings.load_profile("bide")

_SLOWEST_FILES = 15
# By the list that runs print at their end: of make test, then of make test-long.
_FIRST = (
    "acceptance/test_timeouts_cli.py",
    "broker/test_timeouts.py",
    "faults/test_failover.py",
    "broker/test_migration.py",
    "spark/test_audit.py",
    "broker/test_clock_growth.py",
    "spark/test_audit_tables.py",
    "faults/test_publishing.py",
    "spark/test_source.py",
    "spark/test_replay_faults.py",
    "acceptance/test_migration_cli.py",
    "faults/test_schedule_outages.py",
    "acceptance/test_generated_input.py",
    "component/test_schedule_simulation.py",
    "faults/test_outage.py",
    "component/test_schedule_model.py",
)
_TEARDOWN_LIMIT = 600
_SPARK = "tests/spark/"
_FAULTS = "tests/faults/"

_vhost_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first, then those with slow tests, by their time limits: what begins last should be short."""
    slow: Counter[Path] = Counter()
    for item in items:
        if item.get_closest_marker("slow"):
            limit = item.get_closest_marker("timeout")
            slow[item.path] += limit.args[0] if limit else int(item.config.getini("timeout"))
    first = {Path(__file__).parent / file: place for place, file in enumerate(_FIRST)}
    items.sort(key=lambda item: (first.get(item.path, len(first)), -slow[item.path]))


def pytest_collection_finish() -> None:
    """Leave out of garbage collection what was imported and collected: 250 MB, a seventh of the processor time."""
    gc.collect()
    gc.freeze()
    gc.enable()


class _ServersTogether(LoadFileScheduling):  # type: ignore[misc] # its package has no types
    """``--dist=loadfile``, with files that share a server on few of the workers, as long as there are other files.

    A third take those of tests/spark. Each worker that runs one of them starts a JVM: 8 s of processor time, and 10 s
    more for the first queries than for the same queries later. A sixth take those of tests/faults, which start a
    second broker: 8 s.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        number = int(node.gateway.id.removeprefix("gw")) % self.numnodes
        spark, faults = max(self.numnodes // 3, 1), self.numnodes // 6
        shared = [_SPARK, *([_FAULTS] if faults else [])]
        own = _SPARK if number < spark else _FAULTS if number < spark + faults else ""

        def order(file: str) -> tuple[bool, int]:
            folder = next((one for one in shared if file.startswith(one)), "")
            # What is left over of tests/faults before what is left over of tests/spark.
            return folder != own, ["", _FAULTS, _SPARK].index(folder)

        self.workqueue.move_to_end(min(self.workqueue, key=order), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Choose the scheduler above if the command line asks for whole files."""
    return _ServersTogether(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """Name the test at once: if others do not end either, there is no summary."""
    sys.stderr.write(f"\na worker ended while it ran {crashitem}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the time of each folder and of the slowest files, for the table in CONTRIBUTING.md.

    Times are those of all workers together, and include fixtures.
    """
    folders: dict[str, float] = {}
    files: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.partition("::")[0]
                for times, name in ((files, file), (folders, "/".join(file.split("/")[:2]))):
                    times[name] = times.get(name, 0.0) + report.duration
    if len(folders) > 1:
        terminalreporter.section("time by folder, and the slowest files")
        slowest = sorted(files.items(), key=lambda one: -one[1])[:_SLOWEST_FILES]
        for name, seconds in (*sorted(folders.items(), key=lambda one: -one[1]), *slowest):
            terminalreporter.line(f"{seconds:7.1f} s  {name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """End the process if a test's fixtures do not come to an end.

    A time limit that strikes inside an event loop may end a task that a fixture waits for. pytest's own last resort
    (faulthandler_timeout) is called off as soon as a test has failed, so it is set again here.
    """
    faulthandler.dump_traceback_later(_TEARDOWN_LIMIT, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """pytest adds its handler to loggers that pass nothing on, and those of PySpark change the format of what is added.

    Theirs fails for exceptions that cannot be printed, in every test from then on.
    """
    try:
        return (yield)
    finally:
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.propagate = True


@pytest.fixture(scope="module", params=["postgresql", "mysql"])
def database_server(request: pytest.FixtureRequest) -> Iterator[DatabaseServer]:
    """A private database server."""
    from tests.databases import mysql_server, postgresql_server  # the drivers take time to import

    with postgresql_server() if request.param == "postgresql" else mysql_server() as running:
        yield running


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on asyncio alone: it is what bide is written for."""
    return "asyncio"


@pytest.fixture(autouse=True)
def no_handler_stays() -> Iterator[None]:
    """A command that is run within a test may add a handler of logs, for a standard error that is the test's alone.

    It also sets the level of the root logger, with which libraries write more in the tests that follow.
    """
    root = logging.getLogger()
    before, level = set(root.handlers), root.level
    yield
    root.setLevel(level)
    for handler in set(root.handlers) - before:
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


@pytest.fixture(autouse=True)
def no_spark_session(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the Spark session that a test has left in this process: commands of the pipeline would use it."""
    if "pyspark.sql" in sys.modules and "spark" not in request.path.relative_to(request.config.rootpath).parts:
        monkeypatch.setattr(sys.modules["pyspark.sql"].SparkSession, "getActiveSession", lambda: None)


@pytest.fixture(scope="session")
def rabbitmq() -> Rabbitmq:
    """The RabbitMQ under test, for tests that start brokers of their own."""
    root, home = os.environ.get(_ROOT_VARIABLE), os.environ.get(_HOME_VARIABLE)
    return Rabbitmq(chroot=Path(root) if root else None, home=Path(home) if home else None)


@pytest.fixture(scope="session")
def broker(rabbitmq: Rabbitmq) -> Iterator[LocalBroker]:
    """The shared broker. Tests that kill it or raise alarms start their own."""
    with rabbitmq.start(ephemeral=True) as broker:
        yield broker


@pytest.fixture(scope="session")
def release(broker: LocalBroker) -> tuple[int, ...]:
    """The release of the broker under test, e.g. (3, 10, 8)."""
    return numbers(broker.release)


@pytest.fixture
def vhost(broker: LocalBroker) -> Iterator[Vhost]:
    """A new virtual host, deleted after the test with everything in it."""
    yield from _new_vhost(broker)


@pytest.fixture
def other_vhost(broker: LocalBroker) -> Iterator[Vhost]:
    """A second virtual host, for tests of two."""
    yield from _new_vhost(broker)


def _new_vhost(broker: LocalBroker) -> Iterator[Vhost]:
    name = f"test-{next(_vhost_numbers)}"
    yield Vhost(name=name, url=broker.add_vhost(name), broker=broker)
    broker.delete_vhost(name)


@pytest.fixture
def installed_vhost() -> Iterator[Vhost]:
    """A virtual host on another broker, of the installed release even if another one is under test."""
    with Rabbitmq(chroot=None, home=None).start(ephemeral=True) as broker:
        yield Vhost(name="test", url=broker.add_vhost("test"), broker=broker)


@pytest.fixture
def vhost_url(vhost: Vhost) -> str:
    """The AMQP URL of a new virtual host."""
    return vhost.url
