"""What a stream holds, read over the stream protocol."""

from __future__ import annotations

from bide.streams.amqp10 import Sections, sections
from bide.streams.log import Address, StreamLogs
from bide.streams.range_reader import OffsetRange, read_range


def messages(address: Address, stream: str) -> list[Sections]:
    """All messages of a stream, in its order."""
    with StreamLogs(address) as logs:
        end = logs.end(stream)
    found = []
    wanted = OffsetRange(stream=stream, start=0, end=end)
    for chunk, first, stop in read_range(address, wanted, fail_on_data_loss=True):
        for data in list(chunk.messages())[first:stop]:
            assert isinstance(data, bytes)
            found.append(sections(data))
    return found


def bodies(address: Address, stream: str) -> list[str]:
    """The bodies of all messages of a stream, in its order."""
    return [(one.body or b"").decode() for one in messages(address, stream)]


def count(address: Address, stream: str) -> int:
    """The number of offsets of a stream, which are its messages and a few entries of the broker."""
    with StreamLogs(address) as logs:
        return logs.end(stream)
