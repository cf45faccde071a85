"""Formats of the tables of an audit, and the record of the format in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

TableFormat = Literal["parquet", "delta", "iceberg"]
TABLE_FORMATS: Final[tuple[TableFormat, ...]] = get_args(TableFormat)

VERSION: Final = 3
PREVIOUS_VERSION: Final = 2
"""The version that had its positions in checkpoints of Spark. A round converts such an audit to :data:`VERSION`."""

_VERSIONS: Final[Mapping[TableFormat, int]] = {"parquet": VERSION, "delta": 5, "iceberg": 6}
"""The versions of audits by format. Releases of bide that do not know a format refuse its version."""

VERSIONS_IN_WORDS: Final = "version 3, or 5 with Delta tables, or 6 with Iceberg tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderVersion:
    """The version of the audit in a folder.

    Attributes:
        version: the version of the files in the folder.
        table_format: the format of the tables; None if this release of bide does not know it.
    """

    version: int
    table_format: TableFormat | None

    @classmethod
    def of(cls, table_format: TableFormat) -> FolderVersion:
        """The version of a new folder with this format."""
        return cls(version=_VERSIONS[table_format], table_format=table_format)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> FolderVersion:
        """Read the version from the content of its file."""
        version, named = content["version"], content.get("format", "parquet")
        known = {(PREVIOUS_VERSION, "parquet"), *((number, one) for one, number in _VERSIONS.items())}
        return cls(version=version, table_format=named if (version, named) in known else None)

    def to_json(self) -> dict[str, Any]:
        """The content of its file. Earlier releases of bide wrote no format, and ignore it."""
        named = {} if self.table_format == "parquet" else {"format": self.table_format}
        return {"version": self.version, **named}
