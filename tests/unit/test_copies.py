"""Copies of malformed messages, which AMQP has to carry again."""

from __future__ import annotations

import struct
from datetime import timedelta
from typing import Any

import pytest

from bide.amqp import codec, decoding
from bide.delay.received import restore
from bide.durations import EPOCH
from bide.messages.prepared import PreparedMessage
from bide.recoverability import copies, redrive
from bide.recoverability.failed import FailedMessage
from bide.recoverability.history import History

BYTES = b"\x64" + b"\xff" * 100
"""A short string of 100 bytes, which take 400 characters when they are escaped."""


def headers(raw: bytes) -> bytes:
    """Properties with only this content of the header table."""
    return struct.pack(">HI", 1 << 13, len(raw)) + raw


MALFORMED = {
    "id": struct.pack(">H", 1 << 7) + BYTES,
    "correlation id": struct.pack(">H", 1 << 10) + BYTES,
    "type": struct.pack(">H", 1 << 5) + BYTES,
    "content type": struct.pack(">H", 1 << 15) + BYTES,
    "header name": headers(BYTES + b"I\x00\x00\x00\x07"),
    "nested header name": headers(b"\x01aF" + struct.pack(">I", len(BYTES) + 1) + BYTES + b"V"),
    "timestamp": struct.pack(">HQ", 1 << 6, (1 << 64) - 1),
    "timestamp in a header": headers(b"\x02abT" + b"\xff" * 8),
}


def received(raw: bytes) -> dict[str, Any]:
    """The properties of a received message."""
    frame = struct.pack(">BHIHHQ", 2, 1, 12 + len(raw), 60, 0, 1) + raw + b"\xce"
    return dict(decoding.Properties(frame))


def copies_of(values: dict[str, Any]) -> list[PreparedMessage]:
    """The copies that parking and the operations on an error queue make of a message."""
    sent = restore("", "q", values)
    failed = FailedMessage.read("", "error", values, b"x")
    return [
        copies.parked(sent, b"x", queue="error", headers={}, sent_by=None),
        copies.counted(sent, b"x", queue="q", history=History(), max_failure_times=9, sent_by=None),
        redrive.back(failed, to="q"),
        redrive.archived(failed, queue="error.archive", keep=timedelta(days=1), now=EPOCH),
        redrive.unarchived(failed, queue="error"),
        redrive.uncounted(failed, queue="error"),
    ]


@pytest.mark.parametrize("name", MALFORMED)
def test_no_copy_of_a_malformed_message_is_unsendable(name: str) -> None:
    values = received(MALFORMED[name])
    assert values
    raw = copies.raw(restore("", "q", values), b"x", queue="error")
    for one in (raw, *copies_of(values)):
        assert codec.properties({**one.values, "message_id": one.message_id})


def test_copies_of_a_scheduled_message_keep_its_key() -> None:
    schedule = {"bide-key": "invoice:42", "bide-schedule-id": "a-1"}
    values = {"message_id": "m", "headers": {**schedule, "bide-due": 1, "mine": 1}}
    retry = copies.delayed_retry(
        restore("", "q", values),
        b"x",
        queue="q",
        history=History(),
        max_failure_times=9,
        delay=timedelta(seconds=1),
        now=EPOCH,
        nservicebus=False,
        sent_by=None,
    )
    for one in (retry, *copies_of(values)):
        assert schedule.items() <= dict(one.headers).items()
        assert one.headers["mine"] == 1
