"""Rows of a JSONL or Parquet file, one at a time, broken ones by their number."""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from draftfeed_deploy.errors import ConfigError
from draftfeed_deploy.spool_contents import Progressing

MAX_LINE_BYTES = 64 << 20
BATCH_ROWS = 64


class Row(NamedTuple):
    number: int
    """From 1: the line of a JSONL file, the row of a Parquet file."""
    value: dict[str, Any] | None
    fault: str = ""
    """Why there is no value."""
    size: int = 0
    """Bytes of the file, about."""


def rows(path: Path) -> Iterator[Row]:
    """Raises ConfigError when the file cannot be read at all."""
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    return _json_rows(path)


def _json_rows(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                if len(raw) > MAX_LINE_BYTES:
                    _skip_line(file, raw)
                    yield Row(number, None, f"is longer than {MAX_LINE_BYTES} bytes", len(raw))
                elif raw.strip():
                    yield _json_row(number, raw)._replace(size=len(raw))
                else:
                    yield Row(number, None, "is blank", len(raw))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None


def _skip_line(file: Any, raw: bytes) -> None:
    while raw and not raw.endswith(b"\n"):
        raw = file.readline(MAX_LINE_BYTES)


def _json_row(number: int, raw: bytes) -> Row:
    try:
        return Row(number, msgspec.json.decode(raw, type=dict[str, Any]))
    except msgspec.ValidationError as error:
        is_object = raw.lstrip().startswith(b"{")  # then it is a number beyond all bounds
        return Row(number, None, str(error) if is_object else "is not a JSON object")
    except (msgspec.DecodeError, RecursionError) as error:
        return Row(number, None, f"is not JSON: {error}")


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            size = path.stat().st_size // max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                for row in range(batch.num_rows):
                    number += 1
                    yield _parquet_row(number, batch.slice(row, 1), size)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror or error}") from None
    except pyarrow.ArrowException as error:
        where = f" after row {number}" if number else ""
        raise ConfigError(str(path), f"is not Parquet{where}: {error}") from None


def _parquet_row(number: int, one: Any, size: int) -> Row:
    """one: a record batch of that row alone."""
    try:
        (value,) = one.to_pylist()
        return Row(number, plain(value), "", size)
    except UnicodeDecodeError:
        return Row(number, None, "has text that is not UTF-8", size)
    except (ValueError, OverflowError) as error:  # a time that Python has not
        return Row(number, None, f"cannot be read: {error}", size)


def plain(value: Any) -> Any:
    """As JSON would have it. Parquet gives every struct all fields that any row has, and many who
    write it leave out that a column of bytes is text. Raises UnicodeDecodeError."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value.decode() if isinstance(value, bytes) else value


def progressing(path: Path, console: Console, what: str) -> Progressing:
    """Of reading it; `add` takes the rows' sizes. Raises ConfigError."""
    try:
        return Progressing(console, path.stat().st_size, what)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
