"""Topologies in files of RabbitMQ definitions, as commands read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from bide.errors import InvalidInputError

if TYPE_CHECKING:
    from bide.topology import Topology


def read_definitions(file: BinaryIO, vhost: str | None) -> Topology:
    """Read a topology from a file of RabbitMQ definitions.

    Raises:
        InvalidInputError: the file is not a JSON file of definitions, does not have the virtual host, or has several
            and none is chosen.
        InvalidTopologyError: an entry of the file is invalid.
    """
    from bide.topology.rendering import from_definitions

    try:
        document = json.load(file)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{file.name} is not JSON ({error}): export the definitions again") from error
    if not isinstance(document, Mapping):
        raise InvalidInputError(
            f"{file.name} does not hold an object, so it is not a file of definitions: export them again"
        )
    asked = from_definitions(document, vhost)
    hosts = _virtual_hosts(document)
    if vhost is None and len(hosts) > 1:
        raise InvalidInputError(f"{file.name} holds the virtual hosts {_names_text(hosts)}: choose one with --vhost")
    if vhost is not None and hosts and vhost not in hosts:
        raise InvalidInputError(f"{file.name} has no virtual host {vhost!r}: choose one of {_names_text(hosts)}")
    return asked


def _virtual_hosts(document: Mapping[str, Any]) -> list[str]:
    """The virtual hosts in definitions; empty for definitions of a single virtual host."""
    entries = [one for kind in ("exchanges", "queues", "bindings") for one in document.get(kind, ())]
    return sorted({str(one["vhost"]) for one in entries if "vhost" in one})


def _names_text(names: list[str]) -> str:
    return ", ".join(map(repr, names))
