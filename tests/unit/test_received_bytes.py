"""Frames decoded from bytes in arbitrary chunks."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bide.amqp import codec
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl

KINDS = st.sampled_from([codec.METHOD, codec.HEADER, codec.BODY, codec.HEARTBEAT])
FRAMES = st.lists(st.builds(codec.frame, KINDS, st.integers(0, 9), st.binary(max_size=60)), max_size=12)


class Recording(Connection):
    """Remembers the frames, and does nothing about them."""

    def __init__(self) -> None:
        super().__init__(BrokerUrl.parse("amqp://localhost"), "localhost")
        self.frames: list[bytes] = []

    def _on_frame(self, kind: int, number: int, frame: bytes) -> None:
        assert type(frame) is bytes
        assert (kind, number) == (frame[0], int.from_bytes(frame[1:3]))
        self.frames.append(frame)


@given(frames=FRAMES, data=st.data())
def test_frames_are_the_same_wherever_the_bytes_are_cut(frames: list[bytes], data: st.DataObject) -> None:
    sent = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))

    async def received() -> list[bytes]:
        connection = Recording()
        for start, end in pairwise([0, *cuts, len(sent)]):
            connection.data_received(sent[start:end])
        return connection.frames

    assert asyncio.run(received()) == frames


@given(frames=FRAMES, kept=st.binary(max_size=30))
def test_an_incomplete_frame_waits_for_its_remaining_bytes(frames: list[bytes], kept: bytes) -> None:
    last = codec.frame(codec.BODY, 1, kept)

    async def received() -> list[int]:
        connection = Recording()
        connection.data_received(b"".join(frames) + last[:-1])
        counts = [len(connection.frames)]
        connection.data_received(last[-1:])
        return [*counts, len(connection.frames)]

    assert asyncio.run(received()) == [len(frames), len(frames) + 1]


@given(short=st.binary(max_size=11))
def test_a_truncated_content_header_closes_the_connection_with_the_reason(short: bytes) -> None:
    async def next_frame() -> str:
        connection = Connection(BrokerUrl.parse("amqp://localhost"), "localhost")
        connection._channels[1] = Channel(connection, 1)
        connection.data_received(codec.frame(codec.HEADER, 1, short))
        return str(connection.lost.result() if connection.lost.done() else "")

    assert "cannot be decoded" in asyncio.run(next_frame())
