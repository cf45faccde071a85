"""Synchronous classes have the methods and types of their asynchronous twins."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import bide
from bide.client.bulk.sync import BulkPublisher
from bide.messaging.rpc_caller import Caller
from bide.messaging.rpc_sync import SyncCaller

TWINS = {
    bide.Client: bide.SyncClient,
    bide.Message: bide.SyncMessage,
    Caller: SyncCaller,
}

BLOCKING_TYPES = {
    r"AsyncGenerator\[(.*), None\]": r"Iterator[\1]",
    r"(.*) \| AsyncIterable\[.*\]": r"\1",
    "BulkPublish": "PublishSummary",
    "Consumer": "Iterator[Iterator[SyncMessage]]",
    "Connecting": "SyncClient",
    r"AsyncIterator\[(.*)\]": r"Iterator[\1]",
    r"Message \| None": "SyncMessage | None",
}
"""Annotations that must differ, and those of the synchronous twin. ``consume`` is decorated as a context manager."""

ONLY_SYNC = {bide.SyncClient: {"wait_for", "submit", "call", "client"}, bide.SyncMessage: set(), SyncCaller: set()}
"""Names of the synchronous classes that run the asynchronous one in the client's thread."""


def public_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def blocking(annotation: Any) -> Any:
    for own, twin in BLOCKING_TYPES.items():
        if isinstance(annotation, str) and re.fullmatch(own, annotation):
            return re.sub(f"^{own}$", twin, annotation)
    return annotation


def as_blocking(signature: inspect.Signature) -> inspect.Signature:
    """The signature that the twin must have."""
    return signature.replace(
        parameters=[one.replace(annotation=blocking(one.annotation)) for one in signature.parameters.values()],
        return_annotation=blocking(signature.return_annotation),
    )


@pytest.mark.parametrize("kind", TWINS)
def test_each_twin_has_the_same_names(kind: type) -> None:
    own, twin = kind, TWINS[kind]
    instance_attributes = {"url"} if own is bide.Client else set()
    assert public_names(own) | instance_attributes == public_names(twin) - ONLY_SYNC[twin]


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in TWINS for name in sorted(public_names(kind))], ids=str
)
def test_methods_of_twins_have_the_same_signature(kind: type, name: str) -> None:
    own, twin = getattr(kind, name), getattr(TWINS[kind], name)
    if not callable(own):
        # Properties and slots.
        assert type(own) is type(twin)
        return
    assert inspect.signature(twin) == as_blocking(inspect.signature(own))


def test_the_functions_that_connect_have_the_same_signature() -> None:
    assert inspect.signature(bide.connect_sync) == as_blocking(inspect.signature(bide.connect))


def test_no_synchronous_method_takes_untyped_options() -> None:
    for kind in (*TWINS.values(), BulkPublisher):
        for name in public_names(kind):
            found = getattr(kind, name)
            if callable(found):
                kinds = {one.kind for one in inspect.signature(found).parameters.values()}
                assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}, name
