"""The schedule log of a race, read from its first record by the judge of the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Final

from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.gate.log_reader import LogReader
from bide.schedules.names import PARTITIONS, ScheduleNames
from tests.schedule_model.judge import Verdict, read
from tests.schedule_race.history import Fate, LogSummary

NAMES: Final = ScheduleNames()

_EXCHANGES: Final = {NAMES.operations: "operations", NAMES.gates: "gates"}


class ReadLog:
    """What the records of all partitions mean.

    Attributes:
        delivered: the ids that the log says were delivered.
    """

    def __init__(self) -> None:
        self._verdicts = [Verdict() for _ in range(PARTITIONS)]
        self._records = 0
        self._claims = 0

    @property
    def delivered(self) -> set[str]:
        """The ids of what was delivered."""
        return {one.id for one in self.fates() if one.fate == "delivered"}

    async def read(self, url: str) -> None:
        """Read until nothing waits and nothing is under way."""
        connection = await Connection.open(BrokerUrl.parse(url))
        try:
            await asyncio.gather(*(self._read(connection, number) for number in range(PARTITIONS)))
        finally:
            await connection.close()

    async def _read(self, connection: Connection, partition: int) -> None:
        verdict = self._verdicts[partition]
        last = await LogReader.open(connection, NAMES.log(partition), "last")
        end = (await last.batch())[-1].offset
        last.close()
        reader, offset = await LogReader.open(connection, NAMES.log(partition), 0), -1
        while offset < end or verdict.waiting or verdict.under_way:
            for one in await reader.batch():
                exchange, offset = _EXCHANGES.get(one.exchange, ""), one.offset
                read(verdict, exchange, one.body, partition, PARTITIONS)
                self._records += 1
                if exchange == "gates" and one.body.startswith(b'{"v":1,"kind":"claim"'):
                    self._claims += len(json.loads(one.body.partition(b"\n")[0])["items"])
        reader.close()

    def fates(self) -> Iterator[Fate]:
        """How each occurrence ended."""
        for verdict in self._verdicts:
            for occurrence, one in verdict.lives.items():
                yield Fate(id=occurrence, key=one.key, body=one.body.decode(), due=one.due, fate=one.fate)

    def summary(self) -> LogSummary:
        """The numbers of records and claims."""
        void = sum(one.void_claims for one in self._verdicts)
        return LogSummary(records=self._records, claims=self._claims, void_claims=void)
