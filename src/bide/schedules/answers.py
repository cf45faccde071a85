"""Encoding of answers to operations. A gate sends them to the ``reply_to`` of the record.

The correlation id of the answer is the id of the request::

    {"v":1,"outcome":"cancelled","version":"5f2c-17"}\\n
"""

from __future__ import annotations

from typing import Any, Final

from bide.errors import ScheduleRecordError
from bide.schedules.entries import ANSWER_OUTCOMES, ScheduleAnswer
from bide.schedules.fields import RecordFields, read_head, write_head

VERSION: Final = 1
"""The version of answers. It is independent of the version of records, because
applications read answers and gates read records."""


def encode_answer(answer: ScheduleAnswer) -> bytes:
    """The body of the answer to an operation."""
    return write_head({"v": VERSION, **answer_fields(answer)})


def decode_answer(body: bytes) -> ScheduleAnswer:
    """The answer in a body.

    Raises:
        ScheduleRecordError: the body is not an answer, or another release of bide wrote it.
    """
    fields, rest = read_head("an answer of a gate", body)
    check_version(fields, VERSION)
    answer = read_answer(fields)
    fields.end(rest)
    return answer


def check_version(fields: RecordFields, version: int) -> None:
    """Check the version of an answer or a question.

    Raises:
        ScheduleRecordError: the version differs.
    """
    found = fields.integer("v", lowest=1)
    if found != version:
        raise ScheduleRecordError(
            f"{fields.what} has the version {found}, and this release of bide reads {version}: run the same release in "
            "gates and clients"
        )


def answer_fields(answer: ScheduleAnswer) -> dict[str, Any]:
    """The fields of an answer within a JSON object."""
    return {
        "outcome": answer.outcome,
        "version": answer.version,
        "under_way": list(answer.under_way) or None,
        "count": answer.count or None,
        "keys": list(answer.keys) or None,
    }


def read_answer(fields: RecordFields) -> ScheduleAnswer:
    """Take the fields of an answer.

    Raises:
        ScheduleRecordError: a field is missing or wrong.
    """
    outcome = fields.text("outcome")
    found = next((one for one in ANSWER_OUTCOMES if one == outcome), None)
    if found is None:
        raise fields.error("outcome", outcome, f"one of {', '.join(ANSWER_OUTCOMES)}")
    return ScheduleAnswer(
        outcome=found,
        version=fields.optional_text("version"),
        under_way=fields.texts("under_way"),
        count=fields.optional_integer("count") or 0,
        keys=fields.texts("keys"),
    )
