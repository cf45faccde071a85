"""Pages of the reference, generated from the code: API, commands, errors, headers, queues, metrics, settings."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import click

import bide

PACKAGE: Final = Path(bide.__file__).parent
ROOT: Final = Path(__file__).resolve().parents[1]

API: Final = {
    "Clients": ("bide.client", "bide.amqp", "bide.messages"),
    "Delays": ("bide.delay",),
    "Endpoints and retries": ("bide.endpoint", "bide.recoverability"),
    "Schedules, gates and relays": ("bide.schedules", "bide.gate", "bide.relay"),
    "Topologies": ("bide.topology",),
}
"""Title of a page -> packages of the names of ``bide`` on it. Names are public if ``bide.__all__`` lists them."""

MODULES: Final = (
    "bide.messaging",
    "bide.error_queues",
    "bide.migration",
    "bide.timeouts",
    "bide.observability",
    "bide.testing",
)
"""Public packages besides ``bide``: a page each."""

_ERROR_MODULE: Final = "bide.errors"


def write(folder: Path) -> None:
    """Write all pages of the reference into a folder."""
    folder.mkdir()
    _write_api(folder)
    _write_commands(folder)
    for name, lines in {
        "errors.rst": _errors(),
        "headers.md": _headers(),
        "queues.md": _queues(),
        "metrics.md": _metrics(),
        "settings.md": _settings(),
        "versions.md": _versions(),
    }.items():
        (folder / name).write_text("\n".join(lines) + "\n")


# -- API


def _write_api(folder: Path) -> None:
    place = folder / "api"
    place.mkdir()
    left = {name: getattr(bide, name).__module__ for name in bide.__all__ if callable(getattr(bide, name))}
    pages: dict[str, list[str]] = {}
    for title, packages in API.items():
        chosen = [name for name, module in left.items() if _is_in(module, packages)]
        pages[title] = [line for name in chosen for line in _documented(f"bide.{name}", getattr(bide, name))]
        left = {name: module for name, module in left.items() if name not in chosen}
    if unplaced := [name for name, module in left.items() if module != _ERROR_MODULE]:
        raise SystemExit(f"no page of the API reference has {', '.join(unplaced)}: add the package to API")
    for name in MODULES:
        pages[name] = [f".. automodule:: {name}", "   :members:", "   :imported-members:", ""]
    for title, lines in pages.items():
        (place / f"{_slug(title)}.rst").write_text("\n".join([title, "=" * len(title), "", *lines]) + "\n")
    names = [f"api/{_slug(title)}" for title in pages]
    (folder / "api.md").write_text(
        "# Python API\n\nThe names of `bide`, by topic, and the public packages beside it.\n\n" + _contents(names)
    )


def _documented(name: str, value: object) -> Iterator[str]:
    if not isinstance(value, type):
        yield from (f".. autofunction:: {name}", "")
        return
    yield from (f".. autoclass:: {name}", "   :members:", "   :inherited-members: Exception, tuple, str, dict", "")


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == one or module.startswith(f"{one}.") for one in packages)


# -- commands


def _write_commands(folder: Path) -> None:
    from bide.cli.app import COMMANDS, cli

    os.environ["COLUMNS"] = "100"
    place = folder / "commands"
    place.mkdir()
    for name in sorted(COMMANDS):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        lines = [f"# bide {name}", ""]
        for path, one in _tree(f"bide {name}", command):
            if path != f"bide {name}":
                lines += [f"## {path}", ""]
            lines += [*_help(path, one), ""]
        (place / f"{name}.md").write_text("\n".join(lines))
    lines = [
        "# Command line",
        "",
        *_help("bide", cli),
        "",
        _contents([f"commands/{name}" for name in sorted(COMMANDS)]),
    ]
    (folder / "commands.md").write_text("\n".join(lines))


def _tree(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            if (found := command.get_command(context, name)) is not None:
                yield from _tree(f"{path} {name}", found)


def _help(path: str, command: click.Command) -> list[str]:
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "terminal_width": 100}
    context = click.Context(command, info_name=path, **settings)  # type: ignore[arg-type]  # values of several types
    return ["```", command.get_help(context), "```"]


# -- errors and headers


def _errors() -> list[str]:
    return ["Errors", "======", "", f".. automodule:: {_ERROR_MODULE}", "   :members:", "   :show-inheritance:"]


def _headers() -> list[str]:
    lines = [
        "# Headers",
        "",
        "Headers that bide writes besides those of RabbitMQ, NServiceBus and Celery. Senders cannot set those of",
        "delays themselves (`ReservedHeaderError`).",
        "",
        "| header | meaning | defined in |",
        "|---|---|---|",
    ]
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(["bide", *path.relative_to(PACKAGE).with_suffix("").parts])
        for name, value, text in _constants(ast.parse(path.read_text())):
            if name.startswith("HEADER_") and isinstance(value, str) and value.startswith("bide-"):
                found[value] = (_cell(text), module)
    return lines + [f"| `{name}` | {text} | `{module}` |" for name, (text, module) in sorted(found.items())]


def _constants(tree: ast.Module) -> Iterator[tuple[str, object, str]]:
    """Name, value and text of each documented constant of a module."""
    for number, node in enumerate(tree.body):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                pass
            case _:
                continue
        after = tree.body[number + 1] if number + 1 < len(tree.body) else None
        match after:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield name, value, text
            case _:
                yield name, value, ""


def _cell(text: str) -> str:
    """A text of a docstring for a cell of a table in Markdown."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", " ".join(text.split())).replace("``", "`").replace("|", r"\|")
    text = re.sub(r"^Header (with |of copies of a message: |that holds )", "", text).removesuffix(".")
    return text[:1].upper() + text[1:]


# -- queues


def _queues() -> list[str]:
    from bide.delay.by_name import LAYOUTS, make_infrastructure
    from bide.schedules.names import ScheduleNames

    lines = ["# Exchanges and queues", "", "What each layout declares with its default settings."]
    for layout in LAYOUTS:
        lines += ["", f"## {layout}", "", *_topology_table(make_infrastructure(layout).topology())]
    lines += ["", "## Schedule log", "", *_topology_table(ScheduleNames().topology())]
    return lines


def _topology_table(topology: bide.Topology) -> list[str]:
    lines = ["| kind | name | type | arguments |", "|---|---|---|---|"]
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for exchange in topology.exchanges:
        rows.setdefault(("exchange", _shape(exchange.name), exchange.type, _arguments(exchange)), []).append(
            exchange.name
        )
    for queue in topology.queues:
        rows.setdefault(("queue", _shape(queue.name), queue.type, _arguments(queue)), []).append(queue.name)
    for (kind, _, type_, arguments), names in rows.items():
        shown = f"`{names[0]}`" if len(names) == 1 else f"`{names[0]}` to `{names[-1]}` ({len(names)})"
        lines.append(f"| {kind} | {shown} | {type_} | {arguments} |")
    return lines


def _shape(name: str) -> str:
    """A name without its last number, so that the queues of a level are one row."""
    return re.sub(r"\d+$", "N", name)


def _arguments(one: bide.Exchange | bide.Queue) -> str:
    """The arguments; those that differ from queue to queue have the value N."""
    return ", ".join(
        f"`{name}={'N' if name in _VARYING else value}`"
        for name, value in one.arguments.items()
        if name != "x-queue-type"
    )


_VARYING: Final = {"x-message-ttl", "x-dead-letter-exchange"}
"""Arguments that depend on the digit of a queue; the pages about the layouts say how."""


# -- metrics


def _metrics() -> list[str]:
    from prometheus_client import CollectorRegistry

    from bide.observability.metrics import Metrics

    registry = CollectorRegistry()
    metrics = Metrics(registry)
    lines = ["# Metrics", "", "The metrics of `bide.observability.Metrics`, which endpoints and gates fill.", ""]
    lines += ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    labels = _labels_of(metrics)
    for family in sorted(registry.collect(), key=lambda one: one.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        # Families that are made at each scrape have no collector with labels.
        known = labels.get(family.name) or getattr(family, "_labelnames", None) or ()
        shown = ", ".join(f"`{one}`" for one in known) or "none"
        lines.append(f"| `{name}` | {family.type} | {shown} | {_cell(family.documentation)} |")
    return lines


def _labels_of(metrics: object) -> dict[str, tuple[str, ...]]:
    """Name of a metric -> its labels."""
    collectors: list[dict[str, Any]] = [vars(one) for one in vars(metrics).values() if hasattr(one, "_labelnames")]
    return {one["_name"]: one["_labelnames"] for one in collectors}


# -- settings


def _settings() -> list[str]:
    lines = ["# Settings", "", "## Environment variables", ""]
    lines += ["| variable | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in sorted(_variables().items())]
    lines += ["", "## Layouts", "", "| layout | settings |", "|---|---|"]
    from bide.delay.by_name import _SETTINGS

    lines += [
        f"| `{layout}` | {', '.join(f'`{one}`' for one in sorted(names))} |" for layout, names in _SETTINGS.items()
    ]
    from bide.spark import read_options, sink_settings

    for title, known in (("read", read_options.SOURCE_OPTIONS), ("write", sink_settings.SINK_OPTIONS)):
        lines += ["", f"## Options of Spark to {title}", "", ", ".join(f"`{one}`" for one in sorted(known))]
    return lines


def _variables() -> dict[str, str]:
    """Environment variables, by the documented constants that name them and the options that read them."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for _, value, text in _constants(ast.parse(path.read_text())):
            if text and isinstance(value, str) and re.fullmatch(r"BIDE_[A-Z_]+", value):
                found[value] = _cell(text)
    from bide.cli.app import cli

    for _, command in _tree("bide", cli):
        for option in command.params:
            if isinstance(option, click.Option) and isinstance(option.envvar, str):
                found.setdefault(option.envvar, f"The default of `{option.opts[0]}`: {option.help}")
    return found


# -- versions


def _versions() -> list[str]:
    from bide.admin.apply import MINIMUM_RELEASE
    from bide.delay.by_name import LAYOUTS, make_infrastructure
    from bide.schedules.names import ScheduleNames
    from bide.version import VERSION

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = [one.rpartition(" ")[2] for one in project["classifiers"] if re.search(r"Python :: 3\.\d+$", one)]
    lines = ["# Versions", "", "| | |", "|---|---|", f"| these pages | bide {VERSION} |"]
    lines += [f"| RabbitMQ | {'.'.join(map(str, MINIMUM_RELEASE))} or newer |"]
    lines += [f"| Python | {project['requires-python'].removeprefix('>=')} or newer; tested: {', '.join(tested)} |", ""]
    lines += ["## Names on the broker", ""]
    lines += ["A new layout version has new names, so that programs of two releases can use one broker.", ""]
    lines += ["| | names start with |", "|---|---|"]
    for layout in LAYOUTS:
        topology = make_infrastructure(layout).topology()
        names = sorted([*(one.name for one in topology.exchanges), *(one.name for one in topology.queues)])
        same = takewhile(lambda pair: pair[0] == pair[1], zip(names[0], names[-1], strict=False))
        common = "".join(one for one, _ in same)
        lines.append(f"| the layout `{layout}` | `{common}` |")
    lines += [f"| the schedule log | `{ScheduleNames().operations}` |", ""]
    lines += ["## Packages", "", "| extra | packages |", "|---|---|"]
    extras = {"(always)": project["dependencies"], **project["optional-dependencies"]}
    lines += [f"| {extra} | {', '.join(f'`{one}`' for one in packages)} |" for extra, packages in extras.items()]
    return lines


# -- helpers


def _slug(title: str) -> str:
    return re.sub(r"[^\w]+", "-", title.lower()).strip("-")


def _contents(names: list[str]) -> str:
    return "\n".join(["```{toctree}", ":maxdepth: 1", "", *names, "```", ""])
