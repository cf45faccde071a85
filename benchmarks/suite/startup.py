"""Time until the first message: applying the topology, and importing bide."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

from benchmarks.suite.measurement import Case, Measurement, Plan
from benchmarks.suite.task import Answer, Job
from bide.admin.infrastructure import install
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delay.by_name import make_infrastructure

_IMPORTS: Final = (
    # "import bide" alone imports next to nothing, until the first name is asked for.
    ("from bide import connect", None),
    ("import aio_pika", "aio-pika"),
    ("import pika", "pika"),
    # So does "import celery".
    ("from celery import Celery", "celery"),
)
_TRIES: Final = 20


def _cases(plan: Plan) -> Sequence[Case]:
    applying = [
        Case(name=f"apply {name}", work="benchmarks.suite.startup:applying", options={"layout": layout, "times": times})
        for name, layout, times in (
            ("Clock", "clock", 1),
            ("Clock that is there", "clock", 2),
            ("the cascade of NServiceBus", "nservicebus", 1),
        )
    ]
    importing = [
        Case(
            name=statement,
            work="benchmarks.suite.startup:importing",
            options={"statement": statement, "tries": plan.count(_TRIES, least=3)},
            rival=package,
        )
        for statement, package in _IMPORTS
    ]
    return [*applying, *importing]


STARTUP: Final = Measurement(
    name="startup",
    title="Until the first message",
    about=(
        "*apply*: the time to declare all exchanges, queues and bindings of the infrastructure, in an empty virtual "
        "host or in one that already has them. *import*: the processor time of a new interpreter that imports the "
        f"package, minus that of one that imports nothing, medians of {_TRIES}."
    ),
    cases=_cases,
)


async def applying(job: Job) -> Answer:
    """Put an infrastructure on the broker; the last time is measured."""
    infrastructure = make_infrastructure(job.options["layout"])
    connection = await Connection.open(BrokerUrl.parse(job.url))
    seconds = 0.0
    for _ in range(job.options["times"]):
        start = time.perf_counter()
        await install(connection, infrastructure)
        seconds = time.perf_counter() - start
    await connection.close()
    return Answer(values={"seconds": seconds})


def importing(job: Job) -> Answer:
    """Compare with an interpreter that imports nothing, in turns."""
    bare, full = [], []
    for _ in range(job.options["tries"]):
        bare.append(_processor_ms("pass"))
        full.append(_processor_ms(job.options["statement"]))
    return Answer(values={"cpu_ms": statistics.median(full) - statistics.median(bare)})


def _processor_ms(program: str) -> float:
    process = subprocess.Popen([sys.executable, "-c", program])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, program)
    return (usage.ru_utime + usage.ru_stime) * 1000
