"""Imports point down the layers, and pure packages do no input or output."""

from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import bide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE = Path(bide.__file__).parent
CONTRIBUTING = PACKAGE.parents[1] / "CONTRIBUTING.md"

LAYERS: tuple[dict[str, str], ...] = (
    {"__main__": "`python -m bide`"},
    {"cli": "the command line: arguments, output, exit codes"},
    {
        "check": "`bide check`: workloads, faults, and the judge of their history",
        "console": "the web page of `bide console`",
        "demo": "`bide demo`",
    },
    {"pipelines": "jobs on Spark, small ones without it: schedule, replay, audit, plan, report"},
    {"spark": "the Spark data source and sink `rabbitmq`"},
    {
        "integrations": "delays for Celery, dramatiq, FastStream and taskiq; an interface for other clients",
        "testing": "an in-memory RabbitMQ, and its fixtures for pytest",
        "observability": "metrics for Prometheus, tracing for OpenTelemetry",
    },
    {"": "the public names"},
    {
        "delayed_plugin": "leaving the delayed-message plugin: its exchanges, and the messages in it",
        "endpoint": "handlers, retries, parking",
        "error_queues": "failed messages: inspect, retry, edit, archive, discard",
        "messaging": "messaging patterns over a client: RPC, event bus, partitions, wire tap",
        "migration": "waiting messages from one delay infrastructure into another",
        "timeouts": "stored timeouts of NServiceBus from a database into a delay infrastructure",
    },
    {"gate": "the process that delivers schedules", "relay": "the relay process of a waiting hall"},
    {"client": "reconnecting connections, confirmed publishing, consuming"},
    {"admin": "topologies on a broker: apply, delete, verify; policies, taps"},
    {"local_broker": "a private RabbitMQ on this machine"},
    {"management": "RabbitMQ's management HTTP API"},
    {
        "streams": "RabbitMQ's stream protocol",
        "recoverability": "retry policies, and headers of failed messages",
        "schedules": "records of the schedule log, their fold, recurrences",
        "testing.rules": "RabbitMQ's rules, for the in-memory broker",
    },
    {
        "amqp": "AMQP 0-9-1: URLs, frames, channels, connections",
        "messages": "outgoing messages as values, and their checks",
    },
    {"patterns": "topologies as functions, one for each messaging pattern"},
    {"delay": "delay infrastructures: a delay and a target -> a route"},
    {"topology": "exchanges, queues and bindings as data, and where a message would go"},
    {"runtime": "tasks, cancellation, backoff, caches, loggers, range checks, numbers with nouns"},
    {"durations": "delays and due times"},
    {
        "errors": "the error classes",
        "foreign_text": "text of other systems, made safe to print",
        "version": "the version of bide",
    },
)
"""Layers from the top down. Modules and packages import from lower layers and from themselves, and those that share a
layer do not import each other. The empty name is the package itself."""

PURE = frozenset(
    {
        *("recoverability", "schedules", "testing.rules", "patterns", "messages", "delay", "topology"),
        *("durations", "errors", "foreign_text"),
    }
)
"""Plain data and arithmetic."""

INPUT_OUTPUT = frozenset(
    {
        *("asyncio", "concurrent", "http", "logging", "multiprocessing", "os", "pathlib", "random", "secrets"),
        *("selectors", "shutil", "signal", "socket", "socketserver", "ssl", "subprocess", "tempfile", "threading"),
        *("time", "urllib"),
    }
)
PURE_BUILTINS_REFUSED = frozenset({"open", "print", "input"})

MESSAGE_IDS = ("messages.prepared", "os")
"""The one exception: message ids are made of random bits, and made anew in a forked process."""

TOP_MODULES = 6
"""Most modules beside the packages."""

THIRD_PARTY: dict[str, frozenset[str]] = {
    "cli": frozenset({"click", "pyspark", "rich"}),
    "check": frozenset({"duckdb", "pyarrow", "pyspark"}),
    "console": frozenset({"starlette", "uvicorn"}),
    "demo": frozenset({"rich"}),
    "pipelines": frozenset({"deltalake", "duckdb", "numpy", "pyarrow", "pyiceberg", "pyspark"}),
    "spark": frozenset({"pyarrow", "pyspark"}),
    "integrations": frozenset(
        {"aio_pika", "celery", "dramatiq", "faststream", "kombu", "pika", "taskiq", "taskiq_aio_pika"}
    ),
    "observability": frozenset({"prometheus_client", "opentelemetry"}),
    "local_broker": frozenset({"httpx2"}),
    "management": frozenset({"httpx2"}),
    "schedules": frozenset({"cronsim"}),
    "amqp": frozenset({"pamqp"}),
    "testing": frozenset({"pytest"}),
    "timeouts": frozenset({"psycopg", "pymysql"}),
}
"""What a package may import from elsewhere."""

IMPORTED_AS = {
    "aio-pika": "aio_pika",
    "taskiq-aio-pika": "taskiq_aio_pika",
    "prometheus-client": "prometheus_client",
    "opentelemetry-api": "opentelemetry",
}
"""Packages whose module has another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import of a module.

    Attributes:
        target: the module imported, of bide without the ``bide.`` in front.
        own: whether it is a module of bide.
    """

    target: str
    own: bool


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


PLACES = {member: number for number, layer in enumerate(LAYERS) for member in layer}


def member_of(module: str) -> str:
    """The entry of LAYERS that a module belongs to."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (member := ".".join(parts[:length])) in PLACES:
            return member
    raise AssertionError(f"bide.{module} is in no layer: add it to LAYERS")


def refusal(importer: str, imported: str) -> str | None:
    """The reason why an import between two modules of bide is forbidden; None if it is allowed."""
    if not imported:
        return f"bide.{importer} imports the whole of bide"
    above, below = member_of(importer), member_of(imported)
    if above == below or PLACES[above] < PLACES[below]:
        return None
    where = "beside it" if PLACES[above] == PLACES[below] else "above it"
    return f"bide.{importer} ({above}) imports bide.{imported} ({below}), which is {where}"


def circle(graph: dict[str, set[str]]) -> str | None:
    """A circle of imports, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " <- ".join(f"bide.{name}" for name in error.args[1])
    return None


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    return tuple(_imports(ast.parse(MODULES[module].read_text())))


def _imports(node: ast.AST) -> Iterator[Import]:
    for child in ast.walk(node):
        match child:
            case ast.Import(names=names):
                for one in names:
                    yield _import(one.name)
            case ast.ImportFrom(module=source, names=names, level=level):
                assert level == 0, "imports are absolute"
                assert source is not None
                for one in names:
                    inner = f"{source}.{one.name}".removeprefix("bide.")
                    yield _import(f"bide.{inner}" if source.startswith("bide") and inner in MODULES else source)
            case _:
                continue


def _import(name: str) -> Import:
    own = name == "bide" or name.startswith("bide.")
    return Import(target=name.removeprefix("bide").removeprefix(".") if own else name, own=own)


def test_imports_point_down() -> None:
    """Those inside functions and for the type checker too."""
    assert not {
        (module, why)
        for module in MODULES
        for one in imports_of(module)
        if one.own and (why := refusal(module, one.target))
    }


class TestAForbiddenImport:
    """The rules find what they are there for."""

    @pytest.mark.parametrize(
        ("importer", "imported", "why"),
        [
            ("client.client", "endpoint.endpoint", "above it"),
            ("delay.clock", "client", "above it"),
            ("endpoint.worker", "error_queues", "beside it"),
            ("streams.log", "recoverability.retry_policy", "beside it"),
            ("errors", "durations", "above it"),
            ("client.client", "", "the whole of bide"),
        ],
    )
    def test_is_refused_with_the_reason(self, importer: str, imported: str, why: str) -> None:
        found = refusal(importer, imported)
        assert found is not None
        assert why in found

    def test_is_found_inside_a_function_and_for_the_type_checker(self) -> None:
        tree = ast.parse(
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from bide.endpoint import Endpoint\n"
            "class Client:\n    def endpoint(self):\n        from bide.endpoint.worker import Worker\n"
        )
        found = [one.target for one in _imports(tree) if one.own]
        assert found == ["endpoint", "endpoint.worker"]
        assert all(refusal("client.client", one) for one in found)

    def test_a_module_in_no_layer_fails(self) -> None:
        with pytest.raises(AssertionError, match="in no layer"):
            member_of("somewhere.new")

    def test_a_circle_of_imports_is_found(self) -> None:
        assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
        assert circle({"a": {"b"}, "b": {"a"}}) is not None


def test_third_party_packages_stay_in_their_layers() -> None:
    assert not {
        (module, package)
        for module in MODULES
        for one in imports_of(module)
        if not one.own
        and (package := one.target.partition(".")[0]) not in sys.stdlib_module_names
        and package not in THIRD_PARTY.get(member_of(module), frozenset())
    }


def test_imported_packages_are_the_declared_dependencies() -> None:
    """Every package that is imported is a dependency by its own right, and none is installed for nothing."""
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    names = {re.split(r"[^\w-]", text)[0] for texts in (project["dependencies"], *extras) for text in texts}
    declared = {IMPORTED_AS.get(name, name) for name in names}
    imported = {
        one.target.partition(".")[0] for module in MODULES for one in imports_of(module) if not one.own
    } - sys.stdlib_module_names
    assert imported == declared


def test_pure_modules_do_no_input_or_output() -> None:
    pure = [one for one in MODULES if member_of(one) in PURE]
    assert pure
    imported = {(module, one.target.partition(".")[0]) for module in pure for one in imports_of(module)}
    assert {(module, name) for module, name in imported if name in INPUT_OUTPUT} <= {MESSAGE_IDS}
    called = {
        (module, node.func.id)
        for module in pure
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not {(module, name) for module, name in called if name in PURE_BUILTINS_REFUSED}


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Not even inside functions or for the type checker. Packages import what they offer, so they are left out."""
    graph = {
        module: {one.target for one in imports_of(module) if one.own}
        for module, path in MODULES.items()
        if path.name != "__init__.py"
    }
    found = circle(graph)
    assert found is None, f"a circle of imports: {found}"


def test_the_layers_name_only_existing_modules() -> None:
    assert set(PLACES) <= set(MODULES)


def test_at_most_the_agreed_number_of_modules_is_outside_packages() -> None:
    beside = [path.name for path in PACKAGE.glob("*.py")]
    assert len(beside) <= TOP_MODULES, beside


def table() -> str:
    """The layers for CONTRIBUTING.md."""
    lines = ["| layer | what it does |", "|---|---|"]
    for layer in LAYERS:
        names = ", ".join(f"`{name or 'bide'}`" for name in layer)
        lines.append(f"| {names} | {'; '.join(layer.values())} |")
    return "\n".join(lines) + "\n"


def picture() -> str:
    """The layers from ``cli`` down to ``delay`` for CONTRIBUTING.md: each stands on those below it."""
    lines = ["```mermaid", "flowchart TB"]
    shown = [layer for layer in LAYERS if not {"__main__", ""} & set(layer)]
    for number, layer in enumerate(shown):
        label = " | ".join(name.rpartition("bide.")[2] for name in layer)
        lines.append(f'  l{number}["{label}"]')
    lines += [f"  l{number} --> l{number + 1}" for number in range(len(shown) - 1)]
    return "\n".join([*lines, "```"]) + "\n"


@pytest.mark.parametrize(("mark", "made"), [("layers", table), ("picture", picture)])
def test_contributing_shows_the_layers(mark: str, made: Callable[[], str]) -> None:
    """BIDE_WRITE_SNAPSHOT=1 writes them."""
    start, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    page = CONTRIBUTING.read_text()
    before, _, rest = page.partition(start)
    shown, _, after = rest.partition(end)
    if "BIDE_WRITE_SNAPSHOT" in os.environ:
        CONTRIBUTING.write_text(f"{before}{start}{made()}{end}{after}")
        shown = made()
    assert shown == made()
