"""Imports point down the layers only, and what is called pure does no input or output."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import bide

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(bide.__file__).parent
MAX_LINES = 450

LAYERS: dict[str, tuple[str, ...]] = {
    "cli": ("__main__", "cli"),
    "demo": ("demo",),
    "pipelines": ("pipelines",),
    "spark": ("spark",),
    "testing": ("testing", "pytest_plugin"),
    "observability": ("observability",),
    "client": (*("", "client", "relay", "endpoint", "messaging", "error_queues"),),
    "admin": ("admin",),
    "local broker": ("local_broker",),
    "management": ("management",),
    "streams": ("streams",),
    "amqp": ("amqp",),
    "recoverability": ("recoverability",),
    "testing rules": ("testing.rules",),
    "patterns": ("patterns",),
    "messages": ("messages",),
    "delay": ("delay",),
    "topology": ("topology",),
    "runtime": ("runtime",),
    "values": ("arguments", "durations", "foreign_text"),
    "errors": ("errors",),
}
"""Layers from the top down, each with its modules and packages. The empty name is the package itself."""

PURE = ("recoverability", "testing rules", "patterns", "messages", "delay", "topology", "values", "errors")
"""Layers of plain data and arithmetic."""

INPUT_OUTPUT = frozenset(
    [
        "asyncio",
        "concurrent",
        "http",
        "logging",
        "multiprocessing",
        "pathlib",
        "selectors",
        "shutil",
        "signal",
        "socket",
        "socketserver",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "urllib",
    ]
)
PURE_BUILTINS_REFUSED = frozenset({"open", "print", "input"})

THIRD_PARTY: dict[str, frozenset[str]] = {
    "cli": frozenset({"click", "pyspark", "rich"}),
    "demo": frozenset({"rich"}),
    "pipelines": frozenset({"PIL", "pyarrow", "pyspark"}),
    "spark": frozenset({"pyarrow", "pyspark"}),
    "observability": frozenset({"prometheus_client", "opentelemetry"}),
    "local broker": frozenset({"httpx2"}),
    "management": frozenset({"httpx2"}),
    "amqp": frozenset({"pamqp"}),
    "testing": frozenset({"pytest"}),
}
"""What a layer may import from elsewhere."""

IMPORTED_AS = {
    "prometheus-client": "prometheus_client",
    "opentelemetry-api": "opentelemetry",
    "pillow": "PIL",
}
"""Packages whose module has another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import of a module.

    Attributes:
        target: the module imported, of bide without the ``bide.`` in front.
        own: whether it is a module of bide.
        at_once: whether it is imported together with its importer, not later and not for the type checker alone.
    """

    target: str
    own: bool
    at_once: bool


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer_of(module: str) -> str:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        for layer, members in LAYERS.items():
            if ".".join(parts[:length]) in members:
                return layer
    raise AssertionError(f"bide.{module} is in no layer: add it to LAYERS")


def imports_of(module: str) -> list[Import]:
    return list(_imports(ast.parse(MODULES[module].read_text()), at_once=True))


def _imports(node: ast.AST, *, at_once: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                for one in names:
                    yield _import(one.name, at_once)
            case ast.ImportFrom(module=source, names=names, level=level):
                assert level == 0, "imports are absolute"
                assert source is not None
                for one in names:
                    inner = f"{source}.{one.name}".removeprefix("bide.")
                    yield _import(
                        f"bide.{inner}" if source.startswith("bide") and inner in MODULES else source, at_once
                    )
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _imports(child, at_once=False)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from _imports(child, at_once=False)
            case _:
                yield from _imports(child, at_once=at_once)


def _import(name: str, at_once: bool) -> Import:
    own = name == "bide" or name.startswith("bide.")
    return Import(target=name.removeprefix("bide").removeprefix(".") if own else name, own=own, at_once=at_once)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    order = list(LAYERS)
    own = layer_of(module)
    for one in imports_of(module):
        if one.own:
            assert one.target, f"bide.{module} imports the whole of bide"
            other = layer_of(one.target)
            assert order.index(other) >= order.index(own), (
                f"bide.{module} ({own}) imports bide.{one.target} ({other}), which is above it"
            )


@pytest.mark.parametrize("module", MODULES)
def test_third_party_packages_stay_in_their_layers(module: str) -> None:
    layer = layer_of(module)
    others = {one.target.partition(".")[0] for one in imports_of(module) if not one.own} - sys.stdlib_module_names
    assert others <= THIRD_PARTY.get(layer, frozenset())


def test_what_is_imported_is_what_is_installed() -> None:
    """Every package that is imported is a dependency by its own right, and none is installed for nothing."""
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    names = {re.split(r"[^\w-]", text)[0] for texts in (project["dependencies"], *extras) for text in texts}
    declared = {IMPORTED_AS.get(name, name) for name in names}
    imported = {
        one.target.partition(".")[0] for module in MODULES for one in imports_of(module) if not one.own
    } - sys.stdlib_module_names
    assert imported == declared


@pytest.mark.parametrize("module", [one for one in MODULES if one and layer_of(one) in PURE])
def test_pure_modules_do_no_input_or_output(module: str) -> None:
    assert not {one.target.partition(".")[0] for one in imports_of(module)} & INPUT_OUTPUT
    called = {
        node.func.id
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & PURE_BUILTINS_REFUSED


def test_no_two_modules_need_each_other_to_be_imported() -> None:
    graph = {module: {one.target for one in imports_of(module) if one.own and one.at_once} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"an import cycle: {' <- '.join(f'bide.{name}' for name in error.args[1])}")


def test_the_table_names_only_what_exists() -> None:
    packages = {module.rpartition(".")[0] for module in MODULES} | set(MODULES)
    assert {member for members in LAYERS.values() for member in members} <= packages


@pytest.mark.parametrize("module", MODULES)
def test_files_stay_short(module: str) -> None:
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= MAX_LINES, f"bide.{module} has {lines} lines: split it by its nouns"
