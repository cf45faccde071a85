"""Conversion of topologies to Mermaid, Graphviz and RabbitMQ definitions, and back.

Exchanges are drawn as rounded boxes and queues as cylinders. Bindings are solid lines with their key, dead-lettering is
dashed, and alternate exchanges are dotted. A large number of similar queues, such as the 59 of one level of a delay
infrastructure, is drawn as one.
"""

from __future__ import annotations

import html
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from bide.durations import format_delay
from bide.errors import InvalidTopologyError
from bide.foreign_text import visible
from bide.topology import Binding, Exchange, Queue, Topology
from bide.topology.routing import PREDECLARED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from bide.topology import Argument, DestinationType

COLLAPSE_FROM: Final = 4
"""From this number on, similar queues are drawn as one."""

_MAX_KEYS_SHOWN: Final = 3

EdgeKind = Literal["binding", "dead letter", "alternate"]
"""The meaning of a line."""

NodeKind = Literal["exchange", "queue"]
"""The meaning of a box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A box: an exchange, a queue, or several queues.

    Attributes:
        id: its identifier in the drawing.
        kind: exchange or queue.
        lines: the lines of text in it, the name first.
        known: whether the topology contains it. Otherwise the topology only refers to it.
    """

    id: str
    kind: NodeKind
    lines: tuple[str, ...]
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A line from one box to another, with its label."""

    source: str
    target: str
    kind: EdgeKind
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A topology as boxes and lines, independent of a drawing language."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def mermaid(topology: Topology, *, collapse: bool = True) -> str:
    """Draw a topology as a Mermaid flow chart.

    Args:
        topology: the topology.
        collapse: draw :data:`COLLAPSE_FROM` or more similar queues as one. By default, Mermaid refuses to draw more
            than 500 lines.
    """
    drawn = picture(topology, collapse=collapse)
    lines = ["flowchart LR"]
    for node in drawn.nodes:
        label = "<br/>".join(map(_mermaid_text, node.lines))
        left, right = ("([", "])") if node.kind == "exchange" else ("[(", ")]")
        lines.append(f'    {node.id}{left}"{label}"{right}')
    arrows: dict[EdgeKind, str] = {"binding": "-->", "dead letter": "-.->", "alternate": "-.->"}
    styles = []
    for number, edge in enumerate(drawn.edges):
        label = f'|"{_mermaid_text(edge.label)}"|' if edge.label else ""
        lines.append(f"    {edge.source} {arrows[edge.kind]}{label} {edge.target}")
        # Mermaid has only one kind of broken line; the lengths of its strokes distinguish dashes from dots.
        if edge.kind == "dead letter":
            styles.append(f"    linkStyle {number} stroke-dasharray:6 4")
        elif edge.kind == "alternate":
            styles.append(f"    linkStyle {number} stroke-dasharray:1 4")
    unknown = ",".join(node.id for node in drawn.nodes if not node.known)
    if unknown:
        styles += ["    classDef elsewhere stroke-dasharray:3 3", f"    class {unknown} elsewhere"]
    return "\n".join([*lines, *styles]) + "\n"


def graphviz(topology: Topology, *, collapse: bool = True) -> str:
    """Draw a topology as a directed graph in Graphviz's DOT language.

    Args:
        topology: the topology.
        collapse: draw :data:`COLLAPSE_FROM` or more similar queues as one.
    """
    drawn = picture(topology, collapse=collapse)
    lines = ["digraph topology {", "    rankdir=LR", "    node [fontname=sans]", "    edge [fontname=sans]"]
    for node in drawn.nodes:
        label = "\\n".join(map(_dot_text, node.lines))
        shape = "box style=rounded" if node.kind == "exchange" else "cylinder"
        lines.append(f'    {node.id} [label="{label}" shape={shape}{"" if node.known else " color=gray"}]')
    styles: dict[EdgeKind, str] = {"binding": "", "dead letter": " style=dashed", "alternate": " style=dotted"}
    lines += (
        f'    {edge.source} -> {edge.target} [label="{_dot_text(edge.label)}"{styles[edge.kind]}]'
        for edge in drawn.edges
    )
    return "\n".join([*lines, "}"]) + "\n"


def definitions(topology: Topology, vhost: str | None = None) -> dict[str, Any]:
    """Convert a topology to RabbitMQ definitions, ready for ``json.dumps``.

    Predeclared exchanges are left out, as in the broker's own export.

    Args:
        topology: the topology.
        vhost: the virtual host to write into every entry, for ``rabbitmqctl import_definitions`` and
            ``/api/definitions``; None leaves it out, for ``/api/definitions/<vhost>``.

    Raises:
        InvalidTopologyError: a queue is exclusive or has no name, which definitions cannot express.
    """
    problems = [
        f"queue {one.name!r} is {'exclusive' if one.exclusive else 'named by the broker'}, and definitions can contain "
        "only named queues that outlive their connection: leave it out"
        for one in topology.queues
        if one.exclusive or not one.name
    ]
    if problems:
        raise InvalidTopologyError(problems)
    vhost_item: dict[str, Any] = {} if vhost is None else {"vhost": vhost}
    predeclared = {one.name for one in PREDECLARED}
    return {
        **({} if vhost is None else {"vhosts": [{"name": vhost}]}),
        "exchanges": [
            {
                "name": one.name,
                **vhost_item,
                "type": one.type,
                "durable": one.durable,
                "auto_delete": one.auto_delete,
                "internal": one.internal,
                "arguments": dict(one.arguments),
            }
            for one in topology.exchanges
            if one.name not in predeclared
        ],
        "queues": [
            {
                "name": one.name,
                **vhost_item,
                "durable": one.durable,
                "auto_delete": one.auto_delete,
                "arguments": dict(one.arguments),
            }
            for one in topology.queues
        ],
        "bindings": [
            {
                "source": one.source,
                **vhost_item,
                "destination": one.destination,
                "destination_type": one.destination_type,
                "routing_key": one.routing_key,
                "arguments": dict(one.arguments),
            }
            for one in topology.bindings
        ],
    }


def from_definitions(document: Mapping[str, Any], vhost: str | None = None) -> Topology:
    """Read a topology from RabbitMQ definitions, as the broker exports them (4.3 leaves internal exchanges out).

    Args:
        document: the parsed JSON.
        vhost: read the entries of this virtual host, and those without one; None reads all.

    Raises:
        InvalidTopologyError: an entry is incomplete or has a wrong type, or two entries contradict each other, for
            example because the document has several virtual hosts and none is chosen.
    """
    problems: list[str] = []

    def read(kind: str, build: Callable[[Mapping[str, Any]], Any]) -> list[Any]:
        found = []
        entries = document.get(kind, ())
        if not isinstance(entries, list | tuple):
            problems.append(f"{kind} is {type(entries).__name__}, not a list: export the definitions again")
            return []
        for number, entry in enumerate(entries):
            try:
                if vhost is None or entry.get("vhost", vhost) == vhost:
                    found.append(build(entry))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                problems.append(f"{kind}[{number}] is not a definition of RabbitMQ ({error!r}): export the file again")
        return found

    exchanges = read("exchanges", _exchange)
    queues = read("queues", _queue)
    bindings = read("bindings", _binding)
    if problems:
        raise InvalidTopologyError(problems)
    return Topology(exchanges, queues, bindings)


def _exchange(entry: Mapping[str, Any]) -> Exchange:
    return Exchange(
        _text(entry["name"]),
        _text(entry["type"]),
        durable=bool(entry.get("durable", True)),
        auto_delete=bool(entry.get("auto_delete", False)),
        internal=bool(entry.get("internal", False)),
        arguments=_arguments(entry),
    )


def _queue(entry: Mapping[str, Any]) -> Queue:
    return Queue(
        _text(entry["name"]),
        durable=bool(entry.get("durable", True)),
        auto_delete=bool(entry.get("auto_delete", False)),
        arguments=_arguments(entry),
    )


def _binding(entry: Mapping[str, Any]) -> Binding:
    return Binding(
        _text(entry["source"]),
        _text(entry["destination"]),
        _text(entry.get("routing_key", "")),
        _destination_type(entry["destination_type"]),
        _arguments(entry),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _arguments(entry: Mapping[str, Any]) -> dict[str, Argument]:
    arguments = dict(entry.get("arguments") or {})
    for name, value in arguments.items():
        if not isinstance(value, (str, int, float)):
            raise TypeError(f"argument {name} is {value!r}")
    return arguments


def _destination_type(value: object) -> DestinationType:
    match value:
        case "queue":
            return "queue"
        case "exchange":
            return "exchange"
        case _:
            raise ValueError(f"destination_type is {value!r}")


def picture(topology: Topology, *, collapse: bool = True) -> Picture:
    """Convert a topology to boxes and lines."""
    return _Painter(topology, collapse=collapse).picture()


class _Painter:
    def __init__(self, topology: Topology, *, collapse: bool) -> None:
        self._topology = topology
        self._nodes: dict[tuple[NodeKind, str], Node] = {}
        self._labels: dict[tuple[str, str, EdgeKind], dict[str, None]] = {}
        self._collapse = collapse
        self._count: Counter[NodeKind] = Counter()

    def picture(self) -> Picture:
        for exchange in self._topology.exchanges:
            name = exchange.name or "(default)"
            self._add("exchange", [exchange.name], (name, exchange.type))
        for group in _similar_queues(self._topology) if self._collapse else [[one] for one in self._topology.queues]:
            self._add("queue", [one.name for one in group], _queue_lines(group))
        for exchange in self._topology.exchanges:
            alternate = exchange.arguments.get("alternate-exchange")
            if alternate is not None:
                self._connect(("exchange", exchange.name), ("exchange", str(alternate)), "alternate", "alternate")
        for binding in self._topology.bindings:
            destination = (binding.destination_type, binding.destination)
            self._connect(("exchange", binding.source), destination, "binding", _binding_label(binding))
        for queue in self._topology.queues:
            target = queue.arguments.get("x-dead-letter-exchange")
            if target is not None:
                key = queue.arguments.get("x-dead-letter-routing-key")
                label = "dead letter" if key is None else f"dead letter, key {key}"
                self._connect(("queue", queue.name), ("exchange", str(target)), "dead letter", label)
        edges = (
            Edge(source=source, target=target, kind=kind, label=_shortened(list(labels)))
            for (source, target, kind), labels in self._labels.items()
        )
        return Picture(nodes=tuple(dict.fromkeys(self._nodes.values())), edges=tuple(edges))

    def _add(self, kind: NodeKind, names: Iterable[str], lines: tuple[str, ...], *, known: bool = True) -> None:
        self._count[kind] += 1
        node = Node(id=f"{kind[0]}{self._count[kind]}", kind=kind, lines=lines, known=known)
        for name in names:
            self._nodes[kind, name] = node

    def _connect(self, source: tuple[NodeKind, str], target: tuple[NodeKind, str], kind: EdgeKind, label: str) -> None:
        for end in (source, target):
            if end not in self._nodes:
                name = end[1] or "(default)"
                self._add(end[0], [end[1]], (name,), known=False)
        self._labels.setdefault((self._nodes[source].id, self._nodes[target].id, kind), {})[label] = None


def _similar_queues(topology: Topology) -> list[list[Queue]]:
    """Group queues that have the same sources and arguments apart from TTL, if there are many of them."""
    sources: defaultdict[str, set[str]] = defaultdict(set)
    for binding in topology.bindings:
        if binding.destination_type == "queue":
            sources[binding.destination].add(binding.source)
    alike: defaultdict[object, list[Queue]] = defaultdict(list)
    for queue in topology.queues:
        rest = tuple((name, value) for name, value in queue.arguments.items() if name != "x-message-ttl")
        dead_letters = "x-dead-letter-exchange" in queue.arguments
        fed = frozenset(sources[queue.name])
        # Queues that do not dead-letter have consumers, and are drawn separately.
        alike[(rest, fed) if dead_letters and fed else queue].append(queue)
    return [
        part
        for group in alike.values()
        for part in ([group] if len(group) >= COLLAPSE_FROM else [[one] for one in group])
    ]


def _queue_lines(group: list[Queue]) -> tuple[str, ...]:
    waits = sorted(
        timedelta(milliseconds=ttl)
        for one in group
        if isinstance(ttl := one.arguments.get("x-message-ttl"), int) and 0 <= ttl <= 10**15
    )
    first, last = group[0], group[-1]
    if len(group) == 1:
        name = first.name or "(named by the broker)"
        return (name, first.type, *(f"TTL {format_delay(wait)}" for wait in waits))
    span = [f"TTL {format_delay(waits[0])} to {format_delay(waits[-1])}"] if waits else []
    return (f"{first.name} ... {last.name}", ", ".join([f"{len(group)} {first.type} queues", *span]))


def _binding_label(binding: Binding) -> str:
    arguments = ", ".join(f"{name}={value}" for name, value in binding.arguments.items())
    return " ".join(filter(None, (binding.routing_key, f"({arguments})" if arguments else "")))


def _shortened(labels: list[str]) -> str:
    shown = [label for label in labels if label]
    if len(shown) <= _MAX_KEYS_SHOWN:
        return ", ".join(shown)
    return f"{shown[0]}, {shown[1]} ... {shown[-1]} ({len(shown)})"


def _mermaid_text(text: str) -> str:
    """Escape text for a quoted Mermaid label: characters with a meaning in Mermaid or HTML become character codes.

    These are ``#``, quotes, brackets and other Markdown; a colon before a letter, which could name an icon, or after a
    word that Mermaid treats as a style; and the start of a list.
    """
    colons = ":" if re.search("style|classDef", text) else r":(?!\d)"
    special = rf"[^\w .,:+\-()/=~]|{colons}|~(?=~)|(?<=~)~|^(?:[-+]|\d+\.)(?=\s)"
    return re.sub(special, lambda found: "".join(f"#{ord(one)};" for one in found[0]), visible(text))


def _dot_text(text: str) -> str:
    """Escape text for a quoted string of DOT, which interprets HTML character references too."""
    return html.escape(visible(text), quote=False).replace("\\", "\\\\").replace('"', '\\"')
