"""What the index of a partition reports of the records that it applies."""

from __future__ import annotations

from pathlib import Path

from bide.gate.log_reader import LogRecord
from bide.gate.partition_index import PartitionIndex
from bide.schedules.encoding import encode
from bide.schedules.names import ScheduleNames
from bide.schedules.records import Done, EndedOccurrence, ScheduleRecord

NAMES = ScheduleNames()


def stored(offset: int, record: ScheduleRecord) -> LogRecord:
    return LogRecord(offset, NAMES.gates, encode(record))


async def test_an_end_that_another_gate_had_reported_is_reported_again(tmp_path: Path) -> None:
    """Otherwise the gate that reported it second would wait for its own report for ever."""
    index = PartitionIndex(tmp_path / "index.db", 0, NAMES, "mine")
    await index.open()
    items = (EndedOccurrence(occurrence="5f2c8a-17", outcome="delivered"),)
    records = [stored(0, Done(gate="other", items=items)), stored(1, Done(gate="mine", items=items))]
    applied = await index.apply(records, is_leading=False)
    await index.close()
    assert applied.ended == ["5f2c8a-17", "5f2c8a-17"]
