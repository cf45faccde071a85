"""Small tables, read in this process as Spark would read them.

This module reads CSV, JSON lines and Parquet only where the result is certain to be the same as with Spark and its
default options. Anything else raises :class:`~bide.pipelines.engine.NeedsSparkError`: an unusual quotation mark, a type
that Arrow and Spark read differently, a name that Spark would change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any, Final, NoReturn

import pyarrow as pa
from pyarrow import parquet

from bide.errors import InvalidInputError
from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.formats import guess_format, is_hidden, is_pattern, is_uri
from bide.runtime.wording import in_bytes

MAX_SMALL_BYTES: Final = 100_000_000
"""The largest size in bytes of a table that is read in this process by default."""

_FORMATS: Final = ("parquet", "csv", "json")
_SEPARATOR: Final = ","
_CELL: Final = re.compile(r'"[^"]*"|[^",]*')
_LINE: Final = re.compile(r'(?:"[^"]*"|[^",]*)(?:,(?:"[^"]*"|[^",]*))*')
_LONG: Final = 1 << 63
"""The smallest number that is too large for a bigint."""

_EXACT: Final = 1 << 53
"""Whole numbers below this have an exact value in double precision."""

_BLANKS: Final = "".join(map(chr, range(33)))
"""The characters that Java's ``String.trim`` removes."""

_SPARK_SCHEMA: Final = b"org.apache.spark.sql.parquet.row.metadata"
_SPARK_VERSION: Final = b"org.apache.spark.version"
_SPARK_RELEASES: Final = re.compile(rb"4\.")
_TIMESTAMP: Final = pa.timestamp("us", "UTC")
_LEGACY_CALENDAR: Final = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
_SPARK_TYPES: Final = re.compile(
    r"string|byte|short|integer|long|boolean|double|timestamp|timestamp_ntz|date|binary|decimal\(\d+,\d+\)"
)
_LOGICAL_TYPES: Final = ("NONE", "STRING", "INT", "DECIMAL", "DATE", "TIMESTAMP")
_CORRUPT: Final = "_corrupt_record"
"""The column in which Spark puts lines of CSV and JSON that it cannot read."""

_CELL_BYTES: Final = 10
"""Estimated bytes of a Parquet cell in memory. In the file, a repeated value takes almost no space."""

_GROWTH: Final = 2
"""Bytes in memory that are allowed for each byte of the largest size, because columns of an audit grow in memory."""

_BATCH: Final = 8192
"""Rows that are read at a time. The size is checked after each batch."""

_INTEGERS: Final = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


def read_small(
    source: str, *, format: str | None, options: Mapping[str, str], largest: int | None = MAX_SMALL_BYTES
) -> tuple[pa.Table, str]:
    """Read a table, and describe its size.

    The columns have these Arrow types (with Spark's name in parentheses): string, int8 (tinyint), int16 (smallint),
    int32 (int), int64 (bigint), bool (boolean), float64 (double), timestamp in microseconds with the zone UTC
    (timestamp) or without a zone (timestamp_ntz), date32 (date), binary, decimal128 (decimal).

    Args:
        format: the format; None to guess it from the name.
        largest: the largest size of the files in bytes; None for any size.

    Raises:
        NeedsSparkError: only Spark can read the table, or it is too large.
    """
    kind = format or guess_format(source)
    if kind not in _FORMATS:
        raise NeedsSparkError(f"the input is {'a table of a catalog' if kind == 'table' else kind.upper()}")
    if options:
        raise NeedsSparkError("options of Spark's reader were given")
    if is_uri(source):
        raise NeedsSparkError(f"{source} is a URI")
    files = _files(source)
    size = sum(one.stat().st_size for one in files)
    shown = f"{source} has {in_bytes(size)}"
    if largest is not None and size > largest:
        raise NeedsSparkError(f"{shown}, more than {in_bytes(largest)}")
    if kind == "parquet" and largest is not None:
        _refuse_large(files, largest)
    table = {"parquet": _parquet, "csv": _csv, "json": _json}[kind](files)
    if kind != "parquet" and _CORRUPT in table.column_names:
        raise NeedsSparkError(f"{source} has a column {_CORRUPT!r}, which Spark fills itself")
    names = [name.lower() for name in table.column_names]
    if len(set(names)) < len(names):
        raise NeedsSparkError(f"{source} has columns whose names differ only in case")
    return table, shown


def read_columns(
    files: list[Path], columns: Collection[str], *, largest: int | None = MAX_SMALL_BYTES
) -> tuple[pa.Table, int | None]:
    """Read some columns of Parquet files, with the types of :func:`read_small`.

    Args:
        columns: the names of the columns; names that no file has are ignored.
        largest: the largest uncompressed size of the columns, in bytes; None for any size. In memory, they may take
            twice as much.

    Returns:
        The table, and how many bytes of *largest* are left; None for any size.

    Raises:
        InvalidInputError: a file is incomplete, or was removed.
        NeedsSparkError: only Spark can read the files, or they are too large.
    """
    for file in files:
        try:
            parquet.read_metadata(file)
        except (pa.ArrowException, OSError) as error:
            raise InvalidInputError(
                f"{file} is not a complete Parquet file ({error}): run the audit again, or remove the file"
            ) from error
    if largest is None:
        return _parquet(files, columns), None
    left = _refuse_large(files, largest, columns)
    return _parquet(files, columns, most=largest * _GROWTH), left


def spark_name(kind: pa.DataType) -> str:
    """The name of a column type of :func:`read_small` in Spark."""
    names = {pa.int8(): "tinyint", pa.int16(): "smallint", pa.int32(): "int", pa.int64(): "bigint"}
    names |= {pa.bool_(): "boolean", pa.date32(): "date", pa.timestamp("us"): "timestamp_ntz"}
    names |= {pa.timestamp("us", "UTC"): "timestamp"}
    return names.get(kind, str(kind).replace("decimal128(", "decimal(").replace(", ", ","))


def _files(source: str) -> list[Path]:
    """The files of a table: a single file, or the files in a folder without subfolders."""
    path = Path(source)
    if is_pattern(source):
        raise NeedsSparkError(f"{source} is a pattern")
    if not path.exists():
        raise NeedsSparkError(f"{source} is not on this machine")
    if path.is_file():
        found = [path]
    else:
        inside = sorted(path.iterdir())
        if any(one.name == "_spark_metadata" for one in inside):
            raise NeedsSparkError(f"{source} was written by a streaming query, whose log lists the valid files")
        # Spark ignores hidden files.
        found = [one for one in inside if not is_hidden(one.name)]
    if not found:
        raise NeedsSparkError(f"{source} is an empty folder")
    for one in found:
        if not one.is_file():
            raise NeedsSparkError(f"{source} has subfolders")
        if one.suffix.lower() in (".gz", ".bz2", ".zst", ".lz4", ".snappy", ".deflate", ".xz"):
            raise NeedsSparkError(f"{one} is compressed")
    return found


def _refuse_large(files: list[Path], largest: int, columns: Collection[str] | None = None) -> int:
    """Refuse Parquet files that are too large uncompressed. Returns how many bytes of the largest size are left."""
    for file in files:
        try:
            found = parquet.read_metadata(file)
        except (pa.ArrowException, OSError):
            return largest  # The error is reported when the file is read.
        places = [
            place for place in range(found.num_columns) if columns is None or found.schema.column(place).path in columns
        ]
        size = sum(
            found.row_group(number).column(place).total_uncompressed_size
            for number in range(found.num_row_groups)
            for place in places
        )
        largest -= max(size, found.num_rows * len(places) * _CELL_BYTES)
        if largest < 0:
            raise NeedsSparkError(f"{file} is too large in memory, with {found.num_rows:,} rows")
    return largest


def _parquet(files: list[Path], columns: Collection[str] | None = None, *, most: int | None = None) -> pa.Table:
    """The columns of Parquet files; all of them by default.

    Args:
        most: the largest size of the table in memory, in bytes; None for any size.
    """
    tables: list[pa.Table] = []
    for file in files:
        try:
            whole = parquet.ParquetFile(file, coerce_int96_timestamp_unit="us")
            metadata = whole.metadata.metadata or {}
            if any(one in metadata for one in _LEGACY_CALENDAR):
                raise NeedsSparkError(f"{file} has dates in the old hybrid calendar")
            names = whole.schema_arrow.names
            if len({name.lower() for name in names}) < len(names):
                raise NeedsSparkError(f"{file} has columns whose names differ at most in case")
            wanted = [name for name in names if columns is None or name in columns]
            _refuse_spark_types(file, metadata, wanted)
            _refuse_logical_types(file, whole.schema, wanted)
            if most is None:
                table = whole.read(None if columns is None else wanted)
            else:
                table = _read_within(file, whole, wanted, most)
                most -= table.nbytes
            table = pa.table({name: _to_spark_type(file, name, table.column(name)) for name in wanted})
            for name in _int96(file, whole.schema, metadata, wanted):
                place = wanted.index(name)
                table = table.set_column(place, name, table.column(place).cast(_TIMESTAMP))
        except (pa.ArrowException, OSError) as error:
            raise NeedsSparkError(f"{file} cannot be read by Arrow ({error})") from error
        tables.append(table)
    if any(not one.schema.equals(tables[0].schema) for one in tables):
        raise NeedsSparkError("the files have different columns")
    return pa.concat_tables(tables)


def _read_within(file: Path, whole: parquet.ParquetFile, names: list[str], most: int) -> pa.Table:
    """Read columns, and stop when they are too large in memory: a repeated text takes little space in the file."""
    batches: list[pa.RecordBatch] = []
    for batch in whole.iter_batches(_BATCH, columns=names):
        most -= batch.nbytes
        if most < 0:
            raise NeedsSparkError(f"{file} is too large in memory, with {whole.metadata.num_rows:,} rows")
        batches.append(batch)
    return pa.Table.from_batches(batches, pa.schema([whole.schema_arrow.field(name) for name in names]))


def _refuse_spark_types(file: Path, metadata: Mapping[bytes, bytes], names: Collection[str]) -> None:
    """Refuse types that only the metadata of Spark names, such as intervals, which Arrow would read as numbers."""
    if _SPARK_SCHEMA not in metadata:
        return
    for one in json.loads(metadata[_SPARK_SCHEMA])["fields"]:
        kind = one["type"]
        if one["name"] in names and (not isinstance(kind, str) or not _SPARK_TYPES.fullmatch(kind) or one["metadata"]):
            shown = kind if isinstance(kind, str) else kind["type"]
            raise NeedsSparkError(f"the column {one['name']!r} of {file} is {shown}")


def _refuse_logical_types(file: Path, schema: parquet.ParquetSchema, names: Collection[str]) -> None:
    """Refuse types such as ENUM, which Spark reads as text and Arrow as bytes."""
    for number in range(len(schema)):
        column = schema.column(number)
        is_read = column.path in names or column.path.partition(".")[0] in names
        if is_read and (kind := column.logical_type.type) not in _LOGICAL_TYPES:
            raise NeedsSparkError(f"the column {column.path!r} of {file} is {kind}")


def _int96(
    file: Path, schema: parquet.ParquetSchema, metadata: Mapping[bytes, bytes], names: Collection[str]
) -> list[str]:
    """The columns of the type INT96, an old type of timestamps that Spark still writes, and reads as ``timestamp``."""
    columns = [schema.column(place) for place in range(len(schema))]
    found = [one.path for one in columns if one.physical_type == "INT96" and one.path in names]
    if found and not _SPARK_RELEASES.match(metadata.get(_SPARK_VERSION, b"")):
        # Other writers may use the Julian calendar for dates before 1582.
        raise NeedsSparkError(f"the column {found[0]!r} of {file} is INT96, and not from Spark 4")
    return found


def _to_spark_type(file: Path, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert a column of a Parquet file to the type that the column has in Spark."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_large_string(kind) or pa.types.is_string(kind):
        column = column.cast(pa.string())
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise NeedsSparkError(f"the column {name!r} of {file} has text that is not UTF-8") from error
        return column
    if pa.types.is_large_binary(kind) or pa.types.is_binary(kind):
        return column.cast(pa.binary())
    if pa.types.is_timestamp(kind) and kind.unit in ("ms", "us"):
        return column.cast(pa.timestamp("us", None if kind.tz is None else "UTC"))
    if kind in (*_INTEGERS, pa.bool_(), pa.float64(), pa.date32()) or pa.types.is_decimal128(kind):
        return column
    raise NeedsSparkError(f"the column {name!r} of {file} is {kind}")


def _lines(file: Path) -> list[str]:
    data = file.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise NeedsSparkError(f"{file} is not UTF-8") from error
    if text.startswith("\ufeff") or "\0" in text:
        raise NeedsSparkError(f"{file} has a byte order mark, or a zero byte")
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _csv(files: list[Path]) -> pa.Table:
    names: list[str] | None = None
    rows: list[list[str | None]] = []
    for file in files:
        # Spark skips blank lines, and the empty text after the last line break.
        lines = [line for line in _lines(file) if line.strip(_BLANKS)]
        if not lines:
            raise NeedsSparkError(f"{file} is empty")
        # Spark names a column without a name by its place.
        header = [one or f"_c{place}" for place, one in enumerate(_cells(file, lines[0]))]
        if names is not None and header != names:
            raise NeedsSparkError(f"{file} has other columns than the first file")
        names = header
        for line in lines[1:]:
            cells = _cells(file, line)
            if len(cells) != len(names):
                raise NeedsSparkError(f"{file} has lines with more or fewer cells than the header")
            rows.append(cells)
    assert names is not None
    if len(set(names)) < len(names):
        raise NeedsSparkError("two columns have the same name")
    columns = zip(*rows, strict=True) if rows else ([] for _ in names)
    return pa.table({name: pa.array(one, pa.string()) for name, one in zip(names, columns, strict=True)})


def _cells(file: Path, line: str) -> list[str | None]:
    """The cells of a line. An empty cell is null, even if it is in quotation marks."""
    if "\\" in line:
        raise NeedsSparkError(f"{file} has a backslash, which is an escape character for Spark")
    if '"' not in line:
        return [one or None for one in line.split(_SEPARATOR)]
    if not _LINE.fullmatch(line):
        raise NeedsSparkError(f"{file} has a quotation mark or a line break inside a cell")
    cells: list[str | None] = []
    place = 0
    while place <= len(line):
        match = _CELL.match(line, place)
        assert match is not None
        cell = match[0]
        cells.append((cell[1:-1] if cell.startswith('"') else cell) or None)
        place = match.end() + 1
    return cells


def _json(files: list[Path]) -> pa.Table:
    rows = [row for file in files for row in _objects(file)]
    # Spark sorts the columns by name.
    names = sorted({name for row in rows for name in row}, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
    if not names:
        raise NeedsSparkError("the JSON lines have no columns")
    for name in names:
        if not name or not name.isprintable():
            # Spark leaves out a column without a name, and a name with half of a surrogate pair is not UTF-8.
            raise NeedsSparkError(f"the JSON lines have a column {name!r}")
    return pa.table({name: _json_column(name, [row.get(name) for row in rows]) for name in names})


def _objects(file: Path) -> Iterable[dict[str, Any]]:
    for line in _lines(file):
        if not line.strip(" \t"):
            continue
        try:
            found = json.loads(line, object_pairs_hook=_unique, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise NeedsSparkError(f"{file} has a line that is not one JSON object, or not plain JSON") from error
        if not isinstance(found, dict):
            raise NeedsSparkError(f"{file} has a line that is not a JSON object")
        yield found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _json_column(name: str, values: list[Any]) -> pa.Array:
    kinds = {type(one) for one in values if one is not None}
    if kinds <= {str}:
        try:
            return pa.array(values, pa.string())
        except UnicodeEncodeError as error:
            raise NeedsSparkError(f"the column {name!r} has half of a surrogate pair") from error
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds == {int} and all(one is None or -_LONG <= one < _LONG for one in values):
        return pa.array(values, pa.int64())
    if kinds <= {int, float} and all(one is None or abs(one) < (_EXACT if type(one) is int else inf) for one in values):
        return pa.array(values, pa.float64())
    raise NeedsSparkError(f"the column {name!r} has nested values, large numbers, or values of several types")
